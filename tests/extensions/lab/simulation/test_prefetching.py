"""Loads from a simulated host: when they start, and what they are worth."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.queue.orders import Window
from sglang_hybrid.core.queue.waiting import Bound
from sglang_hybrid.core.tiers.rates import INSTANT, Link, Speeds
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.core.victims.eviction import Lru
from sglang_hybrid.extensions.lab.simulation.prefill_time import PAPER, PrefillTime
from sglang_hybrid.extensions.lab.simulation.simulator import Simulator
from sglang_hybrid.extensions.lab.simulation.tiers.prefetching import Loading, LoadingServer
from sglang_hybrid.extensions.lab.simulation.tiers.tier_budgets import TierBudgets
from sglang_hybrid.extensions.lab.simulation.tiers.tier_simulator import TieredSimulator
from sglang_hybrid.extensions.lab.simulation.traces.generators import generate, traffic

DEVICE = 250
"""Bytes: two sessions, each a prompt of 100 tokens with its answer and one state."""

COST = CostModel(linear=1, quadratic=0, windows=(), kv_bytes_per_token=1, state_bytes=10)
SLOW = PrefillTime(0.0, 1.0, 0.0, decode=1.0, about="a second a token")


def request(seed: int, arrival: float, length: int = 100) -> Request:
    prompt = np.arange(1_000 * seed, 1_000 * seed + length)
    answer = np.arange(1_000 * seed + 500, 1_000 * seed + 502)
    tokens = np.concatenate([prompt, answer]).astype(np.int32)
    return Request(seed, 0, arrival, tokens, length)


def again(first: Request, arrival: float) -> Request:
    """The session goes on with ten tokens."""
    more = np.arange(900_000, 900_012) + 100 * first.session
    tokens = np.concatenate([first.tokens, more]).astype(np.int32)
    return Request(first.session, 1, arrival, tokens, len(first.tokens) + 10)


def in_tiers(cost: CostModel, device: int, link: Link, prefill: float) -> TieredSimulator:
    """With a host that holds everything."""
    tiers = TierBudgets((device, 10**15, 0), (INSTANT, link, link))
    return TieredSimulator(cost, tiers, Speeds.of(prefill, link, link), [Lru(), Lru()])


def play(
    requests: list[Request], loading: Loading | None, bandwidth: float = 10.0
) -> LoadingServer:
    """On a device that holds two sessions, with a host that holds all, or none."""
    link = Link(bandwidth)
    cache = Simulator(COST, DEVICE, Lru()) if loading is None else in_tiers(COST, DEVICE, link, 1.0)
    it = LoadingServer(cache, link, SLOW, Window(16), Bound(), loading or Loading.ON_TURN)
    it.served = it.run(requests)  # type: ignore[attr-defined]
    return it


def story() -> list[Request]:
    """The first of three sessions was pushed out. It goes on while a fourth one is prefilled."""
    first = request(1, 0.0)
    others = [request(seed, 110.0 * (seed - 1)) for seed in (2, 3, 4)]
    return [first, *others, again(first, 340.0)]


@pytest.mark.parametrize(
    ("loading", "wait", "hit"),
    [
        (None, 90 + 112, 0),  # the fourth prefill ends at 430; then all is computed
        (Loading.ON_TURN, 90 + 11.2, 102),  # 102 tokens and a state at 10 bytes a second
        (Loading.TIMED, 90 + 10, 102),  # ten tokens are computed
    ],
)
def test_a_session_that_was_pushed_out(loading: Loading | None, wait: float, hit: int) -> None:
    it = play(story(), loading)
    served = it.served[4]  # type: ignore[attr-defined]
    assert served.ttft == pytest.approx(wait)
    assert served.outcome.hit_len == hit
    assert it.loads.counts.loads == (loading is not None)
    assert (it.loads.counts.complete == 1.0) == (loading is Loading.TIMED)


def test_what_is_computed_faster_is_not_loaded() -> None:
    it = play(story(), Loading.ON_TURN, bandwidth=0.5)
    assert it.loads.counts.loads == 0


@pytest.mark.parametrize("loading", list(Loading))
def test_everybody_is_served_once(loading: Loading) -> None:
    """Generated sessions on a small device: caches stay within their bytes, nothing is held."""
    cost = CostModel.paper_7b()
    requests = generate("agent", traffic("agent", sessions=12), 3)
    link = Link(25e9)
    prefill = cost.flops(8_192) / PAPER.seconds(0, 8_192)
    cache = in_tiers(cost, 8 * 10**9, link, prefill)
    it = LoadingServer(cache, link, PAPER, Window(16), Bound(8, 30.0), loading, 4)
    served = it.run(requests)
    assert len(served) == len(requests)
    for one, given in zip(served, requests, strict=True):
        assert given.arrival <= one.start < one.first_token <= one.end
    assert cache.used <= 8 * 10**9
    assert not any(node.standing for node in cache.tree.walk())
    counts = it.loads.counts
    assert counts.used + counts.late + counts.cancelled == counts.started
    if loading is Loading.TIMED:
        assert counts.used > counts.loads / 2
