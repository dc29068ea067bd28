"""When the tuner searches, what it decides, and what it does when a search fails."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pytest

from sglang_hybrid.core.costs.cost import IntArray
from sglang_hybrid.core.server_settings import Serving
from sglang_hybrid.core.specs import PolicySwitch
from sglang_hybrid.core.traffic.recorder import RequestWindow
from sglang_hybrid.extensions.lab.simulation.tuner.candidates import CANDIDATES, TokensFound, search
from sglang_hybrid.extensions.lab.simulation.tuner.regret import Advantages, Regrets
from sglang_hybrid.extensions.lab.simulation.tuner.tuner import Rules, Tuner
from sglang_hybrid.extensions.lab.simulation.workers import Limits
from sglang_hybrid.extensions.lab.systems import Spec
from tests.extensions.lab.simulation.tuner.traffic import COST, fashions, records, templates

REUSE, LRU, MARCONI = CANDIDATES[0], CANDIDATES[1], CANDIDATES[4]
RULES = Rules(window=40)


def even(tokens: int, requests: int = 10) -> IntArray:
    """The tokens of each request, if `tokens` are divided evenly among so many."""
    return np.full(requests, tokens // requests)


class Script:
    """A search that finds what it is told, evenly over ten requests, and remembers what it was
    asked.
    """

    def __init__(self, *found: dict[Spec, int] | Exception) -> None:
        self.found = list(found)
        self.windows: list[RequestWindow] = []

    def __call__(
        self, window: RequestWindow, candidates: Sequence[Spec], limits: Limits
    ) -> TokensFound:
        self.windows.append(window)
        found = self.found.pop(0) if len(self.found) > 1 else self.found[0]
        if isinstance(found, Exception):
            raise found
        return TokensFound(1_000, {spec: even(hits) for spec, hits in found.items()}, [], 0.5)


def tuner(script: Script, rules: Rules = RULES) -> Tuner:
    return Tuner(COST, rules, search=script)


def feed(it: Tuner, count: int, hit_rate: float = 0.5, evicted: bool = True) -> PolicySwitch | None:
    """`count` requests; a search is waited for, a switch adopted. Returns the last one."""
    last = None
    for record in records(templates(count), hit_rate):
        it.on_request_end(record, evicted=evicted)
        if it._thread is not None:
            it._thread.join()
        switch = it.poll()
        if switch is not None:
            last = switch
            it.on_adoption(switch)
    return last


def test_nothing_is_learnt_before_the_first_eviction() -> None:
    script = Script({REUSE: 500, LRU: 500})
    it = tuner(script, Rules(least=1))
    feed(it, 30, evicted=False)
    assert script.windows == []
    feed(it, 1)
    assert it.info()["window"] == 2 * 31
    feed(it, 2 * 31 - 31 - 1)
    assert script.windows == []
    feed(it, 1)
    assert [len(window.requests) for window in script.windows] == [2 * 31]


def test_the_window_is_kept_within_limits() -> None:
    for before, window in ((1, 64), (9_000, 4_096)):
        it = tuner(Script({REUSE: 1}), Rules())
        it._ended = before - 1
        feed(it, 1)
        assert it.info()["window"] == window


def test_the_latter_half_of_what_is_replayed_counts() -> None:
    script = Script({REUSE: 500, LRU: 500})
    feed(tuner(script, Rules(window=40, most=200)), 640)
    shape = [(len(window.requests), window.counted) for window in script.windows]
    assert shape == [(40, 20), (120, 60)] + 5 * [(200, 100)]


def test_a_gain_within_the_margin_changes_nothing() -> None:
    it = tuner(Script({REUSE: 1_000, LRU: 1_010}))
    assert feed(it, 40) is None
    assert it.counts.runs == 1
    assert it.counts.regret_tokens == 10


def test_a_gain_above_it_is_offered_until_it_is_adopted() -> None:
    it = tuner(Script({REUSE: 500, LRU: 600, MARCONI: 600}))
    for record in records(templates(40), 0.5):
        it.on_request_end(record, evicted=True)
    assert it._thread is not None
    it._thread.join()
    switch = it.poll()
    assert switch is not None and switch.spec == LRU, "the first of equals"
    assert it.poll() is switch
    assert it.current == REUSE
    it.on_adoption(switch)
    assert (it.poll(), it.current, it.counts.switches) == (None, LRU, 1)
    assert it.info()["last_switch"] == switch.reason
    assert "lru instead of reuse: 600 instead of 500 of 1,000" in switch.reason
    assert it.expected == 0.6


def test_it_searches_again_after_a_period_and_ever_less_often() -> None:
    script = Script({REUSE: 500, LRU: 500})
    it = tuner(script)
    searches = []
    for n in range(1, 2_000):
        feed(it, 1)
        if len(script.windows) > len(searches):
            searches.append(n)
    assert searches == [40, 120, 280, 600, 1_240]


def test_it_searches_again_when_the_hit_rate_is_another_one() -> None:
    script = Script({REUSE: 500, LRU: 500}, {REUSE: 100, LRU: 300})
    it = tuner(script)
    feed(it, 40, hit_rate=0.5)
    feed(it, 39, hit_rate=0.3)
    assert len(script.windows) == 1
    switch = feed(it, 1, hit_rate=0.3)
    assert len(script.windows) == 2
    assert switch is not None and switch.spec == LRU


def test_a_hit_rate_near_the_expected_one_is_no_reason() -> None:
    script = Script({REUSE: 500, LRU: 500})
    it = tuner(script)
    feed(it, 40, hit_rate=0.5)
    feed(it, 79, hit_rate=0.42)
    assert len(script.windows) == 1


class Costs:
    """A search that finds so many tokens in every request that counts."""

    def __init__(self, *found: dict[Spec, int]) -> None:
        self.found = list(found)
        self.compared: list[list[Spec]] = []
        self.counted: list[int] = []

    def __call__(
        self, window: RequestWindow, candidates: Sequence[Spec], limits: Limits
    ) -> TokensFound:
        self.compared.append(list(candidates))
        self.counted.append(window.counted)
        found = self.found.pop(0) if len(self.found) > 1 else self.found[0]
        tokens = {spec: np.full(window.counted, hits) for spec, hits in found.items()}
        return TokensFound(100 * window.counted, tokens, [], 0.5)


def test_a_switch_that_lost_since_is_taken_back() -> None:
    better, worse = {REUSE: 10, LRU: 20}, {REUSE: 10, LRU: 9}
    script = Costs(better, worse, better)
    it = Tuner(COST, RULES, search=script)
    feed(it, 40, hit_rate=0)
    assert it.current == LRU
    feed(it, 19, hit_rate=0)
    assert len(script.compared) == 1, "half a window has to pass"
    back = feed(it, 1, hit_rate=0)
    assert script.compared[1] == [LRU, REUSE] and script.counted[1] == 20
    assert back is not None and back.spec == REUSE
    assert "reuse again instead of lru: since the switch 200 instead of 180" in back.reason
    assert (it.counts.switches, it.counts.taken_back) == (2, 1)
    feed(it, 20, hit_rate=0)
    assert script.compared[2:] == [list(CANDIDATES)], "what came back is not on probation"


def test_after_a_switch_that_was_taken_back_a_gain_must_be_twice_as_sure() -> None:
    before = [{REUSE: 1_000, LRU: 1_015}, {REUSE: 1_000, LRU: 1_000}, {REUSE: 1_000, LRU: 1_015}]
    it = Tuner(COST, RULES, search=Costs(*before))
    assert feed(it, 40, hit_rate=0) is not None
    feed(it, 20, hit_rate=0)
    assert (it.current, it.counts.taken_back) == (REUSE, 1), "of equals, the one that was there"
    feed(it, 400, hit_rate=0)
    assert it.counts.runs > 3
    assert it.current == REUSE


def test_a_switch_that_proves_itself_is_looked_at_ever_less_often() -> None:
    script = Costs({REUSE: 10, LRU: 20})
    it = Tuner(COST, Rules(window=40, most=200), search=script)
    feed(it, 40 + 400, hit_rate=0)
    watched = [
        n for n, specs in zip(script.counted, script.compared, strict=True) if len(specs) == 2
    ]
    assert watched == [20, 40, 60, 100], "20, 40, 80, 160 since, at most half of what is recorded"
    assert (it.current, it.counts.taken_back) == (LRU, 0)


def test_what_the_policy_in_force_was_seen_to_hit_beats_what_a_replay_says_of_it() -> None:
    """A replay begins empty, and a policy that learns looks worse in it than it was."""
    script = Costs({REUSE: 10, LRU: 30})
    for hit_rate, current in ((0.0, LRU), (0.5, REUSE)):
        it = Tuner(COST, RULES, search=script)
        feed(it, 200, hit_rate=hit_rate)
        assert it.current == current


def test_a_policy_that_hit_less_than_in_its_replay_gets_no_handicap() -> None:
    advantages = Advantages()
    advantages.learn(REUSE, even(100), even(500))
    advantages.learn(LRU, even(500), even(100))
    hits = advantages.added({REUSE: even(500), LRU: even(100), MARCONI: even(200)})
    assert {spec: found.sum() for spec, found in hits.items()} == {
        REUSE: 500,
        LRU: 500,
        MARCONI: 200,
    }


def test_regret_is_remembered() -> None:
    regrets = Regrets()
    for _ in range(3):
        regrets.learn({REUSE: even(1_000), LRU: even(900)})
    regrets.learn({REUSE: even(950), LRU: even(1_000)})
    assert regrets.choose(REUSE, 0.01, 2) == REUSE, "one bad window after three good ones"
    for _ in range(3):
        regrets.learn({REUSE: even(950), LRU: even(1_000)})
    assert regrets.choose(REUSE, 0.01, 2) == LRU
    assert regrets.shares[LRU] == 0 < regrets.shares[REUSE]
    regrets.forget()
    regrets.learn({REUSE: even(1_000), LRU: even(900)})
    assert regrets.choose(LRU, 0.01, 2) == REUSE


def test_what_a_few_requests_gain_may_be_chance() -> None:
    nothing = np.zeros(100, dtype=np.int64)
    for requests, surely in ((4, False), (5, True)):
        some = nothing.copy()
        some[:requests] = 1_000
        regrets = Regrets()
        regrets.learn({REUSE: nothing, LRU: some})
        assert (regrets.choose(REUSE, 0.01, 2) == LRU) == surely
    regrets.learn({REUSE: nothing + 5_000, LRU: nothing})
    assert regrets.choose(REUSE, 0.01, 2) == REUSE


def test_a_candidate_that_was_not_tried_is_not_judged() -> None:
    regrets = Regrets()
    assert regrets.choose(REUSE, 0.01, 2) == REUSE
    regrets.learn({LRU: even(1_000)})
    assert regrets.choose(REUSE, 0.01, 2) == REUSE
    regrets.learn({REUSE: even(0), LRU: even(0)})
    assert regrets.choose(REUSE, 0.01, 2) == REUSE


def test_a_failed_search_is_told_and_the_next_one_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    it = tuner(Script(OSError("no processes left"), {REUSE: 10, LRU: 20}))
    with caplog.at_level(logging.WARNING):
        assert feed(it, 40) is None
    assert "no processes left" in caplog.text
    assert (it.counts.runs, it.counts.failures) == (1, 1)
    assert "no processes left" in it.info()["last_failure"]
    switch = feed(it, 40)
    assert switch is not None and switch.spec == LRU


def few(window: RequestWindow, _: Sequence[Spec], limits: Limits) -> TokensFound:
    return search(window, CANDIDATES[:3], limits)


def test_two_phases_with_real_workers() -> None:
    """Fashions are served as well by LRU as by reuse; templates switch to reuse."""
    it = Tuner(COST, Rules(window=100), LRU, serving=Serving(), search=few)
    in_force = []
    for phase, hit_rate in ((fashions, 0.4), (templates, 0.1)):
        for record in records(phase(101), hit_rate):
            it.on_request_end(record, evicted=True)
            if it._thread is not None:
                it._thread.join()
            switch = it.poll()
            if switch is not None:
                it.on_adoption(switch)
        in_force.append(it.current.name)
    assert in_force == ["lru", "reuse"]
    assert (it.counts.runs, it.counts.failures, it.counts.switches) == (2, 0, 1)


def test_what_was_learnt_before_the_window_is_replayed_too() -> None:
    """Reuse that has seen other traffic before serves fashions as well as LRU does."""
    it = Tuner(COST, Rules(window=100), serving=Serving(), search=few)
    for phase, hit_rate in ((templates, 0.4), (fashions, 0.6)):
        for record in records(phase(101), hit_rate):
            it.on_request_end(record, evicted=True)
            if it._thread is not None:
                it._thread.join()
            assert it.poll() is None
    assert it.counts.runs == 2


def test_searches_that_fail_come_ever_less_often_and_are_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Their workers are killed as soon as they start."""
    caplog.set_level(logging.INFO)
    asked = []

    def killed(window: RequestWindow, candidates: Sequence[Spec], limits: Limits) -> TokensFound:
        asked.append(it.info()["recorded"])
        if len(asked) > 4:
            return TokensFound(1_000, {REUSE: even(500), LRU: even(500)}, [], 0.5)
        return TokensFound(1_000, failures=["a worker ended with status -9: it said nothing"] * 2)

    it = Tuner(COST, RULES, search=killed)
    feed(it, 40 + 40 + 80 + 160)
    assert asked == [40, 80, 160, 320]
    assert (it.counts.failures, it.info()["failed_in_a_row"]) == (8, 4)
    assert it.info()["rests_for_requests"] == 320
    said = [line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING]
    assert len(said) == 1 and "status -9" in said[0] and "after 40 requests" in said[0]
    feed(it, 320)
    assert it.info()["failed_in_a_row"] == 0
    assert "comparing policies works again; it failed 4 times" in caplog.text
