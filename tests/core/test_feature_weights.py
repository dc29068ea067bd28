"""Weights of the features that occurred are those of an array of all features."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.returns import feature_weights
from sglang_hybrid.core.returns.feature_weights import (
    FEATURES,
    FIRST_SQUARES,
    Features,
    FeatureWeights,
)
from tests.examples import examples

SOME = st.sets(st.integers(0, 40) | st.sampled_from([100, FEATURES - 2, FEATURES - 1]), max_size=12)


def features(of: set[int]) -> Features:
    return np.array(sorted(of), dtype=np.uint16)


@pytest.mark.parametrize("most_sparse", [8, 20, 1_000])
@examples(50)
@given(st.lists(SOME, max_size=12))
def test_they_are_those_of_an_array_of_all(most_sparse: int, steps: list[set[int]]) -> None:
    """Whatever occurs, and however many have a place of their own before all have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_weights, "MOST_SPARSE", most_sparse)
        learnt = FeatureWeights()
        weights = np.zeros(FEATURES, dtype=np.float32)
        squares = np.full(FEATURES, FIRST_SQUARES, dtype=np.float32)
        for number, step in enumerate(steps, start=1):
            at = features(step)
            assert learnt.take(at).tolist() == weights[at].tolist()
            rows = learnt.rows(at)
            learnt.weights[rows] += number
            learnt.squares[rows] += number
            weights[at] += number
            squares[at] += number
            if number % 3 == 0:
                known, *values = learnt.learnt()
                learnt.restore(known, *values)
        seen = features(set().union(*steps)) if steps else features(set())
        kept, kept_weights, kept_squares = learnt.learnt()
        assert kept.tolist() == seen.tolist()
        assert kept_weights.tolist() == weights[seen].tolist()
        assert kept_squares.tolist() == squares[seen].tolist()


@pytest.mark.parametrize("most_sparse", [8, 1_000])
def test_what_examples_have_changed_least_is_forgotten(
    most_sparse: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_weights, "MOST_SPARSE", most_sparse)
    learnt = FeatureWeights()
    at = features(set(range(0, 40, 2)))
    rows = learnt.rows(at)
    learnt.squares[rows] += np.arange(20) % 10 + 1
    learnt.forget_half()
    kept, _, squares = learnt.learnt()
    assert len(kept) == 10 and squares.min() > 5
    learnt.forget_half()
    assert len(learnt.learnt()[0]) == 5
    learnt = FeatureWeights()
    learnt.forget_half()
    assert learnt.take(at).tolist() == [0.0] * 20
