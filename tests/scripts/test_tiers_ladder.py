"""What `reuse` lacks in tiers: caches that are told more of a trace, and weights of classes."""

from __future__ import annotations

import pytest

from scripts.bench.tiers_ladder import RUNGS, Told, hit_rate, shares, weigh
from scripts.bench.traces import COST
from sglang_hybrid.core.returns import hazards
from sglang_hybrid.replay.simulation.tiers.tier_budgets import TierBudgets
from sglang_hybrid.replay.simulation.traces import generators

REQUESTS = generators.generate("chat", generators.traffic("chat", sessions=40), 3)
DEVICE = 0.05


def test_a_cache_that_is_told_when_prompts_come_hits_more() -> None:
    names = [*RUNGS, "clairvoyant"]
    found = dict(zip(names, shares("chat", REQUESTS, DEVICE), strict=True))
    assert found["reuse"] < found["ends"]
    assert found["reuse"] < found["times"]
    assert max(found.values()) <= 100


def test_a_weight_holds_for_one_replay_only() -> None:
    before = hazards.PRIOR_WEIGHT
    few, many = (weigh("chat", REQUESTS, DEVICE, weight) for weight in (1.0, 1_000.0))
    assert before == hazards.PRIOR_WEIGHT
    assert few[1] != many[1]
    assert 0 < float(few[1]) < 24


def test_an_index_that_knows_the_intervals_needs_fewer_bits() -> None:
    """What always returns after the same time is foretold better than by the first guess."""
    from scripts.bench.tiers_ladder import Bits
    from sglang_hybrid.core.returns.reuse import ReuseIndex

    index = ReuseIndex(1.0)
    interval, time = index.open(0, 0.0), 0.0
    early = late = 0.0
    bits = Bits(index)
    for step in range(200):
        time += 10.0
        index.on_request(time)
        before = bits.sum
        index.on_return(interval, time)
        if step < 5:
            early += bits.sum - before
        if step >= 195:
            late += bits.sum - before
    assert late < early / 2
    assert bits.intervals == pytest.approx(200, abs=1)


def test_hit_rates_are_shares_of_prompt_tokens() -> None:
    cache = Told(COST, TierBudgets.of(10**10, 10**11), "reuse", REQUESTS)
    assert 0 < hit_rate(cache, REQUESTS) < 1
