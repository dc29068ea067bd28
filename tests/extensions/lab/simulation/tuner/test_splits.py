"""The split of a memory that the tuner's rules prefer for a window of requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_hybrid.core.server_settings import Split
from sglang_hybrid.core.traffic.recorder import RequestWindow
from sglang_hybrid.extensions.lab.simulation.tuner.candidates import counted_hits
from sglang_hybrid.extensions.lab.simulation.tuner.splits import bytes_of, compare_splits, splits_of
from sglang_hybrid.extensions.lab.systems import Spec
from tests.extensions.lab.simulation.tuner.traffic import COST, POOLS, conversations, window

REUSE = Spec("reuse")
ANY = Split(0, 0)
FEW_TOKENS, FEW_SLOTS = Split(800, 9), Split(5_000, 2)
"""Of about the same memory."""


def test_splits_take_the_same_memory() -> None:
    for split in splits_of(POOLS, COST):
        memory = bytes_of(POOLS, COST)
        assert memory - COST.state_bytes < bytes_of(split, COST) <= memory


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
    one = replace(window, budget=bytes_of(FEW_TOKENS, COST), serving=serving)
    assert found.hits_one == counted_hits(one, REUSE).sum() > found.hits_now


def test_a_split_that_gains_little_or_by_chance_is_none() -> None:
    """A third more tokens, in requests that are few."""
    best = max(hits(split) for split in splits_of(POOLS, COST))
    assert best > 1.01 * hits(POOLS)
    assert compare_splits(asked(POOLS), REUSE, ANY).split == POOLS


def test_running_requests_keep_what_they_need() -> None:
    assert compare_splits(asked(), REUSE, Split(0, FEW_TOKENS.slots)).split == FEW_TOKENS
    better = compare_splits(asked(FEW_SLOTS), REUSE, ANY)
    least = Split(3_000, 0)
    bounded = compare_splits(asked(FEW_SLOTS), REUSE, least)
    assert better.split.kv_tokens < least.kv_tokens <= bounded.split.kv_tokens


def test_a_worker_that_fails_is_an_error() -> None:
    broken = replace(asked(), cost=None)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        compare_splits(broken, REUSE, ANY)
