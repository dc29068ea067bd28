"""When loads start: CaR's formula, its form for several loads, predicted lengths, and counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.queue.lengths import AnswerLengths
from sglang_hybrid.core.queue.load_times import Decoding, free_places, latest_starts
from sglang_hybrid.core.queue.loads import MOST_AHEAD, LoadsAhead

INF = math.inf


def fetch(free_in: float, size: float, bandwidth: float) -> bool:
    """CaR's fetch(t) for one load of `size` bytes, as the paper writes it: whether it starts now.
    free_in: seconds until the next running request is expected to end.
    """
    return free_in <= size / bandwidth


class Device:
    """Waiting requests by name, with the bytes that each must load. Prefills take no time.

    full: requests for which there is no room. begun: loads that began, with the requests before.
    """

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes
        self.full: set[str] = set()
        self.begun: list[tuple[str, list[str]]] = []
        self.loads: LoadsAhead[str] = LoadsAhead(self, margin=0.0, per_token=1.0, places=3)

    def load_bytes(self, name: str) -> int:
        return self.sizes[name]

    def prefill_seconds(self, name: str) -> float:
        return 0.0

    def begin_load(self, name: str, before: Sequence[str]) -> tuple[int, bool]:
        if name in self.full:
            return 0, False
        self.begun.append((name, list(before)))
        return self.sizes[name], True

    def begin_due(self, free_in: float = 0.0) -> tuple[list[str], float]:
        """Begin due loads, at 100 bytes a second, on a server that prefills `free_in` seconds."""
        return self.loads.begin_due(list(self.sizes), 0.0, 100.0, busy=free_in)

    def arrive(self, name: str) -> None:
        """Note that the bytes for `name` are on the device, so it need not load them."""
        self.sizes[name] = 0
        self.loads.on_arrival(name)

    def turn(self, name: str, *, had_time: bool = True) -> None:
        self.loads.on_turn(name, self.sizes.pop(name), had_time=had_time)


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
    assert Decoding(0.0, 10).seconds_left(now=5.0, per_token=0.1) == 0.1


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


def test_loads_begin_when_they_would_end_late_otherwise() -> None:
    device = Device(a=100, none=0, b=300, c=100)
    assert device.begin_due(10.0) == ([], 6.0), "b takes 3 s, a 1 s before it"
    assert device.begin_due(4.0) == (["a"], 1.0)
    assert device.loads.is_under_way("a")
    assert device.begin_due(3.0) == (["b"], INF), "c has no place"
    assert device.begun == [("a", []), ("b", ["a", "none"])]


def test_a_margin_and_running_requests_move_the_start() -> None:
    device = Device(a=100)
    device.loads.places = 1
    device.loads.on_decode("running", ["t"], 10, since=-4.0)
    assert device.begin_due() == ([], 5.0), "6 of 10 tokens are to come, at 1 s each"
    device.loads.margin = 5.0
    assert device.begin_due() == (["a"], INF)


def test_only_the_front_is_looked_at() -> None:
    device = Device(**{str(number): 0 for number in range(MOST_AHEAD)}, behind=100)
    device.loads.places = 100
    assert device.begin_due() == ([], INF)


def test_a_load_is_used_late_or_in_vain() -> None:
    device = Device(used=100, late=300, gone=100, gone_early=100)
    loads = device.loads
    loads.places = 4
    assert device.begin_due()[0] == ["used", "late", "gone", "gone_early"]
    device.arrive("used")
    device.arrive("gone")
    device.sizes["late"] = 0  # it is in the tree, but has not arrived
    device.turn("used")
    device.turn("late")
    for _ in range(2):
        loads.cancel("gone")
        loads.cancel("gone_early")
    counts = loads.counts
    assert (counts.started, counts.used, counts.late, counts.cancelled) == (4, 1, 1, 2)
    assert (counts.loaded_bytes, counts.wasted_bytes, len(loads)) == (500, 100, 0)


def test_what_was_evicted_before_its_turn_may_be_loaded_again() -> None:
    device = Device(a=100)
    device.begin_due()
    device.loads.cancel_evicted(["a"])
    assert device.begin_due() == ([], INF), "it is under way"
    device.loads.on_all_arrived()
    assert device.begin_due() == ([], INF), "it was complete once"
    device.loads.cancel_evicted(["a"])
    assert device.begin_due() == (["a"], INF)
    assert (device.loads.counts.cancelled, device.loads.counts.wasted_bytes) == (1, 100)


def test_loads_on_the_turn_had_no_time_or_no_room_or_were_missed() -> None:
    device = Device(room_again=100, no_room=100, no_room_no_time=100)
    counts = device.loads.counts
    assert counts.complete is None
    device.full = set(device.sizes)
    device.begin_due()
    device.full.remove("room_again")
    device.begin_due()
    assert counts.started == 1
    device.loads.on_arrival("room_again")  # and is evicted again
    device.turn("room_again")
    device.turn("no_room")
    device.turn("no_room_no_time", had_time=False)
    assert (counts.on_turn, counts.no_time, counts.no_room) == (3, 1, 1)
    assert (counts.cancelled, counts.wasted_bytes, counts.complete) == (1, counts.loaded_bytes, 0.0)
    device.sizes = {"a": 100, "b": 100}
    device.begin_due()
    for name in ("a", "b"):
        device.arrive(name)
        device.turn(name)
    assert (counts.loads, counts.complete) == (5, pytest.approx(2 / 3))
    assert counts.wasted_bytes * 3 == counts.loaded_bytes


def test_what_left_had_no_room_for_itself_only() -> None:
    device = Device(x=100)
    device.full = {"x"}
    device.begin_due()
    device.loads.cancel("x")
    device.turn("x")
    assert device.loads.counts.no_room == 0


def test_lengths_are_those_of_the_conversation_then_the_schema_then_the_tenant() -> None:
    lengths = AnswerLengths()
    keys = [("t", "chat", 1), ("t", "schema"), ("t",)]
    assert lengths.predict(keys, 512) == 512
    for tokens in (10, 20, 30):
        lengths.on_request_end([("t", "chat", 2), ("t",)], tokens)
    assert lengths.predict(keys, 512) == pytest.approx(20, rel=0.05)
    for _ in range(3):
        lengths.on_request_end(keys, 200)
    assert lengths.predict(keys, 512) == pytest.approx(200)
    assert lengths.predict(keys, 64) == 64
    assert lengths.predict([("other",)], 512) == 512, "other tenants' answers say nothing"


def test_old_answers_fade_and_few_keys_are_kept() -> None:
    lengths = AnswerLengths(most_keys=2)
    for tokens in [10] * 100 + [1_000] * 64:
        lengths.on_request_end(["x"], tokens)
    assert lengths.predict(["x"], 10_000) > 700
    lengths.on_request_end(["y"], 1)
    lengths.on_request_end(["z"], 1)
    assert len(lengths) == 2
    assert lengths.predict(["x"], 10_000) == 10_000
