"""Counts that fade, against a list of all intervals that ever were."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.core.returns.intervals import IntervalCounts

CLASSES, BINS = 3, 4


def counting(half_life: float, classes: int = CLASSES, bins: int = BINS) -> IntervalCounts:
    counts = IntervalCounts(half_life, bins)
    for _ in range(classes):
        counts.add_class()
    return counts


@dataclass
class Interval:
    """younger: how many of its class began after it. how: "ended", "lost" or "open"."""

    reuse_class: int
    younger: float
    how: str = "open"
    age_bin: int = 0


class World:
    """Intervals that begin, move between classes and end at random."""

    def __init__(self, seed: int, half_life: float) -> None:
        self.source = random.Random(seed)
        self.half_life = half_life
        self.every: list[Interval] = []
        self.open: dict[int, Interval] = {}
        self.others: list[IntervalCounts] = []

    def step(self, *counts: IntervalCounts) -> None:
        what = self.source.choice(["begin", "begin", "end", "lose", "move"])
        if what == "begin" or not self.open:
            ids = set(range(200)) - self.open.keys()
            interval, reuse_class = self.source.choice(sorted(ids)), self.source.randrange(CLASSES)
            for other in self.every:
                other.younger += other.reuse_class == reuse_class
            self.open[interval] = Interval(reuse_class, 0.0)
            self.every.append(self.open[interval])
            for one in counts:
                one.on_begin(interval, reuse_class)
            return
        interval = self.source.choice(sorted(self.open))
        known = self.open[interval]
        if what == "move":
            after = self.source.randrange(CLASSES)
            for one in counts:
                one.on_move(interval, known.reuse_class, after)
            known.reuse_class = after
            return
        known.age_bin = self.source.randrange(BINS)
        known.how = "ended" if what == "end" else "lost"
        del self.open[interval]
        for one in counts:
            tell = one.on_interval_end if what == "end" else one.on_close
            tell(interval, known.reuse_class, known.age_bin)

    def plain(self, half_life: float) -> tuple[np.ndarray, np.ndarray]:
        ended, others = np.zeros((2, CLASSES, BINS))
        for interval in self.every:
            weight = 2.0 ** (-interval.younger / half_life)
            (ended if interval.how == "ended" else others)[
                interval.reuse_class, interval.age_bin
            ] += weight
        return ended, others

    def asked(self, counts: IntervalCounts) -> tuple[np.ndarray, np.ndarray]:
        """The content of `counts`; open intervals are in their first bin."""
        ids = np.array(sorted(self.open), dtype=np.int64)
        classes = np.array([self.open[i].reuse_class for i in ids.tolist()], dtype=np.int64)
        return counts.of(np.arange(CLASSES), ids, classes, classes * BINS)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6), st.sampled_from([1.0, 3.0, 40.0]), st.lists(st.booleans(), max_size=6)
)
def test_every_interval_counts_by_what_began_after_it(
    seed: int, half_life: float, asked: list[bool]
) -> None:
    world = World(seed, half_life)
    counts = counting(half_life)
    for ask in [*asked, True]:
        for _ in range(25):
            world.step(counts)
        if ask:
            for found, wanted in zip(world.asked(counts), world.plain(half_life), strict=True):
                assert found == pytest.approx(wanted)


def test_a_class_weighs_no_more_than_its_memory_however_long_it_goes_on() -> None:
    counts = counting(10.0, classes=1, bins=1)
    for _ in range(100_000):
        counts.on_begin(0, 0)
        counts.on_interval_end(0, 0, 0)
    ended, others = counts.of(np.array([0]), *np.zeros((3, 0), dtype=np.int64))
    assert ended[0, 0] == pytest.approx(1 / (1 - 2**-0.1))
    assert others[0, 0] == 0


@pytest.mark.parametrize("reuse_class", range(CLASSES))
def test_starting_over_counts_a_class_as_the_other_does(reuse_class: int) -> None:
    world = World(3, 0.0)
    long, short = counting(1_000.0), counting(10.0)
    for _ in range(400):
        world.step(long, short)
    before = world.asked(long)
    mine = [interval for interval, known in world.open.items() if known.reuse_class == reuse_class]
    long.start_over(short, reuse_class, np.array(sorted(mine), dtype=np.int64))
    for found, wanted, old in zip(world.asked(long), world.asked(short), before, strict=True):
        assert found[reuse_class] == pytest.approx(wanted[reuse_class], rel=0.05)
        rest = [other for other in range(CLASSES) if other != reuse_class]
        assert found[rest] == pytest.approx(old[rest])
