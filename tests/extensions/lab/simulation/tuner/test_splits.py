"""Which split of a memory the tuner's rules prefer for a window of requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_hybrid.core.server_settings import Split
from sglang_hybrid.core.traffic.recorder import RequestWindow
from sglang_hybrid.extensions.lab.simulation.tuner.candidates import counted_hits
from sglang_hybrid.extensions.lab.simulation.tuner.splits import find_better_split, splits_of
from sglang_hybrid.extensions.lab.systems import Spec
from tests.extensions.lab.simulation.tuner.traffic import COST, POOLS, conversations, window

REUSE = Spec("reuse")
ANY = Split(0, 0)
FEW_TOKENS, FEW_SLOTS = Split(800, 9), Split(5_000, 2)
"""Of about the same memory."""


def memory(split: Split) -> int:
    return split.kv_tokens * COST.kv_bytes_per_token + split.slots * COST.state_bytes


def test_splits_take_the_same_memory() -> None:
    for split in splits_of(POOLS, COST):
        assert memory(POOLS) - COST.state_bytes < memory(split) <= memory(POOLS)


def asked(room: Split = FEW_TOKENS, requests: int = 80) -> RequestWindow:
    """A window of conversations on a server with this split."""
    return replace(window(conversations(requests)), budget=room)


def hits(split: Split) -> int:
    return int(counted_hits(asked(split), REUSE).sum())


def test_the_best_split_is_found() -> None:
    better = find_better_split(asked(), REUSE, ANY)
    assert better is not None
    found = {split: hits(split) for split in splits_of(FEW_TOKENS, COST)}
    assert better.hits == found[better.split] == max(found.values())
    assert better.hits_now == hits(FEW_TOKENS) < better.hits
    assert better.tokens == sum(r.input_len for r in asked().requests[40:])
    assert find_better_split(asked(better.split), REUSE, ANY) is None  # it stays


def test_a_split_that_gains_little_or_by_chance_is_none() -> None:
    """A third more tokens, in requests that are few."""
    best = max(hits(split) for split in splits_of(POOLS, COST))
    assert best > 1.01 * hits(POOLS)
    assert find_better_split(asked(POOLS), REUSE, ANY) is None


def test_running_requests_keep_what_they_need() -> None:
    assert find_better_split(asked(), REUSE, Split(0, FEW_TOKENS.slots)) is None
    better = find_better_split(asked(FEW_SLOTS), REUSE, ANY)
    least = Split(3_000, 0)
    bounded = find_better_split(asked(FEW_SLOTS), REUSE, least)
    assert better is not None
    assert bounded is not None
    assert better.split.kv_tokens < least.kv_tokens <= bounded.split.kv_tokens


def test_a_worker_that_fails_is_an_error() -> None:
    broken = replace(asked(), cost=None)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        find_better_split(broken, REUSE, ANY)
