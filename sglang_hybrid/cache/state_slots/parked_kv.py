"""KV that lies in slots without a state, where the pool of KV has no room for it.

The other way round from `spilled_states.py`: a slot that no state needs is bytes, and KV that
nobody holds can lie there, token by token. So slots are not lost to prompts. Before a request
resumes behind such KV, it is brought back into the pool, in exchange for other KV that nobody holds
where the pool is full. Victims of eviction are chosen among all entries.

In SGLang's tree such KV is on the device, and the value of its node has the tokens that are in the
pool: those that the node begins with. The slots are counted here, and the cache adds them to what
may be evicted.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.cache.state_slots.parked_rows import ParkedRows
from sglang_hybrid.cache.state_slots.spilled_states import kv_buffers
from sglang_hybrid.core.memory.token_places import PlaceArray, TokenPlaces
from sglang_hybrid.serving.device_streams import on_stream, to_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from torch import Tensor

logger = logging.getLogger(__name__)

KV, STATE = ComponentType.FULL, ComponentType.MAMBA

LEAST_AT_ONCE: Final = 1_024
"""Tokens that are parked together where fewer are asked for: a decode step asks for one for each
request."""

MOST_BYTES: Final = 128 << 20
"""Bytes of KV that is copied together: as many are allocated beside the pools meanwhile."""


class ParkedKv:
    """The KV of one cache that is parked in slots; the pools are those of `params`.

    tokens_of_slot: of KV that fit into one. freed: as of `SpilledStates`, which counts into it,
    too. parked, brought_back: tokens that ever were. Raises ValueError for pools where KV cannot
    lie in slots.
    """

    def __init__(self, cache: Any, params: CacheInitParams, freed: Counter[ComponentType]) -> None:
        self._cache = cache
        self._kv = params.token_to_kv_pool_allocator
        self._slots = params.req_to_token_pool.mamba_allocator
        self._page = int(params.page_size)
        states = params.req_to_token_pool.mamba_pool.mamba_cache.temporal
        self._rows = ParkedRows(kv_buffers(self._kv.get_kvcache()), states, self._page)
        self.tokens_of_slot = self._rows.tokens
        together = MOST_BYTES // self._rows.token_bytes // self._page
        self._most_at_once = max(1, together) * self._page
        self.freed = freed
        self.parked = self.brought_back = 0
        self._slot_of = torch.zeros(states.shape[1], dtype=torch.int64, device=states.device)
        self.reset()

    def reset(self) -> None:
        """Forget all parked KV, after the tree and its pools were emptied."""
        self._places = TokenPlaces(self.tokens_of_slot)
        self._of: dict[int, PlaceArray] = {}
        self._order: OrderedDict[int, None] = OrderedDict()

    # Counts.

    @property
    def tokens(self) -> int:
        """Tokens that lie in slots now."""
        return self._places.taken

    @property
    def slots(self) -> int:
        """Slots that KV lies in."""
        return self._places.rows

    @property
    def room(self) -> int:
        """Slots that could be given back now without an eviction: but for those of tokens for which
        the pool of KV has no room.
        """
        missing = max(0, self.tokens - int(self._kv.available_size()))
        return self.slots - -(-missing // self.tokens_of_slot)

    def describe(self) -> str:
        """The line of the log."""
        return (
            f"KV without room lies in slots without a state, {self.tokens_of_slot:,} tokens in each"
        )

    def as_dict(self) -> dict[str, int]:
        """The values for /server_info."""
        return {
            "now": self.tokens,
            "slots": self.slots,
            "tokens_of_slot": self.tokens_of_slot,
            "parked": self.parked,
            "brought_back": self.brought_back,
        }

    # Where room is lacking.

    def park(self, tokens: int, free_slots: int) -> bool:
        """Move KV that nobody holds into slots, what was used least recently first. Returns whether
        any was moved.

        tokens: that are lacking in the pool of KV. A call may move more, and where much is lacking
        fewer. free_slots: slots without a state that may be taken for it.
        """
        places = self._places
        wanted = min(max(tokens, LEAST_AT_ONCE), self._most_at_once)
        while places.free < wanted and free_slots > 0 and self._add_slot():
            free_slots -= 1
        wanted = min(wanted, places.free)
        moved, to = [], []
        for node, there in self._take_unlocked(wanted - wanted % self._page):
            taken = places.take(node.id, len(there))
            self._prepend_places(node, taken)
            moved.append(there)
            to.append(taken)
        self._free_empty_slots()
        if not moved:
            return False
        there = torch.cat(moved)
        places_there, slots = self._on_device(np.concatenate(to))
        with on_stream(self._cache.forward_stream, there, places_there, slots):
            self._rows.write(slots, places_there, self._rows.read_kv(there))
        self._free(there)
        self.parked += len(there)
        return True

    def _add_slot(self) -> bool:
        slot = self._slots.alloc(1)
        if slot is None:
            return False
        row = self._places.add_row()
        self._slot_of[row : row + 1] = slot
        self.freed[STATE] -= 1
        return True

    def _take_unlocked(self, tokens: int) -> Iterator[tuple[UnifiedTreeNode, Tensor]]:
        """Take `tokens` tokens of the pool, or as many as there are, from nodes that nobody holds,
        the least recently used first: yields each node, and the tokens that it has lost, which are
        the last ones that it had there.
        """
        core = self._cache.tree_core
        for _ in range(len(self._order)):
            if tokens <= 0:
                return
            name = next(iter(self._order))
            node = core.node_by_id(name)
            data = node.component_data[KV]
            if data.lock_ref:
                self._order.move_to_end(name)
                continue
            left = max(0, len(data.value) - tokens)
            there = data.value[left:]
            tokens -= len(there)
            self._set(node, data.value[:left])
            if left == 0:
                del self._order[name]
            if len(there):
                yield node, there

    def give_back_slot(self, free_tokens: int) -> bool:
        """Free a slot, by moves into others and of up to `free_tokens` tokens into the pool; False
        if that is not enough, or no KV lies in a slot.
        """
        places, width = self._places, self.tokens_of_slot
        slots = places.rows
        short = places.taken - (slots - 1) * width
        if not slots or short > free_tokens:
            return False
        while short > 0:
            name = next(reversed(self._of))
            wanted = -(-short // self._page) * self._page
            there = self._kv.alloc(min(len(self._of[name]), wanted, self._most_at_once))
            if there is None:
                return False
            self._unpark([self._cache.tree_core.node_by_id(name)], there)
            short -= len(there)
        if places.rows == slots:
            self._vacate_slot()
        return True

    def _vacate_slot(self) -> None:
        row, old, new, owners = self._places.vacate_row()
        for name in np.unique(owners).tolist():
            mine = self._of[name]
            at = np.searchsorted(old, mine).clip(max=len(old) - 1)
            self._of[name] = np.where(old[at] == mine, new[at], mine)
        source, target = self._on_device(old), self._on_device(new)
        with on_stream(self._cache.forward_stream, *source, *target):
            self._rows.write(*target[::-1], self._rows.read(*source[::-1]))
        self._free_slot(row)

    # Before a request reads it.

    def make_readable(self, node: UnifiedTreeNode) -> bool:
        """Bring all KV back that a request reads which resumes from `node`; False if there is no
        room for it beside what is held.
        """
        if not self._of:
            return True
        core, path = self._cache.tree_core, []
        above = node
        while above is not core.root_node:
            if above.id in self._of:
                path.append(above)
            elif above.id in self._order:
                self._order.move_to_end(above.id)
            above = above.parent
        if not path:
            return True
        lock = self._cache.inc_lock_ref(node.id)
        try:
            return self._fetch(path[::-1])
        finally:
            self._cache.dec_lock_ref(node.id, lock.to_dec_params())

    def _fetch(self, path: list[UnifiedTreeNode]) -> bool:
        """Bring all KV of these nodes back, which are held; whether there was room for it."""
        missing = sum(len(self._of[node.id]) for node in path)
        while missing:
            wanted = min(missing, self._most_at_once)
            free = int(self._kv.available_size()) // self._page * self._page
            there = self._kv.alloc(min(wanted, free)) if free else None
            if there is not None:
                self._unpark(path, there)
                missing -= len(there)
                continue
            others = list(self._take_unlocked(wanted))
            if not others:
                return False
            self._exchange(path, others)
            missing -= sum(len(tokens) for _, tokens in others)
        return True

    def _unpark(self, path: list[UnifiedTreeNode], there: Tensor) -> None:
        """Move to `there` as many tokens as that has of those that these nodes have in slots."""
        mine = self._take(path, there)
        places, slots = self._on_device(mine)
        with on_stream(self._cache.forward_stream, there, places, slots):
            self._rows.write_kv(there.long(), self._rows.read(slots, places))
        self.freed[KV] -= len(there)
        self._places.give_back(mine)
        self._free_empty_slots()

    def _exchange(
        self, path: list[UnifiedTreeNode], others: list[tuple[UnifiedTreeNode, Tensor]]
    ) -> None:
        """The tokens of `others` are those of the nodes of `path` from now on, and `others` have
        the places in slots that these had.
        """
        there = torch.cat([tokens for _, tokens in others])
        mine = self._take(path, there)
        places, slots = self._on_device(mine)
        with on_stream(self._cache.forward_stream, there, places, slots):
            parked, there = self._rows.read(slots, places), there.long()
            self._rows.write(slots, places, self._rows.read_kv(there))
            self._rows.write_kv(there, parked)
        self.parked += len(mine)
        for other, tokens in others:
            taken, mine = mine[: len(tokens)], mine[len(tokens) :]
            self._places.hand_over(taken, other.id)
            self._prepend_places(other, taken)

    def _prepend_places(self, node: UnifiedTreeNode, places: PlaceArray) -> None:
        """`node` has its KV at these places, and then at those that it has already."""
        self._of[node.id] = np.concatenate([places, self._of.get(node.id, places[:0])])

    def _take(self, path: list[UnifiedTreeNode], there: Tensor) -> PlaceArray:
        """The first places of the nodes of `path`, one after the other: one for each token of
        `there`, which are their KV now.
        """
        found = []
        for node in path:
            mine = self._of.get(node.id)
            if mine is None or not len(there):
                continue
            taken, rest = mine[: len(there)], mine[len(there) :]
            tokens, there = there[: len(taken)], there[len(taken) :]
            if len(rest):
                self._of[node.id] = rest
            else:
                del self._of[node.id]
            self._set(node, torch.cat([node.component_data[KV].value, tokens]))
            self._order[node.id] = None
            self._order.move_to_end(node.id)
            found.append(taken)
        taken = np.concatenate(found)
        self.brought_back += len(taken)
        return taken

    # Other changes of KV.

    def on_add(self, node: UnifiedTreeNode) -> None:
        """Called when `node` has come into the tree, with KV in the pool."""
        self._order[node.id] = None

    def split(self, head: UnifiedTreeNode, tail: UnifiedTreeNode) -> None:
        """The edge of `tail` was cut, and its value; `head` is the new node above it."""
        mine = self._of.get(tail.id)
        if mine is not None:
            of_head = len(head.key) - len(head.component_data[KV].value)
            if of_head:
                self._of[head.id], self._of[tail.id] = mine[:of_head], mine[of_head:]
                self._places.hand_over(mine[:of_head], head.id)
        if tail.id not in self._order:
            return
        del self._order[tail.id]
        for node in (head, tail):
            if len(node.component_data[KV].value):
                self._order[node.id] = None

    def adopt(self, node: UnifiedTreeNode, slots: Tensor) -> bool:
        """A request computed the KV of `node` anew, in `slots` [n] of the pool: if some of it is
        parked, they take the place of all. Returns whether it was.
        """
        if node.id not in self._of:
            return False
        old = node.component_data[KV].value
        self._drop(node.id)
        self._set(node, slots.clone())
        self._order[node.id] = None
        self._free(old)
        return True

    def on_kv_eviction(self, node: UnifiedTreeNode) -> None:
        """The KV of `node` is about to be freed."""
        self._drop(node.id)
        self._order.pop(node.id, None)

    def _drop(self, name: int) -> None:
        mine = self._of.pop(name, None)
        if mine is not None:
            self._places.give_back(mine)
            self._free_empty_slots()

    # SGLang's account.

    def _free_empty_slots(self) -> None:
        """Give back the slots in which nothing is left."""
        for row in self._places.drop_empty_rows():
            self._free_slot(row)

    def _free_slot(self, row: int) -> None:
        self._slots.free(self._slot_of[row : row + 1].clone())
        self.freed[STATE] += 1

    def _free(self, tokens: Tensor) -> None:
        if len(tokens):
            self._kv.free_segment(tokens, start_pos=0)
            self.freed[KV] += len(tokens)

    def _set(self, node: UnifiedTreeNode, value: Tensor) -> None:
        """Give `node` other tokens of the pool, and SGLang's account the difference."""
        data = node.component_data[KV]
        self._cache.tree_core.adjust_component_size(node.id, KV, len(value) - len(data.value))
        data.value = value

    def _on_device(self, places: PlaceArray) -> tuple[Tensor, Tensor]:
        """The positions of these places within their slots, and the slots: int64 [n] each."""
        width, device = self.tokens_of_slot, self._slot_of.device
        there = to_device(torch.from_numpy(places), device)
        return there % width, self._slot_of[there // width]


def make_parked_kv(
    cache: Any, params: CacheInitParams, freed: Counter[ComponentType]
) -> ParkedKv | None:
    """The KV of `cache` in slots; None, and a line of the log, for pools where it cannot lie."""
    try:
        return ParkedKv(cache, params, freed)
    except ValueError as error:
        logger.warning("sglang_hybrid: KV stays in its pool: %s.", error)
        return None
