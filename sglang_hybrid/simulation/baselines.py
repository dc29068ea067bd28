"""Caches to compare with: none, fine-grained blocks, SGLang's, and one that knows the future."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from sglang_hybrid.core.checkpoints.admission import Prefill
from sglang_hybrid.core.costs.cost import MIN_BRANCH_TOKENS, UNBOUNDED, CostModel
from sglang_hybrid.core.records.nodes import Kind, Node
from sglang_hybrid.core.returns.history import History, HistoryMatch
from sglang_hybrid.core.returns.history_tree import HistoryPath
from sglang_hybrid.core.server_settings import Budget, Serving, Split
from sglang_hybrid.core.victims.eviction import Lru
from sglang_hybrid.simulation.future import Oracle
from sglang_hybrid.simulation.policies import Clairvoyant, PathLru
from sglang_hybrid.simulation.server_simulator import Running, ServerSimulator, way_to
from sglang_hybrid.simulation.simulator import Outcome, Simulator, Ticket, serve_in_steps
from sglang_hybrid.simulation.traces.requests import Request, TokenArray

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


@dataclass(slots=True)
class StoredBlock:
    """A cached block: whether a hit used its KV, whether one resumed from its state, and how many
    running requests need it.
    """

    kv_reused: bool = False
    state_reused: bool = False
    held: int = 0


@dataclass(slots=True, eq=False)
class BlockTicket(Ticket):
    """A request that holds cached blocks by their names, and takes `own_blocks` beside them."""

    names: list[int] = field(default_factory=list)
    own_blocks: int = 0


class BlockCache:
    """vLLM+: every full block of `block` tokens is cached with a state, least recently used first
    out, strictly within the budget (paper section 5.1).

    A use touches the whole prefix, the deepest block first, so the oldest block is always one that
    no other needs. Of a sequence that does not fit, the beginning is kept. with_running: the budget
    also holds the blocks that running requests fill, and what these hold stays. stored, kv_reused,
    state_reused: blocks so far, for the paper's figure 3a.
    """

    def __init__(
        self, cost: CostModel, budget: Budget, block: int = 32, *, with_running: bool = False
    ) -> None:
        self.block = block
        each = block * cost.kv_bytes_per_token + cost.state_bytes
        if isinstance(budget, Split):
            self.capacity = min(budget.slots, budget.kv_tokens // block)
        else:
            self.capacity = UNBOUNDED if budget is None else budget // max(each, 1)
        self.used_by_block = each
        self.with_running = with_running
        self.stored = self.kv_reused = self.state_reused = 0
        self._blocks: OrderedDict[int, StoredBlock] = OrderedDict()
        self._in_use = 0  # blocks of running requests that are not cached

    @property
    def used(self) -> int:
        """Bytes that it holds now."""
        return (len(self._blocks) + self._in_use) * self.used_by_block

    def serve(self, request: Request) -> Outcome:
        if self.with_running:
            return serve_in_steps(self, request)
        ticket = self.begin(request)
        self._store(self._names(request, len(request.tokens)))
        return ticket.outcome

    def peek(self, request: Request) -> int:
        return self._found(self._names(request, request.input_len - 1)) * self.block

    def begin(self, request: Request) -> BlockTicket:
        names = self._names(request, request.input_len - 1)
        found = self._found(names)
        for name in reversed(names[:found]):
            block = self._blocks[name]
            self.kv_reused += not block.kv_reused
            block.kv_reused = True
            self._blocks.move_to_end(name)
        if found:
            last = self._blocks[names[found - 1]]
            self.state_reused += not last.state_reused
            last.state_reused = True
        hit = found * self.block
        ticket = BlockTicket(request, Outcome(request.input_len, hit, hit), {})
        if self.with_running:
            self._lock(ticket, names[:found])
            own = -(-request.input_len // self.block) - found
            ticket.apart = not self._make_room(own)
            self._own(ticket, 0 if ticket.apart else own)
        return ticket

    def _found(self, names: list[int]) -> int:
        """How many blocks from the beginning are cached."""
        found = 0
        while found < len(names) and names[found] in self._blocks:
            found += 1
        return found

    def end_prefill(self, ticket: Ticket) -> None:
        self._publish(ticket, ticket.request.input_len)

    def finish(self, ticket: Ticket) -> None:
        self._publish(ticket, len(ticket.request.tokens))
        assert isinstance(ticket, BlockTicket)
        self._own(ticket, 0)
        self._lock(ticket, [])

    def _publish(self, ticket: Ticket, length: int) -> None:
        """What was computed up to `length` is cached; a last block that is not full stays the
        request's own.
        """
        assert isinstance(ticket, BlockTicket)
        if ticket.apart:
            return
        self._own(ticket, 0)
        names = self._store(self._names(ticket.request, length))
        if self.with_running:
            self._lock(ticket, names)
            self._own(ticket, -(-length // self.block) - len(names))

    def _store(self, names: list[int]) -> list[int]:
        """Cache as many blocks, from the first on, as there is room for; returns their names."""
        names = names[: self.capacity - self._in_use]
        for name in reversed(names):
            if name in self._blocks:
                self._blocks.move_to_end(name)
        there = {name for name in names if name in self._blocks}
        if not self._make_room(len(names) - len(there), there):
            return [name for name in names if name in there]
        for name in reversed(names):
            if name in self._blocks:
                self._blocks.move_to_end(name)
            else:
                self._blocks[name] = StoredBlock()
                self.stored += 1
        return names

    def _make_room(self, blocks: int, kept: Container[int] = ()) -> bool:
        """Evict until so many more fit, the oldest first; not what is held, nor `kept`. False,
        and nothing is evicted, if they cannot.
        """
        over = max(0, len(self._blocks) + self._in_use + blocks - self.capacity)
        free = (name for name, block in self._blocks.items() if not block.held and name not in kept)
        victims = list(islice(free, over))
        if len(victims) < over:
            return False
        for name in victims:
            del self._blocks[name]
        return True

    def _lock(self, ticket: BlockTicket, names: list[int]) -> None:
        for name in names:
            self._blocks[name].held += 1
        for name in ticket.names:
            self._blocks[name].held -= 1
        ticket.names = names

    def _own(self, ticket: BlockTicket, blocks: int) -> None:
        self._in_use += blocks - ticket.own_blocks
        ticket.own_blocks = blocks

    def _names(self, request: Request, length: int) -> list[int]:
        """A name for each full block of the first `length` tokens: its tenant, its tokens and all
        before.
        """
        count = length // self.block
        rows = request.tokens[: count * self.block].reshape(count, self.block)
        names = []
        name = hash(request.tenant)
        for row in rows:
            name = hash((name, row.tobytes()))
            names.append(name)
        return names


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
    """What SGLang 0.5.23 keeps, with `extra_buffer` (sglang-notes sections 1 and 2), for caches
    that set `grid`, `chunk`, `interval` and `kv_policy`.

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
        self._own_rest(ticket)

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


class ServedClairvoyant(ServerSimulator):
    """`ClairvoyantCache` as it is served: the server admits and evicts by the future too."""

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
        self._now = 0
        self._history = History(max_bytes=UNBOUNDED)

    def _match_history(self, request: Request) -> HistoryMatch | None:
        history_match = self._history.match(request.tokens[: request.input_len], request.tenant)
        return replace(history_match, path=Future(self._oracle, request, self._now))

    def _learn(self, running: Running, tokens: TokenArray) -> None:
        request = running.request
        self._history.observe(tokens, request.input_len, self.tree.clock, tenant=request.tenant)

    def _on_path(self, request: Request, path: list[Node]) -> None:
        self._now = max(self._now, self._oracle.tick(request))
        for node in path:
            self.tree.link_history(node, self._oracle.next_use(request, node.depth, self._now))

    def _on_publish(self, running: Running) -> None:
        self._on_path(running.request, list(way_to(running.locked_node)))


class Future(HistoryPath):
    """What comes of the positions of `request` after tick `now`, in place of what is known."""

    def __init__(self, oracle: Oracle, request: Request, now: int) -> None:
        super().__init__([])
        self._oracle, self._request, self._now = oracle, request, now

    def exactly(self, depth: int) -> Any:
        return self._oracle.next_use(self._request, depth, self._now)
