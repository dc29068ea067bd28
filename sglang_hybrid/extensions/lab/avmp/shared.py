"""Allocators in which KV and states share every byte: a plain one, SGLang's donor, and ours."""

from __future__ import annotations

from collections import OrderedDict

from sglang_hybrid.core.memory.account import MemoryKind
from sglang_hybrid.extensions.lab.avmp.memory import ModelBytes


class SharedBytes:
    """Bytes of running requests, by kind. Nothing is padded, and there are no pools."""

    def __init__(self, model: ModelBytes, total: int) -> None:
        self.evicted: set[int] = set()
        self.free = total
        self.total = total
        self._unit = {kind: model.unit(kind) for kind in MemoryKind}
        self.held: dict[MemoryKind, OrderedDict[int, int]] = {
            kind: OrderedDict() for kind in MemoryKind
        }

    def end(self, request: int) -> None:
        """Free all that `request`, which has ended, still has."""
        for held in self.held.values():
            self.free += held.pop(request, 0)

    def bytes_of(self, request: int) -> int:
        return sum(held.get(request, 0) for held in self.held.values())

    def _give(self, kind: MemoryKind, request: int, size: int) -> None:
        held = self.held[kind]
        held[request] = held.get(request, 0) + size
        held.move_to_end(request)
        self.free -= size

    def _evict(self, request: int) -> None:
        self.evicted.add(request)
        self.end(request)


class PlainShared(SharedBytes):
    """Short of bytes, the request that took something longest ago is evicted, once."""

    def __init__(self, model: ModelBytes, total: int) -> None:
        super().__init__(model, total)
        self._order: OrderedDict[int, None] = OrderedDict()

    def take(self, kind: MemoryKind, request: int, units: int) -> bool:
        size = units * self._unit[kind]
        if size > self.free and self._order:
            victim, _ = self._order.popitem(last=False)
            self._evict(victim)
        if size > self.free:
            return False
        self._give(kind, request, size)
        self._order[request] = None
        self._order.move_to_end(request)
        return True

    def end(self, request: int) -> None:
        super().end(request)
        self._order.pop(request, None)


class OneWayDonor(SharedBytes):
    """SGLang's unified memory: where states do not find room among states, the KV used longest ago
    gives way; states never give way to KV (`MambaFullCacheDonor`). One victim of a kind at a time.
    """

    def take(self, kind: MemoryKind, request: int, units: int) -> bool:
        size = units * self._unit[kind]
        givers = (
            (MemoryKind.STATES, MemoryKind.KV) if kind is MemoryKind.STATES else (MemoryKind.KV,)
        )
        for giver in givers:
            held = self.held[giver]
            if size > self.free and held:
                victim, freed = held.popitem(last=False)
                self.free += freed
                self.evicted.add(victim)
        if size > self.free:
            return False
        self._give(kind, request, size)
        return True


class SharedByValue(SharedBytes):
    """Ours: whichever kind is short, what is worth least per byte makes room until it suffices.

    A request of which something was evicted, or which did not get something, has to be computed
    again, so the rest of its memory is worth nothing and goes first. Then the request goes that
    holds most bytes: every request counts alike, as in SGLang's retraction, so the largest one is
    worth least per byte. A request that is lost already takes nothing from one that is not.
    """

    def __init__(self, model: ModelBytes, total: int) -> None:
        super().__init__(model, total)
        self._lost: set[int] = set()

    def take(self, kind: MemoryKind, request: int, units: int) -> bool:
        size = units * self._unit[kind]
        while size > self.free:
            victim = self._victim(request)
            if victim is None or size > self.total:
                self._lost.add(request)
                return False
            self._lost.add(victim)
            self._evict(victim)
        self._give(kind, request, size)
        return True

    def _victim(self, request: int) -> int | None:
        """The victim that makes room for `request` next; None if there is none."""
        holding = {*self.held[MemoryKind.KV], *self.held[MemoryKind.STATES]}
        candidates = holding & self._lost
        if not candidates and request not in self._lost:
            candidates = holding
        return max(candidates, key=lambda one: (self.bytes_of(one), one), default=None)
