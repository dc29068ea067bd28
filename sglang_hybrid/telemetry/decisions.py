"""Why checkpoints are not there: a bounded log of states that were not taken and of what was
evicted.

An entry is filed under a position and a mark, the hash of all tokens before that position: so it is
found from a prompt's tokens alone, whatever the tree looks like by then. Marks go on from one
another, so a tree that keeps them on its nodes hashes each of its tokens once.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.admission import Skip
from sglang_hybrid.core.intent import Wish
from sglang_hybrid.core.nodes import Kind
from sglang_hybrid.core.pool import Scarce
from sglang_hybrid.telemetry.stats import Evicted

ENTRIES = 4_096
"""Entries that are kept, the latest ones: at up to 1,000 bytes each, 4 MB."""

NAME_LENGTH = 64
"""Characters that are kept of a request's name, which a client may choose."""

Moment = tuple[int, float]
"""A tick (requests) and a stamp (seconds) of the cache's clock."""


def first_mark(extra_key: str | None = None, cache_salt: str | None = None) -> int:
    """The mark of position 0; prompts with another key or salt share nothing."""
    if extra_key is None and not cache_salt:
        return 0
    return zlib.crc32(repr((extra_key, cache_salt or None)).encode())


def next_mark(mark: int, tokens: npt.ArrayLike, start: int, end: int) -> int:
    """The mark of position `end` of `tokens` [n], from that of `start`; about a nanosecond per
    token between them. Two positions of 4 billion share one.
    """
    return zlib.crc32(_words(np.asarray(tokens)[start:end]), mark)


@dataclass(frozen=True, slots=True)
class Decision:
    """order: how many decisions came before; at: when."""

    order: int
    at: Moment


@dataclass(frozen=True, slots=True)
class NotTaken(Decision):
    """A prefill wanted a state and did not get it."""

    wish: Wish
    skip: Skip


@dataclass(frozen=True, slots=True)
class StateLost(Decision):
    """A state was evicted.

    what: whether its KV went too. short: the pool that ran short. score: what `policy` gave it;
    None for the leaves that go first. taker: the state that got its slot; None if a running request
    did. hits, taken, last_used: of the state.
    """

    kind: Kind
    what: Evicted
    short: Scarce | None
    policy: str
    score: float | None
    taker: Wish | None
    hits: int
    taken: Moment
    last_used: Moment


@dataclass(frozen=True, slots=True)
class KvLost(Decision):
    """The KV of tokens [start, end) was evicted, filed under its first page's end; end_mark: that
    of `end`.
    """

    start: int
    end: int
    end_mark: int
    short: Scarce | None
    policy: str
    last_used: Moment


class Decisions:
    """The last `entries` decisions.

    count: of all there ever were. emptied: when the cache was emptied, None if it never was.
    """

    def __init__(self, entries: int = ENTRIES) -> None:
        self.entries = entries
        self.count = 0
        self.emptied: Moment | None = None
        self._queue: deque[tuple[int, int]] = deque()
        self._at: dict[tuple[int, int], list[Decision]] = {}

    def add(self, position: int, mark: int, decision: Decision) -> None:
        """File `decision`, which has the next order, and forget the oldest one if there are too
        many.
        """
        self.count += 1
        key = (position, mark)
        self._queue.append(key)
        self._at.setdefault(key, []).append(decision)
        if len(self._queue) > self.entries:
            oldest = self._queue.popleft()
            there = self._at[oldest]
            del there[0]
            if not there:
                del self._at[oldest]

    def clear(self, now: Moment | None) -> None:
        """The cache was emptied: nothing that happened before says why something is missing."""
        self._queue.clear()
        self._at.clear()
        self.emptied = now

    def along(self, tokens: npt.ArrayLike, mark: int) -> Iterator[tuple[int, list[Decision]]]:
        """Positions of `tokens` [n] at which something was decided, ascending, each with the
        decisions, oldest first. mark: `first_mark` of their namespace.
        """
        ids = _words(tokens)
        here = 0
        for position in sorted({position for position, _ in self._at if position <= len(ids)}):
            mark = zlib.crc32(ids[here:position], mark)
            here = position
            decisions = self._at.get((position, mark))
            if decisions is not None:
                yield position, decisions

    @property
    def full(self) -> bool:
        """Whether older decisions may have been forgotten."""
        return len(self._queue) >= self.entries

    def __len__(self) -> int:
        return len(self._queue)


def _words(tokens: npt.ArrayLike) -> memoryview:
    """Tokens [n] as 32-bit words; slices cost nothing."""
    return np.asarray(tokens).astype(np.uint32).data
