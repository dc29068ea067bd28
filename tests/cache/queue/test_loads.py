"""The queue over a device with a host behind it: what must be loaded comes last, loads begin before
their requests' turns, and nothing is held when its request has gone.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from sglang_hybrid.cache.queue.clock import ClockTick
from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.core.tiers.rates import Link, Speeds
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import Schedule
from tests.cache.driver import Sizes
from tests.cache.queue.test_queue import Scheduler
from tests.cache.test_rules import run
from tests.cache.tiers import TieredServer, set_speeds
from tests.examples import seeds

SLOW_COMPUTE = Speeds.of(1e6, Link(1e9), Link(1e9))
"""Speeds with which loading always pays."""


SIZES = Sizes(states=7, kv=160, rows=6, context=128)


class TieredScheduler(Scheduler):
    """A scheduler over a tiered server."""

    def __init__(
        self, schedule: Schedule = Schedule.WINDOW, priority_sign: int | None = None, **flags: Any
    ) -> None:
        options = HybridConfig(hybrid_schedule=schedule, **flags)
        self.server: TieredServer = TieredServer.on(SIZES, options, priority_sign=priority_sign)
        self.cache: Any = self.server.cache
        self.queue = []

    def round(self, most: int = 1) -> list[Any]:
        admitted = super().round(most)
        if admitted:
            self.cache.ready_to_load_host_cache()
        return admitted

    def settle(self) -> None:
        """Copies and loads under way are done."""
        for _ in range(4):
            self.server.poll()


class Ahead(TieredScheduler):
    """Steps and ticks as the scheduler makes them; loads take as long as the test says."""

    def __init__(self, **flags: Any) -> None:
        super().__init__(**flags)
        set_speeds(self.cache, SLOW_COMPUTE)
        self.loads = self.cache.schedule.loads
        self.counts = self.loads.ahead.counts
        self.now = 1_000.0

    def step(self, seconds: float = 0.0, *, arrived: bool = True) -> None:
        self.now += seconds
        self.cache.schedule.clock.tick(ClockTick(self.now))
        if arrived:
            self.server.poll()
        self.cache.schedule.step(self.queue)
        if not self.cache.ongoing_load_back:
            self.server.check()

    def on_host(self, number: int) -> list[int]:
        """A document of which the host has all and the device nothing."""
        document = run(60, number)
        self.warm_all(document, run(90, 100 + number), run(60, 200 + number))
        return document

    def warm_all(self, *documents: list[int]) -> None:
        """One after the other, with what each one pushes out copied."""
        for document in documents:
            self.warm(document, self.now)
            self.settle()


@pytest.mark.parametrize("schedule", [Schedule.WINDOW, Schedule.CAR])
def test_what_must_be_loaded_does_not_come_first(schedule: Schedule) -> None:
    """Its place in the window is first-come, with prompts that reuse nothing; in CaR it is last."""
    it = TieredScheduler(schedule)
    away, here = run(60, 1), run(50, 2)
    it.warm(away)
    it.settle()
    it.warm(run(90, 3))  # pushes it off the device
    it.settle()
    it.warm(here)
    it.settle()
    load = it.arrive([*away, 7, 8])
    cold = it.arrive(run(40, 4))
    warm = it.arrive([*here, 7, 8])
    it.cache.schedule.arrange(it.queue)
    assert load.host_hit_length > 0, "it was meant to be on the host only"
    assert it.queue == [warm, *([load, cold] if schedule is Schedule.WINDOW else [cold, load])]


def test_there_are_none_without_a_host_or_an_order_of_ours() -> None:
    assert Scheduler().cache.schedule.loads is None


def test_a_load_begins_when_it_would_end_late_otherwise() -> None:
    it = Ahead()
    document = it.on_host(1)
    running = it.arrive(run(10, 50), it.now, cache_salt="other tenant", answer=20)
    assert it.round() == [running]
    it.server.prefill_step(running)
    waiting = it.arrive([*document, 7, 8], it.now)
    it.step()
    assert waiting.host_hit_length > 0 and it.counts.started == 0, "20 tokens are to come"
    it.server.decode(running, run(18, 60))
    it.step(0.1)
    assert it.counts.started == 1
    it.step(0.1)
    assert it.counts.loaded_bytes > 0
    it.server.finish(running)
    assert it.round() == [waiting]
    assert waiting.host_loaded_length == 0 and waiting.prefix_len == 60
    assert (it.counts.used, it.counts.late, it.counts.wasted_bytes) == (1, 0, 0)


def test_a_load_begins_a_step_earlier_where_steps_are_long() -> None:
    """No load can begin until the next step ends."""
    it = Ahead()
    document = it.on_host(9)
    running = it.arrive(run(10, 50), it.now, cache_salt="other tenant", answer=20)
    assert it.round() == [running]
    it.server.prefill_step(running)
    it.arrive([*document, 7, 8], it.now)
    it.step()
    assert it.counts.started == 0, "20 tokens are to come, which take 0.4 s"
    it.step(0.4)
    assert it.loads.ahead.margin == pytest.approx(0.5)
    assert it.counts.started == 1


def test_all_loads_begin_that_are_due_before_the_next_step() -> None:
    """Both requests may join the next batch."""
    it = Ahead()
    documents = [it.on_host(number) for number in (11, 12)]
    it.server.adder(it.queue, most_running=2)
    waiting = [it.arrive([*document, 7, 8], it.now) for document in documents]
    it.step()
    assert [req.host_hit_length for req in waiting] == [60, 60]
    assert it.counts.started == 2
    it.step(0.1)
    assert it.round(2) == waiting
    assert (it.counts.used, it.counts.on_turn) == (2, 0)


def test_a_load_that_is_late_is_waited_for() -> None:
    it = Ahead()
    document = it.on_host(2)
    waiting = it.arrive([*document, 7, 8], it.now)
    it.step()
    assert it.counts.started == 1 and it.cache.ongoing_load_back
    it.cache.schedule.arrange(it.queue)
    assert it.cache.schedule.stats.front == 1
    assert it.round() == [waiting]
    assert it.cache.schedule.stats.front == 0
    assert (it.counts.used, it.counts.late) == (0, 1)
    it.finish(waiting)


def test_what_goes_is_cancelled_and_counted() -> None:
    it = Ahead()
    document = it.on_host(3)
    waiting = it.arrive([*document, 7, 8], it.now)
    it.step()
    assert it.counts.started == 1
    it.step(0.1)
    it.abort(waiting)
    assert it.counts.cancelled == 1 and it.counts.wasted_bytes > 0
    assert (it.demand(), it.cache.schedule.holds) == (0, 0)
    it.step(0.1)
    it.server.check()


def test_an_aborted_request_that_others_pushed_out_of_the_window_is_kept_by_nothing() -> None:
    """Its load began while it was in the window; requests of higher priority came then."""
    it = Ahead(priority_sign=-1, hybrid_schedule_window=2)
    waiting = it.arrive([*it.on_host(3), 7, 8], it.now)
    it.step()
    assert it.counts.started == 1
    for number in range(4):
        it.arrive(run(10, 300 + number), it.now, priority=5)
    it.step(0.1)
    assert waiting not in it.cache.schedule._waiting.front
    it.abort(waiting)
    assert (len(it.loads.ahead), it.counts.cancelled) == (0, 1)
    assert waiting not in it.cache.schedule._waiting.known
    assert it.cache.schedule.stats.aborted == 1


def test_a_load_pushes_out_nothing_that_a_request_before_it_needs() -> None:
    it = Ahead()
    document = it.on_host(4)
    here = run(60, 204)  # what pushed it out is on the device
    assert it.server.probe([*here, 7]) > 0
    first = it.arrive([*here, 7, 8], it.now)
    second = it.arrive([*document, 7, 8], it.now)
    it.step()
    assert second.host_hit_length > 0
    assert it.counts.started == 0 or it.server.probe([*here, 7]) == 60
    assert it.round() == [first]
    assert first.prefix_len == 60


def test_a_load_pushes_out_what_a_request_behind_it_needs() -> None:
    """Both do not fit; the first has waited so long that its turn is next."""
    it = Ahead(hybrid_schedule_seconds=5.0)
    document, here = run(110, 5), run(60, 6)
    it.warm_all(document, run(90, 7), here)
    it.server.adder(it.queue)
    first = it.arrive([*document, 7, 8], it.now - 10)
    it.arrive([*here, 7, 8], it.now)
    it.step()
    assert first.host_hit_length == 110
    assert it.counts.started == 1
    it.step(0.1)
    assert it.server.probe([*here, 7]) == 0
    assert it.round() == [first]
    assert (it.counts.used, it.counts.on_turn, it.counts.complete) == (1, 0, 1.0)


def test_a_load_without_room_is_counted() -> None:
    """A running request holds what the load would need."""
    it = Ahead()
    document = it.on_host(8)
    running = it.arrive(run(100, 51), it.now)
    assert it.round() == [running]
    it.server.prefill_step(running)
    waiting = it.arrive([*document, 7, 8], it.now)
    it.step(1.0)
    assert waiting.host_hit_length > 0 and it.counts.started == 0
    it.server.finish(running)
    assert it.round() == [waiting]
    assert (it.counts.on_turn, it.counts.no_room, it.counts.no_time) == (1, 1, 0)
    assert it.counts.complete is None


def test_a_session_is_loaded_before_it_is_expected() -> None:
    it = Ahead()
    document = run(60, 5)
    req = it.server.arrive(document, it.now, session=Hint.after(30))
    assert it.server.admit(req)
    it.finish(req)
    it.settle()
    assert len(it.loads.returns) == 1
    it.warm_all(run(90, 6), run(60, 7))
    for _ in range(20):
        it.step(1.0)
    assert it.counts.expected == 0
    for _ in range(11):
        it.step(1.0)
    assert it.counts.expected == 1, "what pushed it out is not expected back at any time"
    assert it.server.probe([*document, 1, 2, 7]) > 60
    assert len(it.loads.returns) == 0


@pytest.mark.parametrize("seed", seeds(2))
def test_nothing_is_left_behind(seed: int) -> None:
    """Random traffic with aborts, retractions and pauses; ranks do the same."""
    ranks = [Ahead(hybrid_schedule_overtaken=4, hybrid_schedule_window=5) for _ in range(2)]
    done: list[list[Any]] = [[], []]
    for it, seen in zip(ranks, done, strict=True):
        rng = random.Random(seed)
        documents = [run(40, number) for number in range(6)]
        for number in range(200):
            what = rng.random()
            if what < 0.45 and len(it.queue) < 12:
                tokens = [*rng.choice(documents), *run(rng.randrange(1, 12), rng.randrange(20))]
                hint = Hint.after(rng.uniform(0.5, 3.0)) if rng.random() < 0.3 else None
                it.arrive(tokens, it.now, rid=str(number), session=hint)
            elif what < 0.52 and it.queue:
                it.abort(rng.choice(it.queue))
            elif what < 0.57 and it.server.running:
                it.retract(rng.choice(it.server.running))
            elif what < 0.8:
                it.begin_round()
            else:
                it.answer_running()
            it.step(rng.uniform(0.0, 0.3), arrived=rng.random() < 0.7)
            seen.append(([req.rid for req in it.queue], vars(it.counts).copy()))
        while it.queue or it.server.running:
            it.begin_round()
            it.answer_running()
            it.step(0.1)
        it.settle()
        assert (it.demand(), it.cache.schedule.holds, len(it.loads.ahead)) == (0, 0, 0)
        assert not it.loads.ahead.running and not it.cache.ongoing_load_back
        assert it.cache.schedule.stats.most_overtaken <= 4
        it.server.check()
    assert done[0] == done[1]
    assert ranks[0].counts.started > 0


def test_who_comes_back_early_is_expected_no_more() -> None:
    it = Ahead()
    session = run(60, 8)
    req = it.server.arrive(session, it.now, session=Hint.after(30))
    assert it.server.admit(req)
    it.finish(req)
    assert len(it.loads.returns) == 1
    it.warm([*session, 1, 500, 501], it.now)
    assert len(it.loads.returns) == 0
