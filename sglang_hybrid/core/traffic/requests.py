"""Request traces: what arrived, when, and what was answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from sglang_hybrid.core.records.pin import PinRequest
from sglang_hybrid.core.returns.hints import Hint

MOST_TOKENS: Final = 1 << 24
"""Tokens of one request, prompt and answer: more than any model's context."""

TokenArray = npt.NDArray[np.int32]
Seconds = Annotated[float, Meta(ge=0, le=1e15)]
Count = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
Length = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
Number = Annotated[int, Meta(ge=0)]
Tokens = list[Annotated[int, Meta(ge=-(2**31), lt=2**31)]]


@dataclass(frozen=True, slots=True)
class Request:
    """One request: `tokens` [input_len + output_len] are its prompt and its answer; `arrival` is in
    seconds. message_starts: positions in the prompt at which the client's messages begin.
    reply_start: where the next turn leaves the prompt, if that is before its end
    (`Prefill.reply_start`). tenant: requests of different ones share nothing. hint: what its client
    said of the session. pins: what it wanted kept; a checkpoint is declared at each of these
    positions.
    """

    session: int
    turn: int
    arrival: float
    tokens: TokenArray
    input_len: int
    message_starts: tuple[int, ...] = ()
    reply_start: int = 0
    tenant: str = ""
    hint: Hint | None = None
    pins: tuple[PinRequest, ...] = ()


class Fresh:
    """Negative ids for tokens of which nothing is known: no two are alike."""

    def __init__(self) -> None:
        self._next = -1

    def take(self, count: int) -> TokenArray:
        tokens = np.arange(self._next, self._next - count, -1, dtype=np.int64)
        self._next -= count
        return tokens.astype(np.int32)


def block_tokens(blocks: list[int], size: int) -> TokenArray:
    """Tokens [n * size] that stand for n blocks: the same block, the same tokens."""
    ids = np.asarray(blocks, dtype=np.int64)[:, None] * size + np.arange(size)
    if ids.size and ids.max() >= 2**31:
        raise ValueError(f"block {max(blocks)} is too large a number for blocks of {size}")
    return ids.ravel().astype(np.int32)


def make_request(
    session: int,
    turn: int,
    arrival: float,
    prompt: npt.ArrayLike,
    answer: npt.ArrayLike,
    message_starts: tuple[int, ...] = (),
    reply_start: int = 0,
    tenant: str = "",
    hint: Hint | None = None,
) -> Request:
    """A request from its parts. Raises ValueError for an empty prompt, or too many tokens."""
    first = np.asarray(prompt, dtype=np.int32)
    if not len(first):
        raise ValueError("its prompt is empty")
    tokens = np.concatenate([first, np.asarray(answer, dtype=np.int32)])
    if len(tokens) > MOST_TOKENS:
        raise ValueError(f"it has {len(tokens):,} tokens; {MOST_TOKENS:,} are the most")
    said = message_starts, reply_start, tenant, hint
    return Request(session, turn, arrival, tokens, len(first), *said)


def common_prefix(one: npt.NDArray[np.integer[Any]], other: npt.NDArray[np.integer[Any]]) -> int:
    """The number of tokens that two sequences share from the start."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
