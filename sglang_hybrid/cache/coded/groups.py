"""Groups of coded states that share a slot of the state pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

Slot = TypeVar("Slot")
Name = TypeVar("Name")


@dataclass(eq=False)
class Group(Generic[Slot, Name]):
    """The states in one slot. members: the name of the state in each part, None where there is
    none.
    """

    slot: Slot
    members: list[Name | None]

    @property
    def names(self) -> list[Name]:
        """The names of the states that are there."""
        return [name for name in self.members if name is not None]


@dataclass(frozen=True)
class Moved(Generic[Slot, Name]):
    """A state that has to be moved: from one group and part to another."""

    name: Name
    source: Group[Slot, Name]
    part: int
    target: Group[Slot, Name]
    to: int


@dataclass
class Groups(Generic[Slot, Name]):
    """Groups of up to `parts` states. At most one has room left, so that n states take n / parts
    slots, rounded up.
    """

    parts: int
    open: Group[Slot, Name] | None = None
    _of: dict[Name, Group[Slot, Name]] = field(default_factory=dict)

    def __contains__(self, name: Name) -> bool:
        return name in self._of

    def __len__(self) -> int:
        """The number of states."""
        return len(self._of)

    def of(self, name: Name) -> tuple[Group[Slot, Name], int]:
        """The group and the part of a state."""
        group = self._of[name]
        return group, group.members.index(name)

    def join(self, name: Name, slot: Slot) -> tuple[Group[Slot, Name], int, bool]:
        """A state that has `slot` to itself is coded: its group and part, and whether it leaves its
        slot, because another group has room.
        """
        group, leaves = self.open, self.open is not None
        if group is None:
            group = self.open = Group(slot, [None] * self.parts)
        part = group.members.index(None)
        group.members[part] = name
        self._of[name] = group
        if None not in group.members:
            self.open = None
        return group, part, leaves

    def leave(self, name: Name) -> tuple[Moved[Slot, Name] | None, Group[Slot, Name] | None]:
        """A state goes. Returns the state that takes its part, if one is to be moved there, and the
        group that is empty now, if any.
        """
        group, part = self.of(name)
        del self._of[name]
        group.members[part] = None
        if self.open is None:
            self.open = group
        moved = None
        if group is not self.open:
            source = self.open
            other = source.names[-1]
            moved = Moved(other, source, source.members.index(other), group, part)
            source.members[moved.part] = None
            group.members[part] = other
            self._of[other] = group
        empty = self.open if not self.open.names else None
        if empty is not None:
            self.open = None
        return moved, empty
