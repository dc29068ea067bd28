"""From counts of intervals to hazards of return, and from these to the best rates of return."""

from __future__ import annotations

from typing import Final

import numpy as np

from sglang_hybrid.core.costs.cost import FloatArray, IntArray
from sglang_hybrid.core.returns.answers import BUCKETS as ANSWERS
from sglang_hybrid.core.returns.reuse_classes import CLASSES, PER_ANSWER, SHAPE

BINS: Final = 24  # of age, each twice as wide as the one before
FIRST_GUESS: Final = 0.05  # of the hazard per bin, while nothing is known
PRIOR_WEIGHT: Final = 8.0  # intervals that a coarser class's hazard counts for


class ClassTree:
    """Which coarser class each of some classes is shrunk towards: the one with its last feature
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

    def hazards(self, ended: FloatArray, unended: FloatArray) -> FloatArray:
        """Kaplan-Meier hazards [..., R, BINS]: of the intervals that reach a bin, the share that
        ends in it.

        ended, unended [..., C, BINS]: intervals of the classes by the bin in which they ended or
        were last seen. Each class is shrunk towards the coarser one, the coarsest towards
        FIRST_GUESS.
        """
        at_risk = np.flip(np.cumsum(np.flip(ended + unended, -1), axis=-1), -1)
        counts = np.stack([ended, at_risk])
        rows = np.empty((*ended.shape[:-2], self._rows, BINS))
        rows[..., 0, :] = FIRST_GUESS
        begin = 1
        for first, coarser in self._levels:
            ends, risk = np.add.reduceat(counts, first, axis=-2)
            guess = PRIOR_WEIGHT * rows[..., coarser, :]
            end = begin + len(first)
            rows[..., begin:end, :] = (ends + guess) / (risk + PRIOR_WEIGHT)
            begin = end
        return rows


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


class RateTable:
    """Best rates by class and bin of age, and the age until which each holds: the end of its bin,
    or never where it is 0.

    Args:
        hazard: [R, BINS].
        row: [CLASSES], of `hazard`, for each class.
        edges: [BINS], upper ends of the bins.

    peak: the highest rate.
    """

    def __init__(self, hazard: FloatArray, row: IntArray, edges: FloatArray) -> None:
        rates = best_rates(hazard, np.diff(edges, prepend=0.0))
        self.peak = float(rates.max())
        # Rates and ends [2, rows * BINS]; the last row is that of NEVER_REUSED.
        table = np.concatenate([rates, np.zeros((1, BINS))])
        self._table = np.stack([table, np.where(table > 0, edges, np.inf)]).reshape(2, -1)
        self._first_cell = np.append(row, len(rates)) * BINS

    def rate_until(self, reuse_class: int, age_bin: int) -> tuple[float, float]:
        """Of one class at one age."""
        cell = self._first_cell.item(reuse_class) + age_bin
        return self._table.item(0, cell), self._table.item(1, cell)

    def rates_until(
        self, reuse_classes: IntArray, age_bins: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Of classes [n] at ages [n]."""
        cells = self._first_cell.take(reuse_classes)
        cells += age_bins
        rates, ends = self._table.take(cells, axis=1)
        return rates, ends
