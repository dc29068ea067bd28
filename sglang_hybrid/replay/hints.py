"""Hints for traces that have none: what clients could have said of their sessions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from sglang_hybrid.core.hints import Hint
from sglang_hybrid.replay.traces import Request

KINDS = {
    "true": "the last request of a session says that it ends",
    "both": "and all others say that the session goes on",
    "lies": "all but the last one say that the session ends",
    "random": "one request in four says so, whatever follows",
}


def with_hints(requests: Sequence[Request], kind: str, seed: int = 0) -> list[Request]:
    """`requests` with hints of a kind of `KINDS`. Raises ValueError for another one."""
    if kind not in KINDS:
        raise ValueError(f"unknown hints {kind!r}; known are {', '.join(KINDS)}")
    rng = random.Random(seed)
    last = {request.session: number for number, request in enumerate(requests)}
    hinted = []
    for number, request in enumerate(requests):
        ends = last[request.session] == number
        if kind == "random":
            hint = Hint.ENDS if rng.random() < 0.25 else None
        elif kind == "lies":
            hint = None if ends else Hint.ENDS
        else:
            hint = Hint.ENDS if ends else Hint.RETURNS if kind == "both" else None
        hinted.append(replace(request, hint=hint))
    return hinted
