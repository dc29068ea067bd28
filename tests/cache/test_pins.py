"""Pins of clients, on SGLang's tree: nodes that are kept, for a time, within a share."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_hybrid.cache.queue.clock import ClockTick
from sglang_hybrid.cache.report import CacheReport
from sglang_hybrid.core.records.pin import PinRequest, Priority
from sglang_hybrid.serving.telemetry import metrics
from tests.cache.backends import options
from tests.cache.driver import Server, Sizes, build_cache
from tests.cache.test_rules import evict_states, run, states
from tests.explain.test_explain import explain, said, server

PREFIX = run(60)


def pinned(it: Server) -> list[int]:
    """Depths of all pinned nodes."""
    records = it.cache.shadow_tree.tree.walk()
    return sorted(record.depth for record in records if record.pin is not None)


def ask(it: Server, *pins: PinRequest, stamp: float = 1.0, salt: str | None = None) -> None:
    it.serve([*PREFIX, *run(9, 3)], run(3, 4), stamp, cache_salt=salt, pins=pins)


def flood(it: Server, count: int = 30, stamp: float = 2.0, apart: float = 0.01) -> None:
    """Requests that nobody repeats, so many seconds apart, as many as push everything out."""
    for number in range(count):
        it.serve(run(60, 10 + number), run(3, 900 + number), stamp + apart * number)


@pytest.mark.parametrize("one_memory", [False, True])
@pytest.mark.parametrize("policy", ["reuse", "lru", "marconi", "gdsf"])
def test_a_pinned_state_outlives_a_flood(policy: str, one_memory: bool) -> None:
    """Without a pin it does not. A high pin counts as much as the entry likeliest to return."""
    more: dict[str, Any] = {"hybrid_alpha": 1.0} if policy == "marconi" else {}
    hits = []
    for pins in ([], [PinRequest(60, 300, Priority.HIGH)]):
        it = server(policy, states=8, kv=400, one_memory=one_memory, **more)
        ask(it, *pins)
        flood(it)
        it.check()
        hits.append(it.probe([*PREFIX, *run(9, 5)]))
    assert hits == [0, 60]


def test_a_normal_pin_outlives_what_is_expected_later_than_its_end() -> None:
    """Requests of which one comes every 20 seconds, beside a return within 300 seconds."""
    hits = []
    for pins in ([], [PinRequest(60, 300)]):
        it = server(states=8, kv=400)
        ask(it, *pins)
        flood(it, count=8, stamp=20.0, apart=20.0)
        hits.append(it.probe([*PREFIX, *run(9, 5)]))
    assert hits == [0, 60]


def test_a_pin_ends_when_its_time_is_over() -> None:
    """The next request ends it, or the clock of the rank that receives requests."""
    it = server(states=8, kv=400)
    ask(it, PinRequest(60, 300))
    assert pinned(it) == [60]
    clock = it.cache.step_clock
    ends = it.cache.shadow_tree.is_pin_over
    assert not ends(300.9) and ends(301.0)
    clock.tick(ClockTick(300.9))
    assert pinned(it) == [60]
    clock.tick(ClockTick(301.0))
    assert pinned(it) == []
    assert it.cache.server_info()["pins"]["expired"] == 1
    ask(it, PinRequest(60, 10), stamp=400.0)
    it.serve(run(20, 77), run(3, 78), 411.0)
    assert pinned(it) == []
    flood(it, stamp=412.0)
    assert it.probe([*PREFIX, *run(9, 5)]) == 0


class Gauges:
    """What Prometheus was told last of pins and of free bytes."""

    def __init__(self, report: CacheReport, labels: dict[str, str]) -> None:
        self._report = report
        self.update()

    def update(self) -> None:
        pins, account = self._report.pins, self._report.account
        assert pins is not None and account is not None
        self.pins, self.free = len(pins), account.free


def test_metrics_are_right_while_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pin ends, and memory becomes free, without a request."""
    monkeypatch.setattr(metrics, "cache_metrics", Gauges)
    monkeypatch.setattr(metrics, "rank_labels", dict)
    monkeypatch.setattr(UnifiedRadixCache, "init_metrics_collector", lambda _: None)  # SGLang's own
    where = Sizes(one_memory=True)
    it = Server(build_cache(where, options("reuse"), rank=0, enable_metrics=True), where)
    told: Any = it.cache.report._metrics
    ask(it, PinRequest(60, 300))
    assert told.pins == 1
    it.cache.step_clock.tick(ClockTick(301.0))
    assert told.pins == 0
    it.flush()
    it.cache.step_clock.tick(ClockTick(306.0))
    assert told.free == it.cache.account.budget


def test_a_position_that_is_there_already_is_pinned_too() -> None:
    it = server()
    it.serve([*PREFIX, *run(9, 3)], run(3, 4), 1.0)
    it.serve([*PREFIX, *run(9, 5)], run(3, 6), 2.0)
    assert 60 in states(it)
    req = it.begin([*PREFIX, *run(9, 7)], 3.0, pins=[PinRequest(60, 300), PinRequest(69, 60)])
    it.prefill(req)
    assert pinned(it) == [60]
    report = it.cache.lookups.report(req).as_dict()
    assert report["declared"]["pinned"] == [60]
    it.decode(req, run(3, 8))
    it.finish(req)


def test_whoever_resumes_from_a_pin_makes_it_last() -> None:
    it = server()
    ask(it, PinRequest(60, 300))
    it.serve([*PREFIX, *run(9, 5)], run(3, 6), 200.0)
    assert it.cache.shadow_tree.tree.pins.next_expiry == 500.0


@pytest.mark.parametrize(("of", "left"), [("extra_key", 4), ("cache_salt", 2)])
def test_a_share_is_not_exceeded_and_payers_do_not_share_theirs(of: str, left: int) -> None:
    """A salt makes another tenant, but no other payer."""
    it = server(states=16, hybrid_pin_share=0.125)
    for number in range(6):
        name: dict[str, Any] = {of: "a"} if number % 2 else {}
        pins = [PinRequest(30, 60)]
        it.serve(run(40, number), run(3, 90 + number), 1.0 + number, pins=pins, **name)
    info = it.cache.server_info()["pins"]
    assert (info["pins"], info["pinned"], info["gave_way"]) == (left, 6, 6 - left)
    held = it.cache.shadow_tree.tree.pins
    assert held.of("a") == (held.of(None) if of == "extra_key" else 0)
    assert info["bytes"] == held.of(None) + held.of("a")
    assert set(info) == {
        *("pins", "bytes", "share_of_a_tenant", "bytes_of_a_tenant"),
        *("pinned", "refused", "gave_way", "expired", "evicted"),
    }


def test_a_pin_is_refused_once() -> None:
    """However many chunks its request has."""
    it = server(hybrid_pin_share=0.001)
    it.chunk = 20
    ask(it, PinRequest(60, 300))
    info = it.cache.server_info()["pins"]
    assert (info["pins"], info["refused"]) == (0, 1)


def test_what_gave_way_to_another_position_is_not_said_to_be_pinned() -> None:
    it = server(states=16, hybrid_pin_share=0.07)
    req = it.begin([*PREFIX, *run(9, 3)], 1.0, pins=[PinRequest(30, 300), PinRequest(60, 300)])
    it.complete(req, run(3, 4))
    report = it.cache.lookups.report(req).as_dict()
    assert len(pinned(it)) == 1 and report["declared"]["pinned"] == pinned(it)


def test_an_evicted_state_is_pinned_no_more() -> None:
    it = server()
    ask(it, PinRequest(60, 300, Priority.LOW))
    while states(it):
        evict_states(it)
    assert pinned(it) == [] and it.cache.shadow_tree.tree.pins.held_bytes == 0
    told = said(explain(it, [*PREFIX, *run(9, 5)]))
    assert "; it was pinned, but all else was worth more or in use" in told


def test_an_explanation_says_until_when() -> None:
    it = server()
    ask(it, PinRequest(60, 300), stamp=1.0)
    it.serve(run(20, 77), run(3, 78), 101.0)
    assert "kept because pinned until 3 min from now" in said(explain(it, [*PREFIX, 9, 9]))
    other = said(explain(it, [*PREFIX, 9, 9], cache_salt="b"))
    assert "pinned" not in other


def test_a_flush_forgets_pins() -> None:
    it = server()
    ask(it, PinRequest(60, 300))
    it.flush()
    assert (
        len(it.cache.shadow_tree.tree.pins) == 0 and it.cache.shadow_tree.tree.pins.held_bytes == 0
    )
    ask(it, PinRequest(60, 300), stamp=2.0)
    assert pinned(it) == [60]


def test_without_states_a_position_within_an_edge_is_pinned() -> None:
    it = server("lru", states=0, kv=400)
    ask(it, PinRequest(33, 300))
    flood(it)
    it.check()
    assert it.probe([*PREFIX[:33], *run(9, 5)]) == 33


def test_pages_round_a_position_down() -> None:
    it = server(page=16, kv=640, states=24, extra_buffer=True, grid=16)
    ask(it, PinRequest(60, 300))
    assert pinned(it) == [48]


def test_sglangs_own_order_knows_no_pins() -> None:
    it = server("sglang-lru", states=8, kv=400)
    ask(it, PinRequest(60, 300))
    assert it.cache.shadow_tree is None and it.cache.server_info()["pins"] is None
    assert it.cache.step_clock.poll() == []


@pytest.mark.parametrize("days", [30, -30])
def test_pins_outlive_a_clock_that_jumps(monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    """A jump of the receiving rank's clock, or of later stamps, does not change a pin's time."""
    it = server(states=8, kv=400)
    clock, now = it.cache.step_clock, 1_000.0
    monkeypatch.setattr(clock, "read", lambda: now)

    def tick() -> None:
        for message in clock.poll():
            clock.tick(message)

    tick()
    ask(it, PinRequest(60, 300), stamp=now)
    assert pinned(it) == [60]
    now += days * 86_400
    tick()
    it.serve(run(20, 77), run(3, 78), now)
    tick()
    assert pinned(it) == [60]
    for _ in range(60):
        now += 5.0
        tick()
    assert pinned(it) == []


def test_requests_without_a_stamp_do_not_end_a_pin_before_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests of clients that no HTTP server stamps: ticks tell the time."""
    it = server(states=8, kv=400)
    clock, now = it.cache.step_clock, 1_000.0
    monkeypatch.setattr(clock, "read", lambda: now)
    for message in clock.poll():
        clock.tick(message)
    ask(it, PinRequest(60, 30), stamp=0.0)
    for _ in range(40):
        it.serve(run(20, 77), run(3, 78), 0.0)
    assert pinned(it) == [60]
    now += 31.0
    for message in clock.poll():
        clock.tick(message)
    assert pinned(it) == []
