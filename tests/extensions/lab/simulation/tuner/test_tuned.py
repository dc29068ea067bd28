"""The tuner in a replay: when its choices arrive, and what they change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from sglang_hybrid.core.server_settings import Serving
from sglang_hybrid.core.specs import Spec
from sglang_hybrid.core.traffic.recorder import RequestWindow
from sglang_hybrid.extensions.lab.runner import Job, Runner
from sglang_hybrid.extensions.lab.simulation.prefill_time import PAPER
from sglang_hybrid.extensions.lab.simulation.system_names import (
    HINDSIGHT,
    Setting,
    best_of,
    build_system,
    parse_spec,
)
from sglang_hybrid.extensions.lab.simulation.tuner.candidates import CANDIDATES, TokensFound
from sglang_hybrid.extensions.lab.simulation.tuner.tuned import (
    CHOICES,
    SimulatedTunedCache,
    build_tuned,
    switching,
)
from sglang_hybrid.extensions.lab.simulation.tuner.tuner import Rules
from sglang_hybrid.extensions.lab.simulation.workers import Limits
from tests.extensions.lab.simulation.tuner.traffic import COST, POOLS, fashions, requests, templates

REUSE, LRU = CANDIDATES[:2]
TRAFFIC = requests(fashions(160) + templates(160, seed=1))
SETTINGS = {
    "as served": Setting(COST, POOLS, TRAFFIC, serving=Serving()),
    "in one memory": Setting(COST, 40_000, TRAFFIC, serving=Serving(one_memory=True)),
    "two pools": Setting(COST, POOLS, TRAFFIC),
    "one budget": Setting(COST, 40_000, TRAFFIC),
}
RULES = Rules(window=40)
everywhere = pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, id=name, marks=[] if "served" in name else pytest.mark.slow)
        for name, setting in SETTINGS.items()
    ],
)
"""Runs a test in each setting; the quick tests have only those of a server."""


def played(setting: Setting, delay: int) -> SimulatedTunedCache:
    cache = SimulatedTunedCache(setting, CANDIDATES[:3], LRU, RULES, delay)
    for request in setting.requests:
        cache.serve(request)
    return cache


@everywhere
def test_while_nothing_is_chosen_it_is_the_cache_it_starts_with(setting: Setting) -> None:
    cache = SimulatedTunedCache(setting, [REUSE], REUSE, RULES)
    alone = build_system(REUSE, setting)
    for request in setting.requests:
        assert cache.serve(request) == alone.serve(request)
    assert cache.cache.memory.has_evicted
    assert {spec for _, spec in cache.decided} == {REUSE}


def prefer_reuse(window: RequestWindow, candidates: Sequence[Spec], limits: Limits) -> TokensFound:
    return TokensFound(1_000, {spec: np.full(10, 50 * (spec == REUSE)) for spec in candidates})


@everywhere
def test_a_choice_takes_over_what_is_cached_when_its_search_ends(setting: Setting) -> None:
    for delay in (0, 15):
        cache, by_hand = (
            SimulatedTunedCache(setting, CANDIDATES, LRU, RULES, delay),
            switching(setting, LRU),
        )
        cache.tuner._search = prefer_reuse
        for number, request in enumerate(setting.requests):
            if number == 40 + delay:
                by_hand.switch(REUSE)
            assert by_hand.serve(request) == cache.serve(request)
        assert cache.decided[0] == (40 + delay, REUSE)


def test_a_search_takes_requests() -> None:
    first = [played(SETTINGS["as served"], delay).decided[0][0] for delay in (0, 15)]
    assert first == [40, 55]


def test_it_follows_the_traffic() -> None:
    cache = played(SETTINGS["as served"], 5)
    before = [spec for at, spec in cache.decided if at <= 160]
    assert (set(before), cache.tuner.current) == ({LRU}, REUSE)


def test_the_paper_tunes_alpha_and_starts_with_0() -> None:
    alphas = CHOICES["marconi-tuned"]
    assert list(alphas) == best_of(Spec(HINDSIGHT))
    assert dict(alphas[0].options) == {"alpha": 0.0}
    cache = build_tuned("marconi-tuned", SETTINGS["one budget"], delay=1, window=40)
    assert cache.tuner.current == alphas[0]
    for request in TRAFFIC:
        cache.serve(request)
    assert {spec for _, spec in cache.decided} <= set(alphas)
    assert cache.tuner.counts.runs > 1


@pytest.mark.parametrize(
    "serving",
    [pytest.param(None, id="paper", marks=pytest.mark.slow), pytest.param(Serving(), id="served")],
)
@pytest.mark.parametrize("name", CHOICES)
def test_it_is_replayed_by_name_and_in_time(name: str, serving: Serving | None) -> None:
    spec = parse_spec(f"{name}:delay=4,window=40")
    job = Job(spec, "both", COST, POOLS, PAPER, serving=serving)
    result = Runner({"both": TRAFFIC}).run(job)
    assert len(result.ttft) == len(TRAFFIC)
    assert 0 < result.hit_rate < 1
