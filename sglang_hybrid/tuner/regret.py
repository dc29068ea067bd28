"""What each candidate lost so far against the best one, and when that is reason to switch."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_hybrid.replay.systems import Spec

NEWEST = 0.5
"""How much the newest search counts against all before it."""


class Regrets:
    """Per candidate the share of the best one's hit tokens that it missed, newer searches counting
    more.
    """

    def __init__(self) -> None:
        self.by_candidate: dict[Spec, float] = {}

    def learn(self, hit_tokens: Mapping[Spec, int]) -> None:
        """A search found so many tokens under each candidate."""
        best = max(hit_tokens.values(), default=0)
        for spec, tokens in hit_tokens.items():
            missed = (best - tokens) / best if best else 0.0
            before = self.by_candidate.get(spec, missed)
            self.by_candidate[spec] = NEWEST * missed + (1 - NEWEST) * before

    def forget(self) -> None:
        """The traffic is another one now."""
        self.by_candidate.clear()

    def choose(self, current: Spec, margin: float) -> Spec:
        """The candidate that lost least, the first of equals, if `current` lost more by `margin`;
        else, and if `current` was never tried, `current`.
        """
        if current not in self.by_candidate:
            return current
        best = min(self.by_candidate, key=self.by_candidate.__getitem__)
        gain = self.by_candidate[current] - self.by_candidate[best]
        return best if gain > margin else current
