"""The queue over a device with a host behind it: what must be loaded comes last, and nothing is
held when its request has gone.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import Schedule
from tests.cache.driver import Sizes
from tests.cache.queue.test_queue import Scheduler
from tests.cache.test_rules import run
from tests.cache.tiers import TieredServer, build_tiered_cache

SIZES = Sizes(states=7, kv=160, rows=6, context=128)


class TieredScheduler(Scheduler):
    """A scheduler over a tiered server."""

    def __init__(self, schedule: Schedule = Schedule.WINDOW, **flags: Any) -> None:
        options = HybridConfig(hybrid_schedule=schedule, **flags)
        self.server = TieredServer(build_tiered_cache(SIZES, options), SIZES)
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


@pytest.mark.parametrize("schedule", [Schedule.WINDOW, Schedule.CAR])
def test_what_must_be_loaded_does_not_come_first(schedule: Schedule) -> None:
    """In the window it is first-come, with what reuses nothing; in CaR it is last."""
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


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_left_behind_with_a_host(seed: int) -> None:
    rng = random.Random(seed)
    it = TieredScheduler(hybrid_schedule_overtaken=4, hybrid_schedule_window=5)
    documents = [run(40, number) for number in range(5)]
    for step in range(150):
        what = rng.random()
        if what < 0.5:
            it.arrive([*rng.choice(documents), *run(rng.randrange(1, 12), rng.randrange(20))], step)
        elif what < 0.6 and it.queue:
            it.abort(rng.choice(it.queue))
        elif not it.server.running:
            for req in it.round():
                it.finish(req)
        it.server.poll()
    while it.queue:
        for req in it.round():
            it.finish(req)
        it.server.poll()
    schedule = it.cache.schedule
    assert schedule.stats.started["to_load"] + schedule.stats.started["on_device"] > 0
    assert schedule.stats.most_overtaken <= 4
    assert (it.standings(), schedule.holds) == (0, 0)
