"""One tenant's part of the history: a radix tree over fingerprints of its prompts and answers."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.answers import Answer
from sglang_hybrid.core.edges import common_bytes
from sglang_hybrid.core.reuse import ReuseIndex, class_of

PLACE_BYTES = 600
TOKEN_BYTES = 2
NO_SLOT = -1


class Place:
    """A position in the history: a possible checkpoint if it has a `slot` in the index, else merely
    a fork.

    turn: sequence ends on its path, itself included. branches: children it ever had, forgotten ones
    included. pace: that of its last interval, or before it had one, of the interval that ended when
    it was made: a session's gaps resemble each other. last: the answer of the request that opened
    it or resumed from it last, and answer: what that says (`AnswerModel.bucket`).
    """

    __slots__ = (
        "answer",
        "branches",
        "children",
        "depth",
        "edge",
        "is_end",
        "last",
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
        self.answer = 0
        self.last: Answer | None = None
        self.slot = NO_SLOT

    def adopt(self, child: Place) -> None:
        self.children[child.edge[:TOKEN_BYTES]] = child
        child.parent = self

    @property
    def klass(self) -> int:
        return class_of(self.branches, self.depth, self.turn, self.pace, self.answer)


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


class HistoryTree:
    """The sequences of one tenant. The index, which all tenants share, is told what becomes of its
    places.

    held_bytes: what it takes, see PLACE_BYTES and TOKEN_BYTES. version: another one after every
    change; no two trees ever have the same.
    """

    def __init__(self, index: ReuseIndex) -> None:
        self.held_bytes = 0
        self.version = 0
        self.root = Place(None, b"")
        self.leaves: OrderedDict[Place, None] = OrderedDict()  # oldest use first
        self._index = index

    def walk(self, marks: bytes, known: list[Place]) -> tuple[list[Place], int]:
        """Places that `marks` cover to their end, and how many tokens are known, the part of an
        edge included. known: places from the root on that they are known to cover.
        """
        path = list(known)
        place = path[-1] if path else self.root
        start = TOKEN_BYTES * place.depth
        while child := place.children.get(marks[start : start + TOKEN_BYTES]):
            same = common_bytes(child.edge, marks, start)
            start += same
            if same < len(child.edge):
                break
            path.append(child)
            place = child
        return path, start // TOKEN_BYTES

    def insert(self, marks: bytes, path: list[Place], matched: int, ends: set[int]) -> list[Place]:
        """Make places at all `ends` and where `marks` leave the tree; return those on the path of
        `marks`.
        """
        trail = list(path)
        place = path[-1] if path else self.root
        at = {place.depth for place in path}
        for cut in sorted({matched, *ends} - at - {0}):
            if cut > matched:
                place = self._grow(place, part(marks, place.depth, cut))
                trail.append(place)
                continue
            index = bisect_left(trail, cut, key=lambda place: place.depth)
            above = trail[index - 1] if index else self.root
            below = above.children[part(marks, above.depth, above.depth + 1)]
            head = self._split(below, cut - above.depth)
            trail.insert(index, head)
            place = trail[-1]
        if trail and trail[-1] in self.leaves:
            self.leaves.move_to_end(trail[-1])
        return trail

    def forget_oldest(self) -> None:
        """Drop the leaf that was used longest ago. There must be one."""
        place, _ = self.leaves.popitem(last=False)
        parent = place.parent
        assert parent is not None
        del parent.children[place.edge[:TOKEN_BYTES]]
        self.held_bytes -= PLACE_BYTES + len(place.edge)
        if place.slot != NO_SLOT:
            self._index.close(place.slot)
            place.slot = NO_SLOT
        if not parent.children and parent is not self.root:
            self.leaves[parent] = None
            self.leaves.move_to_end(parent, last=False)

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
            self._index.reclass(parent.slot, parent.klass)
        self.leaves.pop(parent, None)
        self.leaves[leaf] = None
        self.held_bytes += PLACE_BYTES + len(edge)
        return leaf


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
