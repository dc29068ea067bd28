"""What came back, and when: a radix tree over recent prompts and answers, whatever the cache holds.

A cache sees reuse only of what it kept. This tree remembers every position where a checkpoint could
have been taken, so that the reuse index learns from intervals that no eviction cut short, and
admission knows a shared prefix whose KV is long gone.

Memory: two bytes per token (a fingerprint, not the token) and about 600 bytes per place; the oldest
leaves are forgotten when `max_bytes` is reached.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.edges import common_bytes
from sglang_hybrid.core.nodes import Clock, Node
from sglang_hybrid.core.reuse import ReuseIndex, class_of

PLACE_BYTES = 600
TOKEN_BYTES = 2
NO_SLOT = -1


class TimeUnit(Enum):
    """What ages are counted in. Seconds tell sessions apart by their think times; requests suit
    traffic without stamps.
    """

    SECONDS = "seconds"
    REQUESTS = "requests"

    def now(self, clock: Clock) -> float:
        return clock.stamp if self is TimeUnit.SECONDS else float(clock.tick)

    def last_used(self, node: Node) -> float:
        return node.stamp if self is TimeUnit.SECONDS else float(node.last_used)


class Place:
    """A position in the history: a possible checkpoint if it has a `slot` in the index, else merely
    a fork.

    turn: sequence ends on its path, itself included. branches: children it ever had, forgotten ones
    included. pace: that of its last interval, or before it had one, of the interval that ended when
    it was made: a session's gaps resemble each other.
    """

    __slots__ = (
        "branches",
        "children",
        "depth",
        "edge",
        "is_end",
        "pace",
        "parent",
        "slot",
        "turn",
    )

    def __init__(self, parent: Place | None, edge: bytes) -> None:
        self.parent = parent
        self.edge = edge
        self.children: dict[bytes, Place] = {}
        self.branches = 0
        self.depth: int = len(edge) // TOKEN_BYTES + (parent.depth if parent else 0)
        self.turn: int = parent.turn if parent else 0
        self.is_end = False
        self.pace = 0
        self.slot = NO_SLOT

    def adopt(self, child: Place) -> None:
        self.children[child.edge[:TOKEN_BYTES]] = child
        child.parent = self

    @property
    def klass(self) -> int:
        return class_of(self.branches, self.depth, self.turn, self.pace)


class Trail:
    """The places on one sequence's path, shallowest first."""

    def __init__(self, places: list[Place]) -> None:
        self.places = places
        self._depths = [place.depth for place in places]

    def at(self, depth: int) -> Place | None:
        """The place that stands for a checkpoint at `depth`: there, or the next one down, whose
        resumption passes it.
        """
        index = bisect_left(self._depths, depth)
        return self.places[index] if index < len(self.places) else None

    def exactly(self, depth: int) -> Place | None:
        """The place at `depth`, if there is one."""
        place = self.at(depth)
        return place if place is not None and place.depth == depth else None

    def turn_at(self, depth: int) -> int:
        """Sequence ends on the path down to `depth`."""
        index = bisect_left(self._depths, depth + 1)
        return self.places[index - 1].turn if index else 0


@dataclass(frozen=True)
class Meeting:
    """How a prompt meets the history. known_len: tokens that were seen before. branch: where a
    checkpoint would serve the next prompt of its kind, 0 if nowhere: where it leaves the history,
    or just above at a place that is known already. trail: the places on its path. reused: the
    deepest possible checkpoint among them that it extends.

    version, marks: which history that was, and the prompt's fingerprints, so that `observe` need
    not look again.
    """

    known_len: int
    branch: int
    trail: Trail
    reused: Place | None
    version: int
    marks: bytes


class History:
    """All recent sequences. The index learns from it; `time_unit` says in which time.

    reach: tokens that a checkpoint may lie above the place that it stands for; page_size: positions
    of checkpoints are rounded down to its multiples.
    """

    def __init__(
        self,
        time_unit: TimeUnit = TimeUnit.SECONDS,
        max_bytes: int = 64 << 20,
        min_branch_tokens: int = 16,
        page_size: int = 1,
    ) -> None:
        self.time_unit = time_unit
        self.index = ReuseIndex(unit=0.125 if time_unit is TimeUnit.SECONDS else 1.0)
        self.max_bytes = max_bytes
        self.min_branch_tokens = min_branch_tokens
        self.reach = max(min_branch_tokens, page_size)
        self.held_bytes = 0
        self._version = 0
        self._root = Place(None, b"")
        self._leaves: OrderedDict[Place, None] = OrderedDict()  # oldest use first

    def meet(self, prompt: npt.ArrayLike) -> Meeting:
        """Look `prompt` [n] up before its prefill. Changes nothing."""
        marks = fingerprints(prompt)
        path, matched = self._walk(marks, [])
        return self._meeting(path, matched, marks, len(marks) // TOKEN_BYTES)

    def observe(
        self,
        tokens: npt.ArrayLike,
        input_len: int,
        clock: Clock,
        message_starts: Iterable[int] = (),
        meeting: Meeting | None = None,
    ) -> Trail:
        """Take in a request when it ends: `tokens` [n] is its prompt of `input_len` tokens and its
        answer, or less if it was cut short.

        Once per request, aborted ones too, in the same order on every rank; nothing else may be fed
        to it. Its time is the clock's. meeting: what `meet` said of this very prompt; if nothing
        was observed since, the way to its end is not walked again. Cost: a few vector passes over n
        tokens, and Python work per place on the path.
        """
        now = self.time_unit.now(clock)
        ids = np.asarray(tokens)
        known: list[Place] = []
        if meeting is None or meeting.version != self._version or len(ids) < input_len:
            meeting, marks = None, fingerprints(ids)
        else:
            known = meeting.trail.places
            marks = meeting.marks + fingerprints(ids[input_len:])
        path, matched = self._walk(marks, known)
        if meeting is None:
            meeting = self._meeting(path, matched, marks, input_len)
        self._version += 1
        pace = 0
        if meeting.reused is not None:
            pace = self.index.pace(self.index.returned(meeting.reused.slot, now))
            meeting.reused.pace = pace
            self.index.reclass(meeting.reused.slot, meeting.reused.klass)
        ends = {start for start in message_starts if 0 < start < min(input_len, len(ids))}
        ends |= {meeting.branch, len(ids)} - {0}
        trail = self._insert(marks, path, matched, ends)
        for place in trail:
            if place.depth in ends:
                self._open(place, now, pace, is_end=place.depth == len(ids))
        self._forget_oldest(keep=trail)
        self.index.observed(now)
        return Trail(trail)

    def _meeting(self, path: list[Place], matched: int, marks: bytes, input_len: int) -> Meeting:
        """How a prompt that was walked along `path` meets the history."""
        usable = input_len - 1  # the last prompt token is always computed
        known_len = min(matched, usable)
        reused = None
        for place in path:
            if place.slot != NO_SLOT and place.depth <= usable:
                reused = place
        depth = 0 if reused is None else reused.depth
        gains = known_len - depth >= self.min_branch_tokens
        branch = known_len if gains else depth
        return Meeting(known_len, branch, Trail(path), reused, self._version, marks)

    def _walk(self, marks: bytes, known: list[Place]) -> tuple[list[Place], int]:
        """Places that `marks` cover to their end, and how many tokens are known, the part of an
        edge included. known: places from the root on that they are known to cover.
        """
        path = list(known)
        place = path[-1] if path else self._root
        start = TOKEN_BYTES * place.depth
        while child := place.children.get(marks[start : start + TOKEN_BYTES]):
            same = common_bytes(child.edge, marks, start)
            start += same
            if same < len(child.edge):
                break
            path.append(child)
            place = child
        return path, start // TOKEN_BYTES

    def _insert(self, marks: bytes, path: list[Place], matched: int, ends: set[int]) -> list[Place]:
        """Make places at all `ends` and where `marks` leave the tree; return those on the path of
        `marks`.
        """
        trail = list(path)
        place = path[-1] if path else self._root
        at = {place.depth for place in path}
        for cut in sorted({matched, *ends} - at - {0}):
            if cut > matched:
                place = self._grow(place, part(marks, place.depth, cut))
                trail.append(place)
                continue
            index = bisect_left(trail, cut, key=lambda place: place.depth)
            above = trail[index - 1] if index else self._root
            below = above.children[part(marks, above.depth, above.depth + 1)]
            head = self._split(below, cut - above.depth)
            trail.insert(index, head)
            place = trail[-1]
        return trail

    def _split(self, below: Place, head_tokens: int) -> Place:
        assert below.parent is not None
        cut = TOKEN_BYTES * head_tokens
        head = Place(below.parent, below.edge[:cut])
        below.parent.adopt(head)
        below.edge = below.edge[cut:]
        head.adopt(below)
        head.branches = 1
        self.held_bytes += PLACE_BYTES
        return head

    def _grow(self, parent: Place, edge: bytes) -> Place:
        leaf = Place(parent, edge)
        parent.adopt(leaf)
        parent.branches += 1
        if parent.slot != NO_SLOT:
            self.index.reclass(parent.slot, parent.klass)
        self._leaves.pop(parent, None)
        self._leaves[leaf] = None
        self.held_bytes += PLACE_BYTES + len(edge)
        return leaf

    def _open(self, place: Place, now: float, pace: int, *, is_end: bool) -> None:
        """A checkpoint could have been taken at `place` by now."""
        if is_end and not place.is_end:
            place.is_end = True
            place.turn += 1
        if place.slot == NO_SLOT:
            place.pace = pace
            place.slot = self.index.open(place.klass, now)
        else:
            self.index.reclass(place.slot, place.klass)

    def _forget_oldest(self, keep: list[Place]) -> None:
        """Drop the leaves used longest ago until the tree fits, but not the sequence that just
        came.
        """
        if keep and keep[-1] in self._leaves:
            self._leaves.move_to_end(keep[-1])
        while self.held_bytes > self.max_bytes and len(self._leaves) > 1:
            place, _ = self._leaves.popitem(last=False)
            parent = place.parent
            assert parent is not None
            del parent.children[place.edge[:TOKEN_BYTES]]
            self.held_bytes -= PLACE_BYTES + len(place.edge)
            if place.slot != NO_SLOT:
                self.index.close(place.slot)
                place.slot = NO_SLOT
            if not parent.children and parent is not self._root:
                self._leaves[parent] = None
                self._leaves.move_to_end(parent, last=False)


def part(marks: bytes, start: int, end: int) -> bytes:
    """The fingerprints of tokens [start, end)."""
    return marks[TOKEN_BYTES * start : TOKEN_BYTES * end]


def fingerprints(tokens: npt.ArrayLike) -> bytes:
    """TOKEN_BYTES per token id [n], spread over all values; buffers such as array('q') are read
    without a copy.

    Two different tokens look alike once in 65,536 pairs; a fork is then seen one token late, on
    every rank alike.
    """
    ids = np.asarray(tokens).astype(np.uint32, copy=False)
    return ((ids * np.uint32(2654435761)) >> np.uint32(16)).astype(np.uint16).tobytes()
