"""Expected lengths of answers. No model is asked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

HALVED_AFTER: Final = 32
"""Answers after which one counts half."""

MOST_KEYS: Final = 65_536
"""Keys whose averages are kept; the one that was used longest ago is dropped."""

FEWEST: Final = 3
"""Answers that an average is made of at least."""


@dataclass(slots=True)
class Average:
    """A mean in which old values fade. weight: of all values, at most HALVED_AFTER / ln 2."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        fade = 0.5 ** (1 / HALVED_AFTER)
        self.total = fade * self.total + value
        self.weight = fade * self.weight + 1

    @property
    def mean(self) -> float:
        return self.total / self.weight


class AnswerLengths:
    """Predicted tokens of an answer: the average of its conversation, else of its schema, else of
    its tenant, whichever first has FEWEST answers; never more than the request allows.

    A key belongs to one tenant: answers to others say nothing about this tenant's. Without an
    average the prediction is what the request allows.
    """

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._averages: OrderedDict[Hashable, Average] = OrderedDict()

    def __len__(self) -> int:
        return len(self._averages)

    def on_request_end(self, keys: Sequence[Hashable], tokens: int) -> None:
        """An answer of `tokens` tokens ended. keys: as for `predict`."""
        for key in keys:
            average = self._averages.get(key)
            if average is None:
                average = self._averages[key] = Average()
            self._averages.move_to_end(key)
            average.add(tokens)
        while len(self._averages) > self._most_keys:
            self._averages.popitem(last=False)

    def predict(self, keys: Sequence[Hashable], allowed: int) -> float:
        """Tokens of an answer. keys: the most specific first; each contains its tenant. allowed:
        the request's max_new_tokens.
        """
        for key in keys:
            average = self._averages.get(key)
            if average is not None and average.weight > FEWEST - 0.5:
                return min(average.mean, float(allowed))
        return float(allowed)
