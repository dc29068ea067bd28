"""The replay of the waiting queue: arrivals of other days, and which aims are missed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scripts.bench.queue_rows import jittered
from scripts.bench.schedule_replay import Served, middle, missed, mostly_met
from sglang_hybrid.core.queue.waiting import Bound
from sglang_hybrid.core.traffic.requests import Request

TOKENS = np.arange(10, dtype=np.int32)
BEGUN = (0.0, 10.0, 20.0)
REQUESTS = sorted(
    (
        Request(s, turn, start + 3.0 * turn, TOKENS, 8)
        for s, start in enumerate(BEGUN)
        for turn in (0, 1)
    ),
    key=lambda one: one.arrival,
)
GOOD = Served(1.0, 2.0, 3.0, 4.0, tokens_per_second=100.0, hit_rate=0.5, most_overtaken=0)


def test_sessions_begin_at_other_times_and_keep_their_gaps() -> None:
    assert jittered(REQUESTS, 0) == REQUESTS
    moved = jittered(REQUESTS, 1)
    assert moved == jittered(REQUESTS, 1)
    assert moved != jittered(REQUESTS, 2)
    assert [one.arrival for one in moved] == sorted(one.arrival for one in moved)
    assert moved[0].arrival == 0.0
    for session, start in enumerate(BEGUN):
        first, second = (one.arrival for one in moved if one.session == session)
        assert second - first == 3.0
        assert abs(first - start) <= 20.0


def test_misses_say_with_how_many_seeds() -> None:
    slower = replace(GOOD, p99=3.5, most_overtaken=9)
    seeds = [{"fcfs": GOOD, "lpm": GOOD, "window": one} for one in (slower, GOOD, slower)]
    assert missed(seeds, Bound(8)) == "P99 2/3, bound 2/3"
    assert missed(seeds[1:2], Bound(8)) == ""
    assert missed(seeds[:1], Bound(8)) == "P99, bound"
    assert middle([slower, GOOD, slower]) == slower
    assert mostly_met("window", "P99", [(None, seeds)]) == 0  # type: ignore[list-item]
    assert mostly_met("window", "P50", [(None, seeds)]) == 1  # type: ignore[list-item]
