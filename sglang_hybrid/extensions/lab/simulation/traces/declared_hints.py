"""Hints for traces that have none: what clients could have said of their sessions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from sglang_hybrid.core.returns.hints import LEAST_SECONDS, MOST_SECONDS, Hint
from sglang_hybrid.core.traffic.requests import Request

KINDS = {
    "true": "the last request of a session says that it ends",
    "both": "and all others say that the session goes on",
    "lies": "all but the last one say that the session ends",
    "when": "as both, with the seconds after which the session goes on",
    "whenever": "the same with the seconds of another request",
    "random": "one request in four says so, whatever follows",
}
DRAWN = ("whenever", "random")
"""Kinds that a seed changes."""


def with_hints(requests: Sequence[Request], kind: str, seed: int = 0) -> list[Request]:
    """`requests` with hints of a kind of `KINDS`. Raises ValueError for another one."""
    if kind not in KINDS:
        raise ValueError(f"unknown hints {kind!r}; known are {', '.join(KINDS)}")
    rng = random.Random(seed)
    last = {request.session: number for number, request in enumerate(requests)}
    gaps = _gaps(requests)
    if kind == "whenever":
        rng.shuffle(gaps)
    hinted = []
    for number, request in enumerate(requests):
        ends = last[request.session] == number
        if kind == "random":
            hint = Hint.ENDS if rng.random() < 0.25 else None
        elif kind == "lies":
            hint = None if ends else Hint.ENDS
        elif kind in ("when", "whenever") and not ends:
            hint = Hint.after(gaps.pop())
        else:
            hint = Hint.ENDS if ends else Hint.RETURNS if kind == "both" else None
        hinted.append(replace(request, hint=hint))
    return hinted


def _gaps(requests: Sequence[Request]) -> list[float]:
    """Seconds until the next request of its session, of each that has one, the last one first."""
    following: dict[int, float] = {}
    gaps = []
    for request in reversed(requests):
        if request.session in following:
            gap = following[request.session] - request.arrival
            gaps.append(min(max(gap, LEAST_SECONDS), MOST_SECONDS))
        following[request.session] = request.arrival
    return gaps
