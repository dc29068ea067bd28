"""Time: prefill models, queueing, and requests that overlap, as worked examples."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.core.victims.eviction import Lru
from sglang_hybrid.extensions.lab.simulation.prefill_time import (
    PAPER,
    PAPER_FLOPS,
    PrefillTime,
    at_papers_rate,
    pairs,
)
from sglang_hybrid.extensions.lab.simulation.simulator import Outcome, Simulator
from sglang_hybrid.extensions.lab.simulation.timing import Served, Timeline, paper_ttft
from sglang_hybrid.extensions.lab.simulation.traces.generators import generate, traffic

SECOND_A_TOKEN = PrefillTime(0.0, 1.0, 0.0, decode=10.0, about="test")


def request(
    tokens: range | list[int], answer: int, arrival: float, session: int = 0, turn: int = 0
) -> Request:
    ids = np.array([*tokens, *range(10_000, 10_000 + answer)], dtype=np.int32)
    return Request(session, turn, arrival, ids, len(tokens))


def play(*requests: Request) -> list[Served]:
    cache = Simulator(CostModel.paper_7b(), None, Lru())
    return Timeline([cache], SECOND_A_TOKEN).run(requests)


def test_a_model_takes_its_own_flops_at_the_papers_rate() -> None:
    cost = CostModel.paper_7b()
    time = at_papers_rate(cost)
    for tokens in (1, 700, 50_000):
        expected = PAPER.base + PAPER.per_token * cost.flops(tokens) / PAPER_FLOPS
        assert time.seconds(0, tokens) == pytest.approx(expected)
    rest = cost.flops(9_000) - cost.flops(4_000)
    assert time.seconds(4_000, 5_000) == pytest.approx(
        PAPER.base + PAPER.per_token * rest / PAPER_FLOPS
    )


def test_a_prefill_waits_for_the_one_before() -> None:
    first, second = play(request(range(100), 1, 0.0), request(range(500, 550), 1, 30.0, session=1))
    assert (first.start, first.first_token, first.end, first.ttft) == (0, 100, 110, 100)
    assert (second.start, second.first_token, second.ttft) == (100, 150, 120)


def test_what_is_under_way_is_not_there_yet() -> None:
    """The prefills do not overlap, but the first request still decodes when the second begins."""
    prompt = range(100)
    first, second = play(request(prompt, 5, 0.0), request([*prompt, 1, 2], 1, 10.0, session=1))
    assert first.end == 150
    assert (second.outcome.hit_len, second.outcome.kv_len) == (0, 100)


def test_a_session_goes_on_from_its_answer() -> None:
    prompt = [*range(100)]
    first, second = play(
        request(prompt, 5, 0.0),
        request([*prompt, *range(10_000, 10_005), 7], 1, 10.0, turn=1),
    )
    assert second.arrival == first.end == 150
    assert second.outcome.hit_len == 105
    assert second.ttft == 1


def test_pairs_are_what_causal_attention_sees() -> None:
    assert pairs(0, 4) == 1 + 2 + 3 + 4
    assert pairs(10, 3) == 11 + 12 + 13


def test_a_fit_finds_what_it_was_made_from() -> None:
    rng = random.Random(0)
    true = PrefillTime(0.02, 3e-5, 2e-9, 0.01, "made up", per_hit=2e-6)
    measured = []
    for _ in range(60):
        hit, new = rng.choice([0, rng.randrange(30_000)]), int(8_000 ** rng.uniform(0.3, 1))
        measured.append((hit, new, true.seconds(hit, new) * rng.uniform(0.97, 1.03)))
    fitted = PrefillTime.fit(measured, 0.01, "test")
    for hit, new in ((0, 100), (0, 8_000), (20_000, 500)):
        assert fitted.seconds(hit, new) == pytest.approx(true.seconds(hit, new), rel=0.05)
    assert 0.01 < fitted.error < 0.03


def test_no_coefficient_is_negative() -> None:
    falling = [(0, 100, 1.0), (0, 1_000, 0.5), (0, 5_000, 0.4), (9, 5_000, 0.3)]
    fitted = PrefillTime.fit(falling, 0.0, "test")
    assert min(fitted.base, fitted.per_token, fitted.per_pair, fitted.per_hit) >= 0
    with pytest.raises(ValueError, match="four measurements or more, not 2"):
        PrefillTime.fit(falling[:2], 0.0, "test")


def test_a_fit_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "prefill.json"
    PAPER.write(path)
    assert PrefillTime.read(path) == PAPER
    path.write_text('{"base": "x"}')
    with pytest.raises(ValueError, match="is no prefill time"):
        PrefillTime.read(path)
    with pytest.raises(ValueError, match="cannot be read"):
        PrefillTime.read(tmp_path / "missing")


def test_the_papers_linear_model() -> None:
    """marconi-notes.md 1.6: 20 ms at 50 tokens, 1,710 ms where it is cut."""
    outcomes = [Outcome(49, 0, 0), Outcome(1_050, 1_000, 1_000), Outcome(60_000, 0, 0)]
    expected = [17.81 + 0.052964 * 50, 17.81 + 0.052964 * 100, 1_710]
    assert 1_000 * paper_ttft(outcomes) == pytest.approx(expected, rel=1e-3)


def test_everyone_is_served_once_and_nobody_overtakes_time() -> None:
    requests = generate("agent", traffic("agent", sessions=15), 0)
    ended: list[int] = []
    cache = Simulator(CostModel.paper_7b(), 2 * 10**9, Lru())
    served = Timeline([cache], PAPER, lambda: ended.append(1)).run(requests)
    assert len(served) == len(ended) == len(requests)
    last: dict[int, float] = {}
    starts = sorted((s.arrival, s.start, s.first_token) for s in served)
    for (_, start, end), (_, after, _) in itertools.pairwise(starts):
        assert start < end <= after
    for one, s in zip(requests, served, strict=True):
        assert one.arrival <= s.arrival <= s.start < s.first_token <= s.end
        assert s.arrival >= last.get(one.session, 0.0)
        assert s.outcome.input_len == one.input_len
        last[one.session] = s.end
