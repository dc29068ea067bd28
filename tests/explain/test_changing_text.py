"""Positions at which two prompts part and go on alike, by worked examples."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_hybrid.explain.changing_text import (
    LEAST_TOKENS,
    LONGEST,
    MOST_PROMPTS,
    common_suffix_len,
    find_changing_text,
    line_of,
)
from sglang_hybrid.serving.telemetry.stats import ChangingText

HEAD, RULES = [*range(10)], [*range(1_000, 1_200)]


def prompt(changes: list[int], end: int = 0) -> list[int]:
    return [*HEAD, *changes, *RULES, end]


def found(now: list[int], *earlier: list[int], start: int = len(HEAD)) -> ChangingText | None:
    return find_changing_text(now, start, len(now) - 1 - start, earlier)


@pytest.mark.parametrize(
    ("before", "now"), [([51], [61]), ([51, 52], [61]), ([], [61, 62]), ([51], []), ([51, 9], [61])]
)
def test_a_text_of_any_length_is_passed_on_either_side(before: list[int], now: list[int]) -> None:
    told = found(prompt(now, 1), prompt(before, 2))
    assert told == ChangingText(len(HEAD), len(now), len(RULES))


def test_several_texts_are_passed() -> None:
    def twice(stamp: int) -> list[int]:
        return [*HEAD, stamp, *RULES[:60], stamp, *RULES[60:]]

    assert found(twice(51), twice(52)) == ChangingText(len(HEAD), 1, len(RULES))


@pytest.mark.parametrize("longest", [LONGEST, LONGEST + 1])
def test_a_longer_text_is_another_prompt(longest: int) -> None:
    now = [*range(5_000, 5_000 + longest)]
    assert (found(prompt(now), prompt([51])) is not None) == (longest == LONGEST)


def test_what_goes_on_otherwise_has_no_changing_text() -> None:
    assert found([*HEAD, *range(300)], prompt([])) is None
    assert found(prompt([], 1)[:30], prompt([51])) is None  # too little is missed
    assert found([*prompt([51]), *range(3_000, 3_300)], prompt([52])) is None  # less than half


def test_a_prompt_that_parts_earlier_than_what_was_sent_is_not_compared() -> None:
    assert found(prompt([61]), [99, *prompt([51])[1:]]) is None
    assert found(prompt([61]), [99, *prompt([51])[1:]], start=0) is not None


def test_only_the_latest_prompts_are_compared() -> None:
    others = [[*HEAD, *range(300)]] * MOST_PROMPTS
    assert found(prompt([61]), *others[1:], prompt([51])) is not None
    assert found(prompt([61]), *others, prompt([51])) is None


def test_bytes_that_are_equal_inside_of_tokens_are_no_run() -> None:
    shifted = np.frombuffer(b"\1" + np.array(RULES, np.uint32).tobytes()[:-1], np.uint32)
    assert found(prompt([61]), [*HEAD, 51, *shifted.tolist()]) is None


def test_tokens_that_are_equal_again() -> None:
    now, before = np.array(prompt([61], 1), np.int32), np.array(prompt([51, 52], 2), np.int32)
    assert common_suffix_len(now, before) == len(RULES) >= LEAST_TOKENS
    assert common_suffix_len(now, now) == 0


def test_lines_begin_at_one() -> None:
    assert [line_of(text) for text in ("", "a", "a\n", "a\nb\n")] == [1, 1, 2, 3]
