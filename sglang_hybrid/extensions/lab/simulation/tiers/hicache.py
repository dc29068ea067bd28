"""SGLang 0.5.23 with HiCache: its own cache on the device, and on the host a copy of what that had.

Read in `unified_cache/unified_tree_core.py` and `components/mamba.py` of the wheel.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.nodes import Kind, Node
from sglang_hybrid.core.server_settings import Split
from sglang_hybrid.core.tiers.places import Way, copies_of
from sglang_hybrid.core.tiers.rates import Rates, Speeds, Tier
from sglang_hybrid.core.tiers.tier_pool import TierPool
from sglang_hybrid.core.traffic.requests import Request, TokenArray
from sglang_hybrid.core.victims.eviction import Lru
from sglang_hybrid.core.victims.pool import Scarce
from sglang_hybrid.extensions.lab.simulation.baselines import SGLANG_STATES_TO_KV, SglangRules
from sglang_hybrid.extensions.lab.simulation.policies import PathLru
from sglang_hybrid.extensions.lab.simulation.simulator import Ticket
from sglang_hybrid.extensions.lab.simulation.tiers.tier_budgets import TierBudgets
from sglang_hybrid.extensions.lab.simulation.tiers.tier_simulator import TieredSimulator
from sglang_hybrid.extensions.lab.simulation.tiers.tiered_memory import TieredMemory
from sglang_hybrid.extensions.lab.simulation.token_tree import TokenTree


class HostPool(TierPool):
    """HiCache's order of host copies: a copy of what the device has too is not evicted."""

    def _weigh(self, node: Node) -> tuple[int, int]:
        copies = copies_of(node)
        states = self.scarce is Scarce.STATES
        if copies.has_state(Tier.DEVICE) if states else copies.has_kv(Tier.DEVICE):
            return 0, 0
        return super()._weigh(node)


class HiCache(SglangRules, TieredSimulator):
    """`SglangRules` with HiCache's default policy, write-through: what is inserted is written to
    the host at once, and nothing when the device evicts. Both tiers evict the least recently used,
    and each has a pool of KV and one of states, in the same proportion. The deepest hit is always
    loaded. There is no disk.
    """

    def __init__(
        self,
        cost: CostModel,
        tiers: TierBudgets,
        speeds: Speeds,
        grid: int = 64,
        chunk: int = 8_192,
        interval: int = 256,
    ) -> None:
        self.grid = grid
        self.chunk = chunk
        self.interval = interval
        device, host, _ = tiers.sizes
        self.kv_policy = PathLru()
        self.host_policy = PathLru()
        tree, rates = TokenTree(), Rates(speeds)
        room, pools = {}, {}
        for tier, size, policy in (
            (Tier.DEVICE, device, self.kv_policy),
            (Tier.HOST, host, self.host_policy),
        ):
            kind = TierPool if tier is Tier.DEVICE else HostPool
            room[tier] = Split.of(size, cost, SGLANG_STATES_TO_KV)
            pools[tier] = (
                kind(tier, Scarce.KV, cost, policy, tree.clock, rates),
                kind(tier, Scarce.STATES, cost, Lru(stateless_first=False), tree.clock, rates),
            )
        memory = TieredMemory(tree, cost, room, pools)
        exact = TierBudgets.of(device, host)
        TieredSimulator.__init__(self, cost, exact, speeds, [self.kv_policy], 0, memory)

    def _look_up(self, request: Request) -> tuple[Ticket, list[Node], int]:
        found = super()._look_up(request)
        self._count_lost(found[0])
        return found

    def _choose(self, known: Sequence[Way]) -> Way:
        return known[-1]

    def _insert(
        self,
        tokens: TokenArray,
        path: list[Node],
        matched: int,
        ends: dict[int, Kind | None],
        tenant: str = "",
    ) -> list[Node]:
        nodes = super()._insert(tokens, path, matched, ends, tenant)
        for node in sorted(nodes, key=lambda node: node.depth):
            self._back_up(node)
        return nodes

    def _back_up(self, node: Node) -> None:
        """Write what the device has of `node` to the host, if there is room or can be made."""
        copies = copies_of(node)
        kv = copies.has_kv(Tier.DEVICE) and not copies.has_kv(Tier.HOST)
        state = copies.has_state(Tier.DEVICE) and not copies.has_state(Tier.HOST)
        if kv or state:
            self.memory.copy(node, Tier.HOST, kv=kv, state=state, at_any_cost=True)

    def _on_path(self, request: object, path: list[Node]) -> None:
        for tier, policy in ((Tier.DEVICE, self.kv_policy), (Tier.HOST, self.host_policy)):
            policy.touch(path, self.tree.clock.tick)
            for node in path:
                self.memory.pools[tier][0].mark_dirty(node)
