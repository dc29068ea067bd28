"""Prefix caches of other engines for hybrid models, as these are served by default.

Each class says what it is made from and what it knows. Sizes are those of our cost model for all.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

from sglang_hybrid.core.checkpoints.admission import Prefill
from sglang_hybrid.core.costs.cost import UNBOUNDED, CostModel
from sglang_hybrid.core.records.nodes import Kind, Node
from sglang_hybrid.core.server_settings import Budget, Split
from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.core.victims.eviction import Lru
from sglang_hybrid.extensions.lab.simulation.block_cache import block_names
from sglang_hybrid.extensions.lab.simulation.policies import PathLru
from sglang_hybrid.extensions.lab.simulation.simulator import (
    Outcome,
    Simulator,
    Ticket,
    serve_in_steps,
)
from sglang_hybrid.extensions.lab.simulation.tiers.tier_budgets import TierBudgets

BLOCK_STEP: Final = 16
"""Tokens that a block of vLLM's attention is a multiple of."""


@dataclass(slots=True, eq=False)
class PagedTicket(Ticket):
    """A request that holds cached blocks by their names, and `own` pages beside them. wanted:
    blocks of its prompt after which its state is kept.
    """

    held: list[Hashable] = field(default_factory=list)
    own: int = 0
    wanted: set[int] = field(default_factory=set)


class VllmCache:
    """vLLM 0.33 as it is served (documentation and threads 37898, 45845, 52216, 53595):
    `mamba_cache_mode` align, `prefix_cache_retention_interval` 0, without drafts.

    One pool of pages. A page holds the KV of a block of tokens, so large that a state fits into
    `groups` pages (recurrent layers for each attention layer). All full blocks of KV are cached,
    of answers too. States are kept at two places of a prompt: its last block boundary that leaves a
    token to compute, and the end of the KV that was found where no state is. Of all pages that no
    request holds the least recently released one goes first, the end of a sequence before its
    beginning. It knows nothing of sessions or of time. Sketch: the pages of a state go together.
    """

    def __init__(self, cost: CostModel, budget: Budget, groups: int = 3) -> None:
        per_group = -(-cost.state_bytes // groups)
        tokens = -(-per_group // max(1, cost.kv_bytes_per_token))
        self.block = max(1, -(-tokens // BLOCK_STEP)) * BLOCK_STEP
        self.state_pages = groups if cost.state_bytes else 0
        self.page_bytes = self.block * cost.kv_bytes_per_token
        if isinstance(budget, Split):
            budget = budget.kv_tokens * cost.kv_bytes_per_token + budget.slots * cost.state_bytes
        self.pages = UNBOUNDED if budget is None else budget // max(1, self.page_bytes)
        self._cached: OrderedDict[Hashable, int] = OrderedDict()  # pages, first to go first
        self._holders: Counter[Hashable] = Counter()
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes that it holds now."""
        return self._used * self.page_bytes

    def serve(self, request: Request) -> Outcome:
        return serve_in_steps(self, request)

    def peek(self, request: Request) -> int:
        return self._find(block_names(request, request.input_len - 1, self.block))[1] * self.block

    def begin(self, request: Request) -> PagedTicket:
        names = block_names(request, request.input_len - 1, self.block)
        found, hit = self._find(names)
        outcome = Outcome(request.input_len, hit * self.block, found * self.block)
        ticket = PagedTicket(request, outcome, {}, wanted={found, len(names)} - {0, hit})
        if hit and self.state_pages:
            self._cached.move_to_end((names[hit - 1], "state"))
        self._hold(ticket, names[:hit])
        pages = -(-request.input_len // self.block) - hit + self.state_pages
        ticket.apart = not self._take(ticket, pages)
        if ticket.apart:
            self._release(ticket)
        return ticket

    def end_prefill(self, ticket: Ticket) -> None:
        assert isinstance(ticket, PagedTicket)
        names = self._publish(ticket, ticket.request.input_len)
        for blocks in sorted(ticket.wanted) if names and self.state_pages else ():
            name = (names[blocks - 1], "state")
            if name not in self._cached and self._make_room(self.state_pages):
                self._cached[name] = self.state_pages
                self._used += self.state_pages

    def finish(self, ticket: Ticket) -> None:
        assert isinstance(ticket, PagedTicket)
        length = max(len(ticket.request.tokens) - 1, ticket.request.input_len)
        more = -(-length // self.block) - -(-ticket.request.input_len // self.block)
        if not ticket.apart and self._take(ticket, more):
            self._publish(ticket, length)
        self._release(ticket)

    def _find(self, names: Sequence[int], below: Container[Hashable] = ()) -> tuple[int, int]:
        """The number of blocks from the beginning that are cached, here or `below`, and the number
        of them up to the deepest state that a prompt can resume from.
        """

        def has(name: Hashable) -> bool:
            return name in self._cached or name in below

        found = 0
        while found < len(names) and has(names[found]):
            found += 1
        if not self.state_pages:
            return found, found
        hit = found
        while hit and not has((names[hit - 1], "state")):
            hit -= 1
        return found, hit

    def _publish(self, ticket: PagedTicket, length: int) -> list[int]:
        """Cache the full blocks up to `length`; returns their names. A block that was cached
        already keeps its page.
        """
        if ticket.apart:
            return []
        names = block_names(ticket.request, length, self.block)
        for name in names[len(ticket.held) :]:
            ticket.own -= 1
            if name in self._cached:
                self._used -= 1
            else:
                self._cached[name] = 1
            self._hold(ticket, [name])
        return names

    def _hold(self, ticket: PagedTicket, names: Sequence[Hashable]) -> None:
        ticket.held += names
        self._holders.update(names)

    def _release(self, ticket: PagedTicket) -> None:
        self._used -= ticket.own
        ticket.own = 0
        for name in reversed(ticket.held):
            self._holders[name] -= 1
            if not self._holders[name]:
                del self._holders[name]
                self._cached.move_to_end(name)
        ticket.held = []

    def _take(self, ticket: PagedTicket, pages: int) -> bool:
        if not self._make_room(pages):
            return False
        ticket.own += pages
        self._used += pages
        return True

    def _make_room(self, pages: int) -> bool:
        """Evict until so many more pages are free; False if they cannot be."""
        over = self._used + pages - self.pages
        if over <= 0:
            return True
        victims = []
        for name, size in self._cached.items():
            if over <= 0:
                break
            if name not in self._holders:
                victims.append(name)
                over -= size
        for name in victims if over <= 0 else ():
            self._on_eviction(name)
            self._used -= self._cached.pop(name)
        return over <= 0

    def _on_eviction(self, name: Hashable) -> None:
        """Called when `name` is about to be evicted."""


class LmCache(VllmCache):
    """`VllmCache` with a host below it, under the eviction-aware offload of LMCache 0.5.7rc2 (its
    design document `lazy_offload_policy/eviction_aware.md` and pull request 4847).

    Nothing is copied to the host until vLLM is about to evict it; then it is copied, with all
    blocks before it that are on the device. Host blocks behind the device's blocks are loaded.
    The host evicts the least recently used. It knows vLLM's queue of pages, and nothing of sessions
    or of time. Sketch: copies are in time, states go down as they are evicted, there is no disk.
    """

    def __init__(self, cost: CostModel, tiers: TierBudgets, groups: int = 3) -> None:
        super().__init__(cost, tiers.sizes[Tier.DEVICE], groups)
        self._link = tiers.links[Tier.HOST]
        self._host: OrderedDict[Hashable, int] = OrderedDict()  # pages, first to go first
        self._host_pages = tiers.sizes[Tier.HOST] // max(1, self.page_bytes)
        self._host_used = self._loaded = 0
        self._before: dict[Hashable, Hashable] = {}  # the block before each that is on the device

    def begin(self, request: Request) -> PagedTicket:
        names = block_names(request, request.input_len - 1, self.block)
        _, hit = self._find(names, self._host)
        wanted: list[Hashable] = [*names[:hit]]
        if hit and self.state_pages:
            wanted.append((names[hit - 1], "state"))
        before, held = self._loaded, Counter[Hashable]()
        for name in wanted:
            if name not in self._cached and not self._load(name):
                break
            held[name] += 1
            self._holders[name] += 1
        self._holders -= held
        ticket = super().begin(request)
        ticket.load_seconds = self._link.seconds((self._loaded - before) * self.page_bytes)
        return ticket

    def peek(self, request: Request) -> int:
        names = block_names(request, request.input_len - 1, self.block)
        return self._find(names, self._host)[1] * self.block

    def _load(self, name: Hashable) -> bool:
        """Have `name` on the device, too; False if the host has lost it, or there is no room."""
        pages = self._host.get(name)
        if pages is None or not self._make_room(pages):
            return False
        if name in self._host:
            self._host.move_to_end(name)
        self._cached[name] = pages
        self._used += pages
        self._loaded += pages
        return True

    def _publish(self, ticket: PagedTicket, length: int) -> list[int]:
        names = super()._publish(ticket, length)
        self._before.update(zip(names[1:], names, strict=False))
        return names

    def _on_eviction(self, name: Hashable) -> None:
        before, chain = self._before.pop(name, None), [name]
        while before in self._cached and before not in self._host:
            chain.append(before)
            before = self._before.get(before)
        for each in reversed(chain):
            self._copy(each)

    def _copy(self, name: Hashable) -> None:
        pages = self._cached[name]
        if name in self._host or pages > self._host_pages:
            return
        while self._host_used + pages > self._host_pages:
            self._host_used -= self._host.popitem(last=False)[1]
        self._host[name] = pages
        self._host_used += pages


class TensorRtLlm(Simulator):
    """TensorRT-LLM 1.4.0rc with the policy `per_conversation` (its documentation, threads 16115 and
    16883): states so many tokens before the end of each prompt, and at its branch point.

    A conversation keeps the states of its last `turns` turns. Older ones are given up when a prompt
    has been computed, unless another turn left the same. Branch points are rounded down to whole
    blocks. KV of prompts and answers goes least recently used leaf first; states in a pool of their
    own, least recently used first. It knows which conversation a request is of, and the mean
    length of the trace's sequences (`avg_seq_len`), by which its pools are split. Sketch: how
    victims are chosen among states.
    """

    def __init__(
        self,
        cost: CostModel,
        budget: Budget,
        mean_length: float,
        turns: int = 3,
        offset: int = 2,
        block: int = 32,
        running_states: int | None = None,
    ) -> None:
        self.turns = turns
        self.offset = offset
        self.block = block
        if isinstance(budget, int):
            kv = max(1.0, mean_length * cost.kv_bytes_per_token)
            budget = Split.of(budget, cost, turns * cost.state_bytes / kv)
        states = Lru(stateless_first=False)
        super().__init__(cost, budget, PathLru(), 0, states, running_states)
        self._kept: dict[tuple[str, int], deque[list[Node]]] = {}
        self._kept_by: Counter[Node] = Counter()

    def serve(self, request: Request) -> Outcome:
        return serve_in_steps(self, request)

    def end_prefill(self, ticket: Ticket) -> None:
        request = ticket.request
        if ticket.apart:
            return
        self._own(ticket, 0, ticket.own_states)
        prompt = request.tokens[: request.input_len]
        path = self._publish(ticket, prompt, {len(prompt): None, **ticket.ends})
        self._own_uncached_prompt(ticket)
        left = [node for node in path if node.depth in ticket.ends and node.has_state]
        turns = self._kept.setdefault((request.tenant, request.session), deque())
        turns.append(left)
        self._kept_by.update(left)
        while len(turns) > self.turns:
            for node in turns.popleft():
                self._give_up(node)

    def finish(self, ticket: Ticket) -> None:
        self._own(ticket, 0, 0)
        if not ticket.apart:
            tokens = ticket.request.tokens
            self._publish(ticket, tokens, {len(tokens): None})
            self._lock(ticket, None)

    def _give_up(self, node: Node) -> None:
        self._kept_by[node] -= 1
        if self._kept_by[node]:
            return
        del self._kept_by[node]
        if node.parent is not None and node.has_state and not node.state_locked:
            self.memory.add(0, -1)
            self.tree.drop_state(node)

    def _checkpoints(self, prefill: Prefill) -> dict[int, Kind]:
        ends: dict[int, Kind] = {}
        branch = prefill.kv_len // self.block * self.block
        if branch > prefill.hit_len:
            ends[branch] = Kind.BRANCH
        end = prefill.prompt_len - self.offset
        if end > prefill.hit_len:
            ends[end] = Kind.CHUNK
        return ends

    def _on_path(self, request: Request, path: list[Node]) -> None:
        assert isinstance(self.policy, PathLru)
        self.policy.touch(path, self.tree.clock.tick)
        for node in path:
            self.memory.pool.mark_dirty(node)
