"""The reuse index: hazards and rates against plain loops, and what it learns from known traffic."""

from __future__ import annotations

import copy
import heapq
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.returns import hazards, reuse
from sglang_hybrid.core.returns.answers import BUCKETS as ANSWERS
from sglang_hybrid.core.returns.departures import PRIOR
from sglang_hybrid.core.returns.hazards import (
    BEFORE_END,
    BINS,
    CLASSES,
    DEPTHS,
    FIRST_GUESS,
    INTERVAL_BUCKETS,
    NEVER_REUSED,
    PRIOR_WEIGHT,
    TURNS,
    ClassTree,
    best_rates,
    reuse_class_of,
)
from sglang_hybrid.core.returns.intervals import IntervalCounts
from sglang_hybrid.core.returns.reuse import (
    LEAST_FOR_EXPONENT,
    LONG,
    MICROSECONDS,
    REBUILD_EVERY,
    ReuseIndex,
)
from tests.examples import examples, seeds


def features(reuse_class: int) -> tuple[int, int, int, int, int]:
    rest, turn = divmod(reuse_class, TURNS)
    rest, interval_bucket = divmod(rest, INTERVAL_BUCKETS)
    rest, answer = divmod(rest, ANSWERS)
    return *divmod(rest, DEPTHS), answer, interval_bucket, turn


def test_classes() -> None:
    assert features(reuse_class_of(0, 1, 0)) == (0, 0, 0, 0, 0)
    assert features(reuse_class_of(1, 64, 3, 2, 1)) == (1, 0, 1, 2, 3)
    assert features(reuse_class_of(2, 65, 6, 8, 3)) == (2, 1, 3, 8, 6)
    last = reuse_class_of(50, 10**7, 99, INTERVAL_BUCKETS - 1, ANSWERS - 1)
    assert features(last) == (2, DEPTHS - 1, ANSWERS - 1, INTERVAL_BUCKETS - 1, TURNS - 1)
    assert last == CLASSES - 1


def plain_hazard(
    known: dict[int, tuple[np.ndarray, np.ndarray]], reuse_class: int, bin_: int
) -> float:
    """Kaplan-Meier by counting, shrunk up the chain of coarser classes."""
    of = features(reuse_class)
    hazard = FIRST_GUESS
    answers_tell = any(features(c)[2] for c in known)
    for kept in range(6):
        if kept == 3 and not answers_tell:
            continue
        same = [c for c in known if features(c)[:kept] == of[:kept]]
        events = sum(known[c][0][bin_] for c in same)
        exposed = sum(counts[bin_:].sum() for c in same for counts in known[c])
        hazard = (events + PRIOR_WEIGHT * hazard) / (exposed + PRIOR_WEIGHT)
    return hazard


@examples(15)
@given(
    seed=st.integers(0, 10**6),
    classes=st.sets(st.integers(0, CLASSES - 1), max_size=30),
    other=st.integers(0, CLASSES - 1),
)
def test_hazards_are_kaplan_meier_with_shrinkage(seed: int, classes: set[int], other: int) -> None:
    rng = np.random.default_rng(seed)
    order = sorted(classes)
    counts = rng.integers(0, 3, (2, 2, len(order), BINS)).astype(float)
    tree = ClassTree(np.array(order, dtype=np.int64))
    estimates, row = tree.hazards(counts[:, 0], counts[:, 1]), tree.row
    for rows, (ended, unended) in zip(estimates, counts, strict=True):
        known = dict(zip(order, zip(ended, unended, strict=True), strict=True))
        for reuse_class in (other, *order):
            expected = [plain_hazard(known, reuse_class, bin_) for bin_ in range(BINS)]
            assert rows[row[reuse_class]] == pytest.approx(expected)


@examples(20)
@given(
    rows=st.lists(st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0]), min_size=6, max_size=6)),
    widths=st.lists(st.floats(0.1, 10), min_size=6, max_size=6),
)
def test_best_rates_try_every_horizon(rows: list[list[float]], widths: list[float]) -> None:
    rates = best_rates(np.array(rows).reshape(-1, 6), np.array(widths))
    for row, hazard in enumerate(rows):
        for start in range(6):
            best, alive, time = 0.0, 1.0, 0.0
            for i in range(start, 6):
                time += alive * widths[i] * (1 - hazard[i] / 2)
                alive *= 1 - hazard[i]
                best = max(best, (1 - alive) / time)
            assert rates[row, start] == pytest.approx(best)


@pytest.mark.parametrize("unit", [0.125, 1.0])
def test_ages_fall_into_the_same_bins_one_by_one_and_together(unit: float) -> None:
    index = ReuseIndex(unit)
    edges = unit * 2.0 ** np.arange(-2, BINS + 3)
    ages = np.concatenate([[-1.0, 0.0], edges, np.nextafter(edges, 0), np.nextafter(edges, 1e300)])
    index.open(0, 0.0)
    index.on_request(0.0)
    weights, expiry = index.weights(np.zeros(len(ages), dtype=np.int64), ages)
    many = np.tile(ages, 1 + LEAST_FOR_EXPONENT // len(ages))
    again, _ = index.weights(np.zeros(len(many), dtype=np.int64), many)
    assert (again.reshape(-1, len(ages)) == weights).all()
    for age, weight, until in zip(ages.tolist(), weights, expiry, strict=True):
        assert (weight, until) == index.weight_until(0, age)
    assert len(set(weights.tolist())) > 1


def test_a_unit_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match=r"power of two, not 0\.3"):
        ReuseIndex(unit=0.3)


def test_an_index_that_knows_nothing_guesses() -> None:
    """The less the older, for all alike; nothing is resumed nowhere."""
    index = ReuseIndex(unit=1.0)
    assert index.weight(5, 3.0) == 0
    index.on_request(10.0)
    weights = [index.weight(5, age) for age in (1.0, 3.0, 100.0, 1000.0)]
    assert weights == sorted(weights, reverse=True)
    assert weights[-1] > 0
    assert weights == [
        index.weight(reuse_class_of(2, 5000, 3), age) for age in (1.0, 3.0, 100.0, 1000.0)
    ]
    assert index.weight_until(NEVER_REUSED, 3.0) == (0, np.inf)


def test_pace_tells_intervals_apart_in_steps_of_four() -> None:
    index = ReuseIndex(unit=1.0)
    assert [index.interval_bucket(gap) for gap in (0.0, 3.9, 4.0, 15.9, 16.0, 1e9)] == [
        1,
        1,
        2,
        2,
        3,
        INTERVAL_BUCKETS - 1,
    ]


def test_memoryless_returns_have_one_rate_at_every_age() -> None:
    rng = np.random.default_rng(1)
    index = ReuseIndex(unit=1.0)
    interval_id, now = index.open(7, 0.0), 0.0
    for gap in rng.exponential(100.0, 20_000):
        now += gap
        index.on_return(interval_id, now)
    index.rebuild()
    for age in (0.0, 20.0, 100.0, 200.0):
        assert index.weight(7, age) == pytest.approx(0.01, rel=0.15)


def test_a_return_that_is_due_is_worth_more_than_one_that_is_far_off() -> None:
    index = ReuseIndex(unit=1.0)
    for _ in range(100):
        index.on_return(index.open(7, 0.0), 60.0)
    index.rebuild()
    weights = [index.weight(7, age) for age in (0.0, 20.0, 40.0, 50.0)]
    assert weights == sorted(weights)
    assert weights[-1] > 2 * weights[0]
    assert index.weight(7, 500.0) < 0.1 * weights[0]


def test_open_and_forgotten_intervals_lower_the_hazard() -> None:
    """Nine of ten never come back. Whether they still wait or were forgotten must not matter."""

    def weight(forget: bool) -> float:
        index = ReuseIndex(unit=1.0)
        for i in range(1000):
            interval_id = index.open(7, 0.0)
            if i % 10 == 0:
                index.on_return(interval_id, 30.0)
                index.close(interval_id)
            elif forget:
                index.on_request(1000.0)
                index.close(interval_id)
        index.on_request(1000.0)
        index.rebuild()
        return index.weight(7, 0.0)

    assert weight(forget=True) == pytest.approx(weight(forget=False), rel=0.15)
    assert weight(forget=False) == pytest.approx(0.1 / 30, rel=0.3)


def test_a_new_class_borrows_from_its_relatives() -> None:
    index = ReuseIndex(unit=1.0)
    for _ in range(500):
        index.on_return(index.open(reuse_class_of(2, 1000, 1), 0.0), 10.0)
        index.open(reuse_class_of(0, 1000, 1), 0.0)
    index.on_request(5000.0)
    index.rebuild()
    fork, leaf = (index.weight(reuse_class_of(n, 1000, 5), 5.0) for n in (2, 0))
    assert fork > 10 * leaf


def test_the_probability_of_a_return_is_the_share_of_a_class_that_returned() -> None:
    """Three of four come back within 10 s, the others never; of another class nobody does."""
    index = ReuseIndex(unit=1.0)
    often, never = reuse_class_of(0, 1_000, 1), reuse_class_of(1, 10, 0)
    assert index.return_probability(never, 0.0) == 1.0, "nothing is known yet"
    for number in range(400):
        index.on_request(float(number))
        index.open(never, float(number))
        interval_id = index.open(often, float(number))
        if number % 4:
            index.on_return(interval_id, number + 10.0)
            index.close(interval_id)
    index.rebuild()
    assert index.return_probability(often, 0.0) == pytest.approx(0.75, abs=0.05)
    assert index.return_probability(often, 100.0) < 0.2
    assert index.return_probability(never, 0.0) < 0.02
    assert index.return_probability(NEVER_REUSED, 0.0) == 0.0


def test_positions_on_the_way_are_worth_what_leaves_there() -> None:
    """40 requests left at an end or before it, 30 of them before it."""
    index, end = ReuseIndex(unit=1.0), reuse_class_of(0, 500, 1)
    for number in range(40):
        index.on_request(float(number))
        index.on_return(index.open(end, float(number)), number + 4.0)
    index.rebuild()
    assert index.weight_until(BEFORE_END + end, 3.0) == (0, np.inf)
    assert index.return_probability(BEFORE_END + end, 3.0) == 0.0
    for number in range(40):
        index.on_departure(before=number % 4 > 0)
    assert index.weight(BEFORE_END + end, 3.0) == 0, "not before the next rebuilding"
    index.rebuild()
    share = index.weight(BEFORE_END + end, 3.0) / index.weight(end, 3.0)
    assert share == pytest.approx(30 / (10 + PRIOR), rel=0.1)  # some have faded
    assert 0 < index.return_probability(BEFORE_END + end, 3.0) <= 1
    classes = np.array([end, BEFORE_END + end, NEVER_REUSED])
    one_by_one = [index.weight_until(reuse_class, 3.0) for reuse_class in classes.tolist()]
    weights, until = index.weights(classes, np.full(3, 3.0))
    assert list(zip(weights.tolist(), until.tolist(), strict=True)) == one_by_one


def test_vector_and_scalar_weights_agree_until_they_expire() -> None:
    index = ReuseIndex(unit=0.125)
    rng = np.random.default_rng(3)
    for _ in range(500):
        index.on_return(index.open(int(rng.integers(CLASSES)), 0.0), float(rng.exponential(50)))
    index.rebuild()
    reuse_classes, ages = rng.integers(0, CLASSES, 200), rng.exponential(50, 200)
    weights, until = index.weights(reuse_classes, ages)
    for reuse_class, age, weight, end in zip(reuse_classes, ages, weights, until, strict=True):
        assert index.weight(int(reuse_class), float(age)) == weight
        assert end > age
        last = age + 1000 if np.isinf(end) else np.nextafter(end, 0)
        assert index.weight(int(reuse_class), float(last)) == weight


def test_the_table_is_rebuilt_often_at_first_then_every_some_requests() -> None:
    index = ReuseIndex(unit=1.0)
    rebuilt = []
    for request in range(1000):
        version = index.version
        index.on_request(float(request))
        if index.version != version:
            rebuilt.append(request)
    gaps = np.diff(rebuilt)
    assert rebuilt[0] == 0
    assert gaps.max() == gaps[-1] == REBUILD_EVERY
    assert gaps[0] < 3


class PlainIndex:
    """All intervals that ever were, in a list, and from them the table by its definition."""

    def __init__(self) -> None:
        self.index = ReuseIndex(1.0)
        self.now = 0.0
        self.open: dict[int, Interval] = {}
        self.every: list[Interval] = []
        self.seen: set[int] = set()  # classes that ever had an interval

    def step(self, source: random.Random, classes: list[int]) -> None:
        self.now += source.choice([0.0, 0.5, 3.0, 200.0])
        what = source.choice(["open", "open", "return", "return", "reclass", "close"])
        if what == "open" or not self.open:
            reuse_class = source.choice(classes)
            self._begin(self.index.open(reuse_class, self.now), reuse_class)
        else:
            interval_id = source.choice(sorted(self.open))
            known = self.open[interval_id]
            if what == "reclass":
                known.reuse_class = source.choice(classes)
                self.seen.add(known.reuse_class)
                self.index.reclass(interval_id, known.reuse_class)
            else:
                known.length, known.ended = self.now - known.since, what == "return"
                del self.open[interval_id]
            if what == "return":
                self.index.on_return(interval_id, self.now)
                self._begin(interval_id, known.reuse_class)
            elif what == "close":
                self.index.on_request(self.now)  # which tells the time
                self.index.close(interval_id)
        self.index.on_request(self.now)

    def _begin(self, interval_id: int, reuse_class: int) -> None:
        for other in self.every:
            other.younger += other.reuse_class == reuse_class
        self.seen.add(reuse_class)
        self.open[interval_id] = Interval(reuse_class, self.now)
        self.every.append(self.open[interval_id])

    def rates(self) -> dict[int, list[float]]:
        """Rates of each class, by bin of age."""
        known = {of: (np.zeros(BINS), np.zeros(BINS)) for of in self.seen}
        for one in self.every:
            length = self.now - one.since if one.length is None else one.length
            age_bin = sum(length >= 2.0**edge for edge in range(1, BINS))
            known[one.reuse_class][not one.ended][age_bin] += 2.0 ** (-one.younger / LONG)
        return {of: plain_rates([plain_hazard(known, of, b) for b in range(BINS)]) for of in known}


@dataclass
class Interval:
    """younger: how many of its class began after it. length: None while it is open."""

    reuse_class: int
    since: float
    younger: int = 0
    length: float | None = None
    ended: bool = False


def plain_rates(hazard: list[float]) -> list[float]:
    """The best rate from each bin on: the most returns per unit of time until some later bin."""
    found = []
    for start in range(BINS):
        best, alive, time = 0.0, 1.0, 0.0
        for bin_ in range(start, BINS):
            width = 2.0 ** (bin_ + (bin_ == 0))
            time += alive * width * (1 - hazard[bin_] / 2)
            alive *= 1 - hazard[bin_]
            best = max(best, (1 - alive) / time)
        found.append(best)
    return found


def table_of(index: ReuseIndex, classes: list[int]) -> np.ndarray:
    """Weights [classes, BINS]."""
    ages = 1.5 * 2.0 ** np.arange(BINS)
    return np.array([index.weights(np.full(BINS, of), ages)[0] for of in classes])


SMALL = {
    "INTERVALS_AT_ONCE": (reuse, 3),
    "CLASSES_AT_ONCE": (hazards, 2),
    "ROWS_AT_ONCE": (hazards, 4),
    "MICROSECONDS": (reuse, 1),
}
"""Steps of a rebuilding as if there were millions of intervals, one for each request."""

CHOSEN = [
    reuse_class_of(*one) for one in ((0, 500, 1), (0, 500, 2), (1, 9_000, 1, 2, 1), (2, 60, 0))
]


@pytest.mark.parametrize("steps", [1, 5, 20, 80])
@pytest.mark.parametrize("seed", seeds(3))
def test_the_table_is_what_the_list_of_all_intervals_says(seed: int, steps: int) -> None:
    plain, source = PlainIndex(), random.Random(seed)
    for _ in range(steps):
        plain.step(source, CHOSEN)
    plain.index.rebuild()
    expected = plain.rates()
    found = table_of(plain.index, list(expected))
    for row, rates in zip(found, expected.values(), strict=True):
        assert row == pytest.approx(rates)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("seed", seeds(2))
def test_a_table_that_is_made_step_by_step_is_that_of_when_it_was_begun(
    seed: int, asked: bool
) -> None:
    """Whatever happens between the steps; the old table is in force until the new one is whole."""
    with pytest.MonkeyPatch.context() as patch:
        for name, (module, value) in SMALL.items():
            patch.setattr(module, name, value)
        source = random.Random(seed)
        plain, classes = PlainIndex(), [*CHOSEN, *range(0, CLASSES, CLASSES // 40)]
        index, expected, tables = plain.index, list[np.ndarray](), 0

        def begin(counts: IntervalCounts) -> IntervalCounts:
            if counts is index._long and not expected:
                twin = copy.copy(index)
                twin._long, twin._short = copy.deepcopy((index._long, index._short))
                twin._recent, twin._work = copy.deepcopy(index._recent), None
                expected.append(np.empty(0))  # it is begun in the twin, too
                twin.rebuild()
                expected[:] = [table_of(twin, classes)]
            return frozen(counts)

        frozen = IntervalCounts.frozen
        patch.setattr(IntervalCounts, "frozen", begin)
        for _ in range(200):
            version, before = index.version, table_of(index, classes) if asked else None
            plain.step(source, classes)
            if index.version != version:
                assert table_of(index, classes) == pytest.approx(expected.pop())
                tables += 1
            elif before is not None:
                assert (table_of(index, classes) == before).all()
        assert 1 <= tables < 20, "each takes many requests"


def test_a_request_does_a_bounded_part_of_a_rebuilding(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many intervals and classes there are."""
    index = ReuseIndex(1.0)
    for number in range(20_000):
        index.open(number % CLASSES, float(number))
    index.on_request(20_000.0)
    work, requests = index._work, 1
    assert work is not None and index.version == 0
    steps = list[float]()

    def counted() -> Iterator[float]:
        for cost in work:
            steps.append(cost)
            yield cost

    index._work = counted()
    while not index.version:
        before = len(steps)
        index.on_request(20_000.0)
        requests += 1
        assert sum(steps[before:-1]) < MICROSECONDS
    assert requests > 10 and max(steps) <= MICROSECONDS / 3


# What was learnt fades when the traffic changes.


class Traffic:
    """Positions of one class, one a second. A share of them returns, after `gap` seconds on average
    and once; the others never do. All are forgotten after 2,000 more.
    """

    def __init__(self, index: ReuseIndex, reuse_class: int, seed: int) -> None:
        self.index, self.reuse_class, self.source = index, reuse_class, random.Random(seed)
        self.now = 0.0
        self.waiting: deque[int] = deque()
        self.ready: list[tuple[float, int]] = []

    def go_on(self, count: int, share: float, gap: float) -> None:
        for _ in range(count):
            self.now += 1.0
            while self.ready and self.ready[0][0] <= self.now:
                time, interval_id = heapq.heappop(self.ready)
                self.index.on_return(interval_id, time)
            interval_id = self.index.open(self.reuse_class, self.now)
            self.waiting.append(interval_id)
            if self.source.random() < share:
                heapq.heappush(
                    self.ready, (self.now + self.source.expovariate(1 / gap), interval_id)
                )
            if len(self.waiting) > 2_000:
                self.index.close(self.waiting.popleft())
            self.index.on_request(self.now)

    def requests_until_known(self, share: float, gap: float, rate: float) -> int:
        """After how many positions the index is within a factor of 1.5 of `rate`, for good."""
        known = 0
        for number in range(0, 1_200, 20):
            self.go_on(20, share, gap)
            self.index.rebuild()
            ratio = self.index.weight(self.reuse_class, 0.0) / rate
            if not 1 / 1.5 < ratio < 1.5:
                known = number + 20
        return known


CHANGES = [((0.9, 10.0), (0.1, 10.0)), ((0.05, 10.0), (0.7, 10.0)), ((0.8, 4.0), (0.3, 40.0))]


@pytest.mark.parametrize(("before", "after"), CHANGES)
@pytest.mark.parametrize(
    "count", [20_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_a_change_of_traffic_is_learnt_nearly_as_fast_as_on_a_fresh_index(
    count: int, before: tuple[float, float], after: tuple[float, float]
) -> None:
    """However much was learnt of the other kind."""
    reuse_class = reuse_class_of(0, 500, 1)
    sure = Traffic(ReuseIndex(1.0), reuse_class, 7)
    sure.go_on(6_000, *after)
    sure.index.rebuild()
    rate = sure.index.weight(reuse_class, 0.0)
    took: list[list[int]] = []
    for first in (0, count):
        trained = Traffic(ReuseIndex(1.0), reuse_class, 0)
        trained.go_on(first, *before)
        runs = []
        for seed in range(7):
            traffic = copy.deepcopy(trained)
            traffic.source = random.Random(seed)
            runs.append(traffic.requests_until_known(*after, rate))
        took.append(runs)
    fresh, used = (sorted(runs)[len(runs) // 2] for runs in took)
    assert used <= 2 * fresh + 60, took


def test_traffic_that_stays_as_it_is_is_never_forgotten() -> None:
    """Chance alone does not refute what was learnt."""
    index, reuse_class = ReuseIndex(1.0), reuse_class_of(0, 500, 1)
    started_over = []
    index._long.start_over = lambda *what: started_over.append(what)  # type: ignore[method-assign]
    Traffic(index, reuse_class, 1).go_on(30_000, 0.5, 10.0)
    assert len(started_over) <= 3
