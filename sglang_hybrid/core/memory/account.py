"""The bytes of one memory that KV and states share: who uses them, who keeps them, who gave them.

A *granule* is the smallest amount that changes hands: token rows that fill whole pages of the
operating system, or one state. A kind's granule is *resident* from the moment the kind claims it
until it is given back to the other kind. Resident granules hold bytes in use, bytes that are
wasted (free rows of a granule that is partly used, padding), or nothing: those are *kept*. Kept
bytes are free: their kind takes them again at no cost, and the other kind takes them by a move.
So nothing moves before it is needed, and free + used + waste is the budget at every moment.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from sglang_hybrid.core.memory.states import MemoryState, Monitor


class MemoryKind(Enum):
    """Whose bytes they are."""

    KV = "kv"
    STATES = "states"

    @property
    def other(self) -> MemoryKind:
        return MemoryKind.STATES if self is MemoryKind.KV else MemoryKind.KV

    @property
    def short(self) -> MemoryState:
        return MemoryState.KV_SHORT if self is MemoryKind.KV else MemoryState.STATES_SHORT


Release = Callable[[int], int]
"""Gives physical memory of at least so many kept bytes back; returns how many bytes."""


class MemoryAccount(ABC):
    """The bytes of one budget, whoever gives them out: the account of `Account`, or SGLang's.

    budget: bytes that KV and states may take together. moves: times that one kind gave bytes to
    the other.
    """

    budget: int
    used: Mapping[MemoryKind, int]
    waste: Mapping[MemoryKind, int]
    kept: Mapping[MemoryKind, int]
    moved: Mapping[MemoryKind, int]  # bytes that a kind got from the other one
    moves: int

    @property
    def free(self) -> int:
        """Bytes that nobody uses or wastes."""
        return self.budget - sum(self.used.values()) - sum(self.waste.values())

    @property
    def unclaimed(self) -> int:
        """Free bytes that no kind keeps."""
        return self.free - sum(self.kept.values())

    @property
    @abstractmethod
    def resident(self) -> int:
        """Bytes that may have physical memory behind them."""

    def check(self) -> None:
        """Raises AssertionError if bytes were lost or come from nowhere."""
        parts = (*self.used.values(), *self.waste.values(), *self.kept.values(), self.unclaimed)
        if min(parts) < 0:
            raise AssertionError(f"the memory's account is wrong: {self.as_dict()}")

    def as_dict(self) -> dict[str, Any]:
        """For /server_info: bytes, unless a name says other."""
        per_kind = {
            name: {kind.value: bytes_[kind] for kind in MemoryKind}
            for name, bytes_ in (
                ("used", self.used),
                ("waste", self.waste),
                ("kept", self.kept),
                ("moved_to", self.moved),
            )
        }
        return {
            "budget": self.budget,
            "free": self.free,
            "resident": self.resident,
            **per_kind,
            "moves": self.moves,
        }


class Account(MemoryAccount):
    """The account that our allocators charge.

    Args:
        budget: bytes that KV and states may take together.
    """

    used: dict[MemoryKind, int]
    waste: dict[MemoryKind, int]
    kept: dict[MemoryKind, int]
    moved: dict[MemoryKind, int]

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = dict.fromkeys(MemoryKind, 0)
        self.waste = dict.fromkeys(MemoryKind, 0)
        self.kept = dict.fromkeys(MemoryKind, 0)
        self.moved = dict.fromkeys(MemoryKind, 0)
        self.moves = 0
        self.failed_moves = 0
        self.move_seconds = 0.0
        self.monitor = Monitor()
        self._release: dict[MemoryKind, Release] = {}

    def join(self, kind: MemoryKind, release: Release) -> None:
        """Name the function that gives back what `kind` keeps."""
        self._release[kind] = release

    @property
    def resident(self) -> int:
        return self.budget - self.unclaimed

    def claim(self, kind: MemoryKind, needed: int) -> bool:
        """Let `kind` keep `needed` more bytes, moved from the other kind as far as none are
        unclaimed. False, and nothing has changed but that the other kind may keep less, if they
        cannot be had.
        """
        donor = kind.other
        missing = needed - self.unclaimed
        if missing > self.kept[donor]:
            self.monitor.enter(kind.short, missing - self.kept[donor])
            return False
        if missing > 0 and not self._move(donor, missing):
            return False
        self.kept[kind] += needed
        return True

    def _move(self, donor: MemoryKind, missing: int) -> bool:
        """Have `donor` give back at least `missing` bytes that it keeps."""
        taker = donor.other
        self.monitor.enter(MemoryState.REBALANCING, missing)
        began = time.perf_counter()
        released = 0
        try:
            released = self._release[donor](missing)
        except OSError:  # the pages are still the donor's
            pass
        finally:
            self.move_seconds += time.perf_counter() - began
        moved = released >= missing
        if moved:
            self.moves += 1
            self.moved[taker] += released
        else:
            self.failed_moves += 1
        self.monitor.enter(MemoryState.BALANCED if moved else taker.short, 0 if moved else missing)
        return moved

    def on_free(self, kind: MemoryKind, size: int) -> None:
        """`kind` has released physical memory of `size` bytes that it kept."""
        self.kept[kind] -= size

    def charge(self, kind: MemoryKind, *, used: int, waste: int, kept: int) -> None:
        """Add to what `kind` uses, wastes and keeps; the three changes sum to 0."""
        self.used[kind] += used
        self.waste[kind] += waste
        self.kept[kind] += kept

    def as_dict(self) -> dict[str, Any]:
        return {
            **super().as_dict(),
            "failed_moves": self.failed_moves,
            "move_seconds": self.move_seconds,
            **self.monitor.as_dict(),
        }
