"""Times to first token of servers that were sent the same requests by turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scripts.bench.report import Table, times_of
from scripts.bench.traffic import Outcome

FloatArray = npt.NDArray[np.float64]

GROUPS = (
    ("at most half as many", 0.0, 0.5),
    ("fewer", 0.5, 0.99),
    ("as many", 0.99, 1.01),
    ("more", 1.01, math.inf),
)
"""Groups of requests by the tokens that they prefill, as a multiple of those that the first
configuration prefills for the same request: above the first bound, up to the second."""


def against_the_first(configurations: Sequence[tuple[str, Sequence[Outcome]]]) -> None:
    """Print whether times to first token follow prefilled tokens, request by request, for names and
    outcomes of configurations that served the same requests.

    Requests are grouped by their prefilled tokens over those of the first configuration. Each row
    has the sums of both, of tokens and of times, what the ratio of times is expected to be of the
    tokens (`expected_seconds` of the first configuration), and the median of the requests' own.
    """
    table = Table(
        *("against the first", "a request prefills", "requests"),
        *("prefilled tokens", "time to first token", "expected of the tokens", "median request's"),
        text=2,
    )
    first = configurations[0][1]
    costs = prefill_costs([outcome for outcome in first if not outcome.error])
    for name, outcomes in configurations[1:]:
        pairs = [
            (mine, its)
            for mine, its in zip(outcomes, first, strict=True)
            if not mine.error and not its.error
        ]
        for title, low, high in (*GROUPS, ("all", 0.0, math.inf)):
            group = [pair for pair in pairs if low < prefilled_ratio(*pair) <= high]
            if group:
                table.row(name, title, *ratios(group, costs))


def prefilled_ratio(mine: Outcome, its: Outcome) -> float:
    return mine.prefilled / its.prefilled


def work(outcome: Outcome) -> tuple[float, float, float]:
    """The amounts that a time to first token grows with: one request, its new tokens, and pairs of
    a new token with one before it.
    """
    new = outcome.prefilled
    return 1.0, float(new), new * (outcome.cached_tokens + new / 2)


def prefill_costs(outcomes: Sequence[Outcome]) -> FloatArray:
    """Seconds per unit of each part of `work`, by least squares; shape [3]."""
    parts = np.array([work(outcome) for outcome in outcomes])
    costs: FloatArray = np.linalg.lstsq(parts, np.array([outcome.ttft for outcome in outcomes]))[0]
    return costs


def expected_seconds(outcomes: Sequence[Outcome], costs: FloatArray) -> float:
    """Sum of the times to first token that `costs` predicts for the outcomes."""
    return float((np.array([work(outcome) for outcome in outcomes]) @ costs).sum())


def ratios(pairs: Sequence[tuple[Outcome, Outcome]], costs: FloatArray) -> list[str]:
    """The last five cells of a row of `against_the_first`."""
    mine, its = zip(*pairs, strict=True)
    tokens = [sum(outcome.prefilled for outcome in side) for side in (mine, its)]
    seconds = [sum(outcome.ttft for outcome in side) for side in (mine, its)]
    median = statistics.median(one.ttft / other.ttft for one, other in pairs)
    return [
        f"{len(pairs):,}",
        f"{tokens[0]:,} / {tokens[1]:,} ({times_of(*tokens)})",
        f"{seconds[0]:,.1f} / {seconds[1]:,.1f} s ({times_of(*seconds)})",
        times_of(expected_seconds(mine, costs), expected_seconds(its, costs)),
        f"{median:.2f}x",
    ]
