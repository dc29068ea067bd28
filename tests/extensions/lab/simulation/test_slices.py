"""A slice of a trace keeps what a prefix cache sees: which prefixes are equal and which are not."""

import numpy as np
import pytest

from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.simulation.traces.slices import (
    Slice,
    reusable_tokens,
    to_vocabulary,
)


def request(tokens: list[int], prompt: int, session: int = 0, arrival: float = 0.0) -> Request:
    return Request(session, 0, arrival, np.asarray(tokens, dtype=np.int32), prompt)


FIRST = request([*range(10), 50, 51, 52], prompt=10)
SECOND = request([*FIRST.tokens.tolist(), 60, 61, 70], prompt=15)
OTHER = request([0, 1, 2, 80, 81, 90], prompt=5, session=1)
TRACE = [FIRST, SECOND, OTHER]


def test_a_later_turn_reuses_prompt_and_answer_of_the_one_before() -> None:
    assert reusable_tokens(TRACE) == 0 + 13 + 3


def test_of_a_repeated_prompt_all_but_the_last_token_is_reusable() -> None:
    assert reusable_tokens([FIRST, FIRST]) == 9


def test_answers_are_cut_and_so_are_the_prompts_that_repeat_them() -> None:
    first, second, other = Slice(requests=3, max_answer_tokens=1).cut(TRACE)
    assert first.tokens.tolist() == [*range(10), 50]
    assert second.tokens.tolist() == [*range(10), 50, 60, 61, 70] and second.input_len == 13
    assert other.tokens.tolist() == OTHER.tokens.tolist()
    assert reusable_tokens([first, second]) == 11


def test_a_prompt_that_leaves_an_answer_keeps_what_is_its_own() -> None:
    leaves = request([*range(10), 50, 51, 99, 98, 97], prompt=14)
    _, cut = Slice(requests=2, max_answer_tokens=1).cut([FIRST, leaves])
    assert cut.tokens.tolist() == [*range(10), 50, 99, 98, 97] and cut.input_len == 13


def test_scaling_keeps_equal_prefixes_equal() -> None:
    first, second, other = Slice(requests=3, scale=2).cut(TRACE)
    assert first.input_len == 5 and second.input_len == 8 and other.input_len == 3
    assert second.tokens[:7].tolist() == first.tokens.tolist()
    assert reusable_tokens([first, second, other]) == 0 + 7 + 2
    assert other.tokens[:2].tolist() == first.tokens[:2].tolist()


@pytest.mark.parametrize(
    ("cut", "sessions"),
    [
        (Slice(requests=2), [0, 0]),
        (Slice(requests=9, skip=1), [0, 1]),
        (Slice(requests=9, max_prompt_tokens=10), [0, 1]),
        (Slice(requests=9, max_total_tokens=25), [0, 0]),
        (Slice(requests=9, max_total_tokens=9), []),
    ],
)
def test_a_slice_is_consecutive_and_within_its_bounds(cut: Slice, sessions: list[int]) -> None:
    assert [kept.session for kept in cut.cut(TRACE)] == sessions


def test_ids_that_fit_get_one_of_their_own() -> None:
    mapped, distinct = to_vocabulary(TRACE, 261, 32_768)
    assert distinct
    assert reusable_tokens(mapped) == reusable_tokens(TRACE)
    ids = np.concatenate([each.tokens for each in mapped])
    assert ids.min() == 261
    assert len(np.unique(ids)) == len(np.unique(np.concatenate([r.tokens for r in TRACE])))


def test_ids_that_do_not_fit_are_spread() -> None:
    """Runs of consecutive ids, as in traces of block hashes, some of them negative."""
    blocks = [request([*range(64 * n, 64 * n + 64)], prompt=64) for n in range(-500, 500)]
    mapped, distinct = to_vocabulary(blocks, 261, 32_768)
    assert not distinct
    ids = np.concatenate([each.tokens for each in mapped])
    assert ids.min() >= 261 and ids.max() < 32_768
    assert reusable_tokens(mapped) < 0.002 * 64_000
    again, _ = to_vocabulary(blocks, 261, 32_768)
    assert all((a.tokens == b.tokens).all() for a, b in zip(mapped, again, strict=True))
