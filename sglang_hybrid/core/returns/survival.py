"""How likely a position is to be resumed within some time, by the hazards of its class."""

from __future__ import annotations

import numpy as np

from sglang_hybrid.core.costs.cost import FloatArray, IntArray


class ReturnTimes:
    """Survival curves of waiting: S(t) is the probability that a position has not been resumed at
    age t.

    Args:
        edges [K]: upper ends of the bins of age, rising. hazard [R, K]: of what reaches a bin, the
            share that is resumed within it. row [C]: the row of each class.
    """

    def __init__(self, edges: FloatArray, hazard: FloatArray, row: IntArray) -> None:
        self._ages = np.concatenate([[0.0], edges])
        ones = np.ones((len(hazard), 1))
        self._survival = np.concatenate([ones, np.cumprod(1.0 - hazard, axis=1)], axis=1)
        self._row = row

    def probability(self, reuse_class: int, age: float, horizon: float) -> float:
        """Of a return within `horizon`, of a position that was last used `age` ago. Within a bin
        returns are spread evenly.
        """
        survival = self._survival[self._row[reuse_class]]
        now, then = np.interp([age, age + horizon], self._ages, survival).tolist()
        return 1.0 - then / now if now > 0 else 0.0
