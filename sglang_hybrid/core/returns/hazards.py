"""Classes of positions, and from the intervals of each to how likely a return is.

Positions of one class are taken to return alike. From counts of its intervals follow hazards of
return by age (`ClassTree`); from these follow the best rate of returns that keeping a position can
buy, and the probability of a return within some time (`ReturnEstimate`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Final

import numpy as np

from sglang_hybrid.core.costs.cost import FloatArray, IntArray
from sglang_hybrid.core.returns.answers import BUCKETS as ANSWERS

# Features of a class: children none/one/many; depth to 64 tokens, 128, .. more than 64 Ki; what the
# answer says (core/returns/answers.py); bucket of the interval that ended before: none, or in steps
# of four; turn 0 .. 6 and more.
SHAPE: Final = (3, 12, ANSWERS, 9, 7)
CHILDREN, DEPTHS, _, INTERVAL_BUCKETS, TURNS = SHAPE
CLASSES: Final = CHILDREN * DEPTHS * ANSWERS * INTERVAL_BUCKETS * TURNS
PER_ANSWER: Final = INTERVAL_BUCKETS * TURNS
NEVER_REUSED: Final = CLASSES  # the class of what is never resumed
BEFORE_END: Final = CLASSES + 1  # plus the class of an end: that of positions on the way to it
UNSEEN: Final = -1  # the number of a class that had no position yet


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


BINS: Final = 24  # of age, each twice as wide as the one before
FIRST_GUESS: Final = 0.05  # of the hazard per bin, while nothing is known
PRIOR_WEIGHT: Final = 8.0  # intervals that a coarser class's hazard counts for
CLASSES_AT_ONCE: Final = 128  # in one step of an estimate
ROWS_AT_ONCE: Final = 256
PER_CLASS, PER_ROW, PER_RATE = 4.0, 0.5, 2.0  # microseconds that a step takes, about


class ClassTree:
    """The coarser class that each of some classes is shrunk towards: the one with its last feature
    dropped, first turn, then interval_bucket, answer, depth and children.

    Args:
        classes: [C], rising.

    row [CLASSES]: the row of `hazards` that holds for each class; that of the coarser one for a
    class that is not among `classes`. own [C]: the rows of `classes`.
    """

    def __init__(self, classes: IntArray) -> None:
        row = np.zeros(1, dtype=np.int64)
        self._rows = 1
        # Of each level: where its classes begin among `classes`, and the rows of the coarser ones.
        self._levels: list[tuple[IntArray, IntArray]] = []
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
                self._levels.append((first, row[coarse]))
                row[coarse] = np.arange(self._rows, self._rows + len(coarse))
                self._rows += len(coarse)
        self.row = row
        self.own: IntArray = row[classes]

    @property
    def rows(self) -> int:
        """The number of rows of `hazards`."""
        return self._rows

    def hazards(self, ended: FloatArray, unended: FloatArray) -> FloatArray:
        """Kaplan-Meier hazards [..., R, BINS]: of the intervals that reach a bin, the share that
        ends in it.

        ended, unended [..., C, BINS]: intervals of the classes by the bin in which they ended or
        were last seen. Each class is shrunk towards the coarser one, the coarsest towards
        FIRST_GUESS.
        """
        rows = np.empty((*ended.shape[:-2], self._rows, BINS))
        for _ in self.fill(rows, lambda some: (ended[..., some, :], unended[..., some, :])):
            pass
        return rows

    def fill(
        self, rows: FloatArray, counts: Callable[[slice], tuple[FloatArray, FloatArray]]
    ) -> Iterator[float]:
        """Fill `rows` [..., R, BINS] with hazards, step by step; each says about how many
        microseconds it took. counts: ended and unended intervals [..., K, BINS] of some classes.
        """
        shape = (2, *rows.shape[:-2])
        sums = [np.zeros((*shape, len(first), BINS)) for first, _ in self._levels]
        for begin in range(0, len(self.own), CLASSES_AT_ONCE):
            some = slice(begin, min(begin + CLASSES_AT_ONCE, len(self.own)))
            ended, unended = counts(some)
            at_risk = np.flip(np.cumsum(np.flip(ended + unended, -1), axis=-1), -1)
            both = np.stack([ended, at_risk])
            for total, (first, _) in zip(sums, self._levels, strict=True):
                low, high = first.searchsorted([some.start + 1, some.stop]).tolist()
                starts = np.maximum(first[low - 1 : high] - some.start, 0)
                alone = len(starts) == both.shape[-2]  # each class is a sum of its own
                parts = both if alone else np.add.reduceat(both, starts, axis=-2)
                total[..., low - 1 : high, :] += parts
            yield PER_CLASS * (some.stop - some.start)
        rows[..., 0, :] = FIRST_GUESS
        row = 1
        for (ends, risk), (_, coarser) in zip(sums, self._levels, strict=True):
            for begin in range(0, len(coarser), ROWS_AT_ONCE):
                of = slice(begin, min(begin + ROWS_AT_ONCE, len(coarser)))
                guess = PRIOR_WEIGHT * rows[..., coarser[of], :]
                found = (ends[..., of, :] + guess) / (risk[..., of, :] + PRIOR_WEIGHT)
                rows[..., row + of.start : row + of.stop, :] = found
                yield PER_ROW * (of.stop - of.start)
            row += len(coarser)


class KnownClasses:
    """The classes that ever had a position, numbered in the order in which they came. Counts are
    kept by these numbers, since most of the CLASSES never occur.
    """

    def __init__(self) -> None:
        self._numbers = array("i", [UNSEEN] * CLASSES)
        self._classes = array("q")
        self._order: tuple[IntArray, IntArray, IntArray, ClassTree] | None = None

    def number(self, reuse_class: int) -> int:
        """The number of a class; UNSEEN if it has none."""
        return self._numbers[reuse_class]

    def add(self, reuse_class: int) -> int:
        """Give a number to a class that has a position now, and return it."""
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


class ReturnEstimate:
    """Tables that follow from hazards of return, for each class and age. Each table is made when it
    is first asked for: while nothing must be chosen, nobody needs it.

    Args:
        hazard: [R, K]: of the positions that reach a bin of age, the share resumed within it.
        row: [C]: the row of each class. Class C, NEVER_REUSED, has hazards of 0.
        edges: [K]: upper ends of the bins, rising.
    """

    def __init__(self, hazard: FloatArray, row: IntArray, edges: FloatArray) -> None:
        self._hazard = np.concatenate([hazard, np.zeros((1, len(edges)))])
        self._row = np.append(row, len(hazard))
        self._edges = edges
        self._table: FloatArray | None = None

    @property
    def has_rates(self) -> bool:
        """True if rates were asked for, or made beforehand."""
        return self._table is not None

    def make_rates(self) -> Iterator[float]:
        """Make the table of rates, step by step; each says about how many microseconds it took."""
        made = np.empty((2, *self._hazard.shape))
        widths = np.diff(self._edges, prepend=0.0)
        for first in range(0, len(self._hazard), ROWS_AT_ONCE):
            some = slice(first, first + ROWS_AT_ONCE)
            made[0, some] = best_rates(self._hazard[some], widths)
            yield PER_RATE * len(self._hazard[some])
        made[1] = np.where(made[0] > 0, self._edges, np.inf)
        self._table = made.reshape(2, -1)

    @cached_property
    def _rates(self) -> tuple[FloatArray, IntArray]:
        """Best rates and the ages until which they hold [2, rows * K], and the first cell of each
        class.
        """
        if self._table is None:
            for _ in self.make_rates():
                pass
        assert self._table is not None
        return self._table, self._row * len(self._edges)

    @cached_property
    def _survival(self) -> FloatArray:
        """The probability [rows, K + 1] that a position has not been resumed at age 0 and at the
        end of each bin.
        """
        ones = np.ones((len(self._hazard), 1))
        return np.concatenate([ones, np.cumprod(1.0 - self._hazard, axis=1)], axis=1)

    @cached_property
    def peak(self) -> float:
        """The highest rate."""
        return float(self._rates[0][0].max())

    def rate_until(self, reuse_class: int, age_bin: int) -> tuple[float, float]:
        """The best rate of one class at one age, and the age until which it holds: the end of its
        bin, or never where it is 0.
        """
        table, first_cell = self._rates
        cell = first_cell.item(reuse_class) + age_bin
        return table.item(0, cell), table.item(1, cell)

    def rates_until(
        self, reuse_classes: IntArray, age_bins: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """`rate_until` of classes [n] at ages [n]."""
        table, first_cell = self._rates
        cells = first_cell.take(reuse_classes)
        cells += age_bins
        rates, ends = table.take(cells, axis=1)
        return rates, ends

    def probability(self, reuse_class: int, age: float, horizon: float) -> float:
        """The probability of a return within `horizon`, of a position that was last used `age` ago.
        Within a bin returns are spread evenly.
        """
        ages = np.concatenate([[0.0], self._edges])
        survival = self._survival[self._row[reuse_class]]
        now, then = np.interp([age, age + horizon], ages, survival).tolist()
        return 1.0 - then / now if now > 0 else 0.0
