"""The paper's allocators: one padded pool, two static pools, two pools that move pages."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

from sglang_hybrid.core.memory.account import MemoryKind
from sglang_hybrid.extensions.lab.avmp.memory import Ids, ModelBytes


class Padded:
    """One pool whose pages are as large as the larger of a KV page and a state.

    Short of pages, it evicts the request that took something longest ago, once. Ids are handed out
    again, and a request that ends gives back every id that it ever got, as in the authors'
    simulator: also those that were evicted and belong to another request by now.
    """

    def __init__(self, model: ModelBytes, total: int) -> None:
        self.evicted: set[int] = set()
        self._ids = Ids(total // max(model.page, model.state))
        self._held: OrderedDict[int, dict[int, None]] = OrderedDict()
        self._owner: dict[int, int] = {}
        self._given: defaultdict[int, list[int]] = defaultdict(list)

    def take(self, kind: MemoryKind, request: int, units: int) -> bool:
        ids = self._ids.take(units)
        if ids is None:
            self._evict_one()
            ids = self._ids.take(units)
        if ids is None:
            return False
        self._held.setdefault(request, {}).update(dict.fromkeys(ids))
        self._held.move_to_end(request)
        self._owner.update(dict.fromkeys(ids, request))
        self._given[request].extend(ids)
        return True

    def end(self, request: int) -> None:
        given = dict.fromkeys(self._given.pop(request, ()))
        back = [number for number in given if number in self._owner]
        for number in back:
            owner = self._owner.pop(number)
            del self._held[owner][number]
            if not self._held[owner]:
                del self._held[owner]
        self._ids.give(back)

    def _evict_one(self) -> None:
        if not self._held:
            return
        victim, ids = self._held.popitem(last=False)
        for number in ids:
            del self._owner[number]
        self._ids.give(ids)
        self.evicted.add(victim)


class TwoPools:
    """A pool of KV pages and one of states.

    Short of pages, a pool evicts the request that took something of it longest ago, once. Then, if
    `batch` is not 0, the other pool gives so many of its own pages, if none of the last ones is in
    use; what does not fill a page of the taker is lost.

    Args:
        share: of `total` bytes, what the states have at first.
        batch: pages or states of a move; 0: never.
    """

    def __init__(self, model: ModelBytes, total: int, share: float, batch: int = 0) -> None:
        self.evicted: set[int] = set()
        self.moves = 0
        self._batch = batch
        self._unit = {kind: model.unit(kind) for kind in MemoryKind}
        self._most = {kind: total // self._unit[kind] for kind in MemoryKind}
        for_states = int(total * share)
        bytes_ = {MemoryKind.KV: total - for_states, MemoryKind.STATES: for_states}
        self._ids = {kind: Ids(bytes_[kind] // self._unit[kind]) for kind in MemoryKind}
        # Ids that requests hold, the request first that took something longest ago.
        self._held: dict[MemoryKind, OrderedDict[int, list[int]]] = {
            kind: OrderedDict() for kind in MemoryKind
        }

    def take(self, kind: MemoryKind, request: int, units: int) -> bool:
        pool = self._ids[kind]
        ids = pool.take_one_by_one(units)
        if ids is None:
            self._evict_one(kind)
            ids = pool.take_one_by_one(units)
        if ids is None and self._batch and self._move_to(kind):
            ids = pool.take_one_by_one(units)
        if ids is None:
            return False
        self._held[kind].setdefault(request, []).extend(ids)
        self._held[kind].move_to_end(request)
        return True

    def end(self, request: int) -> None:
        for kind in MemoryKind:
            self._ids[kind].give(self._held[kind].pop(request, []))

    def _evict_one(self, kind: MemoryKind) -> None:
        if self._held[kind]:
            victim, ids = self._held[kind].popitem(last=False)
            self._ids[kind].give(ids)
            self.evicted.add(victim)

    def _move_to(self, taker: MemoryKind) -> bool:
        """The thresholds of the paper are not here: where a move is forced, they are not asked."""
        donor = taker.other
        giving, taking = self._ids[donor], self._ids[taker]
        gained = self._batch * self._unit[donor] // self._unit[taker]
        before = giving.total
        if not giving.resize(before - self._batch):
            return False
        if taking.total + gained > self._most[taker]:
            giving.resize(before)
            return False
        taking.resize(taking.total + gained)
        self.moves += 1
        return True
