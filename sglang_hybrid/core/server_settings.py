"""Settings of a server that its hits depend on, shared by cache, simulator and tuner."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_hybrid.core.costs.cost import UNBOUNDED, CostModel
from sglang_hybrid.core.records.pin import DEFAULT_SHARE
from sglang_hybrid.core.tiers.rates import Speeds


@dataclass(frozen=True)
class Serving:
    """Settings of the scheduler: prompt tokens per forward (--chunked-prefill-size), and the tokens
    between the boundaries at which SGLang would keep a state (its Mamba cache chunk). one_memory:
    KV and states share all bytes; otherwise each has a pool. pin_share: of the memory, for what one
    payer pins.
    """

    chunk: int = 8_192
    grid: int = 64
    one_memory: bool = False
    pin_share: float = DEFAULT_SHARE


LEAST_SLOTS = 2
"""Slots of a pool whose states spill: a request needs one, and a state inside its prefill one."""


@dataclass(frozen=True)
class Split:
    """A budget in two pools: KV tokens and state slots. spilled: tokens of KV in whose place a
    state can lie for which there is no slot; parked: tokens of KV that can lie in a slot without a
    state; 0 each: the pools lend each other nothing.
    """

    kv_tokens: int
    slots: int
    spilled: int = 0
    parked: int = 0

    @classmethod
    def of(
        cls,
        budget: int,
        cost: CostModel,
        states_to_kv: float | None = None,
        *,
        spills: bool = False,
    ) -> Split:
        """`budget` bytes, split as --mamba-full-memory-ratio does; None: as we default it. spills:
        the pools lend each other what they can, if states are large enough for that; there are two
        slots at least then. Bytes that are no whole slot are KV.
        """
        kv_bytes, state_bytes = cost.kv_bytes_per_token, cost.state_bytes
        spilled = cost.spilled_tokens if spills else 0
        if states_to_kv is None:
            states_to_kv = cost.spilling_states_to_kv() if spilled else cost.states_to_kv
        for_states = int(budget * states_to_kv / (1 + states_to_kv)) if state_bytes else 0
        slots = for_states // state_bytes if state_bytes else UNBOUNDED
        if spilled:
            slots = max(slots, min(LEAST_SLOTS, budget // state_bytes))
        for_kv = budget - slots * state_bytes
        pools = cls(for_kv // kv_bytes if kv_bytes else UNBOUNDED, slots)
        return pools.lending(cost) if spills else pools

    def lending(self, cost: CostModel) -> Split:
        """These pools, which lend each other what they can, as two pools `of` a budget do."""
        spilled = cost.spilled_tokens
        fit = cost.state_bytes // cost.kv_bytes_per_token if spilled else 0
        return replace(self, spilled=spilled, parked=fit)

    @property
    def apart(self) -> Split:
        """These pools, which lend each other nothing."""
        return replace(self, spilled=0, parked=0)

    def bytes(self, cost: CostModel) -> int:
        """The bytes of both pools."""
        return self.kv_tokens * cost.kv_bytes_per_token + self.slots * cost.state_bytes


@dataclass(frozen=True)
class ServedTiers:
    """The memory below a server's device, as far as its hits depend on it.

    host: its pools. speeds: those that it decides with. disk: bytes of objects, 0 without a disk.
    write_back: what the device gives up without a copy is copied then. at_once: otherwise, what
    ended requests left is copied when they end, not when the device is about to give it up.
    least_uses: requests that must have passed what is copied. watermark: share of the device's
    memory; what would go next until no more is used is copied beforehand. least_read: tokens that a
    read from the disk must save. exact: copies are what was on the device (`--hybrid-tier-codec`).
    """

    host: Split
    speeds: Speeds
    disk: int = 0
    write_back: bool = False
    least_uses: int = 1
    watermark: float = 1.0
    least_read: int = 256
    at_once: bool = True
    exact: bool = True


Budget = int | Split | None
"""Bytes that KV and states share, two pools, or no bound."""
