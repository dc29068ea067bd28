"""Which states a running prefill takes: from the wish to a slot.

The server and the simulator run these same objects; what a slot is, and how one is freed, is
theirs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from sglang_hybrid.core.admission import (
    Checkpoint,
    Prefill,
    Room,
    Skip,
    judicious,
    last_boundary,
    place,
    worth,
)
from sglang_hybrid.core.history import Meeting
from sglang_hybrid.core.nodes import Clock, Kind, Node
from sglang_hybrid.core.pool import Contest, Pool

Slot = TypeVar("Slot")


@dataclass(frozen=True, slots=True)
class Wish:
    """A state that a prefill wants.

    owner: whose prefill it is, and tenant: whose request that is. contest: how it compared with the
    cheapest victim, None if that was not asked.
    """

    position: int
    kind: Kind
    owner: str = ""
    contest: Contest | None = None
    tenant: Hashable = None


@dataclass
class Planned(Generic[Slot]):
    """A state under way: its slot is the prefill's until the state is published."""

    position: int
    kind: Kind
    slot: Slot


class Slots(Protocol[Slot]):
    """What is asked of a state pool."""

    def free(self) -> int:
        """Slots that cost nothing."""

    def take(self, wish: Wish | None = None) -> Slot | None:
        """A slot for `wish`, pushing out the cheapest victim if none is free; None if nothing may
        go.
        """

    def give_back(self, slot: Slot) -> None:
        """`take` undone."""

    def room(self, intent: Intent[Slot]) -> Room:
        """What a state of `intent` competes with."""


@dataclass
class Intent(Generic[Slot]):
    """What one request's prefill should leave.

    prompt_len: tokens to prefill, the hit included. wanted: kind by position, none of them passed
    yet. messages: whether it is known where the prompt's messages begin. laid: positions of all
    states on the way. owner, tenant: names for the request and for its sender. contest: of the last
    position that was weighed against a victim.
    """

    prompt_len: int
    hit_len: int
    wanted: dict[int, Kind]
    messages: bool
    meeting: Meeting | None
    planned: list[Planned[Slot]] = field(default_factory=list)
    laid: list[int] = field(default_factory=list)
    owner: str = ""
    contest: Contest | None = None
    tenant: Hashable = None

    @property
    def pending(self) -> list[int]:
        """Positions whose states are wanted or under way, in no order."""
        return [*self.wanted, *(planned.position for planned in self.planned)]

    def anchor_of(self, position: int) -> int:
        """The deepest state on the way before `position`."""
        return max((at for at in self.laid if at < position), default=self.hit_len)

    def passed(
        self, slots: Slots[Slot], start: int, end: int, grid: int, min_branch_tokens: int
    ) -> tuple[list[Planned[Slot]], list[tuple[Wish, Skip]]]:
        """A forward of tokens [start, end) is about to run: the states that it takes on its way,
        and why others are not taken.
        """
        self._want_a_boundary(start, end, grid, min_branch_tokens)
        return self.take(slots, [at for at in self.wanted if start < at <= end], end)

    def take(
        self, slots: Slots[Slot], positions: Iterable[int], passed: int
    ) -> tuple[list[Planned[Slot]], list[tuple[Wish, Skip]]]:
        """Slots for those of `positions` that are worth one, and why others get none; what lies at
        or before `passed` is wanted no more.
        """
        taken: list[Planned[Slot]] = []
        skipped: list[tuple[Wish, Skip]] = []
        for position in positions:
            kind = self.wanted[position]
            skip = self.contest = None
            if slots.free() <= 0:
                skip = worth(position, kind, slots.room(self))
            wish = Wish(position, kind, self.owner, self.contest, self.tenant)
            slot = slots.take(wish) if skip is None else None
            if slot is None:
                skipped.append((wish, skip or Skip.NO_SLOT))
                continue
            taken.append(Planned(position, kind, slot))
            self.laid.append(position)
        self.wanted = {at: kind for at, kind in self.wanted.items() if at > passed}
        self.planned += taken
        return taken, skipped

    def due(self, up_to: int) -> list[Planned[Slot]]:
        """Hand over the states under way at `up_to` tokens and before, the deepest first."""
        due = [planned for planned in self.planned if planned.position <= up_to]
        if due:
            self.planned = [planned for planned in self.planned if planned.position > up_to]
        return sorted(due, key=lambda planned: -planned.position)

    def _want_a_boundary(self, start: int, end: int, grid: int, min_branch_tokens: int) -> None:
        boundary = last_boundary(start, end, grid)
        if boundary is not None and boundary < self.prompt_len:
            near = any(abs(boundary - at) < min_branch_tokens for at in self.pending)
            if not near:
                self.wanted.setdefault(boundary, Kind.CHUNK)


def intend(
    prefill: Prefill, meeting: Meeting | None, min_branch_tokens: int
) -> tuple[Intent[Slot], list[Checkpoint]]:
    """What the prefill of a prompt that met the history in `meeting` should leave, and those of its
    branch points that gain too few tokens.
    """
    wanted: dict[int, Kind] = {}
    micro_branches: list[Checkpoint] = []
    for checkpoint in place(judicious(prefill), prefill, min_branch_tokens):
        if checkpoint.admitted:
            wanted[checkpoint.position] = checkpoint.kind
        elif checkpoint.skip is Skip.MICRO_BRANCH and checkpoint.kind is Kind.BRANCH:
            micro_branches.append(checkpoint)
    messages = bool(prefill.message_starts)
    intent = Intent[Slot](prefill.prompt_len, prefill.hit_len, wanted, messages, meeting)
    return intent, micro_branches


def room_for(intent: Intent[Slot], free_slots: int, pool: Pool) -> Room:
    """What a state of `intent` competes with in the `pool` of state slots. States that the policy
    spares are no victims here.
    """

    def outlives(position: int, kind: Kind) -> bool:
        anchor = intent.anchor_of(position)
        new = expected(position, kind, anchor, intent.meeting, pool.clock)
        intent.contest = pool.contest(new)
        return intent.contest is None or intent.contest.wins

    return Room(free_slots, pool.evictable, outlives, pool.policy.knows_returns)


def expected(
    position: int, kind: Kind, anchor_depth: int, meeting: Meeting | None, clock: Clock
) -> Node:
    """The node that a new state at `position` would be, with the next state above it at
    `anchor_depth`.
    """
    node = Node(0, None, 0, clock)
    node.depth, node.anchor_depth = position, anchor_depth
    node.has_state, node.kind = True, kind
    if meeting is not None:
        node.trace, node.turn = meeting.trail.exactly(position), meeting.trail.turn_at(position)
    children = 2 if kind is Kind.BRANCH else 1
    node.children = dict.fromkeys(range(children), node)
    return node
