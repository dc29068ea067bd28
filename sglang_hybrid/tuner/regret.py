"""What each candidate lost so far against the others, and when that is reason to switch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.cost import FloatArray
from sglang_hybrid.replay.systems import Spec

Ints = npt.NDArray[np.int64]

OLDER = 0.5
"""What a request counts for beside one of the next search."""


class Regrets:
    """Hit tokens of the candidates in all requests that searches counted, and how sure it is that
    one of them does better than another.

    Requests are taken as independent: the difference D of two candidates in n of them, d_i in each,
    has a standard error of sqrt(sum d_i^2) at most.
    """

    def __init__(self) -> None:
        self._specs: tuple[Spec, ...] = ()
        self._tokens: FloatArray = np.zeros(0)  # [C]
        self._products: FloatArray = np.zeros((0, 0))  # [C, C]: of the hits of two, summed

    @property
    def shares(self) -> dict[Spec, float]:
        """Of the best one's tokens, what each missed."""
        best = max(1.0, self._tokens.max(initial=0))
        return dict(zip(self._specs, ((best - self._tokens) / best).tolist(), strict=True))

    def learn(self, hits: Mapping[Spec, Ints]) -> None:
        """A search found so many tokens [n] in each request, under each candidate. Where another
        one tried other candidates, it is forgotten.
        """
        found = np.array(list(hits.values()), dtype=np.float64)
        if tuple(hits) != self._specs:
            self._specs = tuple(hits)
            self.forget()
        self._tokens = OLDER * self._tokens + found.sum(axis=1)
        self._products = OLDER**2 * self._products + found @ found.T

    def forget(self) -> None:
        """The traffic is another one now."""
        count = len(self._specs)
        self._tokens, self._products = np.zeros(count), np.zeros((count, count))

    def choose(self, current: Spec, margin: float, sure: float) -> Spec:
        """The candidate that gained most on `current`, the first of equals, if that is more than
        `margin` of its tokens and than `sure` standard errors; else, and if `current` was never
        tried, `current`.
        """
        if current not in self._specs:
            return current
        now = self._specs.index(current)
        gains = self._tokens - self._tokens[now]
        squares = self._products.diagonal()
        errors = np.sqrt(np.maximum(squares + squares[now] - 2 * self._products[now], 0.0))
        enough = (gains > margin * self._tokens[now]) & (gains > sure * errors)
        return self._specs[int(np.where(enough, gains, 0.0).argmax())] if enough.any() else current
