"""The memory of a replayed cache in tiers: what each tier holds, how room is made in it, and what
becomes of a victim.

There is one such memory for the paper's rules, for the server's and for HiCache. They differ in
when copies are written to slower tiers (`CopyRule`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.nodes import Node
from sglang_hybrid.core.server_settings import Split
from sglang_hybrid.core.tiers.places import ALL_TIERS, Placement, Unit, copies_of
from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.core.tiers.tier_pool import TierPool
from sglang_hybrid.core.victims.pool import Pool
from sglang_hybrid.extensions.lab.simulation.device_memory import DeviceMemory
from sglang_hybrid.extensions.lab.simulation.tiers.losses import Losses
from sglang_hybrid.extensions.lab.simulation.tiers.tier_budgets import TierCounts
from sglang_hybrid.extensions.lab.simulation.token_tree import TokenTree

Pinned = Sequence[tuple[Node, Tier]]


class CopyRule(Protocol):
    """Rules by which copies are written to slower tiers: `PaperCopies`, `ServedCopies`."""

    def before_eviction(self, pool: TierPool, node: Node, unit: Unit) -> None:
        """Called when `node` is about to lose `unit` in the tier of `pool`."""
        ...


class TieredMemory(DeviceMemory):
    """The tiers of one cache, the device among them.

    room: what each tier holds, the fastest first: bytes that KV and states share, or two pools.
    pools: for each tier, candidates among KV and among states. counted: a mask of tiers; a node
    whose state is in other tiers only has no state in the tree. copy_rule: None where nothing is
    written when it is evicted. losses: where hits are lost; None unless it is set before the first
    request, since it takes a hash of every prefix.
    """

    copy_rule: CopyRule | None = None
    losses: Losses | None = None

    def __init__(
        self,
        tree: TokenTree,
        cost: CostModel,
        room: Mapping[Tier, int | Split],
        pools: Mapping[Tier, tuple[TierPool, TierPool]],
        counted: int = ALL_TIERS,
    ) -> None:
        if not cost.state_bytes:
            raise ValueError("tiers are replayed for models with states only")
        super().__init__(tree, cost, room[Tier.DEVICE], pools[Tier.DEVICE])
        self.room = room
        self.pools = pools
        self.placement = Placement(tree, counted)
        self.counts = TierCounts()
        for tier in self.below_device:
            for pool in dict.fromkeys(pools[tier]):
                tree.listen(pool)

    @property
    def below_device(self) -> list[Tier]:
        """The tiers below the device, the fastest first."""
        return [tier for tier in self.room if tier is not Tier.DEVICE]

    @property
    def kv_used(self) -> int:
        return self.placement.kv_tokens[Tier.DEVICE]

    @property
    def states_used(self) -> int:
        return self.placement.states[Tier.DEVICE]

    # Room in a tier.

    def short_of(self, kv: int, states: int) -> Pool | None:
        return self.short_in(Tier.DEVICE, kv, states)

    def short_in(self, tier: Tier, kv: int, states: int) -> TierPool | None:
        """The pool of `tier` that must evict before so many tokens and states fit, None if they
        do. Where both must, states do first on the device, and KV below it: SGLang makes room for
        a copy's KV before that for its state (unified_radix_cache.py, `_execute_kv_backup`).
        """
        kv, states = self._with_running(tier, kv, states)
        room, placement = self.room[tier], self.placement
        pool, state_pool = self.pools[tier]
        if isinstance(room, Split):
            lacks_kv = placement.kv_tokens[tier] + kv > room.kv_tokens
            if placement.states[tier] + states > room.slots:
                return pool if lacks_kv and tier is not Tier.DEVICE else state_pool
            return pool if lacks_kv else None
        needed = placement.used(tier, self.cost) + self.cost.bytes_in(tier, kv, states)
        return pool if needed > room else None

    def make_room(self, kv: int, states: int, path: list[Node]) -> bool:
        return self.make_room_in(Tier.DEVICE, kv, states, path)

    def make_room_in(self, tier: Tier, kv: int, states: int, path: Sequence[Node]) -> bool:
        """Evict until so many tokens and states fit into `tier`; False if they cannot. `path`
        stays in all tiers.
        """
        if self.short_in(tier, kv, states) is None:
            return True
        if not self.could_fit_in(tier, kv, states, path):
            return False
        pinned = self.pin(path)
        while pool := self.short_in(tier, kv, states):
            if not self.evict_one(pool):
                break
        self.unpin(pinned)
        return self.short_in(tier, kv, states) is None

    def could_fit_in(self, tier: Tier, kv: int, states: int, path: Sequence[Node]) -> bool:
        """True if it would fit beside nothing but what `path` and running requests have there."""
        kv, states = self._with_running(tier, kv, states)
        for node in path:
            kv += node.tokens * copies_of(node).has_kv(tier)
            states += copies_of(node).has_state(tier)
        room = self.room[tier]
        if isinstance(room, Split):
            return kv <= room.kv_tokens and states <= room.slots
        return self.cost.bytes_in(tier, kv, states) <= room

    def _with_running(self, tier: Tier, kv: int, states: int) -> tuple[int, int]:
        if tier is not Tier.DEVICE:
            return kv, states
        return kv + self.kv_in_use, states + self.slots_in_use

    def pin(self, path: Sequence[Node], *tiers: Tier) -> Pinned:
        """Keep the copies of `path` in `tiers`, or in all, until they are unpinned; returns those
        that were not pinned already.
        """
        pinned = [
            (node, tier)
            for node in path
            for tier in tiers or self.room
            if not copies_of(node).is_pinned(tier)
        ]
        for node, tier in pinned:
            self.placement.pin(node, tier, True)
        return pinned

    def unpin(self, pinned: Pinned) -> None:
        """The copies that `pin` returned may be evicted again."""
        for node, tier in pinned:
            self.placement.pin(node, tier, False)

    # Copies.

    def copy(
        self, node: Node, tier: Tier, *, kv: bool, state: bool, at_any_cost: bool = False
    ) -> bool:
        """Write KV or state of `node` or both to `tier`, if there is room, or if they are worth
        more than what must be evicted for them. at_any_cost: whatever that is worth.
        """
        tokens, states = kv * node.tokens, int(state)
        if not self._make_room_for_copy(node, tier, tokens, states, at_any_cost):
            return False
        self.add_copy(node, tier, kv=kv, state=state)
        return True

    def add_copy(self, node: Node, tier: Tier, *, kv: bool, state: bool) -> None:
        """KV or state of `node` or both were written to `tier`, where there was room."""
        if kv:
            self.placement.add_kv(node, tier)
        if state:
            self.placement.add_state(node, tier)
        self.counts.written[tier] += self.cost.bytes_in(tier, kv * node.tokens, int(state))

    def _make_room_for_copy(
        self, node: Node, tier: Tier, kv: int, states: int, at_any_cost: bool
    ) -> bool:
        if self.short_in(tier, kv, states) is None:
            return True
        if not self.could_fit_in(tier, kv, states, []):
            return False
        pinned = self.pin([node])
        while pool := self.short_in(tier, kv, states):
            if not at_any_cost:
                comparison = pool.compare_copy(node)
                if comparison is not None and not comparison.beats_victim:
                    break
            if not self.evict_one(pool):
                break
        self.unpin(pinned)
        return self.short_in(tier, kv, states) is None

    # Victims.

    def evict(self, pool: Pool, node: Node) -> None:
        """Evict the unit of `node` from the tier of `pool`, after the copy rule could write it to
        another tier.
        """
        assert isinstance(pool, TierPool)
        unit = pool.unit(node)
        assert unit is not None
        self.has_evicted = True
        if self.copy_rule is not None:
            self.copy_rule.before_eviction(pool, node, unit)
        self._drop(node, unit, pool.tier)

    def _drop(self, node: Node, unit: Unit, tier: Tier) -> None:
        """Take `unit` of `node` from `tier`, and from the tree what no tier has any more."""
        self.counts.evicted[tier] += unit.freed
        if unit.kv and copies_of(node).kv == 1 << tier:
            self._remove(node, tier)
            return
        if unit.state:
            self.placement.drop_state(node, tier)
            if not copies_of(node).state:
                self._note_loss(node, tier)
        if unit.kv:
            self.placement.drop_kv(node, tier)

    def _remove(self, node: Node, last: Tier) -> None:
        """Remove `node`, of whose KV `last` had the only copy, and all below it, which that KV led
        to.
        """
        for child in list(node.children.values()):
            self._remove(child, last)
        self._note_loss(node, last)
        for tier in self.room:
            self.placement.drop_state(node, tier)
        for tier in self.room:
            self.placement.drop_kv(node, tier)
        assert not copies_of(node).kv
        self.tree.remove(node)

    def _note_loss(self, node: Node, last: Tier) -> None:
        """Note that no tier has the state of `node` any more; `last` had it."""
        if self.losses is not None:
            below = next((tier for tier in self.room if tier > last), None)
            self.losses.lost(node, last, below)
