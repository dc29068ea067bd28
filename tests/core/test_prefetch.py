"""When loads start: CaR's formula, its form for several loads, predicted lengths, and counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.queue.lengths import AnswerLengths, Decoding, free_places
from sglang_hybrid.core.queue.prefetch import Prefetcher, fetch, latest_starts

INF = math.inf


def test_cars_formula_with_numbers() -> None:
    """Two answers of 100 and 40 tokens at 20 ms, begun 1 s and 0.3 s ago: 1.0 and 0.5 s are left.
    A load of 12 GB at 25 GB/s takes 0.48 s.
    """
    running = [Decoding(9.0, 100), Decoding(9.7, 40)]
    free = free_places(running, 10.0, 0.02, places=2)
    assert free == pytest.approx([0.5, 1.0])
    assert not fetch(free[0], 12e9, 25e9)
    later = free_places(running, 10.03, 0.02, places=2)
    assert fetch(later[0], 12e9, 25e9)
    assert free_places(running, 10.0, 0.02, places=3)[0] == 0


def test_an_answer_longer_than_predicted_may_end_at_any_step() -> None:
    assert Decoding(0.0, 10).left(now=5.0, per_token=0.1) == 0.1


def test_with_one_load_and_one_place_it_is_cars_rule() -> None:
    for free_in, seconds in ((0.5, 0.48), (0.48, 0.48), (0.4, 0.48)):
        (start,) = latest_starts([seconds], [free_in])
        assert (start <= 0) == fetch(free_in, seconds, 1.0)


def test_a_load_ends_early_enough_for_the_next() -> None:
    assert latest_starts([1.0, 2.0], [5.0, 5.0]) == [2.0, 3.0]
    assert latest_starts([1.0, 0.0, 2.0], [5.0, 5.5, 9.0]) == [4.0, INF, 7.0]
    assert latest_starts([1.0, 2.0], [5.0]) == [4.0, INF]


@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), max_size=8),
    st.lists(st.floats(0, 20), max_size=8).map(sorted),
)
def test_loads_begun_at_their_latest_end_in_time(seconds: list[float], free: list[float]) -> None:
    """One after the other on one link: none ends late, and none could have begun later."""
    starts = latest_starts(seconds, free)
    loads = [at for at, start in enumerate(starts) if start < INF]
    link_free = -INF
    for at in loads:
        assert starts[at] >= link_free - 1e-9, "the link is free when a load must begin"
        link_free = starts[at] + seconds[at]
        assert link_free <= free[at] + 1e-9
    for nth, at in enumerate(loads):
        ends = starts[at] + seconds[at]
        limit = min([free[at], *(starts[later] for later in loads[nth + 1 : nth + 2])])
        assert ends == pytest.approx(limit)


def test_a_prefetch_is_used_late_or_in_vain() -> None:
    prefetcher: Prefetcher[str] = Prefetcher()
    waiting = [("a", 100), ("none", 0), ("b", 300), ("c", 100)]
    assert prefetcher.due(waiting, 100.0, [10.0, 10.0, 10.0]) == ([], 6.0)
    assert prefetcher.due(waiting, 100.0, [4.0, 4.0, 4.0]) == (["a"], 1.0)
    prefetcher.started("a", 100)
    prefetcher.arrived("a", 100)
    assert prefetcher.due(waiting, 100.0, [3.0, 3.0, 3.0]) == (["b"], INF)
    prefetcher.started("b", 300)
    prefetcher.started("c", 100)
    prefetcher.arrived("b", 200)
    assert prefetcher.runs("a")
    assert not prefetcher.runs("b")
    prefetcher.arrived("c", 40)
    assert prefetcher.cancel("c")
    assert not prefetcher.cancel("c")
    counts = prefetcher.counts
    assert (counts.started, counts.used, counts.late, counts.cancelled) == (3, 1, 1, 1)
    assert (counts.loaded_bytes, counts.wasted_bytes, len(prefetcher)) == (440, 40, 0)


def test_loads_on_the_turn_had_no_time_or_no_room_or_were_missed() -> None:
    prefetcher: Prefetcher[str] = Prefetcher()
    counts = prefetcher.counts
    assert counts.complete is None
    for name in ("had room again", "no room", "no room and no time"):
        prefetcher.room(name, there_is=False)
    prefetcher.room("had room again", there_is=True)
    prefetcher.started("evicted again", 100)
    prefetcher.arrived("evicted again", 100)
    for name in ("had room again", "no room", "evicted again"):
        prefetcher.loads_on_turn(name, had_time=True)
    prefetcher.loads_on_turn("no room and no time", had_time=False)
    assert (counts.on_turn, counts.no_time, counts.no_room) == (4, 1, 1)
    assert (counts.cancelled, counts.in_vain, counts.complete) == (1, 1.0, 0.0)
    for name in ("a", "b"):
        prefetcher.started(name, 100)
        prefetcher.arrived(name, 100)
        assert prefetcher.runs(name)
    assert (counts.loads, counts.complete) == (6, 0.5)
    assert counts.in_vain == pytest.approx(1 / 3)


def test_what_left_had_no_room_for_itself_only() -> None:
    prefetcher: Prefetcher[str] = Prefetcher()
    prefetcher.room("x", there_is=False)
    prefetcher.cancel("x")
    prefetcher.loads_on_turn("x", had_time=True)
    assert prefetcher.counts.no_room == 0


def test_lengths_are_those_of_the_conversation_then_the_schema_then_the_tenant() -> None:
    lengths = AnswerLengths()
    keys = [("t", "chat", 1), ("t", "schema"), ("t",)]
    assert lengths.predicted(keys, 512) == 512
    for tokens in (10, 20, 30):
        lengths.ended([("t", "chat", 2), ("t",)], tokens)
    assert lengths.predicted(keys, 512) == pytest.approx(20, rel=0.05)
    for _ in range(3):
        lengths.ended(keys, 200)
    assert lengths.predicted(keys, 512) == pytest.approx(200)
    assert lengths.predicted(keys, 64) == 64
    assert lengths.predicted([("other",)], 512) == 512, "other tenants' answers say nothing"


def test_old_answers_fade_and_few_keys_are_kept() -> None:
    lengths = AnswerLengths(most_keys=2)
    for tokens in [10] * 100 + [1_000] * 64:
        lengths.ended(["x"], tokens)
    assert lengths.predicted(["x"], 10_000) > 700
    lengths.ended(["y"], 1)
    lengths.ended(["z"], 1)
    assert len(lengths) == 2
    assert lengths.predicted(["x"], 10_000) == 10_000
