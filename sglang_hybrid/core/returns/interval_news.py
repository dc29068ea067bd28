"""Whether what happens to intervals is what was expected of their classes."""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

from sglang_hybrid.core.costs.cost import FloatArray, IntArray
from sglang_hybrid.core.returns.interval_counts import as_ints, with_room

REFUTED = 6.0  # by how much (in nats) the short estimate must foretell better
LEAST: Final = 1e-4  # probability of what nobody expects
EVIDENCE = 64  # intervals of a class after which evidence counts half


class IntervalNews:
    """What happened to the intervals since the last look, and how well two estimates foretold it.

    Every bin of age that an interval passed through is one trial: it ended there or it did not.
    Classes are numbered from 0 on as they are added.
    """

    def __init__(self, bins: int) -> None:
        self._bins = bins
        self._ended = np.zeros((0, bins))
        self._steps = np.zeros((0, bins + 1))  # differences, along bins, of those that passed
        self._evidence = np.zeros(0)
        self._classes = 0
        self._seen = array("q", bytes(8 * 64))  # by interval id: bins that were counted
        self._known: IntArray = np.zeros(0, dtype=np.int64)
        self._gain_if_ended = self._gain_if_not = np.zeros((0, bins))  # of the short estimate

    def add_class(self) -> None:
        """One more; nothing happened to it yet."""
        self._ended = with_room(self._ended, self._classes)
        self._steps = with_room(self._steps, self._classes)
        self._evidence = with_room(self._evidence, self._classes)
        self._classes += 1

    def begins(self, interval: int) -> None:
        """An interval begins under this id."""
        if interval >= len(self._seen):
            self._seen.frombytes(bytes(8 * (interval + 1)))
        self._seen[interval] = 0

    def ends(self, interval: int, number: int, age_bin: int) -> None:
        """An interval of the class of that number ended in this bin, having passed those before."""
        self._ended[number, age_bin] += 1
        self.survived(interval, number, age_bin)

    def survived(self, interval: int, number: int, age_bin: int) -> None:
        """It passed all bins before this one."""
        seen = self._seen[interval]
        if age_bin > seen:
            self._steps[number, seen] += 1
            self._steps[number, age_bin] -= 1
            self._seen[interval] = age_bin

    def look(self, intervals: IntArray, numbers: IntArray, age_bins: IntArray) -> None:
        """The open intervals [n], of classes of these numbers [n], are in these bins [n] by now.
        Weigh what happened.
        """
        every = as_ints(self._seen)
        seen = every.take(intervals)
        on = (age_bins > seen).nonzero()[0]
        np.add.at(self._steps, (numbers[on], seen[on]), 1)
        np.add.at(self._steps, (numbers[on], age_bins[on]), -1)
        every[intervals[on]] = age_bins[on]
        ended = self._ended[self._known]
        passed = np.cumsum(self._steps[self._known], axis=1)[:, : self._bins]
        gain = (ended * self._gain_if_ended + passed * self._gain_if_not).sum(axis=1)
        fade = 2.0 ** (-ended.sum(axis=1) / EVIDENCE - passed[:, 0] / EVIDENCE)
        self._evidence[self._known] = np.maximum(
            fade * self._evidence[self._known] + gain, -REFUTED
        )
        self._ended[: self._classes] = 0
        self._steps[: self._classes] = 0

    def refuted(self) -> list[int]:
        """Numbers of classes of which the short estimate knows more than the long one; once
        each.
        """
        numbers: list[int] = (self._evidence > REFUTED).nonzero()[0].tolist()
        self._evidence[numbers] = 0.0
        return numbers

    def expect(self, known: IntArray, long: FloatArray, short: FloatArray) -> None:
        """The hazards [C, bins] that both estimates have from now for classes of the numbers
        `known` [C].
        """
        long, short = np.clip(long, LEAST, 1 - LEAST), np.clip(short, LEAST, 1 - LEAST)
        self._known = known
        self._gain_if_ended = np.log(short) - np.log(long)
        self._gain_if_not = np.log1p(-short) - np.log1p(-long)
