"""SGLang's queue in our order, on the real cache and pools, without a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome

from sglang_hybrid.cache.queue.clock import ClockTick
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import Schedule
from tests.cache.driver import Server, Sizes
from tests.cache.test_rules import run
from tests.examples import seeds


class Scheduler:
    """A server with a waiting queue, whose rounds are SGLang's (get_new_batch_prefill)."""

    def __init__(
        self, schedule: Schedule = Schedule.WINDOW, sizes: Sizes | None = None, **more: Any
    ) -> None:
        sizes = sizes or Sizes(kv=2_048, states=24)
        flags = {name: more.pop(name) for name in list(more) if name.startswith("hybrid")}
        options = HybridConfig(hybrid_schedule=schedule, **flags)
        self.server = Server.on(sizes, options, **more)
        self.cache: Any = self.server.cache
        self.queue: list[Req] = []

    def warm(self, tokens: Sequence[int], stamp: float = 0.0) -> None:
        """`tokens` and the answer 7 are cached; nothing is counted."""
        self.server.serve(tokens, [7], stamp)
        self.cache.schedule.stats.started.clear()

    def arrive(self, tokens: Sequence[int], stamp: float = 0.0, **more: Any) -> Req:
        priority = more.pop("priority", 0)
        req = self.server.arrive(tokens, stamp, **more)
        req.priority = priority
        self.queue.append(req)
        return req

    def round(self, most: int = 1) -> list[Req]:
        """Admit at most so many; returns them."""
        adder = self.server.adder(self.queue)
        for req in list(self.queue):
            if len(adder.can_run_list) == most:
                break
            req.init_next_round_input(self.cache)
            result = adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
            if result is not AddReqResult.CONTINUE:
                if req not in adder.can_run_list:
                    self.server.send_back(req)
                break
        for req in adder.can_run_list:
            self.queue.remove(req)
            self.server.running.append(req)
        return list(adder.can_run_list)

    def finish(self, req: Req) -> None:
        self.server.complete(req, [1, 2])

    def answer_running(self, chance: Callable[[], bool] = lambda: True) -> None:
        """Requests whose prefill is done get their answers and end, each by chance."""
        for req in list(self.server.running):
            if chance():
                self.server.decode(req, [1, 2])
                self.server.finish(req)

    def begin_round(self, most: int = 1) -> None:
        """A round, and the prefills of those that it admits."""
        for req in self.round(most):
            self.server.prefill_step(req)

    def retract(self, req: Req) -> None:
        """If it runs, it waits again."""
        if req.kv.holds_kv:
            self.queue.append(self.server.retract(req))

    def abort(self, req: Req) -> None:
        """It waits, and its client goes away (scheduler.py, abort_request)."""
        self.queue.remove(req)
        self.cache.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)

    def demand(self) -> int:
        return sum(node.demand for node in self.cache.shadow_tree.tree.walk())


def test_sglang_orders_the_queue_by_default() -> None:
    assert Scheduler(Schedule.SGLANG).cache.schedule is None
    assert Scheduler(Schedule.LPM).cache.schedule is None


@pytest.mark.parametrize("schedule", [Schedule.WINDOW, Schedule.CAR])
def test_what_is_cached_runs_before_what_is_not(schedule: Schedule) -> None:
    it = Scheduler(schedule)
    document = run(100)
    it.warm([*document, *run(10, 1)])
    cold = it.arrive(run(80, 2))
    warm = it.arrive([*document, *run(10, 1), 7, 8])
    assert it.round() == [warm]
    assert it.cache.schedule.stats.started == {"on_device": 1}
    assert it.round() == [cold]
    assert it.cache.schedule.stats.started == {"on_device": 1, "nothing": 1}
    assert it.cache.schedule.stats.most_overtaken == 1


def test_kv_without_a_state_is_no_reuse() -> None:
    """SGLang's `lpm` would not rank it either; CaR would call it the first class."""
    it = Scheduler(sizes=Sizes(kv=2_048, states=8), hybrid_schedule_window=4)
    document = run(100)
    it.warm([*document, *run(10, 1)])
    shared = it.arrive([*document[:50], *run(30, 3)])  # KV reaches to 50, no state is there
    it.round()
    assert it.cache.schedule.stats.started == {"nothing": 1}
    it.finish(shared)


def test_siblings_run_behind_the_one_that_leaves_their_checkpoint() -> None:
    it = Scheduler()
    document = run(200)
    siblings = [it.arrive([*document, *run(10, seed)]) for seed in range(1, 4)]
    assert it.round(most=3) == siblings[:1]
    assert it.round(most=3) == [], "they wait for its checkpoint"
    it.finish(siblings[0])
    assert it.round(most=3) == siblings[1:]
    assert [req.prefix_len for req in siblings[1:]] == [200, 200]


def test_health_probes_are_not_counted() -> None:
    it = Scheduler()
    it.arrive(run(10), rid=f"{HEALTH_CHECK_RID_PREFIX}_1")
    it.arrive(run(20, 1))
    assert len(it.round(2)) == 2
    assert it.cache.schedule.stats.started == {"nothing": 1}


def test_a_stream_of_hits_does_not_starve_a_cold_request() -> None:
    it = Scheduler(hybrid_schedule_overtaken=5)
    document = run(100)
    it.warm(document)
    cold = it.arrive(run(90, 9))
    for number in range(20):
        it.arrive([*document, 7, number])
        (ran,) = it.round()
        it.finish(ran)
        if ran is cold:
            break
    assert number == 5
    assert it.cache.schedule.stats.most_overtaken == 5
    assert it.cache.schedule.stats.bound_reached == {"overtaken": 1}


def test_time_bounds_a_wait_on_the_clock_of_all_ranks() -> None:
    it = Scheduler(hybrid_schedule_seconds=10.0)
    document = run(100)
    it.warm(document, stamp=1.0)
    cold = it.arrive(run(90, 9), stamp=100.0)
    warm = it.arrive([*document, 7, 8], stamp=101.0)
    ((_, tick),) = it.cache.step_clock.handlers()
    tick(ClockTick(109.9))
    it.cache.schedule.arrange(it.queue)
    assert it.queue == [warm, cold]
    tick(ClockTick(110.0))
    assert it.round() == [cold]


def test_priorities_are_above_the_window() -> None:
    it = Scheduler(priority_sign=-1)
    document = run(100)
    it.warm(document)
    warm = it.arrive([*document, 7, 8], priority=0)
    urgent = it.arrive(run(90, 9), priority=5)
    assert it.round() == [urgent]
    assert it.round() == [warm]
    assert it.cache.schedule.stats.most_overtaken == 0


def test_what_the_window_needs_is_evicted_last() -> None:
    it = Scheduler(sizes=Sizes(kv=400, states=24))
    wanted, idle = run(100, 1), run(100, 2)
    it.warm(wanted)
    for _ in range(3):
        it.warm(idle)  # by itself the idle one is worth more
    large = it.arrive(run(250, 3))
    assert it.round() == [large]
    waiting = it.arrive([*wanted, 7, 8])
    it.cache.schedule.arrange(it.queue)
    assert it.demand() == 1
    it.finish(large)
    assert it.server.probe([*wanted, 7, 8]) == 100
    assert it.server.probe([*idle, 7, 8]) == 0
    assert it.round() == [waiting]
    assert it.demand() == 2
    it.finish(waiting)
    assert it.demand() == 0


def test_an_abort_gives_up_its_demand_without_a_round() -> None:
    it = Scheduler()
    it.warm(run(100))
    req = it.arrive([*run(100), 7, 8])
    it.cache.schedule.arrange(it.queue)
    assert it.demand() == 1
    it.abort(req)
    assert (it.demand(), it.cache.schedule.holds) == (0, 0)
    assert it.cache.schedule.stats.aborted == 1


def test_a_flush_forgets_what_waiting_requests_hold() -> None:
    it = Scheduler()
    it.warm(run(100))
    req = it.arrive([*run(100), 7, 8])
    it.cache.schedule.arrange(it.queue)
    assert (it.demand(), it.cache.schedule.holds) == (1, 1)
    it.server.flush()
    assert (it.demand(), it.cache.schedule.holds) == (0, 0)
    assert it.round() == [req] and req.prefix_len == 0
    it.finish(req)
    it.server.check()


@pytest.mark.parametrize("one_memory", [False, True])
@pytest.mark.parametrize("seed", seeds(2))
def test_nothing_is_left_behind(seed: int, one_memory: bool) -> None:
    """Random traffic with aborts while waiting and while running, retractions, pauses (rounds in
    which nothing is admitted) and a flush. Nobody is overtaken beyond the bound.
    """
    rng = random.Random(seed)
    sizes = Sizes(kv=700, states=20, one_memory=one_memory)
    it = Scheduler(
        sizes=sizes,
        hybrid_schedule_overtaken=4,
        hybrid_schedule_window=6,
        priority_sign=1 if seed % 2 else None,
    )
    documents = [run(60, seed) for seed in range(4)]
    for step in range(250):
        what = rng.random()
        if what < 0.5:
            tokens = [*rng.choice(documents), *run(rng.randrange(1, 60), rng.randrange(30))]
            it.arrive(tokens, float(step), priority=rng.randrange(2))
        elif what < 0.55 and it.queue:
            it.abort(rng.choice(it.queue))
        elif what < 0.6:
            it.cache.schedule.arrange(it.queue)
        elif what < 0.7 and it.server.running:
            req = rng.choice(it.server.running)
            if req.kv.holds_kv:
                it.server.abort(req)
        elif what < 0.8 and it.server.running:
            it.retract(rng.choice(it.server.running))
        else:
            it.begin_round(most=3)
            it.answer_running(lambda: rng.random() < 0.5)
        it.server.check()
    while it.queue or it.server.running:
        it.begin_round(most=3)
        it.answer_running()
    assert it.cache.schedule.stats.most_overtaken <= 4
    assert (it.demand(), it.cache.schedule.holds) == (0, 0)
    it.server.flush()
    assert it.cache.schedule.holds == 0


def test_two_ranks_arrange_alike() -> None:
    """Ranks whose own clocks and objects differ, with the same arrivals and ticks."""
    ranks = [Scheduler(hybrid_schedule_seconds=20.0) for _ in range(2)]
    rng = random.Random(5)
    documents = [run(60, seed) for seed in range(3)]
    for step in range(80):
        tokens = [*rng.choice(documents), *run(rng.randrange(1, 40), rng.randrange(50))]
        orders = []
        for it in ranks:
            it.arrive(tokens, 100.0 + step, rid=str(step))
            it.cache.schedule.clock.tick(ClockTick(100.5 + step))
            for req in it.round() if step % 3 else []:
                it.finish(req)
            orders.append([req.rid for req in it.queue])
        assert orders[0] == orders[1]


@pytest.mark.parametrize("seed", seeds(2))
def test_what_others_send_does_not_change_a_tenants_own_order(seed: int) -> None:
    """Requests of one tenant run in the same order among themselves, and find the same, with
    another tenant's in the queue and in the cache: of those it learns no more than the time they
    take.
    """
    found = []
    for others in (False, True):
        rng, noise = random.Random(seed), random.Random(seed + 100)
        it = Scheduler(sizes=Sizes(kv=8_192, states=60), hybrid_schedule_overtaken=1_000)
        documents = [run(60, number) for number in range(4)]
        mine: list[Req] = []
        for number in range(30):
            if number < 4:
                it.server.serve(documents[number], [7], cache_salt="a")
                if others:  # the same documents, in other states
                    part = documents[number][: noise.randrange(9, 50)]
                    it.server.serve(part, [7], cache_salt="b")
            tokens = [*rng.choice(documents), *run(rng.randrange(1, 40), rng.randrange(30))]
            mine.append(it.arrive(tokens, 100.0 + number, cache_salt="a"))
            if others:
                tokens = [*noise.choice(documents), *run(noise.randrange(1, 40), number)]
                it.arrive(tokens, 100.5 + number, cache_salt="b")
        started = []
        while it.queue:
            for req in it.round():
                if req in mine:
                    started.append((mine.index(req), req.prefix_len))
                it.finish(req)
        found.append(started)
    assert found[0] == found[1]
    assert len(found[0]) == 30 and any(hit for _, hit in found[0])
