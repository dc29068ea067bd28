"""Copies to slower tiers in a replay by the paper's rules: made as something is evicted."""

from __future__ import annotations

from sglang_hybrid.core.records.nodes import Node
from sglang_hybrid.core.tiers.places import Unit, copies_of, slower_tiers
from sglang_hybrid.core.tiers.rates import Speeds, Tier
from sglang_hybrid.core.tiers.tier_pool import TierPool
from sglang_hybrid.core.tiers.writes import copy_savings, write_pays
from sglang_hybrid.extensions.lab.simulation.tiers.tiered_memory import TieredMemory


class PaperCopies:
    """Writes what is evicted from a tier to the next slower one, unless a slower tier has it
    already, or a copy is worth less than its writing or than what it would push out. KV that nodes
    below need is worth any room.
    """

    def __init__(self, memory: TieredMemory, speeds: Speeds) -> None:
        self._memory = memory
        self._speeds = speeds

    def before_eviction(self, pool: TierPool, node: Node, unit: Unit) -> None:
        if pool.demotes_to is not None:
            self._write_down(node, unit, pool.tier, pool.demotes_to)
        is_last = unit.state and copies_of(node).state == 1 << pool.tier
        pool.tell_policy(node, lost=is_last)

    def _write_down(self, node: Node, unit: Unit, tier: Tier, below: Tier) -> None:
        copies, memory = copies_of(node), self._memory
        kv = unit.kv and not slower_tiers(copies.kv, tier)
        state = unit.state and not slower_tiers(copies.state, tier)
        is_needed = kv and bool(node.children)
        if not (state or is_needed or (kv and node.has_state)):
            return  # it has copies, or nothing is resumed there
        if self._pays(below, node, kv=kv, state=state) and memory.copy(
            node, below, kv=kv, state=state, at_any_cost=is_needed
        ):
            return
        if is_needed:
            memory.copy(node, below, kv=True, state=False, at_any_cost=True)

    def _pays(self, tier: Tier, node: Node, *, kv: bool, state: bool) -> bool:
        """True if copies of `node` in `tier` are expected to save more seconds than their writing
        costs (`core.tiers.writes`); True where the policy knows nothing of returns.
        """
        policy, memory = self._memory.pools[tier][1].policy, self._memory
        returns = policy.return_probability(node, memory.tree.clock)
        size = memory.cost.bytes_in(tier, kv * node.tokens, int(state))
        saves = copy_savings(node, tier, memory.cost, self._speeds)
        return returns is None or write_pays(size, saves, returns, tier, self._speeds)
