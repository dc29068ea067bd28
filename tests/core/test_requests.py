"""Tokens of requests, and runs of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.traffic.requests import (
    FreshTokens,
    Request,
    TokenRuns,
    block_tokens,
    in_runs,
    make_request,
)

IDS = st.one_of(
    st.integers(-(2**31), 2**31 - 1),
    st.sampled_from([-(2**31), -(2**31) + 1, -2, -1, 0, 1, 2**31 - 2, 2**31 - 1]),
)


@given(st.lists(st.tuples(IDS, st.sampled_from([-1, 0, 1]), st.integers(1, 40)), min_size=1))
def test_runs_expand_to_the_tokens_that_they_were_made_of(
    parts: list[tuple[int, int, int]],
) -> None:
    pieces = [first + step * np.arange(length) for first, step, length in parts]
    tokens = np.concatenate(pieces).astype(np.int32)  # beyond the end of int32 it goes on below
    kept = in_runs(tokens)
    request = Request(0, 0, 0.0, kept, 1)
    assert request.tokens.tolist() == tokens.tolist()
    assert request.kept_bytes <= tokens.nbytes
    if isinstance(kept, TokenRuns):
        assert not request.tokens.flags.writeable


def test_blocks_take_a_few_bytes_each() -> None:
    prompt, answer = block_tokens([7, 8, 3], 512)[:1500], FreshTokens().take(300)
    request = make_request(0, 0, 0.0, prompt, answer)
    assert request.kept_bytes == 8 * 3  # 7 and 8 are one run
    assert request.tokens.tolist() == [*prompt, *answer]
    text = np.random.default_rng(0).integers(0, 32_000, 1_000)
    assert make_request(0, 0, 0.0, text, []).kept_bytes == 4 * 1_000


def test_blocks_of_a_long_trace_differ_in_every_token() -> None:
    per_id = 2**31 // 512
    numbers = [0, 1, per_id - 1, per_id, per_id + 1, 2 * per_id, 2**31 - 1]
    rows = block_tokens(numbers, 512).reshape(len(numbers), 512)
    assert (rows >= 0).all()
    for column in rows.T:
        assert len(set(column.tolist())) == len(numbers)
    assert rows[1].tolist() == list(range(512, 1024))
    with pytest.raises(ValueError, match="block 2147483648 is too large a number for blocks of 5"):
        block_tokens([2**31], 512)


def test_fresh_tokens_stay_negative_beyond_their_last_id() -> None:
    fresh = FreshTokens()
    assert fresh.take(3).tolist() == [-1, -2, -3]
    fresh._taken = 2**31 - 1
    assert fresh.take(2).tolist() == [-(2**31), -1]
