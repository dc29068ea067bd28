"""The reuse index: how likely a position is to be resumed per unit of time that it is kept
(marconi-notes.md section 9).

Positions are grouped into classes. For each class the index knows how long positions waited until
they were resumed (ended intervals) and how long others have been waiting (open ones). From these it
estimates the hazard of a return per bin of age (Kaplan-Meier, shrunk towards coarser classes), and
from the hazards the best rate of returns that keeping a position of a given age can buy (a Gittins
index).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.cost import FloatArray

IntArray = npt.NDArray[np.int64]

# Features of a class: children none/one/many; depth to 64 tokens, 128, .. more than 64 Ki; turn
# 0 .. 6 and more.
CHILDREN, DEPTHS, TURNS = 3, 12, 7
CLASSES: Final = CHILDREN * DEPTHS * TURNS
BINS: Final = 48  # of age, each sqrt(2) times as wide as the one before
PRIOR_WEIGHT: Final = 8.0  # intervals that a coarser class's hazard counts for
REBUILD_EVERY: Final = 32  # requests


def class_of(children: int, depth: int, turn: int) -> int:
    """Class of a position by its children, tokens from the root, and sequence ends on its path."""
    bucket = min(max((depth - 1).bit_length() - 6, 0), DEPTHS - 1)
    return (min(children, 2) * DEPTHS + bucket) * TURNS + min(turn, TURNS - 1)


class ReuseIndex:
    """Intervals in, weights out. Times are whatever the caller counts in; `unit` scales the
    youngest age bin.

    Memory: 16 bytes per open interval and 0.4 MB of tables.
    """

    def __init__(self, unit: float) -> None:
        self.version = 0  # of the table: weights of different versions do not compare
        self._edges = unit * 2.0 ** (np.arange(1, BINS + 1) / 2)  # upper ends of the age bins
        self._cuts = self._edges[:-1]
        self._cut_list = self._cuts.tolist()
        self._table = np.zeros((CLASSES, BINS))
        self._expiry = np.full((CLASSES, BINS), np.inf)
        self._ended = np.zeros((CLASSES, BINS))
        self._cut_short = np.zeros((CLASSES, BINS))
        self._class = np.full(64, -1, dtype=np.int64)  # per slot; -1: free
        self._since = np.zeros(64)
        self._free = list(range(63, -1, -1))
        self._now = 0.0
        self._observed = 0
        self._rebuild_at = 1

    def open(self, klass: int, time: float) -> int:
        """A position of class `klass` starts to wait. Returns the slot it is known by."""
        if not self._free:
            count = len(self._class)
            self._class = np.concatenate([self._class, np.full(count, -1, dtype=np.int64)])
            self._since = np.concatenate([self._since, np.zeros(count)])
            self._free = list(range(2 * count - 1, count - 1, -1))
        slot = self._free.pop()
        self._class[slot], self._since[slot] = klass, time
        return slot

    def returned(self, slot: int, time: float) -> None:
        """It was resumed: its interval ends, and the next one begins."""
        self._ended[self._class[slot], self._bins(time - self._since[slot])] += 1
        self._since[slot] = time

    def reclass(self, slot: int, klass: int) -> None:
        """It now belongs to `klass`, and so will its present interval."""
        self._class[slot] = klass

    def close(self, slot: int) -> None:
        """It is forgotten: its interval lasted until now at least."""
        self._cut_short[self._class[slot], self._bins(self._now - self._since[slot])] += 1
        self._class[slot] = -1
        self._free.append(slot)

    def observed(self, time: float) -> None:
        """One more request, at `time`. The table is rebuilt every REBUILD_EVERY of them, sooner in
        the beginning.
        """
        self._now = max(self._now, time)
        self._observed += 1
        if self._observed >= self._rebuild_at:
            self.rebuild()
            self._rebuild_at = self._observed + min(REBUILD_EVERY, self._observed // 4 + 1)

    def rebuild(self) -> None:
        """Estimate hazards from all intervals and tabulate the best rates."""
        waiting = self._class >= 0
        cells = self._class[waiting] * BINS + self._bins(self._now - self._since[waiting])
        still_open = np.bincount(cells, minlength=CLASSES * BINS).reshape(CLASSES, BINS)
        hazard = hazards(self._ended, self._cut_short + still_open)
        self._table = best_rates(hazard, np.diff(self._edges, prepend=0.0))
        self._expiry = np.where(self._table > 0, self._edges, np.inf)
        self.version += 1

    def weight(self, klass: int, age: float) -> float:
        """Best rate of returns per unit of time for a position of `klass` last used `age` ago; 0
        while nothing is known.
        """
        return float(self._table[klass, self._bins(age)])

    def weight_until(self, klass: int, age: float) -> tuple[float, float]:
        """`weights` for one position."""
        age_bin = bisect_right(self._cut_list, age)
        return float(self._table[klass, age_bin]), float(self._expiry[klass, age_bin])

    def weights(self, klasses: IntArray, ages: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Weights [n] of classes [n] at ages [n], and the ages [n] at which each weight expires:
        the end of its bin, or never once nothing is known to return later.
        """
        cells = klasses * BINS + self._cuts.searchsorted(ages, "right")
        return self._table.take(cells), self._expiry.take(cells)

    def _bins(self, ages: FloatArray | float) -> IntArray:
        return self._cuts.searchsorted(ages, "right")


def hazards(ended: FloatArray, unended: FloatArray) -> FloatArray:
    """Kaplan-Meier hazards [CLASSES, BINS]: of the intervals that reach a bin, the share that ends
    in it.

    ended, unended [CLASSES, BINS]: intervals by the bin in which they ended or were last seen. Each
    class is shrunk towards the one with its last feature dropped: first turn, then depth, then
    children; the coarsest towards "never returns".
    """
    shape = (CHILDREN, DEPTHS, TURNS, BINS)
    ends = ended.reshape(shape)
    at_risk = np.flip(np.cumsum(np.flip((ended + unended).reshape(shape), -1), axis=-1), -1)
    hazard: FloatArray = np.zeros((1, 1, 1, BINS))
    for dropped in ((0, 1, 2), (1, 2), (2,), ()):
        events = ends.sum(axis=dropped, keepdims=True)
        exposed = at_risk.sum(axis=dropped, keepdims=True)
        hazard = (events + PRIOR_WEIGHT * hazard) / (exposed + PRIOR_WEIGHT)
    return hazard.reshape(CLASSES, BINS)


def best_rates(hazard: FloatArray, widths: FloatArray) -> FloatArray:
    """G [C, K] from hazards [C, K] of bins of `widths` [K]: max over T of P(return by T) / E[time
    until return or T].

    T runs over the ends of bins; a return within a bin takes half of the bin on average.
    """
    rates = np.zeros_like(hazard)
    known = np.flatnonzero(hazard.any(axis=0))
    if not len(known):
        return rates
    bins = known[-1] + 1  # nothing is known to return later
    distinct, which = np.unique(hazard[:, :bins], axis=0, return_inverse=True)
    best = np.empty_like(distinct)
    spent = widths[:bins] * (1 - distinct / 2)
    reached = np.ones_like(distinct)
    for start in range(bins):
        alive = np.cumprod(1 - distinct[:, start:], axis=1)
        reached[:, start + 1 :] = alive[:, :-1]
        reached[:, start] = 1
        time = np.cumsum(reached[:, start:] * spent[:, start:], axis=1)
        best[:, start] = ((1 - alive) / time).max(axis=1)
    rates[:, :bins] = best[which.reshape(-1)]
    return rates
