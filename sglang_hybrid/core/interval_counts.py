"""How many intervals of each class ended, or were last seen, in each bin of age; old ones fade."""

from __future__ import annotations

import numpy as np

from sglang_hybrid.core.cost import FloatArray, IntArray
from sglang_hybrid.core.learnt import LearntCounts


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

    def begins(self, interval_id: int, reuse_class: int) -> None:
        """An interval of `reuse_class` begins under this id."""
        if interval_id >= len(self._number):
            more = np.zeros(interval_id + 1, dtype=np.int64)
            self._number = np.concatenate([self._number, more])
        self._number[interval_id] = self._begun[reuse_class]
        self._begun[reuse_class] += 1

    def moves(self, interval_id: int, before: int, after: int) -> None:
        """An open interval now belongs to class `after`; it weighs there what it did before."""
        self._number[interval_id] += self._begun[after] - self._begun[before]

    def ends(self, interval_id: int, reuse_class: int, age_bin: int) -> None:
        """It ended in this bin."""
        self._fade(reuse_class)
        self._ended[reuse_class, age_bin] += self._weight(interval_id, reuse_class)

    def is_lost(self, interval_id: int, reuse_class: int, age_bin: int) -> None:
        """It is observed no more; it was in this bin then."""
        self._fade(reuse_class)
        self._cut_short[reuse_class, age_bin] += self._weight(interval_id, reuse_class)

    def of(
        self, known: IntArray, open_intervals: IntArray, classes: IntArray, cells: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Ended and unended intervals [C, bins] of the classes `known` [C]. Changes nothing.
        open_intervals, classes and cells [n]: ids and classes of the open ones, and where each
        counts among C * bins.
        """
        faded = self._faded(self._begun[known] - self._as_of[known])[:, None]
        younger = self._begun.take(classes) - self._number.take(open_intervals)
        ended = self._ended[known] * faded
        still_open = np.bincount(cells, self._faded(younger - 1), ended.size).reshape(ended.shape)
        return ended, self._cut_short[known] * faded + still_open

    def learnt(
        self, known: IntArray, open_intervals: IntArray, classes: IntArray, cells: IntArray
    ) -> LearntCounts:
        """What `of` returns for the same arguments, as it can be restored. Changes nothing."""
        counts = self.of(known, open_intervals, classes, cells)
        return LearntCounts(self._begun[known], *counts)

    def restore(self, known: IntArray, learnt: LearntCounts) -> None:
        """These classes were counted before, in another process."""
        self._begun[known] = self._as_of[known] = learnt.begun
        self._ended[known] = learnt.ended
        self._cut_short[known] = learnt.unended

    def start_over(self, other: IntervalCounts, reuse_class: int, open_intervals: IntArray) -> None:
        """Count `reuse_class`, whose open intervals are given, as `other` does, with the same
        weights.
        """
        other._fade(reuse_class)
        self._ended[reuse_class] = other._ended[reuse_class]
        self._cut_short[reuse_class] = other._cut_short[reuse_class]
        self._as_of[reuse_class] = self._begun[reuse_class]
        younger = other._begun[reuse_class] - other._number[open_intervals]
        stretched = np.rint(younger * (self._half_life / other._half_life)).astype(np.int64)
        self._number[open_intervals] = self._begun[reuse_class] - stretched

    def _fade(self, reuse_class: int) -> None:
        """Bring the counts of a class up to now."""
        younger = self._begun[reuse_class] - self._as_of[reuse_class]
        if younger:
            faded = self._faded(younger)
            self._ended[reuse_class] *= faded
            self._cut_short[reuse_class] *= faded
            self._as_of[reuse_class] = self._begun[reuse_class]

    def _weight(self, interval_id: int, reuse_class: int) -> float:
        younger = self._begun[reuse_class] - self._number[interval_id] - 1
        return float(self._faded(younger))

    def _faded(self, younger: FloatArray | IntArray) -> FloatArray:
        """What an interval weighs of whose class so many began after it."""
        faded: FloatArray = np.exp2(-younger / self._half_life)
        return faded
