"""The probability of returns: survival curves against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.returns.hazards import ReturnEstimate

EDGES = np.array([1.0, 2.0, 4.0, 8.0])
HAZARDS = st.lists(st.floats(0, 1), min_size=4, max_size=4)


def survival(hazard: list[float], age: float) -> float:
    """The share that has not been resumed at `age`, bin by bin."""
    left, start = 1.0, 0.0
    for share, end in zip(hazard, EDGES.tolist(), strict=True):
        if age < end:
            return left * (1 - share * max(0.0, age - start) / (end - start))
        left, start = left * (1 - share), end
    return left


@given(HAZARDS, st.floats(0, 20), st.floats(0, 20))
def test_a_return_is_as_likely_as_the_share_that_leaves_the_curve(
    hazard: list[float], age: float, horizon: float
) -> None:
    times = ReturnEstimate(np.array([[0.5] * 4, hazard]), np.array([1]), EDGES)
    now = survival(hazard, age)
    expected = 1 - survival(hazard, age + horizon) / now if now > 0 else 0.0
    assert times.probability(0, age, horizon) == pytest.approx(expected, abs=1e-6)


def test_each_class_has_its_own_curve() -> None:
    times = ReturnEstimate(np.array([[0.0] * 4, [1.0, 0, 0, 0]]), np.array([0, 1]), EDGES)
    assert [times.probability(reuse_class, 0.0, 8.0) for reuse_class in (0, 1)] == [0.0, 1.0]
