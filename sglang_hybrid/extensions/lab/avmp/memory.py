"""The common part of all allocators: sizes, and ids of pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from sglang_hybrid.core.memory.account import MemoryKind
from sglang_hybrid.extensions.lab.avmp.requests import LiveRequest

GIB = 1 << 30


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of a KV page (16 tokens) and of a state, of one layer, and layers of each kind."""

    name: str
    page: int
    state: int
    kv_layers: int = 4
    state_layers: int = 28

    def unit(self, kind: MemoryKind) -> int:
        """Bytes of what one layer takes of `kind` at a time."""
        return self.page if kind is MemoryKind.KV else self.state

    def peak(self, request: LiveRequest) -> dict[MemoryKind, int]:
        """Units of each kind that `request` holds when it ends."""
        return {
            MemoryKind.KV: self.kv_layers * request.pages_at_its_end,
            MemoryKind.STATES: self.state_layers,
        }


MODELS = (
    ModelBytes("jamba_1_5_mini", 64 << 10, 256 << 10),
    ModelBytes("mamba2_1b3", 64 << 10, 2 << 20),
)
"""Jamba 1.5 Mini, and the same with states of Mamba-2 1.3B."""

POOLS = (1 * GIB, 4 * GIB)


class SimulatedMemory(Protocol):
    """An allocator of one model and size.

    evicted: requests of which memory was taken while they ran.
    """

    evicted: set[int]

    def take(self, kind: MemoryKind, request: int, units: int) -> bool:
        """Give `request` so many pages or states; False, and it gets none, if there is no room."""

    def end(self, request: int) -> None:
        """Free all that `request`, which has ended, still has."""


class Ids:
    """Ids of pages: the one that was given back last is handed out first."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))

    def take(self, count: int) -> list[int] | None:
        """`count` ids, or None if fewer are free."""
        if count > len(self._free):
            return None
        first = len(self._free) - count
        taken = self._free[first:][::-1]
        del self._free[first:]
        return taken

    def take_one_by_one(self, count: int) -> list[int] | None:
        """The same; when they do not suffice, all are taken and put back, which turns their order
        round.
        """
        taken = self.take(count)
        if taken is None:
            self._free.reverse()
        return taken

    def give(self, ids: Iterable[int]) -> None:
        self._free.extend(ids)

    def resize(self, total: int) -> bool:
        """Let there be ids below `total`; False, and nothing has changed, if others are in use."""
        if total < 0:
            return False
        if total >= self.total:
            self._free.extend(range(self.total, total))
        else:
            kept = [number for number in self._free if number < total]
            if len(self._free) - len(kept) < self.total - total:
                return False
            self._free = kept
        self.total = total
        return True
