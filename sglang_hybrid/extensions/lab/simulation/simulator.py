"""A trace-driven cache: the server's tree, candidates and policies, with a budget and without a
model.

Admission is the paper's: the branch point of the prompt, if it gains enough tokens, and the last
token. A policy that keeps a history also knows branch points whose KV was evicted. By the paper's
rules the budget holds what is cached; what running requests compute before it is cached is in it
only where it is said to be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from sglang_hybrid.core.checkpoints.admission import Prefill, screen_positions
from sglang_hybrid.core.checkpoints.checkpoint_plan import hypothetical_node
from sglang_hybrid.core.costs.cost import MIN_BRANCH_TOKENS, CostModel
from sglang_hybrid.core.records.nodes import Kind, Node
from sglang_hybrid.core.returns.history import HistoryMatch
from sglang_hybrid.core.server_settings import Budget
from sglang_hybrid.core.traffic.requests import Request, TokenArray
from sglang_hybrid.core.victims.eviction import Policy
from sglang_hybrid.extensions.lab.simulation.device_memory import DeviceMemory, device_pools
from sglang_hybrid.extensions.lab.simulation.token_tree import TokenTree


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request: tokens skipped, and how far KV alone reached. hit_len <= kv_len <
    input_len. exact: nothing that it resumed from was ever coded.
    """

    input_len: int
    hit_len: int
    kv_len: int
    exact: bool = True


def hit_rate(outcomes: Iterable[Outcome]) -> float:
    """Skipped tokens over prompt tokens."""
    outcomes = list(outcomes)
    return sum(o.hit_len for o in outcomes) / sum(o.input_len for o in outcomes)


@dataclass(slots=True, eq=False)
class Ticket:
    """A request under way. ends: positions of its prompt at which a state is kept. locked_node: the
    node that must stay meanwhile. history_match: what its prompt has in common with the history, if
    there is one. own_kv and own_states: tokens and states that it takes of the budget beside what
    is cached. apart: there was no room for it, so it leaves nothing. load_seconds: it waits so long
    for what is loaded from other tiers.
    """

    request: Request
    outcome: Outcome
    ends: dict[int, Kind]
    locked_node: Node | None = None
    history_match: HistoryMatch | None = None
    own_kv: int = 0
    own_states: int = 0
    apart: bool = False
    load_seconds: float = 0.0


class Cache(Protocol):
    """A cache that can be replayed: requests one after the other by `serve`, or overlapping, by
    `begin` at the start of a prefill, `end_prefill` at its end and `finish` after the last token.
    """

    def serve(self, request: Request) -> Outcome: ...

    def peek(self, request: Request) -> int:
        """Prompt tokens that `request` would hit now. Nothing changes."""
        ...

    def begin(self, request: Request) -> Ticket: ...

    def end_prefill(self, ticket: Ticket) -> None: ...

    def finish(self, ticket: Ticket) -> None: ...


def serve_in_steps(cache: Cache, request: Request) -> Outcome:
    """`request` alone, from the beginning to the end."""
    ticket = cache.begin(request)
    cache.end_prefill(ticket)
    cache.finish(ticket)
    return ticket.outcome


class Simulator:
    """A cache that holds at most `budget` (bytes, two pools, or None: unbounded) and evicts by
    `policy`.

    state_policy: the policy of the state slots of a split budget, where `policy` is the KV's.
    running_states: where it is not None, the budget also holds what running requests compute: the
    KV beyond what they hold of the cache, and so many states each. memory: what it holds; by
    default a device alone. A model without state resumes wherever its KV reaches.
    """

    page = 1

    def __init__(
        self,
        cost: CostModel,
        budget: Budget,
        policy: Policy,
        min_branch_tokens: int = MIN_BRANCH_TOKENS,
        state_policy: Policy | None = None,
        running_states: int | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        if memory is None:
            tree = TokenTree(self.page)
            pools = device_pools(budget, cost, tree.clock, policy, state_policy)
            memory = DeviceMemory(tree, cost, budget, pools)
        self.cost = cost
        self.budget = budget
        self.min_branch_tokens = min_branch_tokens
        self.memory = memory
        self.tree = memory.tree
        self.policy = policy
        self.running_states = running_states
        self._running: Counter[Node] = Counter()

    @property
    def used(self) -> int:
        """Bytes on the device that are cached, and those of running requests where the budget
        holds these too.
        """
        return self.memory.used

    def run(self, requests: Iterable[Request]) -> list[Outcome]:
        """Serve every request, in order."""
        return [self.serve(request) for request in requests]

    def serve(self, request: Request) -> Outcome:
        """Match the prompt, then insert the whole sequence with the checkpoints it deserves."""
        if self.running_states is not None:
            return serve_in_steps(self, request)
        ticket, path, matched = self._look_up(request)
        ends: dict[int, Kind | None] = {**ticket.ends, len(request.tokens): Kind.TAIL}
        path = self._insert(request.tokens, path, matched, ends, request.tenant)
        self._on_path(request, path)
        self._remember(ticket, path)
        return ticket.outcome

    def adopt(self, request: Request, ends: Mapping[int, Kind]) -> list[Node]:
        """Store what another cache computed of `request`, up to the last of `ends`, with states at
        these positions. Returns the nodes on its path; what cannot fit is not stored.
        """
        tokens = request.tokens[: max(ends)]
        path, matched = self.tree.find(tokens, tenant=request.tenant)
        return self._insert(tokens, path, matched, dict(ends), request.tenant)

    def peek(self, request: Request) -> int:
        return self.resumes_from(request)[1]

    def resumes_from(self, request: Request) -> tuple[Node | None, int]:
        """The node whose state, or KV where that is enough, `request` would resume from now, and
        how many of its tokens that skips; None and 0 if there is none. Nothing changes.
        """
        prompt, tenant = request.tokens[: request.input_len - 1], request.tenant
        path, matched = self.tree.find(prompt, tenant=tenant)
        if not self.cost.state_bytes:
            beyond = self.tree.beyond(path, matched, prompt, tenant)
            return (beyond[-1], matched) if matched else (None, 0)
        node = next((node for node in reversed(path) if node.has_state), None)
        return node, 0 if node is None else node.depth

    def to_load(self, request: Request) -> tuple[int, float]:
        """Bytes that `request` would load now, and seconds of that. Nothing changes."""
        return 0, 0.0

    def begin(self, request: Request) -> Ticket:
        """Match the prompt, and hold what it resumes from."""
        ticket, path, matched = self._look_up(request)
        if ticket.outcome.hit_len:
            passed = self.tree.beyond(path, matched, request.tokens, request.tenant)
            hit_len = ticket.outcome.hit_len
            self._lock(ticket, next(node for node in passed if node.depth >= hit_len))
        self._admit(ticket)
        return ticket

    def end_prefill(self, ticket: Ticket) -> None:
        """Publish the prompt and its checkpoints."""
        request = ticket.request
        if not ticket.apart:
            self._own(ticket, 0, ticket.own_states)  # what it computed becomes the cache's
            prompt = request.tokens[: request.input_len]
            self._publish(ticket, prompt, {**ticket.ends, len(prompt): None})
            self._own_uncached_prompt(ticket)

    def finish(self, ticket: Ticket) -> None:
        """Publish the answer and the tail."""
        request = ticket.request
        self._own(ticket, 0, 0)
        if not ticket.apart:
            path = self._publish(ticket, request.tokens, {len(request.tokens): Kind.TAIL})
            self._lock(ticket, None)
            self._remember(ticket, path)

    def _admit(self, ticket: Ticket) -> None:
        """Make room for what the request computes. One that finds none runs beside the cache; the
        server would let it wait, or refuse it.
        """
        if self.running_states is None:
            return
        kv, states = ticket.request.input_len - ticket.outcome.hit_len, self.running_states
        if self.memory.make_room(kv, states, []):
            self._own(ticket, kv, states)
        else:
            ticket.apart = True
            self._lock(ticket, None)

    def _own_uncached_prompt(self, ticket: Ticket) -> None:
        """Count the part of a prompt that is not cached after its prefill as the request's own."""
        if self.running_states is not None:
            cached = 0 if ticket.locked_node is None else ticket.locked_node.depth
            self._own(ticket, max(0, ticket.request.input_len - cached), ticket.own_states)

    def _own(self, ticket: Ticket, kv: int, states: int) -> None:
        """Count so much of the budget for `ticket` from now on, instead of what it took."""
        self.memory.kv_in_use += kv - ticket.own_kv
        self.memory.slots_in_use += states - ticket.own_states
        ticket.own_kv, ticket.own_states = kv, states

    def _look_up(self, request: Request) -> tuple[Ticket, list[Node], int]:
        """The ticket of a request, with its hit and the checkpoints that it deserves; the nodes on
        its whole path, and how many of its tokens are stored.
        """
        self.tree.clock.advance(request.arrival)
        usable = request.input_len - 1  # the last prompt token is always computed
        path, matched = self.tree.find(request.tokens, tenant=request.tenant)
        kv_len = min(matched, usable)
        touched = self.tree.beyond(path, matched, request.tokens, request.tenant)
        hit, load_seconds = self._resume(path, request.input_len, touched)
        hit_len = hit.depth
        if not self.cost.state_bytes and kv_len:  # KV alone is enough
            hit_len = kv_len
            hit = next(node for node in touched if node.depth >= kv_len)
        if hit is not self.tree.root:
            self.tree.hit(hit)
        history_match = self._match_history(request)
        known_branch = 0 if history_match is None else history_match.branch
        prefill = Prefill(request.input_len, hit_len, kv_len, known_branch)
        if history_match is not None and not self._is_worth(history_match, prefill):
            prefill = replace(prefill, known_branch=0)
        self._on_path(request, path)
        outcome = Outcome(prefill.prompt_len, prefill.hit_len, prefill.kv_len)
        ticket = Ticket(request, outcome, self._checkpoints(prefill), history_match=history_match)
        ticket.load_seconds = load_seconds
        return ticket, path, matched

    def _resume(self, path: list[Node], prompt_len: int, touched: list[Node]) -> tuple[Node, float]:
        """The node on `path` that a prompt resumes from, and the seconds to load what it needs.
        `touched` stays.
        """
        usable = (node for node in reversed(path) if node.has_state and node.depth < prompt_len)
        return next(usable, self.tree.root), 0.0

    def _is_worth(self, history_match: HistoryMatch, prefill: Prefill) -> bool:
        """True if a state at the branch that the history knows should be taken. The paper's rule
        takes every branch that it sees. Where a prompt only goes on with a sequence, it sees none;
        the state there has to be worth what it pushes out.
        """
        at = history_match.branch
        if not history_match.only_continues or at <= prefill.hit_len:
            return True
        if self.memory.short_of(prefill.prompt_len - prefill.kv_len, 2) is None:
            return True
        clock = self.tree.clock
        new = hypothetical_node(at, Kind.BRANCH, prefill.hit_len, history_match, clock)
        comparison = self.memory.state_pool.compare_with_victim(new)
        return comparison is None or comparison.beats_victim

    def _checkpoints(self, prefill: Prefill) -> dict[int, Kind]:
        branches = [(position, Kind.BRANCH) for position in prefill.branch_points()]
        screened = screen_positions(branches, prefill, self.min_branch_tokens)
        return {c.position: c.kind for c in screened if c.admitted}

    def _match_history(self, request: Request) -> HistoryMatch | None:
        """The common part of its prompt and the history."""
        history = self.policy.history
        if history is None:
            return None
        return history.match(request.tokens[: request.input_len], request.tenant)

    def _remember(self, ticket: Ticket, path: list[Node]) -> None:
        history = self.policy.history
        if history is not None:
            request, clock = ticket.request, self.tree.clock
            history_path = history.observe(
                request.tokens,
                request.input_len,
                clock,
                history_match=ticket.history_match,
                tenant=request.tenant,
                hint=request.hint,
            )
            for node in path:
                self.tree.link_history(node, history_path.at(node.depth))

    def _on_path(self, request: Request, path: list[Node]) -> None:
        """`request` found or left the nodes on `path`: for caches that note more than the hit."""

    def _publish(
        self, ticket: Ticket, tokens: TokenArray, ends: dict[int, Kind | None]
    ) -> list[Node]:
        """Insert what was computed by now and hold its end instead of what was held before."""
        known = ticket.locked_node
        if known is not None and not self._leads_to(known):
            known = None
        tenant = ticket.request.tenant
        path, matched = self.tree.find(tokens, known, tenant)
        path = self._insert(tokens, path, matched, ends, tenant)
        self._on_path(ticket.request, path)
        deepest = max(path, key=lambda node: node.depth, default=None)
        if deepest is not None and deepest.depth == len(tokens):
            self._lock(ticket, deepest)
        return path

    def _leads_to(self, node: Node) -> bool:
        """True if what a request holds, `node`, is on its path; without states it may lie aside."""
        return bool(self.cost.state_bytes)

    def _lock(self, ticket: Ticket, node: Node | None) -> None:
        """Hold `node` for a running request, and let go of what it held."""
        before, ticket.locked_node = ticket.locked_node, node
        if node is not None:
            self._running[node] += 1
            self.tree.lock(node, kv=True, state=True)
        if before is not None:
            self._running[before] -= 1
            if self._running[before] <= 0:
                del self._running[before]
                self.tree.lock(before, kv=False, state=False)

    def _insert(
        self,
        tokens: TokenArray,
        path: list[Node],
        matched: int,
        ends: dict[int, Kind | None],
        tenant: str = "",
    ) -> list[Node]:
        """Store `tokens` of `tenant` with nodes at `ends`, those of a kind with states; return the
        nodes on their path. Nothing is stored of a sequence that cannot fit.
        """
        stored = {node.depth for node in path if node.has_state}
        kv = len(tokens) - matched
        states = sum(1 for end, kind in ends.items() if kind and end not in stored)
        touched = self.tree.beyond(path, matched, tokens, tenant)
        if not self.memory.make_room(kv, states, touched):
            return path
        self.memory.add(kv, states)
        return self._grow_path(tokens, path, touched, matched, ends, tenant)

    def _grow_path(
        self,
        tokens: TokenArray,
        path: list[Node],
        touched: list[Node],
        matched: int,
        ends: dict[int, Kind | None],
        tenant: str,
    ) -> list[Node]:
        """Nodes at all `ends` of `tokens`, of which `touched` hold the first `matched`, and states
        where they have a kind; the nodes on their path.
        """
        at = {node.depth: node for node in path}
        for cut in sorted({matched, *ends} - at.keys() - {0}):
            if cut <= matched:
                at[cut] = self.tree.cut(next(node for node in touched if node.depth > cut), cut)
        start = matched
        for end in sorted(end for end in ends if end > matched):
            above = at[start] if start else self.tree.root
            at[end] = self.tree.grow(above, tokens[start:end], tenant)
            start = end
        for end, kind in ends.items():
            if kind:
                self.tree.give_state(at[end], kind)
        return list(at.values())
