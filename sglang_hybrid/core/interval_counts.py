"""How many intervals of each class ended, or were last seen, in each bin of age; old ones fade."""

from __future__ import annotations

import numpy as np

from sglang_hybrid.core.cost import FloatArray, IntArray


class IntervalCounts:
    """Counts of intervals by class and bin of age [classes, bins]: those that ended, and others.

    An interval weighs half as much as one of its class that began `half_life` intervals later. So
    it does not matter how many there ever were: a class weighs about 1.44 half-lives at the most.
    """

    def __init__(self, half_life: float, classes: int, bins: int) -> None:
        self._half_life = half_life
        self._begun = np.zeros(classes, dtype=np.int64)  # intervals of a class so far
        self._ended = np.zeros((classes, bins))
        self._cut_short = np.zeros((classes, bins))
        self._as_of = np.zeros(classes, dtype=np.int64)  # the counts above: when so many had begun
        self._number = np.zeros(64, dtype=np.int64)  # by interval id: how many began before it

    def begins(self, interval: int, klass: int) -> None:
        """An interval of `klass` begins under this id."""
        if interval >= len(self._number):
            more = np.zeros(interval + 1, dtype=np.int64)
            self._number = np.concatenate([self._number, more])
        self._number[interval] = self._begun[klass]
        self._begun[klass] += 1

    def moves(self, interval: int, before: int, after: int) -> None:
        """An open interval now belongs to class `after`; it weighs there what it did before."""
        self._number[interval] += self._begun[after] - self._begun[before]

    def ends(self, interval: int, klass: int, age_bin: int) -> None:
        """It ended in this bin."""
        self._fade(klass)
        self._ended[klass, age_bin] += self._weight(interval, klass)

    def is_lost(self, interval: int, klass: int, age_bin: int) -> None:
        """It is observed no more; it was in this bin then."""
        self._fade(klass)
        self._cut_short[klass, age_bin] += self._weight(interval, klass)

    def of(
        self, known: IntArray, open_intervals: IntArray, classes: IntArray, cells: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Ended and unended intervals [C, bins] of the classes `known` [C]. open_intervals, classes
        and cells [n]: ids and classes of the open ones, and where each counts among C * bins.
        """
        faded = self._faded(self._begun[known] - self._as_of[known])[:, None]
        self._ended[known] *= faded
        self._cut_short[known] *= faded
        self._as_of[known] = self._begun[known]
        younger = self._begun.take(classes) - self._number.take(open_intervals)
        ended = self._ended[known]
        still_open = np.bincount(cells, self._faded(younger - 1), ended.size).reshape(ended.shape)
        return ended, self._cut_short[known] + still_open

    def start_over(self, other: IntervalCounts, klass: int, open_intervals: IntArray) -> None:
        """Count `klass`, whose open intervals are given, as `other` does, with the same weights."""
        other._fade(klass)
        self._ended[klass] = other._ended[klass]
        self._cut_short[klass] = other._cut_short[klass]
        self._as_of[klass] = self._begun[klass]
        younger = other._begun[klass] - other._number[open_intervals]
        stretched = np.rint(younger * (self._half_life / other._half_life)).astype(np.int64)
        self._number[open_intervals] = self._begun[klass] - stretched

    def _fade(self, klass: int) -> None:
        """Bring the counts of a class up to now."""
        younger = self._begun[klass] - self._as_of[klass]
        if younger:
            faded = self._faded(younger)
            self._ended[klass] *= faded
            self._cut_short[klass] *= faded
            self._as_of[klass] = self._begun[klass]

    def _weight(self, interval: int, klass: int) -> float:
        younger = self._begun[klass] - self._number[interval] - 1
        return float(self._faded(younger))

    def _faded(self, younger: FloatArray | IntArray) -> FloatArray:
        """What an interval weighs of whose class so many began after it."""
        faded: FloatArray = np.exp2(-younger / self._half_life)
        return faded
