"""The bytes of one memory that KV and states share: who uses them, who keeps them, who gave them.

Bytes that a kind *keeps* are free, but lie between rows that it uses: that kind takes them again at
no cost, and the other kind takes them by a move. free + used is the budget at every moment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import Any


class MemoryKind(Enum):
    """The two users of one memory."""

    KV = "kv"
    STATES = "states"

    @property
    def other(self) -> MemoryKind:
        return MemoryKind.STATES if self is MemoryKind.KV else MemoryKind.KV


class MemoryAccount(ABC):
    """The bytes of one budget, as its allocators have given them out.

    budget: bytes that KV and states may take together.
    """

    budget: int

    @property
    @abstractmethod
    def used(self) -> Mapping[MemoryKind, int]:
        """Bytes that each kind uses."""

    @property
    @abstractmethod
    def kept(self) -> Mapping[MemoryKind, int]:
        """Free bytes that each kind keeps."""

    @property
    @abstractmethod
    def moved(self) -> Mapping[MemoryKind, int]:
        """Bytes that each kind ever got from the other one."""

    @property
    @abstractmethod
    def moves(self) -> int:
        """Times that one kind gave bytes to the other by a copy of rows."""

    @property
    def free(self) -> int:
        """Bytes that nobody uses."""
        return self.budget - sum(self.used.values())

    @property
    def unclaimed(self) -> int:
        """Free bytes that no kind keeps."""
        return self.free - sum(self.kept.values())

    def check(self) -> None:
        """Raises AssertionError if bytes were lost or come from nowhere."""
        parts = (*self.used.values(), *self.kept.values(), self.unclaimed)
        if min(parts) < 0:
            raise AssertionError(f"the memory's account is wrong: {self.as_dict()}")

    def as_dict(self) -> dict[str, Any]:
        """The account for /server_info: bytes, but `moves` is a count."""
        per_kind = {
            name: {kind.value: bytes_[kind] for kind in MemoryKind}
            for name, bytes_ in (("used", self.used), ("kept", self.kept), ("moved_to", self.moved))
        }
        return {"budget": self.budget, "free": self.free, **per_kind, "moves": self.moves}
