"""A slice of a trace in tokens of a served model: what a benchmark sends to a real server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.records.edges import common_prefix
from sglang_hybrid.core.traffic.requests import Request, TokenArray

_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, Knuth's multiplicative hash


@dataclass(frozen=True)
class Slice:
    """A choice of requests of a trace, and the changes made to them.

    Attributes:
        requests: how many at most.
        skip: requests at the start of the trace that are left out.
        scale: one token of `scale` is kept, by its position, so that lengths shrink and equal
            prefixes stay equal.
        max_prompt_tokens: longer prompts are left out.
        max_total_tokens: the slice ends before its prompts have more tokens than this.
        max_answer_tokens: answers are cut there, in later prompts that repeat them as well.
    """

    requests: int
    skip: int = 0
    scale: int = 1
    max_prompt_tokens: int = 8_192
    max_total_tokens: int = 1_000_000
    max_answer_tokens: int = 64

    def cut(self, trace: Iterable[Request]) -> list[Request]:
        """The slice's requests in the trace's tokens, in the trace's order."""
        kept: list[Request] = []
        total = 0
        for number, request in enumerate(trace):
            if number < self.skip:
                continue
            if len(kept) == self.requests:
                break
            length = -(-request.input_len // self.scale)
            if not 0 < length <= self.max_prompt_tokens:
                continue
            if total + length > self.max_total_tokens:
                break
            total += length
            kept.append(_with(request, request.tokens[:: self.scale], length))
        return [_shorten(kept, number, self.max_answer_tokens) for number in range(len(kept))]


def to_vocabulary(trace: Sequence[Request], low: int, high: int) -> tuple[list[Request], bool]:
    """Map token ids into [low, high); returns the requests and whether no two ids became one.

    Where the distinct ids fit they are numbered in ascending order. Otherwise each is hashed by
    itself, so that two prefixes which part at ids of the same hash part a token later.
    """
    if not trace:
        return [], True
    ids = np.unique(np.concatenate([request.tokens for request in trace]))
    fits = len(ids) <= high - low
    images: npt.NDArray[np.int64]
    if fits:
        images = np.arange(len(ids), dtype=np.int64) + low
    else:
        mixed = (ids.astype(np.int64).astype(np.uint64) * _MIX) >> np.uint64(32)
        images = (mixed % np.uint64(high - low)).astype(np.int64) + low
    mapped = []
    for request in trace:
        tokens = images[np.searchsorted(ids, request.tokens)].astype(np.int32)
        mapped.append(_with(request, tokens, request.input_len))
    return mapped, fits


def reusable_tokens(trace: Sequence[Request]) -> int:
    """Prompt tokens that a cache of every prefix of everything before would have had.

    A prompt's last token is always computed.
    """
    total = 0
    for number, request in enumerate(trace):
        prompt, best = request.tokens[: request.input_len - 1], 0
        for earlier in trace[:number]:
            if best == len(prompt):
                break
            if earlier.tenant != request.tenant:
                continue
            if len(earlier.tokens) > best and earlier.tokens[best] == prompt[best]:
                best = max(best, common_prefix(prompt, earlier.tokens))
        total += best
    return total


def _shorten(trace: Sequence[Request], number: int, limit: int) -> Request:
    """Request `number` without what answers, its own and those it repeats, have over `limit`.

    Which positions go depends on the tokens before them alone, so equal prefixes stay equal.
    """
    request = trace[number]
    prompt = request.tokens[: request.input_len]
    keep = np.ones(len(request.tokens), dtype=np.bool_)
    keep[request.input_len + limit :] = False
    for earlier in trace[:number]:
        if earlier.tenant != request.tenant:
            continue
        end = earlier.input_len + limit
        if end < min(len(earlier.tokens), len(prompt)) and prompt[end] == earlier.tokens[end]:
            keep[end : max(end, common_prefix(prompt, earlier.tokens))] = False
    return _with(request, request.tokens[keep], int(keep[: request.input_len].sum()))


def _with(request: Request, tokens: TokenArray, input_len: int) -> Request:
    return replace(request, kept=tokens, input_len=input_len, message_starts=())
