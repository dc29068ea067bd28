"""Request traces: what arrived, when, and what was answered."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Final

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

_IDS: Final = 2**31
"""Token ids that are not negative."""


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """Token ids as runs of consecutive ones: rising, or falling where they are negative. Blocks
    that a trace names are such runs, and what `FreshTokens` gives. packed: int32 [2, runs], the
    first id and the length of each.
    """

    packed: bytes


@dataclass(frozen=True, slots=True)
class Request:
    """One request: `tokens` [input_len + output_len] are its prompt and its answer; `arrival` is in
    seconds. kept: the tokens as they are in memory; runs are expanded when `tokens` is read, so
    that a trace of a million prompts fits. message_starts: positions in the prompt at which the
    client's messages begin. reply_start: where the next turn leaves the prompt, if that is before
    its end (`Prefill.reply_start`). tenant: requests of different ones share nothing. hint: what
    its client said of the session. pins: what it wanted kept; a checkpoint is declared at each of
    these positions.
    """

    session: int
    turn: int
    arrival: float
    kept: TokenArray | TokenRuns
    input_len: int
    message_starts: tuple[int, ...] = ()
    reply_start: int = 0
    tenant: str = ""
    hint: Hint | None = None
    pins: tuple[PinRequest, ...] = ()

    @property
    def tokens(self) -> TokenArray:
        kept = self.kept
        return _expanded(kept.packed) if isinstance(kept, TokenRuns) else kept

    @property
    def kept_bytes(self) -> int:
        """Bytes of memory that its tokens take."""
        kept = self.kept
        return len(kept.packed) if isinstance(kept, TokenRuns) else kept.nbytes


class FreshTokens:
    """Negative ids for tokens of which nothing is known: no two of 2**31 in a row are alike."""

    def __init__(self) -> None:
        self._taken = 0

    def take(self, count: int) -> TokenArray:
        numbers = np.arange(self._taken, self._taken + count)
        self._taken += count
        return (-1 - numbers % _IDS).astype(np.int32)


def block_tokens(blocks: list[int], size: int) -> TokenArray:
    """Tokens [n * size] that stand for n blocks: the same block, the same tokens. Two blocks differ
    in every token at the same place. While there are ids enough (2**31 / size blocks) no token is
    in two blocks. Raises ValueError for a number of about 2**31 or more.
    """
    places = _IDS // size
    numbers = np.asarray(blocks, dtype=np.int64)
    if numbers.size and numbers.max() >= places * size:
        raise ValueError(f"block {max(blocks)} is too large a number for blocks of {size}")
    rounds, place = np.divmod(numbers, places)
    ids = (place * size + rounds)[:, None].astype(np.uint32) + np.arange(size).astype(np.uint32)
    tokens: TokenArray = (ids.ravel() & np.uint32(_IDS - 1)).view(np.int32)
    return tokens


def in_runs(tokens: TokenArray) -> TokenArray | TokenRuns:
    """`tokens` [n] as runs if these take a quarter of their bytes at most, and otherwise as they
    are.
    """
    rising = tokens ^ (tokens >> 31)  # -1, -2, ... become 0, 1, ...
    breaks = (np.diff(rising) != 1) | ((tokens[1:] ^ tokens[:-1]) < 0)
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    if 8 * len(starts) > len(tokens):
        return tokens
    lengths = np.diff(starts, append=len(tokens))
    return TokenRuns(np.stack([tokens[starts], lengths.astype(np.int32)]).tobytes())


@lru_cache(maxsize=4)  # a request under way is read several times
def _expanded(packed: bytes) -> TokenArray:
    """The tokens [n] of `TokenRuns`, not to be changed."""
    firsts, lengths = np.frombuffer(packed, np.int32).reshape(2, -1)
    signs = firsts >> 31
    starts = np.cumsum(lengths, dtype=np.int32) - lengths
    tokens = np.arange(lengths.sum(), dtype=np.int32)
    tokens += np.repeat((firsts ^ signs) - starts, lengths)
    tokens ^= np.repeat(signs, lengths)
    tokens.flags.writeable = False
    return tokens


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
    return Request(session, turn, arrival, in_runs(tokens), len(first), *said)
