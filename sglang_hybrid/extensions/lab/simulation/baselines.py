"""Caches to compare with: none, SGLang's, and one that knows the future."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang_hybrid.core.checkpoints.admission import Prefill
from sglang_hybrid.core.costs.cost import MIN_BRANCH_TOKENS, UNBOUNDED, CostModel
from sglang_hybrid.core.records.nodes import Kind, Node
from sglang_hybrid.core.returns.history import History, HistoryMatch
from sglang_hybrid.core.returns.history_tree import HistoryPath
from sglang_hybrid.core.server_settings import Budget, Serving, Split
from sglang_hybrid.core.traffic.requests import Request, TokenArray
from sglang_hybrid.core.victims.eviction import Lru
from sglang_hybrid.extensions.lab.simulation.future import Oracle
from sglang_hybrid.extensions.lab.simulation.policies import Clairvoyant, PathLru
from sglang_hybrid.extensions.lab.simulation.server_simulator import (
    Running,
    ServerSimulator,
    way_to,
)
from sglang_hybrid.extensions.lab.simulation.simulator import (
    Outcome,
    Simulator,
    Ticket,
    serve_in_steps,
)

SGLANG_STATES_TO_KV = 0.9
"""SGLang's default of --mamba-full-memory-ratio."""
SGLANG_RUNNING_STATES = 3
"""State slots that a running request holds there, with `extra_buffer` (sglang-notes section 1)."""


class NoCache:
    """Every prompt is computed."""

    def serve(self, request: Request) -> Outcome:
        return Outcome(request.input_len, 0, 0)

    def peek(self, request: Request) -> int:
        return 0

    def begin(self, request: Request) -> Ticket:
        return Ticket(request, self.serve(request), {})

    def end_prefill(self, ticket: Ticket) -> None: ...

    def finish(self, ticket: Ticket) -> None: ...


class SglangPlus(Simulator):
    """SGLang+: Marconi's admission, least recently used leaf (paper section 5.1)."""

    def __init__(
        self,
        cost: CostModel,
        budget: Budget,
        min_branch_tokens: int = MIN_BRANCH_TOKENS,
        running_states: int | None = None,
    ) -> None:
        super().__init__(cost, budget, PathLru(), min_branch_tokens, PathLru(), running_states)

    def _on_path(self, request: Request, path: list[Node]) -> None:
        for pool in {self.memory.pool, self.memory.state_pool}:
            assert isinstance(pool.policy, PathLru)
            pool.policy.touch(path, self.tree.clock.tick)
            for node in path:
                pool.mark_dirty(node)


class SglangRules(Simulator):
    """The states that SGLang 0.5.23 keeps, with `extra_buffer` (sglang-notes sections 1 and 2), for
    caches that set `grid`, `chunk`, `interval` and `kv_policy`.

    One state per prefill chunk of at most `chunk` tokens, at the last multiple of `grid` tokens
    from the chunk's start, or at the branch point if that lies before it and on the grid; KV is
    published as far as a state reaches. While decoding, states at multiples of `interval` tokens
    (0: none).
    """

    grid: int
    chunk: int
    interval: int
    kv_policy: PathLru

    def serve(self, request: Request) -> Outcome:
        return serve_in_steps(self, request)

    def end_prefill(self, ticket: Ticket) -> None:
        if ticket.apart:
            return
        self._own(ticket, 0, ticket.own_states)
        for end in sorted(ticket.ends):
            self._publish(ticket, ticket.request.tokens[:end], {end: ticket.ends[end]})
        self._own_uncached_prompt(ticket)

    def finish(self, ticket: Ticket) -> None:
        request = ticket.request
        self._own(ticket, 0, 0)
        if self.interval and not ticket.apart:
            end = (len(request.tokens) - 1) // self.interval * self.interval
            if end > request.input_len:
                self._publish(ticket, request.tokens[:end], {end: Kind.TAIL})
        self._lock(ticket, None)

    def _look_up(self, request: Request) -> tuple[Ticket, list[Node], int]:
        self.tree.clock.advance(request.arrival)
        prompt = request.tokens[: request.input_len - 1]
        path, matched = self.tree.find(prompt, tenant=request.tenant)
        if matched > (path[-1].depth if path else 0):
            below = self.tree.beyond(path, matched, prompt, request.tenant)[-1]
            path = [*path, self.tree.cut(below, matched)]
        hit, load_seconds = self._resume(path, request.input_len, path)
        if hit is not self.tree.root:
            self.tree.hit(hit)
            self._on_path(request, path[: path.index(hit) + 1])
        prefill = Prefill(request.input_len, hit.depth, matched)
        outcome = Outcome(request.input_len, hit.depth, matched)
        ticket = Ticket(request, outcome, self._checkpoints(prefill), load_seconds=load_seconds)
        return ticket, path, matched

    def _checkpoints(self, prefill: Prefill) -> dict[int, Kind]:
        branch = prefill.kv_len // self.grid * self.grid
        ends: dict[int, Kind] = {}
        start = prefill.hit_len
        while start < prefill.prompt_len:
            end = min(start + self.chunk, prefill.prompt_len)
            target = start + (end - start) // self.grid * self.grid
            if start < branch < target and (branch - start) % self.grid == 0:
                ends[branch] = Kind.BRANCH
            elif target > start:
                ends[target] = Kind.CHUNK
            start = end
        return ends

    def _on_path(self, request: Request, path: list[Node]) -> None:
        self.kv_policy.touch(path, self.tree.clock.tick)
        for node in path:
            self.memory.pool.mark_dirty(node)


class SglangSimulator(SglangRules):
    """SGLang 0.5.23 as it is: `SglangRules` in two pools, for states and for KV. States go by least
    recent use, however many children they have; KV by least recently used leaf.
    """

    def __init__(
        self,
        cost: CostModel,
        budget: Budget,
        grid: int = 64,
        chunk: int = 8_192,
        interval: int = 256,
        page: int = 1,
        running_states: int | None = None,
    ) -> None:
        self.page = page
        self.grid = grid
        self.chunk = chunk
        self.interval = interval
        if isinstance(budget, Split):
            budget = budget.apart
        if isinstance(budget, int):
            budget = Split.of(budget, cost, SGLANG_STATES_TO_KV)
        self.kv_policy = PathLru()
        policy = Lru(stateless_first=False)
        super().__init__(cost, budget, self.kv_policy, 0, policy, running_states)


class KnowsFuture(Simulator):
    """Links nodes to the tick of their next use, for caches that evict by it. They set `_oracle`,
    and `_history`, None where evicted branch points are not remembered.
    """

    _oracle: Oracle
    _history: History | None
    _now = 0

    def _match_history(self, request: Request) -> HistoryMatch | None:
        if self._history is None:
            return None
        return self._history.match(request.tokens[: request.input_len], request.tenant)

    def _remember(self, ticket: Ticket, path: list[Node]) -> None:
        if self._history is not None:
            request, clock = ticket.request, self.tree.clock
            self._history.observe(
                request.tokens,
                request.input_len,
                clock,
                history_match=ticket.history_match,
                tenant=request.tenant,
            )

    def _on_path(self, request: Request, path: list[Node]) -> None:
        self._now = max(self._now, self._oracle.tick(request))
        for node in path:
            self.tree.link_history(node, self._oracle.next_use(request, node.depth, self._now))


class ClairvoyantCache(KnowsFuture):
    """Evicts by what the rest of the trace will ask for: a bound that no online policy can be
    expected to reach.

    remember: it also knows branch points whose KV was evicted, as `reuse` does. Without it, its
    admission is LRU's (marconi-notes.md section 8).
    """

    def __init__(
        self,
        cost: CostModel,
        budget: Budget,
        oracle: Oracle,
        remember: bool = True,
        min_branch_tokens: int = MIN_BRANCH_TOKENS,
    ) -> None:
        super().__init__(cost, budget, Clairvoyant(), min_branch_tokens, Clairvoyant())
        self._oracle = oracle
        self._history = History(max_bytes=UNBOUNDED) if remember else None


class ServedClairvoyant(KnowsFuture, ServerSimulator):
    """`ClairvoyantCache` as it is served: the server admits and evicts by the future too."""

    _history: History

    def __init__(
        self,
        cost: CostModel,
        budget: Split | int,
        oracle: Oracle,
        min_branch_tokens: int = MIN_BRANCH_TOKENS,
        serving: Serving | None = None,
    ) -> None:
        super().__init__(cost, budget, Clairvoyant(), Clairvoyant(), min_branch_tokens, serving)
        self._oracle = oracle
        self._history = History(max_bytes=UNBOUNDED)

    def _match_history(self, request: Request) -> HistoryMatch | None:
        history_match = self._history.match(request.tokens[: request.input_len], request.tenant)
        return replace(history_match, path=Future(self._oracle, request, self._now))

    def _learn(self, running: Running, tokens: TokenArray) -> None:
        request = running.request
        self._history.observe(tokens, request.input_len, self.tree.clock, tenant=request.tenant)

    def _on_publish(self, running: Running) -> None:
        self._on_path(running.request, list(way_to(running.locked_node)))


class Future(HistoryPath):
    """The future of the positions of `request` after tick `now`, in place of what is known."""

    def __init__(self, oracle: Oracle, request: Request, now: int) -> None:
        super().__init__([])
        self._oracle, self._request, self._now = oracle, request, now

    def exactly(self, depth: int) -> Any:
        return self._oracle.next_use(self._request, depth, self._now)
