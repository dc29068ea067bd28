"""Regrets of candidates, in hit tokens against the best one, and the condition for a switch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

import numpy as np

from sglang_hybrid.core.costs.cost import FloatArray, IntArray
from sglang_hybrid.core.specs import Spec

Candidate = TypeVar("Candidate", bound=Hashable)

OLDER = 0.5
"""The weight of a request beside one of the next search."""


class Regrets(Generic[Candidate]):
    """Hit tokens of the candidates in all requests that searches counted, and how sure it is that
    one of them does better than another.

    Requests are taken as independent: the difference D of two candidates in n of them, d_i in each,
    has a standard error of sqrt(sum d_i^2) at most.
    """

    def __init__(self) -> None:
        self._candidates: tuple[Candidate, ...] = ()
        self._tokens: FloatArray = np.zeros(0)  # [C]
        self._products: FloatArray = np.zeros((0, 0))  # [C, C]: of the hits of two, summed

    @property
    def shares(self) -> dict[Candidate, float]:
        """The share of the best candidate's hit tokens that each candidate missed."""
        best = max(1.0, self._tokens.max(initial=0))
        return dict(zip(self._candidates, ((best - self._tokens) / best).tolist(), strict=True))

    def learn(self, hits: Mapping[Candidate, IntArray] | Mapping[Candidate, FloatArray]) -> None:
        """Add the hit tokens [n] of each request that a search found, by candidate. Earlier
        searches are forgotten if they compared other candidates.
        """
        found = np.array(list(hits.values()), dtype=np.float64)
        if tuple(hits) != self._candidates:
            self._candidates = tuple(hits)
            self.forget()
        self._tokens = OLDER * self._tokens + found.sum(axis=1)
        self._products = OLDER**2 * self._products + found @ found.T

    def forget(self) -> None:
        """Forget all searches, because the traffic has changed."""
        count = len(self._candidates)
        self._tokens, self._products = np.zeros(count), np.zeros((count, count))

    def choose(self, current: Candidate, margin: float, sure: float) -> Candidate:
        """The candidate that gained most on `current`, the first of equals, if that is more than
        `margin` of its tokens and than `sure` standard errors; else, and if `current` was never
        tried, `current`.
        """
        if current not in self._candidates:
            return current
        now = self._candidates.index(current)
        gains = self._tokens - self._tokens[now]
        squares = self._products.diagonal()
        errors = np.sqrt(np.maximum(squares + squares[now] - 2 * self._products[now], 0.0))
        enough = (gains > margin * self._tokens[now]) & (gains > sure * errors)
        if not enough.any():
            return current
        return self._candidates[int(np.where(enough, gains, 0.0).argmax())]


class Advantages:
    """The advantage of a policy in the server over a replay of the same requests.

    A replay begins with an empty cache and knows nothing, so that a policy that learns looks worse
    in it than it is. The hits while a policy was in force show by how much. A policy that
    found less than in its replay gets no handicap: requests that overlap cost every policy hits.
    """

    def __init__(self) -> None:
        self._tokens: dict[Spec, float] = {}  # per request

    def learn(self, spec: Spec, seen: IntArray, replayed: IntArray) -> None:
        """Compare what requests hit under `spec` in the server, `seen` [n] tokens, with what they
        would have hit in a replay, `replayed` [n] tokens.
        """
        more = float(np.mean(seen - replayed))
        known = self._tokens.get(spec)
        self._tokens[spec] = more if known is None else OLDER * known + (1 - OLDER) * more

    def added(self, hits: Mapping[Spec, IntArray]) -> dict[Spec, FloatArray]:
        """`hits` of replays with what each policy is known to hit more in the server."""
        return {
            spec: found.astype(np.float64) + max(0.0, self._tokens.get(spec, 0.0))
            for spec, found in hits.items()
        }
