"""The split of a memory that the tuner's rules prefer for a window of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from sglang_hybrid.core.costs.cost import IntArray
from sglang_hybrid.core.server_settings import Budget, Split
from sglang_hybrid.core.traffic.recorder import RequestWindow
from sglang_hybrid.extensions.lab.simulation.tuner.candidates import counted_hits
from sglang_hybrid.extensions.lab.simulation.tuner.splits import compare_splits, splits_of
from sglang_hybrid.extensions.lab.systems import Spec
from tests.extensions.lab.simulation.tuner.traffic import COST, POOLS, conversations, window

REUSE = Spec("reuse")
ANY = Split(0, 0)
FEW_TOKENS, FEW_SLOTS = Split(800, 9), Split(5_000, 2)
"""Splits of about the same memory."""


def test_splits_take_the_same_memory() -> None:
    for split in splits_of(POOLS, COST):
        memory = POOLS.bytes(COST)
        assert memory - COST.state_bytes < split.bytes(COST) <= memory


def asked(room: Split = FEW_TOKENS, requests: int = 80) -> RequestWindow:
    """A window of conversations on a server with this split."""
    return replace(window(conversations(requests)), budget=room)


def hits(split: Split) -> int:
    return int(counted_hits(asked(split), REUSE).sum())


def test_the_best_split_is_found() -> None:
    better = compare_splits(asked(), REUSE, ANY)
    found = {split: hits(split) for split in splits_of(FEW_TOKENS, COST)}
    assert better.hits == found[better.split] == max(found.values())
    assert better.hits_now == hits(FEW_TOKENS) < better.hits
    assert better.tokens == sum(r.input_len for r in asked().requests[40:])
    stays = compare_splits(asked(better.split), REUSE, ANY)
    assert (stays.split, stays.hits) == (better.split, stays.hits_now)


def test_one_memory_is_replayed_beside_splits() -> None:
    found = compare_splits(asked(), REUSE, ANY)
    window = asked()
    assert window.serving is not None
    serving = replace(window.serving, one_memory=True)
    one = replace(window, budget=FEW_TOKENS.bytes(COST), serving=serving)
    assert found.hits_one == counted_hits(one, REUSE).sum() > found.hits_now


@pytest.mark.parametrize(
    ("now", "other", "taken"),
    [
        ([1_000, 1_000, 0], [1_009, 1_009, 0], False),  # less than a percent
        ([1_000, 1_000, 0], [1_000, 1_000, 900], False),  # one request alone
        ([1_000, 1_000, 0], [1_900, 200, 900], False),  # nearly as much is lost
        ([1_000, 1_000, 0], [1_100, 1_100, 100], True),
    ],
)
def test_a_split_that_gains_little_or_by_chance_is_none(
    now: list[int], other: list[int], taken: bool
) -> None:
    """Hit tokens of three requests, with the split that there is and with each other one."""

    def replay(window: RequestWindow, spec: Spec, budgets: Sequence[Budget]) -> list[IntArray]:
        return [np.array(now), *[np.array(other)] * (len(budgets) - 1)]

    assert (compare_splits(asked(POOLS), REUSE, ANY, replay).split != POOLS) is taken


def test_running_requests_keep_what_they_need() -> None:
    assert compare_splits(asked(), REUSE, Split(0, FEW_TOKENS.slots)).split == FEW_TOKENS
    better = compare_splits(asked(FEW_SLOTS), REUSE, ANY)
    least = Split(3_000, 0)
    bounded = compare_splits(asked(FEW_SLOTS), REUSE, least)
    assert better.split.kv_tokens < least.kv_tokens <= bounded.split.kv_tokens


def test_prompts_that_grew_ask_for_no_more_states() -> None:
    """Twice as long in the latter half: splits with more KV are compared all the same."""
    settled, tried = asked(POOLS), list[Budget]()
    half = len(settled.requests) // 2
    longer = [
        replace(one, kept=np.resize(one.tokens, 2 * one.input_len), input_len=2 * one.input_len)
        for one in settled.requests[half:]
    ]
    grown = replace(settled, requests=[*settled.requests[:half], *longer])

    def replay(window: RequestWindow, spec: Spec, budgets: Sequence[Budget]) -> list[IntArray]:
        tried[:] = budgets
        return [np.zeros(1, dtype=np.int64)] * len(budgets)

    compare_splits(settled, REUSE, ANY, replay)
    compared = {split for split in tried if isinstance(split, Split)}
    assert compared == {POOLS, *splits_of(POOLS, COST)}
    compare_splits(grown, REUSE, ANY, replay)
    more = {split for split in compared if split.kv_tokens > POOLS.kv_tokens}
    assert {split for split in tried if isinstance(split, Split)} == {POOLS} | more
    assert 1 < len(more) < len(compared) - 1


def test_a_worker_that_fails_is_an_error() -> None:
    broken = replace(asked(), cost=None)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        compare_splits(broken, REUSE, ANY)
