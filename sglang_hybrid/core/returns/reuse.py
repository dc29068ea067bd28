"""The reuse index: how likely a position is to be resumed per unit of time that it is kept
(marconi-notes.md section 9).

Positions are grouped into classes. For each class the index knows how long positions waited until
they were resumed (ended intervals) and how long others have been waiting (open ones). From these it
estimates the hazard of a return per bin of age (Kaplan-Meier, shrunk towards coarser classes), and
from the hazards the best rate of returns that keeping a position of a given age can buy (a Gittins
index).

The past fades in two ways (`IntervalCounts`). The estimate remembers about LONG intervals of a
class. A second one remembers about SHORT. Where the short one foretold what happened since clearly
better, the traffic of that class has changed, and the long one starts over from the short one.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from math import frexp
from typing import Final

import numpy as np

from sglang_hybrid.core.costs.cost import FloatArray, IntArray
from sglang_hybrid.core.returns.departures import Departures
from sglang_hybrid.core.returns.hazards import (
    BEFORE_END,
    BINS,
    CLASSES,
    INTERVAL_BUCKETS,
    NEVER_REUSED,
    UNSEEN,
    KnownClasses,
    ReturnEstimate,
)
from sglang_hybrid.core.returns.intervals import (
    IntervalCounts,
    LearntCounts,
    RecentIntervals,
    as_ints,
)

REBUILD_EVERY: Final = 32  # requests
MICROSECONDS: Final = 2_000
"""Microseconds of a rebuilding per request: all of it where there is little."""
INTERVALS_AT_ONCE: Final = 4_096  # in one step of it
PER_INTERVAL, PER_START = 0.05, 100.0  # microseconds
LEAST_FOR_EXPONENT: Final = 1_000  # ages; bins of fewer are searched for
LONG = 2_048  # half-lives, in intervals of a class
SHORT = 32


@dataclass(frozen=True)
class LearntClasses:
    """classes [C]: rising. long, short: as the reuse index remembers them."""

    classes: IntArray
    long: LearntCounts
    short: LearntCounts


class ReuseIndex:
    """Intervals in, weights out. Times are whatever the caller counts in; `unit` scales the
    youngest age bin: a power of two, so that an age's bin is its exponent.

    A position on the way to an end that nothing has continued yet has no intervals. Its weight is
    that of the end, times the requests that leave on such a way for each one that leaves at an end.

    Memory: 40 bytes per open interval, 1.2 KB per class that was seen, and half a megabyte; while a
    table is made, about as much again.
    """

    def __init__(self, unit: float) -> None:
        if unit <= 0 or frexp(unit)[0] != 0.5:
            raise ValueError(f"The unit of a reuse index must be a power of two, not {unit}.")
        self.version = 0  # of the table: weights of different versions do not compare
        self._per_unit = 1 / unit
        # upper ends of the age bins
        self._edges: FloatArray = np.ldexp(unit, np.arange(1, BINS + 1))
        self._cuts = self._edges[:-1]
        self._cut_list = self._cuts.tolist()
        self._classes = KnownClasses()
        self._long = IntervalCounts(LONG, BINS)
        self._short = IntervalCounts(SHORT, BINS)
        self._recent = RecentIntervals(BINS)
        self._observers = (self._long, self._short, self._recent)
        self._number = array("q", [-1] * 64)  # by interval id: that of its class; -1: free
        self._since = array("d", [0.0] * 64)
        self._free = list(range(63, -1, -1))
        self._now = 0.0
        self._began = 0.0
        no_hazard, one_row = np.zeros((1, BINS)), np.zeros(CLASSES, dtype=np.int64)
        self._estimate = ReturnEstimate(no_hazard, one_row, self._edges)
        self._departures = Departures()
        self._share = 0.0  # of the departures, as the table in force has it
        self._observed = 0
        self._rebuild_at = 1
        self._work: Iterator[float] | None = None  # what is left of the rebuilding under way

    def open(self, reuse_class: int, time: float) -> int:
        """Begin the first interval of a position of class `reuse_class`. Returns the id of its
        intervals.
        """
        if not self._free:
            count = len(self._number)
            self._number.extend([-1] * count)
            self._since.extend([0.0] * count)
            self._free = list(range(2 * count - 1, count - 1, -1))
        interval_id = self._free.pop()
        number = self._number[interval_id] = self._number_of(reuse_class)
        self._start_interval(interval_id, number, time)
        return interval_id

    def _number_of(self, reuse_class: int) -> int:
        """The number under which a class is counted from now on."""
        number = self._classes.number(reuse_class)
        if number != UNSEEN:
            return number
        for observer in self._observers:
            observer.add_class()
        return self._classes.add(reuse_class)

    def _start_interval(self, interval_id: int, number: int, time: float) -> None:
        self._since[interval_id] = time
        for observer in self._observers:
            observer.on_begin(interval_id, number)

    def on_return(self, interval_id: int, time: float) -> float:
        """A position was resumed: its interval ends, and the next one begins. Returns the length of
        the interval that ended.
        """
        interval = time - self._since[interval_id]
        number, age_bin = self._number[interval_id], self._bin(interval)
        for observer in self._observers:
            observer.on_interval_end(interval_id, number, age_bin)
        self._start_interval(interval_id, number, time)
        return interval

    def since(self, interval_id: int) -> float:
        """The time at which the present interval began."""
        return self._since[interval_id]

    def on_departure(self, *, before: bool) -> None:
        """A request left a sequence that nothing had continued yet: at its end, or before it.
        Weights follow at the next rebuilding.
        """
        self._departures.add(before=before)

    def interval_bucket(self, interval: float) -> int:
        """The bucket of an interval: 1 .. INTERVAL_BUCKETS - 1, the shortest first; 0 is none."""
        return 1 + min(self._bin(interval) // 2, INTERVAL_BUCKETS - 2)

    def reclass(self, interval_id: int, reuse_class: int) -> None:
        """Move a position, and its present interval, to class `reuse_class`."""
        before, after = self._number[interval_id], self._number_of(reuse_class)
        if before != after:
            for observer in self._observers:
                observer.on_move(interval_id, before, after)
            self._number[interval_id] = after

    def close(self, interval_id: int) -> None:
        """Forget a position. Its interval counts as one that lasted until now at least."""
        number = self._number[interval_id]
        age_bin = self._bin(self._now - self._since[interval_id])
        for observer in self._observers:
            observer.on_close(interval_id, number, age_bin)
        self._number[interval_id] = -1
        self._free.append(interval_id)

    def on_request(self, time: float) -> None:
        """A request ended at `time`. Hazards are estimated anew every REBUILD_EVERY requests, more
        often in the beginning. Where there are many intervals, that is spread over the requests
        that follow.
        """
        if not self._observed:
            self._began = time
        self._now = max(self._now, time)
        self._observed += 1
        if self._work is None and self._observed >= self._rebuild_at:
            self._work = self._rebuild_steps()
            self._rebuild_at = self._observed + min(REBUILD_EVERY, self._observed // 4 + 1)
        if self._work is not None:
            self._continue_rebuild(self._work)

    def _continue_rebuild(self, work: Iterator[float]) -> None:
        """Do some of the rebuilding under way: all of it, if there is little."""
        spent = 0.0
        for microseconds in work:
            spent += microseconds
            if spent >= MICROSECONDS:
                return
        self._work = None

    def rebuild(self) -> None:
        """Estimate hazards from all intervals, at once."""
        self._work = None
        for _ in self._rebuild_steps():
            pass

    def _rebuild_steps(self) -> Iterator[float]:
        """Estimate hazards from all intervals as they are once the news has been weighed; at the
        end the new table is in force. Each step says about how many microseconds it took: not more
        where there are more intervals or classes, but for one copy of what is counted.
        """
        # 1 What happened since the last time speaks for one estimate or the other.
        first = 0
        while first < len(self._number):
            self._recent.on_pass(*self._open(slice(first, first + INTERVALS_AT_ONCE)))
            first += INTERVALS_AT_ONCE
            yield PER_INTERVAL * INTERVALS_AT_ONCE
        for number in self._recent.refuted():
            waiting = (as_ints(self._number) == number).nonzero()[0]
            self._long.start_over(self._short, number, waiting)
            yield PER_START
        # 2 The intervals of now are counted.
        _, known, places, tree = self._classes.in_order()
        counts = self._long.frozen(), self._short.frozen()
        taken = self._number[:], self._since[:], self._now
        still_open = np.zeros((2, len(known), BINS))
        for first in range(0, len(taken[0]), INTERVALS_AT_ONCE):
            waiting, numbers, age_bins = self._open(slice(first, first + INTERVALS_AT_ONCE), *taken)
            cells = places.take(numbers) * BINS + age_bins
            for counted, one in zip(still_open, counts, strict=True):
                one.add_open(counted.reshape(-1), waiting, numbers, cells)
            yield PER_INTERVAL * INTERVALS_AT_ONCE

        def counted_of(some: slice) -> tuple[FloatArray, FloatArray]:
            closed = [one.closed(known[some]) for one in counts]
            ended, unended = (np.stack(of) for of in zip(*closed, strict=True))
            return ended, unended + still_open[:, some]

        # 3 Hazards and rates follow.
        estimates = np.empty((2, tree.rows, BINS))
        yield from tree.fill(estimates, counted_of)
        estimate = ReturnEstimate(estimates[0], tree.row, self._edges)
        if self._estimate.has_rates:  # somebody will ask for these again
            yield from estimate.make_rates()
        self._recent.expect(known, tree.own, estimates)
        self._estimate = estimate
        self._share = self._departures.share
        self.version += 1

    def _open(
        self,
        some: slice,
        numbers: array[int] | None = None,
        since: array[float] | None = None,
        now: float | None = None,
    ) -> tuple[IntArray, IntArray, IntArray]:
        """The open intervals [n] among some ids, the numbers of their classes, and their bins of
        age: of now, or by what was taken before.
        """
        of_ids = as_ints(self._number if numbers is None else numbers)[some]
        began = np.frombuffer(self._since if since is None else since)[some]
        waiting = (of_ids >= 0).nonzero()[0]
        ages = (self._now if now is None else now) - began.take(waiting)
        return some.start + waiting, of_ids.take(waiting), self._bins(ages)

    def export(self) -> LearntClasses:
        """The counts of all classes, with open intervals as long as they have been. Changes
        nothing: another rank need not do the same.
        """
        classes, known, places, _ = self._classes.in_order()
        waiting, numbers, age_bins = self._open(slice(0, len(self._number)))
        cells = places.take(numbers) * BINS + age_bins
        long, short = (
            counts.export(known, waiting, numbers, cells) for counts in (self._long, self._short)
        )
        return LearntClasses(classes, long, short)

    def restore(self, learnt: LearntClasses) -> None:
        """Begin with what another index has learnt. Only before the first request."""
        known = np.array([self._number_of(one) for one in learnt.classes.tolist()], dtype=np.int64)
        self._long.restore(known, learnt.long)
        self._short.restore(known, learnt.short)
        self.rebuild()

    @property
    def has_observed(self) -> bool:
        """True if a request was observed."""
        return self._observed > 0

    @property
    def peak(self) -> float:
        """The highest weight that any position can have."""
        return self._estimate.peak

    def weight(self, reuse_class: int, age: float) -> float:
        """Best rate of returns per unit of time for a position of `reuse_class` last used `age`
        ago; 0 before the first request.
        """
        return self.weight_until(reuse_class, age)[0]

    def weight_until(self, reuse_class: int, age: float) -> tuple[float, float]:
        """`weights` for one position."""
        reuse_class, share = self._resolve_class(reuse_class)
        rate, until = self._estimate.rate_until(reuse_class, self._bin(age))
        return (share * rate, until) if share else (0.0, math.inf)

    def _resolve_class(self, reuse_class: int) -> tuple[int, float]:
        """A class that has intervals, and the share of its weight that `reuse_class` has."""
        if reuse_class < BEFORE_END:
            return reuse_class, 1.0
        return reuse_class - BEFORE_END, self._share

    def return_probability(self, reuse_class: int, age: float) -> float:
        """Probability that a position of `reuse_class`, last used `age` ago, is resumed at all. No
        return is expected later than the index has watched so far, since it has seen none. During
        the first REBUILD_EVERY requests every position is taken to be resumed.
        """
        reuse_class, share = self._resolve_class(reuse_class)
        if reuse_class == NEVER_REUSED or not share:
            return 0.0
        if not self.version or self._observed < REBUILD_EVERY:
            return 1.0
        returns = self._estimate.probability(reuse_class, age, self._now - self._began)
        return min(1.0, share * returns)

    def weights(self, reuse_classes: IntArray, ages: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Weights [n] of classes [n] at ages [n], and the ages [n] at which each weight expires:
        the end of its bin, or never where they are 0.
        """
        before = reuse_classes >= BEFORE_END
        if not np.count_nonzero(before):
            return self._estimate.rates_until(reuse_classes, self._bins(ages))
        known = np.where(before, reuse_classes - BEFORE_END, reuse_classes)
        shares = np.where(before, self._share, 1.0)
        rates, ends = self._estimate.rates_until(known, self._bins(ages))
        return rates * shares, np.where(shares > 0, ends, np.inf)

    def _bin(self, age: float) -> int:
        return bisect_right(self._cut_list, age)

    def _bins(self, ages: FloatArray) -> IntArray:
        """`_bin` of each; of many it is the exponent in units, much faster than a search."""
        if len(ages) < LEAST_FOR_EXPONENT:
            found: IntArray = self._cuts.searchsorted(ages, "right")
            return found
        bins: IntArray = np.frexp(np.maximum(ages, 0.0) * self._per_unit)[1]
        np.maximum(bins, 1, out=bins)
        np.minimum(bins, BINS, out=bins)
        bins -= 1
        return bins
