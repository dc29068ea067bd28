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
from math import frexp
from typing import Final

import numpy as np

from sglang_hybrid.core.answers import BUCKETS as ANSWERS
from sglang_hybrid.core.cost import FloatArray, IntArray
from sglang_hybrid.core.interval_counts import IntervalCounts, as_ints
from sglang_hybrid.core.learnt import LearntClasses
from sglang_hybrid.core.survival import ReturnTimes

# Features of a class: children none/one/many; depth to 64 tokens, 128, .. more than 64 Ki; what the
# answer says (core/answers.py); bucket of the interval that ended before: none, or in steps of
# four; turn 0 .. 6 and more.
SHAPE: Final = (3, 12, ANSWERS, 9, 7)
CHILDREN, DEPTHS, _, INTERVAL_BUCKETS, TURNS = SHAPE
CLASSES: Final = CHILDREN * DEPTHS * ANSWERS * INTERVAL_BUCKETS * TURNS
PER_ANSWER: Final = INTERVAL_BUCKETS * TURNS
NEVER_REUSED: Final = CLASSES  # the class of what is never resumed
BINS: Final = 24  # of age, each twice as wide as the one before
FIRST_GUESS: Final = 0.05  # of the hazard per bin, while nothing is known
PRIOR_WEIGHT: Final = 8.0  # intervals that a coarser class's hazard counts for
REBUILD_EVERY: Final = 32  # requests
SEARCHED: Final = 1_000  # ages that are searched for among the bins
LONG = 2_048  # half-lives, in intervals of a class
SHORT = 32
REFUTED = 6.0  # by how much (in nats) the short estimate must foretell better
LEAST: Final = 1e-4  # probability of what nobody expects
EVIDENCE = 64  # intervals of a class after which evidence counts half


def reuse_class_of(
    children: int, depth: int, turn: int, interval_bucket: int = 0, answer: int = 0
) -> int:
    """Class of a position.

    children: of its node. depth: tokens from the root. turn: sequence ends on its path.
    interval_bucket: `ReuseIndex.interval_bucket` of the interval that ended before, 0 if none did.
    answer: `Answer.bucket` of the answer at the position, 0 if nothing is expected.
    """
    shape = (min(children, 2) * DEPTHS + depth_bucket(depth)) * ANSWERS + answer
    return (shape * INTERVAL_BUCKETS + interval_bucket) * TURNS + min(turn, TURNS - 1)


def depth_bucket(depth: int) -> int:
    """0 for up to 64 tokens from the root, 1 for up to 128, and so on to DEPTHS - 1."""
    return min(max((depth - 1).bit_length() - 6, 0), DEPTHS - 1)


class ReuseIndex:
    """Intervals in, weights out. Times are whatever the caller counts in; `unit` scales the
    youngest age bin: a power of two, so that an age's bin is its exponent.

    Memory: 40 bytes per open interval and 19 MB of tables.
    """

    def __init__(self, unit: float) -> None:
        if unit <= 0 or frexp(unit)[0] != 0.5:
            raise ValueError(f"The unit of a reuse index must be a power of two, not {unit}.")
        self.version = 0  # of the table: weights of different versions do not compare
        self.peak = 0.0  # the highest weight that any position can have
        self._per_unit = 1 / unit
        # upper ends of the age bins
        self._edges: FloatArray = unit * 2.0 ** np.arange(1.0, BINS + 1)
        self._cuts = self._edges[:-1]
        self._cut_list = self._cuts.tolist()
        # Weights and their ends, [2, rows * BINS]: a row per class with a hazard of its own; the
        # last one holds no weight.
        self._table = np.array([[0.0] * BINS, [np.inf] * BINS])
        # Of a class's row, NEVER_REUSED included.
        self._first_cell = np.zeros(CLASSES + 1, dtype=np.int64)
        self._long = IntervalCounts(LONG, CLASSES, BINS)
        self._short = IntervalCounts(SHORT, CLASSES, BINS)
        self._news = News()
        self._known = np.zeros(CLASSES, dtype=np.bool_)  # classes that had a position
        self._class = array("q", [-1] * 64)  # per slot; -1: free
        self._since = array("d", [0.0] * 64)
        self._free = list(range(63, -1, -1))
        self._now = 0.0
        self._began = 0.0
        self._returns: ReturnTimes | None = None  # until the first rebuild
        self._observed = 0
        self._rebuild_at = 1

    def open(self, reuse_class: int, time: float) -> int:
        """A position of class `reuse_class` starts to wait. Returns the slot it is known by."""
        if not self._free:
            count = len(self._class)
            self._class.extend([-1] * count)
            self._since.extend([0.0] * count)
            self._free = list(range(2 * count - 1, count - 1, -1))
        interval_id = self._free.pop()
        self._class[interval_id] = reuse_class
        self._known[reuse_class] = True
        self._begins(interval_id, reuse_class, time)
        return interval_id

    def _begins(self, interval_id: int, reuse_class: int, time: float) -> None:
        self._since[interval_id] = time
        self._long.begins(interval_id, reuse_class)
        self._short.begins(interval_id, reuse_class)
        self._news.begins(interval_id)

    def returned(self, interval_id: int, time: float) -> float:
        """It was resumed: its interval ends, and the next one begins. Returns how long it was."""
        interval = time - self._since[interval_id]
        reuse_class, age_bin = self._class[interval_id], self._bin(interval)
        self._long.ends(interval_id, reuse_class, age_bin)
        self._short.ends(interval_id, reuse_class, age_bin)
        self._news.ends(interval_id, reuse_class, age_bin)
        self._begins(interval_id, reuse_class, time)
        return interval

    def since(self, interval_id: int) -> float:
        """When its present interval began."""
        return self._since[interval_id]

    def interval_bucket(self, interval: float) -> int:
        """The bucket of an interval: 1 .. INTERVAL_BUCKETS - 1, the shortest first; 0 is none."""
        return 1 + min(self._bin(interval) // 2, INTERVAL_BUCKETS - 2)

    def reclass(self, interval_id: int, reuse_class: int) -> None:
        """It now belongs to `reuse_class`, and so will its present interval."""
        before = self._class[interval_id]
        if before != reuse_class:
            self._long.moves(interval_id, before, reuse_class)
            self._short.moves(interval_id, before, reuse_class)
            self._class[interval_id] = reuse_class
            self._known[reuse_class] = True

    def close(self, interval_id: int) -> None:
        """It is forgotten: its interval lasted until now at least."""
        reuse_class, age_bin = (
            self._class[interval_id],
            self._bin(self._now - self._since[interval_id]),
        )
        self._long.is_lost(interval_id, reuse_class, age_bin)
        self._short.is_lost(interval_id, reuse_class, age_bin)
        self._news.survived(interval_id, reuse_class, age_bin)
        self._class[interval_id] = -1
        self._free.append(interval_id)

    def observed(self, time: float) -> None:
        """One more request, at `time`. The table is rebuilt every REBUILD_EVERY of them, sooner in
        the beginning.
        """
        if not self._observed:
            self._began = time
        self._now = max(self._now, time)
        self._observed += 1
        if self._observed >= self._rebuild_at:
            self.rebuild()
            self._rebuild_at = self._observed + min(REBUILD_EVERY, self._observed // 4 + 1)

    def rebuild(self) -> None:
        """Estimate hazards from all intervals and tabulate the best rates."""
        known, waiting, classes, age_bins, cells = self._open_now()
        self._news.look(known, waiting, classes, age_bins)
        for reuse_class in self._news.refuted():
            self._long.start_over(self._short, reuse_class, waiting[classes == reuse_class])
        both = (
            self._long.of(known, waiting, classes, cells),
            self._short.of(known, waiting, classes, cells),
        )
        ended, unended = (np.stack(counts) for counts in zip(*both, strict=True))
        (hazard, short), row = hazards(known, ended, unended)
        self._news.expect(known, hazard[row[known]], short[row[known]])
        self._returns = ReturnTimes(self._edges, hazard, row)
        rates = best_rates(hazard, np.diff(self._edges, prepend=0.0))
        table = np.concatenate([rates, np.zeros((1, BINS))])
        self._table = np.stack([table, np.where(table > 0, self._edges, np.inf)]).reshape(2, -1)
        self._first_cell = np.append(row, len(rates)) * BINS
        self.peak = float(rates.max())
        self.version += 1

    def _open_now(self) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
        """All classes [C] that had a position; the open intervals [n], their classes and bins of
        age, and where each counts among C * BINS.
        """
        known = self._known.nonzero()[0]
        position = np.zeros(CLASSES, dtype=np.int64)
        position[known] = np.arange(len(known))
        every = as_ints(self._class)
        waiting = (every >= 0).nonzero()[0]
        classes = every.take(waiting)
        age_bins = self._bins(self._now - np.frombuffer(self._since).take(waiting))
        return known, waiting, classes, age_bins, position.take(classes) * BINS + age_bins

    def learnt(self) -> LearntClasses:
        """The counts of all classes, with open intervals as long as they have been. Changes
        nothing: another rank need not do the same.
        """
        known, waiting, classes, _, cells = self._open_now()
        long, short = (
            counts.learnt(known, waiting, classes, cells) for counts in (self._long, self._short)
        )
        return LearntClasses(known, long, short)

    def restore(self, learnt: LearntClasses) -> None:
        """Begin with what another index has learnt. Only before the first request."""
        self._known[learnt.classes] = True
        self._long.restore(learnt.classes, learnt.long)
        self._short.restore(learnt.classes, learnt.short)
        self.rebuild()

    @property
    def observed_any(self) -> bool:
        """Whether a request was observed."""
        return self._observed > 0

    def weight(self, reuse_class: int, age: float) -> float:
        """Best rate of returns per unit of time for a position of `reuse_class` last used `age`
        ago; 0 before the first request.
        """
        return self.weight_until(reuse_class, age)[0]

    def weight_until(self, reuse_class: int, age: float) -> tuple[float, float]:
        """`weights` for one position."""
        cell = self._first_cell.item(reuse_class) + self._bin(age)
        return self._table.item(0, cell), self._table.item(1, cell)

    def return_probability(self, reuse_class: int, age: float) -> float:
        """Probability that a position of `reuse_class`, last used `age` ago, is resumed at all. No
        return is expected later than the index has watched so far, since it has seen none. During
        the first REBUILD_EVERY requests every position is taken to be resumed.
        """
        if reuse_class == NEVER_REUSED:
            return 0.0
        if self._returns is None or self._observed < REBUILD_EVERY:
            return 1.0
        return self._returns.probability(reuse_class, age, self._now - self._began)

    def weights(self, reuse_classes: IntArray, ages: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Weights [n] of classes [n] at ages [n], and the ages [n] at which each weight expires:
        the end of its bin, or never where they are 0.
        """
        cells = self._first_cell.take(reuse_classes)
        cells += self._bins(ages)
        weights, ends = self._table.take(cells, axis=1)
        return weights, ends

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


class News:
    """What happened to the intervals since the last look, and how well two estimates foretold it.

    Every bin of age that an interval passed through is one trial: it ended there or it did not.
    """

    def __init__(self) -> None:
        self._ended = np.zeros((CLASSES, BINS))
        self._steps = np.zeros((CLASSES, BINS + 1))  # differences, along bins, of those that passed
        self._seen = array("q", bytes(8 * 64))  # by interval id: bins that were counted
        self._known: IntArray = np.zeros(0, dtype=np.int64)
        self._gain_if_ended = self._gain_if_not = np.zeros((0, BINS))  # of the short estimate
        self._evidence = np.zeros(CLASSES)

    def begins(self, interval: int) -> None:
        """An interval begins under this id."""
        if interval >= len(self._seen):
            self._seen.frombytes(bytes(8 * (interval + 1)))
        self._seen[interval] = 0

    def ends(self, interval: int, reuse_class: int, age_bin: int) -> None:
        """It ended in this bin, having passed those before."""
        self._ended[reuse_class, age_bin] += 1
        self.survived(interval, reuse_class, age_bin)

    def survived(self, interval: int, reuse_class: int, age_bin: int) -> None:
        """It passed all bins before this one."""
        seen = self._seen[interval]
        if age_bin > seen:
            self._steps[reuse_class, seen] += 1
            self._steps[reuse_class, age_bin] -= 1
            self._seen[interval] = age_bin

    def look(
        self, known: IntArray, intervals: IntArray, classes: IntArray, age_bins: IntArray
    ) -> None:
        """The open intervals [n] are in these bins [n] by now. Weigh what happened. known [C]: all
        classes of which something can have happened.
        """
        every = as_ints(self._seen)
        seen = every.take(intervals)
        on = (age_bins > seen).nonzero()[0]
        np.add.at(self._steps, (classes[on], seen[on]), 1)
        np.add.at(self._steps, (classes[on], age_bins[on]), -1)
        every[intervals[on]] = age_bins[on]
        ended = self._ended[self._known]
        passed = np.cumsum(self._steps[self._known], axis=1)[:, :BINS]
        gain = (ended * self._gain_if_ended + passed * self._gain_if_not).sum(axis=1)
        fade = 2.0 ** (-ended.sum(axis=1) / EVIDENCE - passed[:, 0] / EVIDENCE)
        self._evidence[self._known] = np.maximum(
            fade * self._evidence[self._known] + gain, -REFUTED
        )
        self._ended[known] = 0
        self._steps[known] = 0

    def refuted(self) -> list[int]:
        """Classes of which the short estimate knows more than the long one; once each."""
        classes: list[int] = (self._evidence > REFUTED).nonzero()[0].tolist()
        self._evidence[classes] = 0.0
        return classes

    def expect(self, known: IntArray, long: FloatArray, short: FloatArray) -> None:
        """The hazards [C, BINS] that both estimates have for the classes `known` [C] from now."""
        long, short = np.clip(long, LEAST, 1 - LEAST), np.clip(short, LEAST, 1 - LEAST)
        self._known = known
        self._gain_if_ended = np.log(short) - np.log(long)
        self._gain_if_not = np.log1p(-short) - np.log1p(-long)


def hazards(
    classes: IntArray, ended: FloatArray, unended: FloatArray
) -> tuple[FloatArray, IntArray]:
    """Kaplan-Meier hazards [..., R, BINS]: of the intervals that reach a bin, the share that ends
    in it; and the row [CLASSES] that holds for each class.

    classes [C]: rising. ended, unended [..., C, BINS]: their intervals by the bin in which they
    ended or were last seen. Each class is shrunk towards the one with its last feature dropped:
    first turn, then interval_bucket, depth and children; the coarsest towards FIRST_GUESS. A class
    that is not among `classes` has the row of the coarser one.
    """
    at_risk = np.flip(np.cumsum(np.flip(ended + unended, -1), axis=-1), -1)
    rows = np.full((*ended.shape[:-2], 1, BINS), FIRST_GUESS)
    row = np.zeros(1, dtype=np.int64)
    finer = CLASSES
    answers_tell = bool((classes // PER_ANSWER % ANSWERS).any())
    for level, size in enumerate((1, *SHAPE)):
        row = np.repeat(row, size)
        finer //= size
        if finer == PER_ANSWER and level and not answers_tell:
            continue  # all classes are alike in this: it would count them twice
        coarse = classes // finer
        if len(coarse):
            first = np.concatenate([[True], coarse[1:] != coarse[:-1]]).nonzero()[0]
            coarse = coarse[first]
            ends, risk = (np.add.reduceat(counts, first, axis=-2) for counts in (ended, at_risk))
            guess = rows[..., row[coarse], :]
            own = (ends + PRIOR_WEIGHT * guess) / (risk + PRIOR_WEIGHT)
            row[coarse] = np.arange(rows.shape[-2], rows.shape[-2] + len(coarse))
            rows = np.concatenate([rows, own], axis=-2)
    return rows, row


def best_rates(hazard: FloatArray, widths: FloatArray) -> FloatArray:
    """G [R, K] from hazards [R, K] of bins of `widths` [K]: max over T of P(return by T) / E[time
    until return or T].

    T runs over the ends of bins; a return within a bin takes half of the bin on average.
    """
    ends = np.ascontiguousarray(hazard.T)  # bins first: a pass over all rows at once
    stays, spent = 1 - ends, widths[:, None] * (1 - ends / 2)
    # From each start, after `count` bins: the share that is left, and the time spent so far.
    alive, time = stays.copy(), spent.copy()
    best = (1 - alive) / time
    for count in range(2, len(ends) + 1):
        starts = len(ends) - count + 1
        alive, time = alive[1 : starts + 1], time[1 : starts + 1]  # of the bins after the first
        alive *= stays[:starts]
        time *= stays[:starts]
        time += spent[:starts]
        np.maximum(best[:starts], (1 - alive) / time, out=best[:starts])
    return best.T
