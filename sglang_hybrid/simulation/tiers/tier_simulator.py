"""A trace-driven cache over device, host and disk, by the paper's rules of admission.

One tree holds all nodes that have KV in some tier. A victim of a tier is written to the next one if
it is worth more there than what it pushes out, and freed without a copy if a slower tier has it. A
request takes the cheapest way over all tiers; what it loads or computes is on the device then.
Writing takes no time of a request; loading comes before its prefill.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_hybrid.core.checkpoints.admission import Prefill
from sglang_hybrid.core.costs.cost import MIN_BRANCH_TOKENS, UNBOUNDED, CostModel
from sglang_hybrid.core.records.nodes import Kind, Node
from sglang_hybrid.core.returns.history import History, HistoryMatch
from sglang_hybrid.core.tiers.places import Way, copies_of, ways
from sglang_hybrid.core.tiers.rates import Speeds, Tier
from sglang_hybrid.simulation.baselines import KnowsFuture
from sglang_hybrid.simulation.future import Oracle
from sglang_hybrid.simulation.policies import Clairvoyant
from sglang_hybrid.simulation.simulator import Ticket
from sglang_hybrid.simulation.tiers.losses import prefix_hashes
from sglang_hybrid.simulation.tiers.tier_budgets import TierBudgets
from sglang_hybrid.simulation.tiers.tiered_memory import TieredMemory
from sglang_hybrid.simulation.traces.requests import Request, TokenArray


class TieredSimulator(TieredMemory):
    """A cache in tiers: which way a request takes, what it loads, and what it leaves. Arguments are
    those of `TieredMemory`.
    """

    def _look_up(self, request: Request) -> tuple[Ticket, list[Node], int]:
        found = super()._look_up(request)
        self._count_lost(found[0])
        return found

    def _count_lost(self, ticket: Ticket) -> None:
        if self.losses is not None:
            request = ticket.request
            usable = request.tokens[: request.input_len - 1]
            self.losses.request(prefix_hashes(usable, request.tenant), ticket.outcome.hit_len)

    def _resume(self, path: list[Node], prompt_len: int, touched: list[Node]) -> tuple[Node, float]:
        known = list(ways(path, prompt_len, self.cost, self.rates.speeds))
        way = self._choose(known)
        self._count_hit(way, known)
        if not way.depth:
            return self.tree.root, 0.0
        passed = [node for node in path if node.depth <= way.depth]
        self._bring(passed, passed[-1], touched)
        self.counts.resumed(way.depth, exact=is_exact(passed))
        return passed[-1], way.load_seconds

    def resumes_from(self, request: Request) -> tuple[Node | None, int]:
        path, way = self._way(request)
        return (path[-1], way.depth) if path else (None, 0)

    def to_load(self, request: Request) -> tuple[int, float]:
        _, way = self._way(request)
        return sum(way.load_bytes), way.load_seconds

    def fetch(
        self, request: Request, kv: int = 0, states: int = 0, keep: Sequence[Request] = ()
    ) -> bool:
        path, way = self._way(request)
        if not any(way.load_bytes):
            return False
        kv += sum(node.tokens for node in path if not copies_of(node).has_kv(Tier.DEVICE))
        states += not copies_of(path[-1]).has_state(Tier.DEVICE)
        kept = [node for one in keep for node in self._way(one)[0]]
        if not self._make_room_in(Tier.DEVICE, kv, states, list(dict.fromkeys([*path, *kept]))):
            return False
        self._bring(path, path[-1], path)
        return True

    def _way(self, request: Request) -> tuple[list[Node], Way]:
        """The nodes that `request` would resume behind now, and its way. Nothing changes."""
        usable = request.tokens[: request.input_len - 1]
        path, _ = self.tree.find(usable, tenant=request.tenant)
        way = self._choose(list(ways(path, request.input_len, self.cost, self.rates.speeds)))
        return [node for node in path if node.depth <= way.depth], way

    def _leads_to(self, node: Node) -> bool:
        """Whether some tier has KV of `node`. A copy that found no room on the device may have been
        dropped below it, and then the KV above it leads nowhere.
        """
        return bool(copies_of(node).kv)

    def _lock(self, ticket: Ticket, node: Node | None) -> None:
        before = ticket.locked_node
        super()._lock(ticket, node)
        for one in (before, node):
            if one is not None:
                self._pin_below(one, one in self._running)

    def _pin_below(self, node: Node, pinned: bool) -> None:
        """What found no room on the device is held where it is."""
        for tier in self.tiers.present[1:]:
            self.placement.pin(node, tier, pinned)

    def _choose(self, known: Sequence[Way]) -> Way:
        """The way that a request takes, of those there are, the shallowest first."""
        return min(known, key=lambda way: (way.seconds, -way.depth))

    def _count_hit(self, way: Way, known: Sequence[Way]) -> None:
        reached = 0
        for tier in self.room:
            without_slower = (w.depth for w in known if not any(w.load_bytes[tier + 1 :]))
            depth = min(max(without_slower), way.depth)
            self.counts.hit_tokens[tier] += max(depth - reached, 0)
            reached = max(reached, depth)
            self.counts.loads[tier] += way.load_bytes[tier] > 0
            self.counts.loaded[tier] += way.load_bytes[tier]
        self.counts.load_seconds += way.load_seconds

    def _bring(self, path: list[Node], hit: Node, touched: list[Node]) -> None:
        """Have the KV of `path` and the state of `hit` on the device, if there is room beside
        `touched`; otherwise only the request has them. Either way they are marked if they come from
        copies that are not exact.
        """
        missing = [node for node in path if not copies_of(node).has_kv(Tier.DEVICE)]
        state = not copies_of(hit).has_state(Tier.DEVICE)
        for node in missing:
            self._mark(node, copies_of(node).kv_tier, state=False)
        if state:
            self._mark(hit, copies_of(hit).state_tier, state=True)
        if self._make_room(sum(node.tokens for node in missing), int(state), touched):
            for node in missing:
                self.placement.add_kv(node, Tier.DEVICE)
            self.placement.add_state(hit, Tier.DEVICE)

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
        if matched > (path[-1].depth if path else 0):
            below = self.tree.beyond(path, matched, tokens, tenant)[-1]
            path = [*path, self.tree.cut(below, matched)]
        stored = {node.depth for node in path if node.has_state}
        missing = [node for node in path if not copies_of(node).has_kv(Tier.DEVICE)]
        kv = len(tokens) - matched + sum(node.tokens for node in missing)
        new = {end for end, kind in ends.items() if kind and end not in stored}
        if self._make_room(kv, len(new), path):
            tier = Tier.DEVICE
            kept = self._grow_path(tokens, path, path, matched, ends, tenant)
        else:  # written down from the memory of the request itself
            tier, kv = self.tiers.present[1], len(tokens) - matched
            if not self._make_room_in(tier, kv, len(new), path):
                if self.losses is not None:
                    self.losses.refused(prefix_hashes(tokens, tenant), new)
                return path
            self.counts.written[tier] += self.cost.bytes_in(tier, kv, len(new))
            kept = self._grow_path(tokens, path, path, matched, ends, tenant)
        for node in kept:
            if tier is Tier.DEVICE or node.copies is None:
                self.placement.add_kv(node, tier)
            if node.depth in new:
                self.placement.add_state(node, tier)
        if self.losses is not None:
            made = [node for node in kept if node.depth in new]
            self.losses.stored(prefix_hashes(tokens, tenant), made)
        return kept

    def _is_worth(self, history_match: HistoryMatch, prefill: Prefill) -> bool:
        """Always: what it pushes out finds room in another tier."""
        return True


def is_exact(path: Sequence[Node]) -> bool:
    """Whether nothing on the way from the root to the end of `path` is marked: what is computed
    behind a mark is as inexact.
    """
    return not any(copies_of(node).inexact for node in path)


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
