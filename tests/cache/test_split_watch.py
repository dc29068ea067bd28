"""When splits are compared, what is advised, and what is not."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.cache.learnt_split import read_split
from sglang_hybrid.cache.split_watch import FIRST, SplitWatch
from sglang_hybrid.core.server_settings import Split
from sglang_hybrid.core.specs import Spec
from sglang_hybrid.extensions.disk.tier_folder import TIER, make_tier, tier_lock
from sglang_hybrid.extensions.lab.simulation.tuner.splits import SplitsFound
from sglang_hybrid.serving.advice import ServerSetup
from tests.extensions.lab.simulation.tuner.traffic import COST, conversations, window
from tests.serving.test_advice import DEFAULT

SPARE = 3
"""Slots beside the free ones, which running requests hold."""

FEW_TOKENS, FEW_SLOTS, GOOD = Split(800, 9), Split(5_000, 2), Split(1_506, 8)
"""Splits of about the same memory, beside running requests."""


def watch(
    room: Split, context: int = 600, path: Path | None = None
) -> tuple[SplitWatch, ServerSetup]:
    """The watch of a server whose running requests leave `room`, after conversations."""
    server = replace(
        DEFAULT,
        slots=room.slots + SPARE,
        kv_tokens=room.kv_tokens,
        state_bytes=COST.state_bytes,
        kv_bytes=COST.kv_bytes_per_token,
        context=context,
        counted=1,
    )
    made = replace(window(conversations(80)), budget=room)
    return SplitWatch(server, lambda: lambda: made, lambda: Spec("reuse"), lambda: path), server


def feed(it: SplitWatch, count: int, *, evicted: bool = True) -> None:
    room = Split(800, 9)
    for _ in range(count):
        it.on_request_end(room, evicted=evicted)
    it.wait()


def sizes(advice: str) -> tuple[int, int]:
    """Slots and KV tokens that are advised."""
    words = advice.replace(",", "").split()
    slots, tokens = (
        int(words[words.index(flag) + 1])
        for flag in ("--max-mamba-cache-size", "--max-total-tokens")
    )
    return slots, tokens


def test_a_better_split_is_advised_in_the_same_memory(caplog: pytest.LogCaptureFixture) -> None:
    it, server = watch(FEW_SLOTS)
    with caplog.at_level(logging.INFO):
        feed(it, FIRST)
    slots, tokens = sizes(it.advice)
    assert slots > server.slots
    assert 0 <= server.bytes - slots * server.state_bytes - tokens * server.kv_bytes < 8
    assert it.advice in caplog.text
    assert "of the prompts of the last 40 requests" in it.advice


def test_one_memory_is_named_where_it_hits_more() -> None:
    """Beside another split, and alone where running requests leave none."""
    it, _ = watch(Split(500, FEW_TOKENS.slots))
    feed(it, FIRST)
    assert re.search(r"[\d.]+ % with --hybrid-memory one, where that can be had, in", it.advice)
    held, _ = watch(FEW_TOKENS)
    held.on_request_end(Split(800, 0), evicted=False)
    feed(held, FIRST)
    assert re.search(r"[\d.]+ % would be hit instead of [\d.]+ % with --hybrid-mem", held.advice)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a file in the folder of a disk tier."""
    with tier_lock(make_tier(tmp_path), 1):
        return tmp_path / TIER / "a.split"


def test_the_next_server_is_told(path: Path) -> None:
    it, server = watch(FEW_SLOTS, path=path)
    feed(it, FIRST)
    learnt = read_split(path)
    assert learnt is not None
    memory = Split.of(server.bytes, COST, round(learnt.states_to_kv, 3))
    slots, tokens = sizes(it.advice)
    assert memory.slots == slots, "a ratio in three digits gives all of them"
    assert memory.kv_tokens == pytest.approx(tokens, abs=COST.state_bytes / server.kv_bytes)
    assert f"{100 * learnt.hits:.1f} % would be hit instead of {100 * learnt.hits_now:.1f} %" in (
        it.advice
    )
    assert learnt.requests == 40


def test_a_split_that_is_good_is_not_told(path: Path) -> None:
    it, _ = watch(GOOD, path=path)
    feed(it, FIRST)
    assert not path.exists()


def test_what_an_earlier_search_told_is_taken_back(path: Path) -> None:
    """The next server has the split that this one has, where the last search found no other."""
    server = watch(FEW_SLOTS)[1]
    made = replace(window(conversations(80)), budget=FEW_SLOTS)
    found = [SplitsFound(GOOD, 30, 20, 30, 100), SplitsFound(FEW_SLOTS, 20, 20, 20, 100)]
    it = SplitWatch(
        *(server, lambda: lambda: made, lambda: Spec("reuse"), lambda: path),
        lambda *_: found.pop(0),
    )
    feed(it, FIRST)
    told = read_split(path)
    assert told is not None and (told.hits, told.hits_now) == (0.3, 0.2)
    feed(it, FIRST)
    told = read_split(path)
    assert told is not None and told.hits == told.hits_now == 0.2
    assert Split.of(server.bytes, COST, round(told.states_to_kv, 3)).slots == server.slots


def test_nothing_is_compared_before_something_was_evicted_or_requests_are_few() -> None:
    it, _ = watch(FEW_SLOTS)
    feed(it, FIRST - 1)
    feed(it, FIRST, evicted=False)
    assert it.advice == ""
    feed(it, 1)
    assert it.advice != ""


def test_searches_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[object] = []
    ended = []
    it, _ = watch(FEW_SLOTS)
    monkeypatch.setattr(it, "_search", lambda *args: searches.append(args))
    for number in range(1, 5 * FIRST):
        before = len(searches)
        feed(it, 1)
        if len(searches) > before:
            ended.append(number)
    assert ended == [128, 192, 288, 432]


def test_what_is_good_gets_no_advice() -> None:
    it, _ = watch(GOOD)
    feed(it, FIRST)
    assert it.advice == ""


def test_as_many_requests_may_run_as_have() -> None:
    """More KV would hit more; but running requests held all slots at some time."""
    free, server = watch(FEW_TOKENS)
    feed(free, FIRST)
    assert sizes(free.advice)[0] < server.slots
    held, _ = watch(FEW_TOKENS)
    held.on_request_end(Split(800, 0), evicted=False)
    feed(held, FIRST)
    assert "--max-total-tokens" not in held.advice
    feed(held, FIRST)
    assert held.advice == free.advice, "that was before the last search"


def test_the_longest_request_finds_room() -> None:
    short, _ = watch(FEW_SLOTS)
    long, server = watch(FEW_SLOTS, context=3_000)
    for it in (short, long):
        feed(it, FIRST)
    assert sizes(short.advice)[1] < server.context <= sizes(long.advice)[1]


def test_a_failure_is_said_once_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Any:
        raise OSError("no memory")

    _, server = watch(GOOD)
    it = SplitWatch(server, lambda: fail, lambda: Spec("reuse"))
    feed(it, 4 * FIRST)
    feed(it, 4 * FIRST)
    assert it.advice == ""
    assert caplog.text.count("no memory") == 1
