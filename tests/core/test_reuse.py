"""The reuse index: hazards and rates against plain loops, and what it learns from known traffic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.core.reuse import (
    BINS,
    CLASSES,
    DEPTHS,
    PRIOR_WEIGHT,
    REBUILD_EVERY,
    TURNS,
    ReuseIndex,
    best_rates,
    class_of,
    hazards,
)


def features(klass: int) -> tuple[int, int, int]:
    return klass // (DEPTHS * TURNS), klass // TURNS % DEPTHS, klass % TURNS


def test_classes() -> None:
    assert features(class_of(0, 1, 0)) == (0, 0, 0)
    assert features(class_of(1, 64, 3)) == (1, 0, 3)
    assert features(class_of(2, 65, 6)) == (2, 1, 6)
    assert features(class_of(50, 10**7, 99)) == (2, DEPTHS - 1, TURNS - 1)
    assert class_of(50, 10**7, 99) == CLASSES - 1


def plain_hazard(ended: np.ndarray, unended: np.ndarray, klass: int, bin_: int) -> float:
    """Kaplan-Meier by counting, shrunk up the chain of coarser classes."""
    of = features(klass)
    hazard = 0.0
    for kept in range(4):
        same = [c for c in range(CLASSES) if features(c)[:kept] == of[:kept]]
        events = sum(ended[c, bin_] for c in same)
        exposed = sum(ended[c, bin_:].sum() + unended[c, bin_:].sum() for c in same)
        hazard = (events + PRIOR_WEIGHT * hazard) / (exposed + PRIOR_WEIGHT)
    return hazard


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), klass=st.integers(0, CLASSES - 1), bin_=st.integers(0, BINS - 1))
def test_hazards_are_kaplan_meier_with_shrinkage(seed: int, klass: int, bin_: int) -> None:
    rng = np.random.default_rng(seed)
    ended, unended = (rng.integers(0, 3, (CLASSES, BINS)).astype(float) for _ in range(2))
    expected = plain_hazard(ended, unended, klass, bin_)
    assert hazards(ended, unended)[klass, bin_] == pytest.approx(expected)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0]), min_size=6, max_size=6)),
    widths=st.lists(st.floats(0.1, 10), min_size=6, max_size=6),
)
def test_best_rates_try_every_horizon(rows: list[list[float]], widths: list[float]) -> None:
    rates = best_rates(np.array(rows).reshape(-1, 6), np.array(widths))
    for row, hazard in enumerate(rows):
        for start in range(6):
            best, alive, time = 0.0, 1.0, 0.0
            for i in range(start, 6):
                time += alive * widths[i] * (1 - hazard[i] / 2)
                alive *= 1 - hazard[i]
                best = max(best, (1 - alive) / time)
            assert rates[row, start] == pytest.approx(best)


def test_an_index_that_knows_nothing_gives_zero() -> None:
    index = ReuseIndex(unit=1.0)
    slot = index.open(5, 0.0)
    index.observed(10.0)
    assert index.weight(5, 3.0) == 0
    index.returned(slot, 10.0)
    index.observed(10.0)
    assert index.weight(5, 3.0) > 0


def test_memoryless_returns_have_one_rate_at_every_age() -> None:
    rng = np.random.default_rng(1)
    index = ReuseIndex(unit=1.0)
    slot, now = index.open(7, 0.0), 0.0
    for gap in rng.exponential(100.0, 20_000):
        now += gap
        index.returned(slot, now)
    index.rebuild()
    for age in (0.0, 20.0, 100.0, 200.0):
        assert index.weight(7, age) == pytest.approx(0.01, rel=0.15)


def test_a_return_that_is_due_is_worth_more_than_one_that_is_far_off() -> None:
    index = ReuseIndex(unit=1.0)
    for _ in range(100):
        index.returned(index.open(7, 0.0), 60.0)
    index.rebuild()
    weights = [index.weight(7, age) for age in (0.0, 20.0, 40.0, 50.0)]
    assert weights == sorted(weights)
    assert weights[-1] > 3 * weights[0]
    assert index.weight(7, 500.0) == 0


def test_open_and_forgotten_intervals_lower_the_hazard() -> None:
    """Nine of ten never come back. Whether they still wait or were forgotten must not matter."""

    def weight(forget: bool) -> float:
        index = ReuseIndex(unit=1.0)
        for i in range(1000):
            slot = index.open(7, 0.0)
            if i % 10 == 0:
                index.returned(slot, 30.0)
                index.close(slot)
            elif forget:
                index.observed(1000.0)
                index.close(slot)
        index.observed(1000.0)
        index.rebuild()
        return index.weight(7, 0.0)

    assert weight(forget=True) == pytest.approx(weight(forget=False), rel=0.15)
    assert weight(forget=False) == pytest.approx(0.1 / 30, rel=0.3)


def test_a_new_class_borrows_from_its_relatives() -> None:
    index = ReuseIndex(unit=1.0)
    for _ in range(500):
        index.returned(index.open(class_of(2, 1000, 1), 0.0), 10.0)
        index.open(class_of(0, 1000, 1), 0.0)
    index.observed(5000.0)
    index.rebuild()
    fork, leaf = (index.weight(class_of(n, 1000, 5), 5.0) for n in (2, 0))
    assert fork > 10 * leaf


def test_vector_and_scalar_weights_agree_until_they_expire() -> None:
    index = ReuseIndex(unit=0.125)
    rng = np.random.default_rng(3)
    for _ in range(500):
        index.returned(index.open(int(rng.integers(CLASSES)), 0.0), float(rng.exponential(50)))
    index.rebuild()
    klasses, ages = rng.integers(0, CLASSES, 200), rng.exponential(50, 200)
    weights, until = index.weights(klasses, ages)
    for klass, age, weight, end in zip(klasses, ages, weights, until, strict=True):
        assert index.weight(int(klass), float(age)) == weight
        assert end > age
        last = age + 1000 if np.isinf(end) else np.nextafter(end, 0)
        assert index.weight(int(klass), float(last)) == weight


def test_the_table_is_rebuilt_often_at_first_then_every_some_requests() -> None:
    index = ReuseIndex(unit=1.0)
    rebuilt = []
    for request in range(1000):
        version = index.version
        index.observed(float(request))
        if index.version != version:
            rebuilt.append(request)
    gaps = np.diff(rebuilt)
    assert rebuilt[0] == 0
    assert gaps.max() == gaps[-1] == REBUILD_EVERY
    assert gaps[0] < 3
