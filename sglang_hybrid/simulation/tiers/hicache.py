"""SGLang 0.5.23 with HiCache: its own cache on the device, and on the host a copy of what that had.

Read in `unified_cache/unified_tree_core.py` and `components/mamba.py` of the wheel.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.nodes import Kind, Node
from sglang_hybrid.core.server_settings import Split
from sglang_hybrid.core.tiers.places import Way, copies_of
from sglang_hybrid.core.tiers.rates import Speeds, Tier
from sglang_hybrid.core.tiers.tier_pool import TierPool
from sglang_hybrid.core.victims.eviction import Lru, Policy
from sglang_hybrid.core.victims.pool import Scarce
from sglang_hybrid.simulation.baselines import SGLANG_STATES_TO_KV, SglangRules
from sglang_hybrid.simulation.policies import PathLru
from sglang_hybrid.simulation.simulator import Ticket
from sglang_hybrid.simulation.tiers.tier_budgets import TierBudgets
from sglang_hybrid.simulation.tiers.tier_simulator import TieredSimulator
from sglang_hybrid.simulation.traces.requests import Request, TokenArray


class HostPool(TierPool):
    """HiCache's order of host copies: those of what the device has too stay."""

    def _weigh(self, node: Node) -> tuple[int, int]:
        copies = copies_of(node)
        states = self.scarce is Scarce.STATES
        if copies.has_state(Tier.DEVICE) if states else copies.has_kv(Tier.DEVICE):
            return 0, 0
        return super()._weigh(node)


class HiCache(SglangRules, TieredSimulator):
    """`SglangRules` with HiCache's default policy, write-through: what is inserted is written to
    the host at once, both tiers forget by recency, each has a pool of KV and one of states, the
    host's in the device's proportion, and the deepest hit is always loaded. Nothing is written when
    the device evicts. A disk is not played.
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
        tiers = TierBudgets.of(device, host, 0)
        self.kv_policy = PathLru()
        self.host_policy = PathLru()
        TieredSimulator.__init__(
            self,
            cost,
            tiers,
            speeds,
            [self.kv_policy, self.host_policy],
            min_branch_tokens=0,
            room=[Split.of(size, cost, SGLANG_STATES_TO_KV) for size in (device, host)],
            state_policies=[Lru(stateless_first=False), Lru(stateless_first=False)],
        )

    def _tier_pool(self, tier: Tier, scarce: Scarce, policy: Policy) -> TierPool:
        kind = TierPool if tier is Tier.DEVICE else HostPool
        pool = kind(tier, scarce, self.cost, policy, self.tree.clock, self.rates)
        self.tree.listen(pool)
        return pool

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
        if (kv or state) and self._take(Tier.HOST, node, kv=kv, state=state, needed=True):
            self._add(Tier.HOST, node, kv=kv, state=state)

    def _passed(self, request: object, path: list[Node]) -> None:
        for tier in self.room:
            pool = self.pools[tier][0]
            assert isinstance(pool.policy, PathLru)
            pool.policy.touch(path, self.tree.clock.tick)
            for node in path:
                pool.mark_dirty(node)
