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

from array import array
from bisect import bisect_right
from dataclasses import dataclass
from math import frexp
from typing import Final

import numpy as np

from sglang_hybrid.core.costs.cost import FloatArray, IntArray
from sglang_hybrid.core.returns.hazards import (
    BINS,
    CLASSES,
    INTERVAL_BUCKETS,
    NEVER_REUSED,
    ClassTree,
    ReturnEstimate,
)
from sglang_hybrid.core.returns.intervals import (
    IntervalCounts,
    IntervalNews,
    LearntCounts,
    as_ints,
)

REBUILD_EVERY: Final = 32  # requests
SEARCHED: Final = 1_000  # ages that are searched for among the bins
LONG = 2_048  # half-lives, in intervals of a class
SHORT = 32
UNSEEN: Final = -1  # the number of a class that had no position yet


@dataclass(frozen=True)
class LearntClasses:
    """classes [C]: rising. long, short: as the reuse index remembers them."""

    classes: IntArray
    long: LearntCounts
    short: LearntCounts


class SeenClasses:
    """The classes that ever had a position, numbered in the order in which they came. Counts are
    kept by these numbers, since most of the CLASSES never occur.
    """

    def __init__(self) -> None:
        self._numbers = array("i", [UNSEEN] * CLASSES)
        self._classes = array("q")
        self._order: tuple[IntArray, IntArray, IntArray, ClassTree] | None = None

    def number(self, reuse_class: int) -> int:
        """Its number; UNSEEN if it has none."""
        return self._numbers[reuse_class]

    def add(self, reuse_class: int) -> int:
        """It has a position now; returns its number."""
        number = self._numbers[reuse_class] = len(self._classes)
        self._classes.append(reuse_class)
        self._order = None
        return number

    def in_order(self) -> tuple[IntArray, IntArray, IntArray, ClassTree]:
        """All seen classes [C], rising; their numbers [C]; by number, the place of each among them
        [C]; and what they are shrunk towards.
        """
        if self._order is None:
            as_they_came = np.array(self._classes, dtype=np.int64)
            numbers = as_they_came.argsort()
            places = np.empty_like(numbers)
            places[numbers] = np.arange(len(numbers))
            classes = as_they_came[numbers]
            self._order = classes, numbers, places, ClassTree(classes)
        return self._order


class ReuseIndex:
    """Intervals in, weights out. Times are whatever the caller counts in; `unit` scales the
    youngest age bin: a power of two, so that an age's bin is its exponent.

    Memory: 40 bytes per open interval, 1.2 KB per class that was seen, and half a megabyte.
    """

    def __init__(self, unit: float) -> None:
        if unit <= 0 or frexp(unit)[0] != 0.5:
            raise ValueError(f"The unit of a reuse index must be a power of two, not {unit}.")
        self.version = 0  # of the table: weights of different versions do not compare
        self._per_unit = 1 / unit
        # upper ends of the age bins
        self._edges: FloatArray = unit * 2.0 ** np.arange(1.0, BINS + 1)
        self._cuts = self._edges[:-1]
        self._cut_list = self._cuts.tolist()
        self._seen = SeenClasses()
        self._long = IntervalCounts(LONG, BINS)
        self._short = IntervalCounts(SHORT, BINS)
        self._news = IntervalNews(BINS)
        self._observers = (self._long, self._short, self._news)
        self._number = array("q", [-1] * 64)  # by interval id: that of its class; -1: free
        self._since = array("d", [0.0] * 64)
        self._free = list(range(63, -1, -1))
        self._now = 0.0
        self._began = 0.0
        no_hazard, one_row = np.zeros((1, BINS)), np.zeros(CLASSES, dtype=np.int64)
        self._estimate = ReturnEstimate(no_hazard, one_row, self._edges)
        self._observed = 0
        self._rebuild_at = 1

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
        self._begins(interval_id, number, time)
        return interval_id

    def _number_of(self, reuse_class: int) -> int:
        """The number under which a class is counted from now on."""
        number = self._seen.number(reuse_class)
        if number != UNSEEN:
            return number
        for observer in self._observers:
            observer.add_class()
        return self._seen.add(reuse_class)

    def _begins(self, interval_id: int, number: int, time: float) -> None:
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
            observer.on_end(interval_id, number, age_bin)
        self._begins(interval_id, number, time)
        return interval

    def since(self, interval_id: int) -> float:
        """The time at which the present interval began."""
        return self._since[interval_id]

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
        often in the beginning.
        """
        if not self._observed:
            self._began = time
        self._now = max(self._now, time)
        self._observed += 1
        if self._observed >= self._rebuild_at:
            self.rebuild()
            self._rebuild_at = self._observed + min(REBUILD_EVERY, self._observed // 4 + 1)

    def rebuild(self) -> None:
        """Estimate hazards from all intervals."""
        _, known, _, tree = self._seen.in_order()
        waiting, numbers, age_bins, cells = self._open_now()
        self._news.weigh(waiting, numbers, age_bins)
        for number in self._news.refuted():
            self._long.start_over(self._short, number, waiting[numbers == number])
        both = (
            self._long.of(known, waiting, numbers, cells),
            self._short.of(known, waiting, numbers, cells),
        )
        ended, unended = (np.stack(counts) for counts in zip(*both, strict=True))
        long, short = tree.hazards(ended, unended)
        self._news.expect(known, long[tree.own], short[tree.own])
        self._estimate = ReturnEstimate(long, tree.row, self._edges)
        self.version += 1

    def _open_now(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """The open intervals [n], the numbers of their classes, their bins of age, and where each
        counts among C * BINS, the C seen classes in their order.
        """
        every = as_ints(self._number)
        waiting = (every >= 0).nonzero()[0]
        numbers = every.take(waiting)
        age_bins = self._bins(self._now - np.frombuffer(self._since).take(waiting))
        places = self._seen.in_order()[2]
        return waiting, numbers, age_bins, places.take(numbers) * BINS + age_bins

    def export(self) -> LearntClasses:
        """The counts of all classes, with open intervals as long as they have been. Changes
        nothing: another rank need not do the same.
        """
        classes, known, _, _ = self._seen.in_order()
        waiting, numbers, _, cells = self._open_now()
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
        """Whether a request was observed."""
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
        return self._estimate.rate_until(reuse_class, self._bin(age))

    def return_probability(self, reuse_class: int, age: float) -> float:
        """Probability that a position of `reuse_class`, last used `age` ago, is resumed at all. No
        return is expected later than the index has watched so far, since it has seen none. During
        the first REBUILD_EVERY requests every position is taken to be resumed.
        """
        if reuse_class == NEVER_REUSED:
            return 0.0
        if not self.version or self._observed < REBUILD_EVERY:
            return 1.0
        return self._estimate.probability(reuse_class, age, self._now - self._began)

    def weights(self, reuse_classes: IntArray, ages: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Weights [n] of classes [n] at ages [n], and the ages [n] at which each weight expires:
        the end of its bin, or never where they are 0.
        """
        return self._estimate.rates_until(reuse_classes, self._bins(ages))

    def _bin(self, age: float) -> int:
        return bisect_right(self._cut_list, age)

    def _bins(self, ages: FloatArray) -> IntArray:
        """`_bin` of each; of many it is the exponent in units, much faster than a search."""
        if len(ages) < SEARCHED:
            return self._cuts.searchsorted(ages, "right")
        bins: IntArray = np.frexp(np.maximum(ages, 0.0) * self._per_unit)[1]
        np.maximum(bins, 1, out=bins)
        np.minimum(bins, BINS, out=bins)
        bins -= 1
        return bins
