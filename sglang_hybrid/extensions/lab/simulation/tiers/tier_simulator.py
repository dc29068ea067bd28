"""A cache over device, host and disk, replayed by the paper's rules of admission.

One tree holds all nodes that have KV in some tier. A request takes the cheapest way over all tiers;
what it loads or computes is on the device then. Writing takes no time of a request; loading comes
before its prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sglang_hybrid.core.checkpoints.admission import Prefill
from sglang_hybrid.core.costs.cost import MIN_BRANCH_TOKENS, UNBOUNDED, CostModel
from sglang_hybrid.core.records.nodes import Kind, Node
from sglang_hybrid.core.returns.history import History, HistoryMatch
from sglang_hybrid.core.tiers.places import Way, cheapest, copies_of, is_exact, ways
from sglang_hybrid.core.tiers.rates import Rates, Speeds, Tier
from sglang_hybrid.core.tiers.tier_pool import TierPool
from sglang_hybrid.core.traffic.requests import Request, TokenArray
from sglang_hybrid.core.victims.eviction import Policy
from sglang_hybrid.core.victims.pool import Scarce
from sglang_hybrid.extensions.lab.simulation.baselines import KnowsFuture
from sglang_hybrid.extensions.lab.simulation.future import Oracle
from sglang_hybrid.extensions.lab.simulation.policies import Clairvoyant
from sglang_hybrid.extensions.lab.simulation.simulator import Simulator, Ticket
from sglang_hybrid.extensions.lab.simulation.tiers.paper_copies import PaperCopies
from sglang_hybrid.extensions.lab.simulation.tiers.tier_budgets import TierBudgets
from sglang_hybrid.extensions.lab.simulation.tiers.tiered_memory import TieredMemory
from sglang_hybrid.extensions.lab.simulation.token_tree import TokenTree, prefix_hashes


class TieredSimulator(Simulator):
    """A `Simulator` above the tiers of `tiers`: which way a request takes, what it loads, and what
    it stores.

    policies: one for each tier that there is, the fastest first. memory: by default, one that
    copies by the paper's rules (`PaperCopies`).
    """

    memory: TieredMemory

    def __init__(
        self,
        cost: CostModel,
        tiers: TierBudgets,
        speeds: Speeds,
        policies: Sequence[Policy],
        min_branch_tokens: int = MIN_BRANCH_TOKENS,
        memory: TieredMemory | None = None,
    ) -> None:
        self.speeds = speeds
        memory = memory or _paper_memory(tiers.with_copies(cost), tiers, speeds, policies)
        self._inexact_in = tiers.inexact_in(memory.cost)
        super().__init__(memory.cost, memory.budget, policies[0], min_branch_tokens, memory=memory)

    def _look_up(self, request: Request) -> tuple[Ticket, list[Node], int]:
        ticket, path, matched = super()._look_up(request)
        self._count_lost(ticket)
        hit_len = ticket.outcome.hit_len
        exact = is_exact(node for node in path if node.depth <= hit_len)
        ticket.outcome = replace(ticket.outcome, exact=exact)
        return ticket, path, matched

    def _count_lost(self, ticket: Ticket) -> None:
        losses, request = self.memory.losses, ticket.request
        if losses is not None:
            usable = request.tokens[: request.input_len - 1]
            losses.request(prefix_hashes(usable, request.tenant), ticket.outcome.hit_len)

    def _resume(self, path: list[Node], prompt_len: int, touched: list[Node]) -> tuple[Node, float]:
        known = list(ways(path, prompt_len, self.cost, self.speeds))
        way = self._choose(known)
        self.memory.counts.count_way(way, known, self.memory.room)
        if not way.depth:
            return self.tree.root, 0.0
        passed = [node for node in path if node.depth <= way.depth]
        self._load(passed, passed[-1], touched)
        self.memory.counts.count_resumed(way.depth, exact=is_exact(passed))
        return passed[-1], way.load_seconds

    def resumes_from(self, request: Request) -> tuple[Node | None, int]:
        path, way = self._way(request)
        return (path[-1], way.depth) if path else (None, 0)

    def to_load(self, request: Request) -> tuple[int, float]:
        _, way = self._way(request)
        return sum(way.load_bytes), way.load_seconds

    def _way(self, request: Request) -> tuple[list[Node], Way]:
        """The nodes that `request` would resume behind now, and its way. Nothing changes."""
        usable = request.tokens[: request.input_len - 1]
        path, _ = self.tree.find(usable, tenant=request.tenant)
        way = self._choose(list(ways(path, request.input_len, self.cost, self.speeds)))
        return [node for node in path if node.depth <= way.depth], way

    def _choose(self, known: Sequence[Way]) -> Way:
        """The way that a request takes, of those that there are, the shallowest first."""
        return cheapest(known)

    def _leads_to(self, node: Node) -> bool:
        """True if some tier has KV of `node`. A copy that found no room on the device may have been
        evicted from a slower tier, and then the KV above it leads nowhere.
        """
        return bool(copies_of(node).kv)

    def _lock(self, ticket: Ticket, node: Node | None) -> None:
        """Keep what a request holds in the slower tiers too: it may have found no room on the
        device.
        """
        before = ticket.locked_node
        super()._lock(ticket, node)
        placement = self.memory.placement
        for one in (before, node):
            if one is not None:
                for tier in self.memory.below_device:
                    placement.pin(one, tier, one in self._running)

    def _load(self, path: list[Node], hit: Node, touched: list[Node]) -> None:
        """Have the KV of `path` and the state of `hit` on the device, if there is room beside
        `touched`; otherwise only the request has them. Either way they are marked if they come from
        copies that are not exact.
        """
        placement = self.memory.placement
        missing = [node for node in path if not copies_of(node).has_kv(Tier.DEVICE)]
        state = not copies_of(hit).has_state(Tier.DEVICE)
        for node in missing:
            self._mark(node, copies_of(node).kv_tier, state=False)
        if state:
            self._mark(hit, copies_of(hit).state_tier, state=True)
        if self.memory.make_room(sum(node.tokens for node in missing), int(state), touched):
            for node in missing:
                placement.add_kv(node, Tier.DEVICE)
            placement.add_state(hit, Tier.DEVICE)

    def _mark(self, node: Node, tier: Tier | None, *, state: bool) -> None:
        """The KV or the state of `node` is read from a copy in `tier`."""
        if tier is not None and self._inexact_in[tier][state]:
            copies_of(node).inexact = True

    def _insert(
        self,
        tokens: TokenArray,
        path: list[Node],
        matched: int,
        ends: dict[int, Kind | None],
        tenant: str = "",
    ) -> list[Node]:
        memory, losses = self.memory, self.memory.losses
        if matched > (path[-1].depth if path else 0):
            below = self.tree.beyond(path, matched, tokens, tenant)[-1]
            path = [*path, self.tree.cut(below, matched)]
        stored = {node.depth for node in path if node.has_state}
        missing = [node for node in path if not copies_of(node).has_kv(Tier.DEVICE)]
        kv = len(tokens) - matched + sum(node.tokens for node in missing)
        new = {end for end, kind in ends.items() if kind and end not in stored}
        tier = Tier.DEVICE
        if not memory.make_room(kv, len(new), path):
            # written to the next tier from the memory of the request itself
            tier, kv = memory.below_device[0], len(tokens) - matched
            if not memory.make_room_in(tier, kv, len(new), path):
                if losses is not None:
                    losses.refused(prefix_hashes(tokens, tenant), new)
                return path
            memory.counts.written[tier] += self.cost.bytes_in(tier, kv, len(new))
        kept = self._grow_path(tokens, path, path, matched, ends, tenant)
        for node in kept:
            if tier is Tier.DEVICE or node.copies is None:
                memory.placement.add_kv(node, tier)
            if node.depth in new:
                memory.placement.add_state(node, tier)
        if losses is not None:
            made = [node for node in kept if node.depth in new]
            losses.stored(prefix_hashes(tokens, tenant), made)
        return kept

    def _is_worth(self, history_match: HistoryMatch, prefill: Prefill) -> bool:
        """Always: what it pushes out finds room in another tier."""
        return True


def _paper_memory(
    cost: CostModel, tiers: TierBudgets, speeds: Speeds, policies: Sequence[Policy]
) -> TieredMemory:
    """One number of bytes in each tier, and copies by the paper's rules."""
    tree, rates = TokenTree(), Rates(speeds)
    pools: dict[Tier, tuple[TierPool, TierPool]] = {}
    for tier, policy in zip(tiers.present, policies, strict=True):
        pool = TierPool(
            tier,
            Scarce.SHARED,
            cost,
            policy,
            tree.clock,
            rates,
            tiers.below(tier),
            tells_on_choice=False,
        )
        pools[tier] = pool, pool
    memory = TieredMemory(tree, cost, {tier: tiers.sizes[tier] for tier in pools}, pools)
    memory.copy_rule = PaperCopies(memory, speeds)
    return memory


class TieredClairvoyant(KnowsFuture, TieredSimulator):
    """Evicts from every tier by what the rest of the trace will ask for. remember: as
    `ClairvoyantCache`.
    """

    def __init__(
        self,
        cost: CostModel,
        tiers: TierBudgets,
        speeds: Speeds,
        oracle: Oracle,
        remember: bool = True,
        min_branch_tokens: int = MIN_BRANCH_TOKENS,
    ) -> None:
        policies = [Clairvoyant() for _ in tiers.present]
        TieredSimulator.__init__(self, cost, tiers, speeds, policies, min_branch_tokens)
        self._oracle = oracle
        self._history = History(max_bytes=UNBOUNDED) if remember else None
