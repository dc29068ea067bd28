"""Weights of a logistic regression over hashed features: of those that occurred, or of all."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.costs.cost import IntArray

Features = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]

WEIGHT_BITS: Final = 16
FEATURES: Final = 1 << WEIGHT_BITS
FIRST_SQUARES: Final = 0.1
"""The sum of squares of a weight that no example has changed."""
MOST_SPARSE: Final = FEATURES // 8
"""Features from which on all have their place: finding those that occurred would take longer."""
FEATURE_BYTES: Final = 10
"""Bytes of a feature that occurred."""


class FeatureWeights:
    """A weight and a sum of squared gradients for each feature.

    weights, squares [n]: of the features [n], rising, that occurred (and of the last one of all, so
    that each search ends at one of them), or of all FEATURES. Other features have 0 and
    FIRST_SQUARES.
    """

    def __init__(self) -> None:
        self._features: Features | None = np.array([FEATURES - 1], dtype=np.uint16)
        self.weights: Floats = np.zeros(1, dtype=np.float32)
        self.squares: Floats = np.full(1, FIRST_SQUARES, dtype=np.float32)

    @property
    def held_bytes(self) -> int:
        """Memory that the weights take."""
        return (FEATURE_BYTES if self._features is not None else 8) * len(self.weights)

    def take(self, features: Features) -> Floats:
        """The weights [k] of features [k]."""
        if self._features is None:
            return self.weights.take(features)
        rows = self._features.searchsorted(features)
        weights = self.weights.take(rows)
        weights *= self._features.take(rows) == features
        return weights

    def rows(self, features: Features) -> IntArray:
        """The places [k] of features [k], rising, until the next call; new ones get one."""
        if self._features is None:
            return features.astype(np.intp)  # numpy would convert 16 bits at each use
        rows = self._features.searchsorted(features)
        found = self._features.take(rows)
        if found.tobytes() == features.tobytes():  # a third of the time that == takes
            return rows
        new = found != features
        self._add(features[new], rows[new])
        return self.rows(features)

    def _add(self, features: Features, before: IntArray) -> None:
        """Features [k] that are not there get their places, in front of those at `before` [k]."""
        assert self._features is not None
        if len(self._features) + len(features) > MOST_SPARSE:
            self._spread()
            return
        self._features = np.insert(self._features, before, features)
        self.weights = np.insert(self.weights, before, 0.0)
        self.squares = np.insert(self.squares, before, FIRST_SQUARES)

    def _spread(self) -> None:
        """Store a weight for each of all features, no longer of those that were seen only."""
        features, weights, squares = self.learnt()
        self._features = None
        self.weights = np.zeros(FEATURES, dtype=np.float32)
        self.squares = np.full(FEATURES, FIRST_SQUARES, dtype=np.float32)
        self.weights[features], self.squares[features] = weights, squares

    def learnt(self) -> tuple[Features, Floats, Floats]:
        """The features [n], rising, that examples have changed; weights and squares [n] of these:
        copies.
        """
        at = (self.squares != FIRST_SQUARES).nonzero()[0]
        features = at.astype(np.uint16) if self._features is None else self._features[at]
        return features, self.weights[at], self.squares[at]

    def restore(self, features: Features, weights: Floats, squares: Floats) -> None:
        """Begin with what `learnt` returned."""
        last = FEATURES - 1
        sentinel = [] if len(features) and features[-1] == last else [last]
        self._features = np.append(features, np.array(sentinel, dtype=np.uint16))
        self.weights = np.append(weights, np.zeros(len(sentinel), dtype=np.float32))
        self.squares = np.append(squares, np.full(len(sentinel), FIRST_SQUARES, dtype=np.float32))
        if len(self.weights) > MOST_SPARSE:
            self._spread()

    def forget_half(self) -> None:
        """Forget half of the features: those that examples have changed least."""
        features, weights, squares = self.learnt()
        half = len(features) // 2
        kept = np.sort(squares.argpartition(half)[half:]) if half else slice(None)
        self.restore(features[kept], weights[kept], squares[kept])
