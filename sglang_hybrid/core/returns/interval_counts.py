"""How many intervals of each class ended, or were last seen, in each bin of age; old ones fade.

Classes are numbered from 0 on as they are added.
"""

from __future__ import annotations

from array import array

import numpy as np

from sglang_hybrid.core.costs.cost import FloatArray, IntArray
from sglang_hybrid.core.returns.learnt import LearntCounts

ENDED, UNENDED = 0, 1
FADED = 1_024
"""Weights that are computed beforehand: of what so many intervals and fewer began after."""


class IntervalCounts:
    """Counts of intervals by class and bin of age: those that ended, and others.

    An interval weighs half as much as one of its class that began `half_life` intervals later. So
    it does not matter how many there ever were: a class weighs about 1.44 half-lives at the most.
    """

    def __init__(self, half_life: float, bins: int) -> None:
        self._half_life = half_life
        # Arrays whose items are read and written one by one are not numpy's, where each access
        # takes three times as long.
        self._begun = array("q")  # intervals of a class so far
        self._counts = np.zeros((0, 2, bins))  # ENDED and UNENDED
        self._as_of = array("q")  # the counts above: when so many had begun
        self._number = array("q", bytes(8 * 64))  # by interval id: how many began before it
        self._faded_by: list[float] = self._faded(np.arange(FADED)).tolist()

    def add_class(self) -> None:
        """One more, without intervals."""
        self._counts = with_room(self._counts, len(self._begun))
        self._begun.append(0)
        self._as_of.append(0)

    def begins(self, interval_id: int, reuse_class: int) -> None:
        """Note that an interval begins. reuse_class: the number of its class."""
        if interval_id >= len(self._number):
            self._number.frombytes(bytes(8 * (interval_id + 1)))
        begun = self._begun[reuse_class]
        self._number[interval_id] = begun
        self._begun[reuse_class] = begun + 1

    def moves(self, interval_id: int, before: int, after: int) -> None:
        """An open interval now belongs to class `after`; it weighs there what it did before."""
        self._number[interval_id] += self._begun[after] - self._begun[before]

    def ends(self, interval_id: int, reuse_class: int, age_bin: int) -> None:
        """It ended in this bin."""
        self._fade(reuse_class)
        self._counts[reuse_class, ENDED, age_bin] += self._weight(interval_id, reuse_class)

    def is_lost(self, interval_id: int, reuse_class: int, age_bin: int) -> None:
        """It is observed no more; it was in this bin then."""
        self._fade(reuse_class)
        self._counts[reuse_class, UNENDED, age_bin] += self._weight(interval_id, reuse_class)

    def of(
        self, known: IntArray, open_intervals: IntArray, classes: IntArray, cells: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Ended and unended intervals [C, bins] of the classes `known` [C]. Changes nothing.
        open_intervals, classes and cells [n]: ids and classes of the open ones, and where each
        counts among C * bins.
        """
        begun = as_ints(self._begun)
        faded = self._faded(begun[known] - as_ints(self._as_of)[known])[:, None]
        younger = begun.take(classes) - as_ints(self._number).take(open_intervals)
        ended = self._counts[known, ENDED] * faded
        still_open = np.bincount(cells, self._faded(younger - 1), ended.size).reshape(ended.shape)
        return ended, self._counts[known, UNENDED] * faded + still_open

    def learnt(
        self, known: IntArray, open_intervals: IntArray, classes: IntArray, cells: IntArray
    ) -> LearntCounts:
        """What `of` returns for the same arguments, as it can be restored. Changes nothing."""
        counts = self.of(known, open_intervals, classes, cells)
        return LearntCounts(as_ints(self._begun)[known], *counts)

    def restore(self, known: IntArray, learnt: LearntCounts) -> None:
        """These classes were counted before, in another process."""
        as_ints(self._begun)[known] = as_ints(self._as_of)[known] = learnt.begun
        self._counts[known, ENDED] = learnt.ended
        self._counts[known, UNENDED] = learnt.unended

    def start_over(self, other: IntervalCounts, reuse_class: int, open_intervals: IntArray) -> None:
        """Count `reuse_class`, whose open intervals are given, as `other` does, with the same
        weights.
        """
        other._fade(reuse_class)
        self._counts[reuse_class] = other._counts[reuse_class]
        self._as_of[reuse_class] = self._begun[reuse_class]
        younger = other._begun[reuse_class] - as_ints(other._number)[open_intervals]
        stretched = np.rint(younger * (self._half_life / other._half_life)).astype(np.int64)
        as_ints(self._number)[open_intervals] = self._begun[reuse_class] - stretched

    def _fade(self, reuse_class: int) -> None:
        """Bring the counts of a class up to now."""
        begun = self._begun[reuse_class]
        younger = begun - self._as_of[reuse_class]
        if younger:
            self._counts[reuse_class] *= self._one_faded(younger)
            self._as_of[reuse_class] = begun

    def _weight(self, interval_id: int, reuse_class: int) -> float:
        return self._one_faded(self._begun[reuse_class] - self._number[interval_id] - 1)

    def _one_faded(self, younger: int) -> float:
        """`_faded` of one; looked up where that is possible."""
        if 0 <= younger < FADED:
            return self._faded_by[younger]
        return float(self._faded(np.array(younger)))

    def _faded(self, younger: FloatArray | IntArray) -> FloatArray:
        """What an interval weighs of whose class so many began after it."""
        faded: FloatArray = np.exp2(-younger / self._half_life)
        return faded


def with_room(values: FloatArray, used: int) -> FloatArray:
    """`values` [n, ...], of which `used` are in use, or a larger copy with room for one more."""
    if used < len(values):
        return values
    larger = np.zeros((2 * used + 16, *values.shape[1:]))
    larger[:used] = values
    return larger


def as_ints(values: array[int]) -> IntArray:
    """The same memory as a numpy array [n]. `values` cannot grow while that is in use."""
    return np.frombuffer(values, np.int64)
