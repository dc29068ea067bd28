"""Intervals of the reuse index, counted by class: how many ended in which bin of age, and whether
what happens to them is what was expected.

An interval is the time from one use of a position to the next. Classes are numbered from 0 on as
they are added.
"""

from __future__ import annotations

from array import array
from copy import copy
from dataclasses import dataclass
from typing import Final

import numpy as np

from sglang_hybrid.core.costs.cost import FloatArray, IntArray

ENDED, UNENDED = 0, 1
FADED = 1_024
"""Weights that are computed beforehand: of what so many intervals and fewer began after."""
REFUTED = 6.0
"""The amount (in nats) by which the short estimate must foretell better."""
LEAST: Final = 1e-4
"""The least probability that an estimate gives, and the least that it leaves to the opposite."""
EVIDENCE = 64
"""Intervals of a class after which evidence counts half."""


@dataclass(frozen=True)
class LearntCounts:
    """Intervals of classes [C] that began [C], and of those by bin of age [C, BINS]: that ended,
    and that did not, open ones among them.
    """

    begun: IntArray
    ended: FloatArray
    unended: FloatArray


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
        """Add a class, without intervals."""
        self._counts = with_room(self._counts, len(self._begun))
        self._begun.append(0)
        self._as_of.append(0)

    def on_begin(self, interval_id: int, reuse_class: int) -> None:
        """Note that an interval begins. reuse_class: the number of its class."""
        if interval_id >= len(self._number):
            self._number.frombytes(bytes(8 * (interval_id + 1)))
        begun = self._begun[reuse_class]
        self._number[interval_id] = begun
        self._begun[reuse_class] = begun + 1

    def on_move(self, interval_id: int, before: int, after: int) -> None:
        """An open interval now belongs to class `after`; it weighs there what it did before."""
        self._number[interval_id] += self._begun[after] - self._begun[before]

    def on_interval_end(self, interval_id: int, reuse_class: int, age_bin: int) -> None:
        """An interval ended in this bin."""
        self._fade(reuse_class)
        self._counts[reuse_class, ENDED, age_bin] += self._weight(interval_id, reuse_class)

    def on_close(self, interval_id: int, reuse_class: int, age_bin: int) -> None:
        """An interval is observed no more; it was in this bin then."""
        self._fade(reuse_class)
        self._counts[reuse_class, UNENDED, age_bin] += self._weight(interval_id, reuse_class)

    def of(
        self, known: IntArray, open_intervals: IntArray, classes: IntArray, cells: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Ended and unended intervals [C, bins] of the classes `known` [C]. Changes nothing.
        open_intervals, classes and cells [n]: ids and classes of the open ones, and where each
        counts among C * bins.
        """
        ended, unended = self.closed(known)
        still_open = np.zeros(ended.size)
        self.add_open(still_open, open_intervals, classes, cells)
        return ended, unended + still_open.reshape(ended.shape)

    def closed(self, known: IntArray, bins: slice = slice(None)) -> tuple[FloatArray, FloatArray]:
        """Ended intervals, and those that were closed before they ended, of the classes `known`
        [C], in some bins.
        """
        faded = self._faded(as_ints(self._begun)[known] - as_ints(self._as_of)[known])[:, None]
        return self._counts[known, ENDED, bins] * faded, self._counts[known, UNENDED, bins] * faded

    def add_open(
        self, counted: FloatArray, open_intervals: IntArray, classes: IntArray, cells: IntArray
    ) -> None:
        """Add open intervals to `counted`. open_intervals, classes, cells [n]: ids, numbers of
        their classes, and where each counts.
        """
        younger = as_ints(self._begun).take(classes) - as_ints(self._number).take(open_intervals)
        np.add.at(counted, cells, self._faded(younger - 1))

    def frozen(self) -> IntervalCounts:
        """A copy of what is counted now."""
        taken = copy(self)
        taken._begun, taken._as_of = self._begun[:], self._as_of[:]
        taken._number = self._number[:]
        taken._counts = self._counts[: len(self._begun)].copy()
        return taken

    def export(
        self, known: IntArray, open_intervals: IntArray, classes: IntArray, cells: IntArray
    ) -> LearntCounts:
        """The result of `of` for the same arguments, for `restore`. Changes nothing."""
        counts = self.of(known, open_intervals, classes, cells)
        return LearntCounts(as_ints(self._begun)[known], *counts)

    def restore(self, known: IntArray, learnt: LearntCounts) -> None:
        """Begin with the counts that another process exported for the classes `known` [C]."""
        as_ints(self._begun)[known] = as_ints(self._as_of)[known] = learnt.begun
        self._counts[known, ENDED] = learnt.ended
        self._counts[known, UNENDED] = learnt.unended

    def start_over(self, other: IntervalCounts, reuse_class: int, open_intervals: IntArray) -> None:
        """Replace what is counted of `reuse_class` by what `other` has counted. open_intervals:
        ids of its open intervals, which get the weights that they have in `other`.
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
        """Weights of intervals after which `younger` [n] others of their class began."""
        faded: FloatArray = np.exp2(-younger / self._half_life)
        return faded


class RecentIntervals:
    """Recent intervals, as evidence for the long estimate of hazards or the short one.

    Every bin of age that an interval reached is one trial: the interval ended in it or passed it.
    """

    def __init__(self, bins: int) -> None:
        self._bins = bins
        self._ended = np.zeros((0, bins))
        self._steps = np.zeros((0, bins + 1))  # differences, along bins, of those that passed
        self._evidence = np.zeros(0)
        self._classes = 0
        self._counted_bins = array("q", bytes(8 * 64))  # by interval id: bins that were counted
        self._touched: set[int] = set()  # numbers of the classes that had trials
        # By number of a class: the row of both estimates that holds for it. Classes that came later
        # have none.
        self._rows: IntArray = np.zeros(0, dtype=np.int64)
        self._estimates = np.zeros((2, 0, bins))

    def add_class(self) -> None:
        """Add a class, without events."""
        self._ended = with_room(self._ended, self._classes)
        self._steps = with_room(self._steps, self._classes)
        self._evidence = with_room(self._evidence, self._classes)
        self._classes += 1

    def on_begin(self, interval: int, number: int) -> None:
        """An interval of the class of that number begins under this id."""
        if interval >= len(self._counted_bins):
            self._counted_bins.frombytes(bytes(8 * (interval + 1)))
        self._counted_bins[interval] = 0

    def on_interval_end(self, interval: int, number: int, age_bin: int) -> None:
        """An interval of the class of that number ended in this bin, having passed those before."""
        self._ended[number, age_bin] += 1
        self._touched.add(number)
        self.on_close(interval, number, age_bin)

    def on_move(self, interval: int, before: int, after: int) -> None:
        """Count an open interval for the class of number `after` from now on."""

    def on_close(self, interval: int, number: int, age_bin: int) -> None:
        """An interval has passed all bins before this one, and is observed no more."""
        seen = self._counted_bins[interval]
        if age_bin > seen:
            self._steps[number, seen] += 1
            self._steps[number, age_bin] -= 1
            self._counted_bins[interval] = age_bin
            self._touched.add(number)

    def on_pass(self, intervals: IntArray, numbers: IntArray, age_bins: IntArray) -> None:
        """Open intervals [n] have reached these bins [n]. intervals: their ids. numbers: those of
        their classes.
        """
        every = as_ints(self._counted_bins)
        seen = every.take(intervals)
        on = (age_bins > seen).nonzero()[0]
        if not len(on):
            return
        passing = numbers[on]
        np.add.at(self._steps, (passing, seen[on]), 1)
        np.add.at(self._steps, (passing, age_bins[on]), -1)
        every[intervals[on]] = age_bins[on]
        self._touched.update(passing.tolist())

    def refuted(self) -> list[int]:
        """Weigh all trials since the last call. Returns the numbers of the classes whose trials the
        short estimate foretold better than the long one by REFUTED nats; their evidence begins
        anew.
        """
        touched = np.array(sorted(self._touched), dtype=np.int64)
        known = touched[touched < len(self._rows)]
        long, short = np.clip(self._estimates[:, self._rows[known]], LEAST, 1 - LEAST)
        ended = self._ended[known]
        passed = np.cumsum(self._steps[known], axis=1)[:, : self._bins]
        gain_if_ended, gain_if_not = (
            np.log(short) - np.log(long),
            np.log1p(-short) - np.log1p(-long),
        )
        gain = (ended * gain_if_ended + passed * gain_if_not).sum(axis=1)
        fade = 2.0 ** (-ended.sum(axis=1) / EVIDENCE - passed[:, 0] / EVIDENCE)
        evidence = np.maximum(fade * self._evidence[known] + gain, -REFUTED)
        refuted = evidence > REFUTED
        self._evidence[known] = np.where(refuted, 0.0, evidence)
        self._ended[touched] = 0
        self._steps[touched] = 0
        self._touched.clear()
        numbers: list[int] = known[refuted].tolist()
        return numbers

    def expect(self, known: IntArray, rows: IntArray, estimates: FloatArray) -> None:
        """Weigh trials from now on by the long and the short estimate [2, R, bins] of hazards.
        known, rows [C]: numbers of classes, and the row that holds for each.
        """
        self._rows = np.empty_like(rows)
        self._rows[known] = rows
        self._estimates = estimates


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
