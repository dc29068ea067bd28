"""Rates are what was assumed until enough was measured, and then what was measured, whatever a few
measurements say.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.tiers.rates import (
    FEWEST,
    INSTANT,
    STEP,
    WINDOW,
    LineEstimate,
    Link,
    Rates,
    Speeds,
    Tier,
)
from tests.examples import examples

FIRST = Speeds.of(1e12, host=Link(10e9, 1e-4), disk=Link(1e9, 1e-3))


def feed(line: LineEstimate, link: Link, sizes: list[int], wrong: float = 0.0) -> None:
    """Measurements of `link`; a share `wrong` of them took up to 50 times as long."""
    rng = random.Random(1)
    for size in sizes:
        slower = rng.uniform(2, 50) if rng.random() < wrong else rng.uniform(0.98, 1.02)
        line.observe(size, link.seconds(size) * slower)


def random_sizes(count: int = 4 * WINDOW) -> list[int]:
    rng = random.Random(2)
    return [int(10 ** rng.uniform(6, 9)) for _ in range(count)]


def test_what_was_assumed_holds_until_enough_was_measured() -> None:
    line = LineEstimate(10e9, 1e-4)
    feed(line, Link(2e9), random_sizes(FEWEST - 1))
    assert (line.rate, line.base) == (10e9, 1e-4)


@pytest.mark.parametrize("wrong", [0.0, 0.2])
def test_a_line_finds_bandwidth_and_latency_though_some_transfers_were_late(wrong: float) -> None:
    line = LineEstimate(10e9, 1e-4)
    feed(line, Link(2e9, 5e-3), random_sizes(), wrong)
    assert line.rate == pytest.approx(2e9, rel=0.1)
    assert line.base == pytest.approx(5e-3, rel=0.3)


def test_transfers_of_one_size_tell_a_bandwidth_and_leave_the_latency() -> None:
    line = LineEstimate(10e9, 1e-4)
    feed(line, Link(2e9, 1e-4), [27_000_000] * WINDOW, wrong=0.2)
    assert line.base == 1e-4
    assert line.rate == pytest.approx(2e9, rel=0.05)


def test_a_rate_that_changes_is_followed() -> None:
    line = LineEstimate(10e9)
    feed(line, Link(2e9), random_sizes())
    feed(line, Link(8e9), random_sizes())
    assert line.rate == pytest.approx(8e9, rel=0.05)


@examples(60)
@given(
    before=st.lists(
        st.tuples(st.integers(1, 10**9), st.floats(1e-4, 1e4)), min_size=8, max_size=64
    ),
    sizes=st.lists(st.integers(10**6, 10**9), min_size=1, max_size=WINDOW),
    late=st.floats(0.001, 1000),
)
def test_usual_sizes_are_expected_to_take_what_they_take(
    before: list[tuple[int, float]], sizes: list[int], late: float
) -> None:
    """Whatever was measured before, however alike sizes are, and though one in eight is wrong by
    any factor.
    """
    line, true = LineEstimate(10e9, 1e-4), Link(2e9, 5e-3)
    for size, seconds in before:
        line.observe(size, seconds)
    held = [sizes[at % len(sizes)] for at in range(2 * WINDOW)]
    for at, size in enumerate(held):
        line.observe(size, true.seconds(size) * (late if at % 8 == 3 else 1))
    usual = float(np.median(held[WINDOW:]))
    assert line.base >= 0
    assert line.seconds(usual) == pytest.approx(true.seconds(usual), rel=0.5)


def test_no_time_begins_before_zero() -> None:
    line = LineEstimate(10e9)
    for size in range(1, WINDOW + 1):
        line.observe(size, size**2 / 1e3)
    assert line.base == 0


def test_one_measurement_of_another_size_decides_nothing() -> None:
    line, true = LineEstimate(10e9), Link(2e9)
    feed(line, true, [1_000_000] * (WINDOW - 1))
    line.observe(2_000_000, 100 * true.seconds(2_000_000))
    feed(line, true, [1_000_000] * STEP)
    assert line.seconds(1_000_000) == pytest.approx(true.seconds(1_000_000), rel=0.1)


def test_what_took_no_time_says_nothing() -> None:
    line = LineEstimate(10e9)
    for _ in range(WINDOW):
        line.observe(1_000, 0.0)
        line.observe(0, 1.0)
    assert (line.measured, line.rate) == (0, 10e9)


def test_speeds_stay_the_same_object_until_a_rate_has_moved() -> None:
    rates = Rates(FIRST)
    for size in random_sizes(WINDOW):
        rates.observe_load(Tier.HOST, size, FIRST.loads[Tier.HOST].seconds(size) * 1.05)
        rates.observe_prefill(size, size / 1e12)
    assert rates.speeds is FIRST
    for size in random_sizes(WINDOW):
        rates.observe_load(Tier.HOST, size, Link(5e9, 1e-4).seconds(size))
        rates.observe_write(Tier.DISK, size, Link(0.5e9, 1e-3).seconds(size))
    assert rates.speeds.loads[Tier.HOST].bandwidth == pytest.approx(5e9, rel=0.1)
    assert rates.speeds.writes[Tier.DISK].bandwidth == pytest.approx(0.5e9, rel=0.1)
    assert rates.speeds.loads[Tier.DISK] == FIRST.loads[Tier.DISK]
    assert rates.speeds.prefill == pytest.approx(1e12, rel=0.1)
    assert rates.measured(Tier.HOST) == 2 * WINDOW
    assert rates.measured(Tier.DISK) == 0


def test_the_device_itself_takes_no_time() -> None:
    assert INSTANT.seconds(10**12) == 0
    assert FIRST.loads[Tier.DEVICE].seconds(1) == 0


def test_a_link_without_bandwidth_is_refused() -> None:
    with pytest.raises(ValueError, match="bandwidth above 0"):
        Link(0.0)
