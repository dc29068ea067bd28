"""A cache of fine-grained blocks, each with a state, to compare with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field
from itertools import islice

from sglang_hybrid.core.costs.cost import UNBOUNDED, CostModel
from sglang_hybrid.core.server_settings import Budget, Split
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.simulation.simulator import Outcome, Ticket, serve_in_steps


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
    out, strictly within the budget (paper section 5.1). vLLM itself keeps far fewer states today
    (`rivals.VllmCache`).

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
        self._store(block_names(request, len(request.tokens), self.block))
        return ticket.outcome

    def peek(self, request: Request) -> int:
        return self._found(block_names(request, request.input_len - 1, self.block)) * self.block

    def begin(self, request: Request) -> BlockTicket:
        names = block_names(request, request.input_len - 1, self.block)
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
        """The number of blocks from the beginning that are cached."""
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
        """Put what was computed up to `length` into the cache; a last block that is not full stays
        the request's own.
        """
        assert isinstance(ticket, BlockTicket)
        if ticket.apart:
            return
        self._own(ticket, 0)
        names = self._store(block_names(ticket.request, length, self.block))
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


def block_names(request: Request, length: int, block: int) -> list[int]:
    """A name for each full block of the first `length` tokens: its tenant, its tokens and all
    before.
    """
    count = length // block
    rows = request.tokens[: count * block].reshape(count, block)
    names = []
    name = hash(request.tenant)
    for row in rows:
        name = hash((name, row.tobytes()))
        names.append(name)
    return names
