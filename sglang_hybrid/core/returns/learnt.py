"""What a history has learnt, as plain arrays: for a file that outlives the server.

Positions, prompts and answers are not in it. What is: counts of intervals by class, and for each
tenant the weights of its answers' features and how true its clients' hints were.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.costs.cost import FloatArray, IntArray


@dataclass(frozen=True)
class LearntCounts:
    """Intervals of classes [C] that began [C], and of those by bin of age [C, BINS]: that ended,
    and that did not, open ones among them.
    """

    begun: IntArray
    ended: FloatArray
    unended: FloatArray


@dataclass(frozen=True)
class LearntClasses:
    """classes [C]: rising. long, short: as the reuse index remembers them."""

    classes: IntArray
    long: LearntCounts
    short: LearntCounts


@dataclass(frozen=True)
class LearntAnswers:
    """Of one tenant. features [n]: those that some answer had; weights, squares [n]: theirs.
    numbers: what else the regression knows (`AnswerModel.NUMBERS`). intervals: seconds until the
    last returns. hints: `HintRecord.as_list`.
    """

    features: npt.NDArray[np.uint16]
    weights: npt.NDArray[np.float32]
    squares: npt.NDArray[np.float32]
    numbers: list[float]
    intervals: list[float]
    hints: list[float]


@dataclass(frozen=True)
class Learnt:
    """classes: common to all tenants. answers: by a name of the tenant, the one that was here last
    at the end.
    """

    classes: LearntClasses
    answers: dict[str, LearntAnswers] = field(default_factory=dict)
