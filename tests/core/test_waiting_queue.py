"""The request that runs next: orders, the bound on overtaking, and the cost of a round."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.core.queue.orders import (
    Car,
    FirstCome,
    Order,
    Window,
)
from sglang_hybrid.core.queue.waiting import Bound, Prospect, ReuseKind
from sglang_hybrid.core.queue.waiting_queue import Found, WaitingQueue
from tests.core.plain_queue import PlainQueue

WHOLE = 100.0
FREE = Bound()


def hit(share: float) -> Prospect:
    """A prefill of which `share` is reused."""
    reuse = ReuseKind.ON_DEVICE if share else ReuseKind.NOTHING
    return Prospect(int(1_000 * share), WHOLE * (1 - share), WHOLE, reuse)


LOADED = Prospect(900, 20.0, WHOLE, ReuseKind.TO_LOAD)


class Line:
    """A queue of named requests under one order."""

    def __init__(self, order: Order, bound: Bound = FREE, *, with_priorities: bool = False) -> None:
        self.prospects: dict[str, Prospect] = {}
        self.arrived: dict[str, float] = {}
        self.priorities: dict[str, int] = {}
        self.queue: list[str] = []
        self.looked_at = 0
        self.order: WaitingQueue[str] = WaitingQueue(
            order,
            bound,
            self._look_up,
            self.arrived.__getitem__,
            priority=self.priorities.__getitem__ if with_priorities else None,
        )

    def add(self, name: str, prospect: Prospect, now: float = 0.0, priority: int = 0) -> None:
        self.queue.append(name)
        self.prospects[name], self.arrived[name] = prospect, now
        self.priorities[name] = priority

    def arrange(self, now: float = 0.0) -> list[str]:
        self.order.arrange(self.queue, now)
        return list(self.queue)

    def run(self, name: str) -> int:
        """`name` runs; how many had overtaken it."""
        self.queue.remove(name)
        taken = self.order.on_start(name)
        return 0 if taken is None else taken.overtaken

    def _look_up(self, name: str) -> Found:
        self.looked_at += 1
        return self.prospects[name], None


def line(
    order: Order, bound: Bound = FREE, *, with_priorities: bool = False, **prospects: Prospect
) -> Line:
    made = Line(order, bound, with_priorities=with_priorities)
    for name, prospect in prospects.items():
        made.add(name, prospect)
    return made


def test_first_come_looks_at_nobody() -> None:
    waiting = line(FirstCome(), a=hit(0), b=hit(0.9))
    assert waiting.arrange() == ["a", "b"]
    assert waiting.looked_at == 0


def test_cars_classes() -> None:
    """Classes in order: on the device, nothing, to load; first-come within each (CaR III B 1)."""
    waiting = line(Car(8), load=LOADED, cold=hit(0), little=hit(0.1), cold_2=hit(0), much=hit(0.9))
    assert waiting.arrange() == ["little", "much", "cold", "cold_2", "load"]


def test_the_window_goes_by_the_part_that_remains() -> None:
    waiting = line(Window(8), load=LOADED, cold=hit(0), little=hit(0.2), third=hit(0.3))
    waiting.add("long", Prospect(9_000, 9.0, 100.0, ReuseKind.ON_DEVICE))
    waiting.add("short", Prospect(85, 1.5, 10.0, ReuseKind.ON_DEVICE))
    assert waiting.arrange() == ["long", "short", "third", "load", "cold", "little"]


@pytest.mark.parametrize("with_priorities", [False, True])
def test_who_is_in_the_window_stays_in(with_priorities: bool) -> None:
    waiting = line(Window(2), with_priorities=with_priorities, cold=hit(0), cold_2=hit(0))
    assert waiting.arrange() == ["cold", "cold_2"]
    waiting.add("hit", hit(0.9))
    assert waiting.arrange() == ["cold", "cold_2", "hit"]
    waiting.run("cold")
    assert waiting.arrange() == ["hit", "cold_2"]


def test_priorities_are_above_all() -> None:
    waiting = line(Window(2), with_priorities=True, hit=hit(0.9))
    waiting.add("urgent", hit(0), priority=-1)
    waiting.add("hit_2", hit(0.95))
    assert waiting.arrange() == ["urgent", "hit", "hit_2"]
    assert waiting.run("urgent") == 0
    waiting.arrange()
    assert waiting.run("hit_2") == 0
    assert waiting.run("hit") == 1, "only hit_2 has its priority"


def test_who_urgent_requests_push_out_of_the_window_is_the_latest() -> None:
    """No request behind the window can then be overtaken by one in it."""
    waiting = line(Window(2), with_priorities=True, cold=hit(0), warm=hit(0.9))
    assert waiting.arrange() == ["warm", "cold"]
    waiting.add("urgent", hit(0), priority=-1)
    assert waiting.arrange() == ["urgent", "cold", "warm"]
    assert not waiting.order.can_run("warm")


def test_a_stream_of_hits_and_one_cold_request() -> None:
    """The cold one runs after `times` hits."""
    waiting = line(Window(4), Bound(times=3), cold=hit(0))
    for number in range(10):
        waiting.add(str(number), hit(0.9))
    ran = []
    while waiting.queue:
        ran.append(waiting.arrange()[0])
        waiting.run(ran[-1])
    assert ran.index("cold") == 3
    assert ran[:3] == ["0", "1", "2"]


def test_whoever_waited_long_is_overtaken_no_more() -> None:
    waiting = line(Window(4), Bound(seconds=10.0), cold=hit(0), cold_2=hit(0))
    waiting.add("hit", hit(0.9), now=9.0)
    assert waiting.arrange(now=9.9) == ["hit", "cold", "cold_2"]
    assert waiting.arrange(now=10.0) == ["cold", "cold_2", "hit"]


def test_who_was_passed_over_stops_the_rest_when_it_is_due() -> None:
    """`cold` is first and cannot run yet: it waits for a prefix."""
    waiting = line(Window(4), Bound(times=1), cold=hit(0), a=hit(0.9), b=hit(0.9))
    assert waiting.arrange()[0] == "a"
    assert waiting.order.can_run("a")
    waiting.run("a")
    assert waiting.arrange() == ["cold", "b"]
    assert not waiting.order.can_run("b")
    assert not waiting.order.can_run("somebody behind the front")
    assert waiting.order.can_run("cold")


def test_an_aborted_request_overtakes_nobody() -> None:
    waiting = line(Window(4), cold=hit(0), a=hit(0.9))
    waiting.arrange()
    waiting.queue.remove("a")
    waiting.order.on_abort("a")
    assert waiting.run("cold") == 0


def test_a_round_looks_at_the_window_only() -> None:
    waiting = line(Window(16))
    for number in range(1_000):
        waiting.add(str(number), hit(number % 10 / 10))
    waiting.arrange()
    waiting.arrange()
    assert waiting.looked_at == 32


shares = st.sampled_from([0.0, 0.0, 0.2, 0.5, 0.9, 0.95])
arrivals = st.lists(st.tuples(shares, st.integers(0, 3), st.booleans()), max_size=60)
ORDERS = [Window(5), Car(5), Window(64)]


@settings(max_examples=200, deadline=None)
@given(
    arrivals,
    st.sampled_from(ORDERS),
    st.integers(0, 6),
    st.sampled_from([math.inf, 4.0, 20.0]),
    st.booleans(),
)
def test_nobody_is_overtaken_beyond_the_bound(
    events: list[tuple[float, int, bool]],
    order: Order,
    times: int,
    seconds: float,
    with_priorities: bool,
) -> None:
    """Under any mix of arrivals, batches, requests that are passed over and aborts. The plain twin
    counts who overtook whom, and gives the same order.
    """
    bound = Bound(times, seconds)
    waiting = Line(order, bound, with_priorities=with_priorities)
    twin = PlainQueue(order, bound)
    for now, (share, runs, passed_over) in enumerate([*events, *[(0.0, 2, False)] * 40]):
        name = str(now)
        if now < len(events):
            priority = now % 2 if with_priorities else 0
            waiting.add(name, hit(share), float(now), priority)
            twin.add(name, hit(share), float(now), priority)
        tried = waiting.arrange(float(now))
        count = order.front(len(tried))
        assert tried[:count] == twin.arrange(float(now), count)
        for name in tried[passed_over : passed_over + runs]:
            assert waiting.order.can_run(name) == twin.can_run(name)
            if waiting.order.can_run(name):
                assert waiting.run(name) == twin.run(name, float(now)) <= times


def test_a_bound_is_reached_at_its_numbers() -> None:
    waiting = line(Window(4), a=hit(0))
    waiting.arrange()
    (record,) = waiting.order.front.values()
    assert not Bound(1, 1.0).reached(record, 0.5)
    assert Bound(0, 1.0).reached(record, 0.5)
    assert Bound(1, 1.0).reached(record, 1.0)
    assert hit(0.25).share == pytest.approx(0.75)
