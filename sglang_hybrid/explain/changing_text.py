"""Finds text that changes with each request and stands before text that stays the same, as a clock
at the top of a system prompt: nothing behind it can be hit.

A prompt is compared with the latest ones of its own tenant. Where two of them part, the first run
of equal tokens is looked for within a short distance, and from there on they are compared again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.queue.prefix_overlap import TOKEN_BYTES, as_key
from sglang_hybrid.core.records.edges import common_prefix
from sglang_hybrid.serving.telemetry.stats import ChangingText

Tokens = npt.NDArray[np.integer[Any]]

LONGEST = 64
"""Tokens of one changing text; longer text that differs is another prompt."""

RUN = 16
"""Equal tokens after which two prompts go on alike."""

LEAST_TOKENS = 32
"""The least tokens that are equal again behind the text, for it to count."""

MOST_TEXTS = 4
"""Changing texts of one prompt that a comparison skips, at most."""

MOST_PROMPTS = 8
"""Earlier prompts that one is compared with, the latest ones."""


def find_changing_text(
    prompt: Sequence[int] | Tokens,
    start: int,
    missed: int,
    earlier: Iterable[Sequence[int] | Tokens],
) -> ChangingText | None:
    """The changing text because of which `prompt` [n] was not hit further; None if that has another
    reason. It is the reason if more than half of what was missed is equal again behind the text.

    start: tokens of `prompt` that its tenant sent before. missed: tokens that could have been hit
    and were not. earlier: prompts of the same tenant, the latest one first. Cost: a comparison of
    the tokens with those of each of the first `MOST_PROMPTS`.
    """
    if missed < LEAST_TOKENS:
        return None
    ids = np.asarray(prompt)
    for other in islice(earlier, MOST_PROMPTS):
        if start and (len(other) < start or prompt[start - 1] != other[start - 1]):
            continue  # as with nearly all others, without a comparison of all their tokens
        found = _between(ids, np.asarray(other), start)
        if found is not None and 2 * found.same_tokens > missed:
            return found
    return None


def common_suffix_len(prompt: Tokens, earlier: Tokens) -> int:
    """Tokens of `prompt` [n] that are equal again behind the place at which it parts from `earlier`
    [m]; 0 if it parts nowhere.
    """
    found = _between(prompt, earlier, 0)
    return 0 if found is None else found.same_tokens


def line_of(before: str) -> int:
    """The number of the line, from 1 on, on which the text behind `before` begins."""
    return before.count("\n") + 1


def _between(prompt: Tokens, earlier: Tokens, start: int) -> ChangingText | None:
    """The first text that differs, and what is equal behind it; None if less than `start` tokens
    are equal before it.
    """
    if not np.array_equal(prompt[:start], earlier[:start]):
        return None
    position = here = there = start + common_prefix(prompt[start:], earlier[start:])
    tokens = same = 0
    for _ in range(MOST_TEXTS):
        gap = _shortest_gap(prompt[here:], earlier[there:])
        if gap is None:
            break
        here, there = here + gap[0], there + gap[1]
        tokens = tokens if same else gap[0]
        equal = common_prefix(prompt[here:], earlier[there:])
        here, there, same = here + equal, there + equal, same + equal
    return ChangingText(position, tokens, same) if same >= LEAST_TOKENS else None


def _shortest_gap(prompt: Tokens, earlier: Tokens) -> tuple[int, int] | None:
    """Tokens of both before they go on alike for `RUN` tokens; None if they do not soon."""
    here, there = as_key(prompt[: LONGEST + RUN]), as_key(earlier[: LONGEST + RUN])
    for skipped in range(len(here) // TOKEN_BYTES - RUN + 1):
        begin = skipped * TOKEN_BYTES
        run = here[begin : begin + RUN * TOKEN_BYTES]
        at = there.find(run)
        while at > 0 and at % TOKEN_BYTES:  # inside of a token
            at = there.find(run, at + 1)
        if at >= 0:
            return skipped, at // TOKEN_BYTES
    return None
