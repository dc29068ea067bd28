"""Tasks that need their context, hybrids that answer them, and hits on coded KV and states."""

from __future__ import annotations

import random

import pytest
import torch

from scripts.bench.coded import measure
from scripts.train.hybrids import STRONGEST, Hybrid, Kind, scan
from scripts.train.recall import (
    ASK,
    BOTH,
    COPY,
    FIRST_PAIRS,
    KV,
    NOTHING,
    STATES,
    TASKS,
    TURNS,
    WORDS,
    Answers,
    Coder,
    Reach,
    answer,
    conversations,
    converse,
    draw,
    lost,
    prefill,
    recode,
    train,
    wrong_scale,
)
from sglang_hybrid.kernels import naive
from sglang_hybrid.storage.codecs.codecs import Codec

KINDS: tuple[Kind, ...] = ("mamba2", "gdn", "kda")


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Hybrid:
    torch.manual_seed(0)
    return Hybrid(request.param, WORDS).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_the_scan_is_the_definition(kind: Kind) -> None:
    drawn = torch.Generator().manual_seed(0)
    length, heads, keys, values = 37, 2, 8, 4
    q, k = (torch.randn(1, length, heads, keys, generator=drawn) / 3 for _ in range(2))
    v = torch.randn(1, length, heads, values, generator=drawn)
    g = STRONGEST * torch.rand(1, length, heads, keys if kind == "kda" else 1, generator=drawn)
    beta = torch.rand(1, length, heads, 1, generator=drawn)
    state = torch.randn(1, heads, values, keys, generator=drawn)
    if kind == "mamba2":
        step, rate = beta[0, ..., 0], torch.tensor([-1.5, -0.1])
        found = scan(q, k, v * beta, step[None, ..., None] * rate[:, None], None, state)
        expected = naive.ssd(v[0], step, rate, k[0], q[0], initial_state=state[0])
    else:
        found = scan(q, k, v, g, beta, state)
        decay = g[0] if kind == "kda" else g[0, ..., 0]
        one = (q[0], k[0], v[0], decay, beta[0, ..., 0])
        expected = naive.gated_delta_rule(*one, scale=1.0, initial_state=state[0])
    torch.testing.assert_close(found[0][0].double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1][0].double(), expected[1][-1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_what_is_asked_stands_in_the_prefix_only(task: str) -> None:
    asked = draw(task, 64, 12, 8, random.Random(0), 48)
    rows = zip(*(each.tolist() for each in (asked.before, asked.after, asked.target)), strict=True)
    for before, after, target in rows:
        places = [place for place, word in enumerate(target) if word != NOTHING]
        assert places
        for place in places:
            above = before.index(after[place])
            assert before[above + 1] == target[place]
            if task == "copy":
                assert after[places[0]] == COPY
            else:
                assert after[place - 1] == ASK
                assert target[place] not in after


def test_a_conversation_asks_for_pairs_that_were_told() -> None:
    turns = conversations(2, random.Random(0))
    assert len(turns) == TURNS
    told = torch.cat([turns[0].before, *(turn.after for turn in turns)], 1).tolist()
    for number, turn in enumerate(turns):
        assert (turn.before.shape[1] > 0) == (number == 0)
        for row, place in (turn.target != NOTHING).nonzero().tolist():
            above = told[row].index(turn.after[row, place].item())
            assert told[row][above + 1] == turn.target[row, place]
    assert len({*told[0]}) > FIRST_PAIRS + TURNS


@pytest.mark.parametrize("reach", [BOTH, STATES], ids=lambda reach: reach.name)
def test_an_exact_hit_answers_like_the_whole_sequence(model: Hybrid, reach: Reach) -> None:
    asked = draw("recall", 40, 8, 2, random.Random(0), 24)
    cache = recode(prefill(model, asked.before, reach), Codec.EXACT, Codec.EXACT)
    found, _ = answer(model, asked, cache, reach)
    with torch.no_grad():
        out, _ = model(torch.cat([asked.before, asked.after], 1), None, reach.window)
        logprobs = model.head(out[:, 40:]).log_softmax(-1)
    expected = logprobs.transpose(0, 1)[(asked.target != NOTHING).T]
    torch.testing.assert_close(found.logprobs, expected, atol=1e-4, rtol=0)


def test_a_wrong_scale_is_seen_beside_the_error_of_int8(model: Hybrid) -> None:
    asked = draw("recall", 64, 16, 4, random.Random(0), 32)
    cache = prefill(model, asked.before, BOTH)

    def moved(kv: Coder, states: Coder) -> float:
        return answer(model, asked, recode(cache, kv, states), BOTH)[0].beside(exact)[1]

    exact, _ = answer(model, asked, cache, BOTH)
    assert moved(Codec.EXACT, Codec.EXACT) == 0
    int8 = moved(Codec.INT8, Codec.INT8)
    assert moved(Codec.BF16, Codec.BF16) < int8 < 0.02
    assert moved(wrong_scale, Codec.INT8) > 3 * int8
    assert moved(Codec.INT8, wrong_scale) > 3 * int8


def test_a_conversation_coded_at_each_turn_drifts_and_an_exact_one_does_not(model: Hybrid) -> None:
    turns = conversations(2, random.Random(0))[:4]
    exact = converse(model, turns, Codec.EXACT, STATES)

    def moved(coder: Coder, each_token: bool) -> float:
        found = converse(model, turns, coder, STATES, each_token)
        return max(turn.beside(one)[1] for turn, one in zip(found, exact, strict=True))

    assert moved(Codec.EXACT, each_token=True) < 1e-4 < moved(Codec.INT8, each_token=False) < 0.05


def test_answers_are_counted_by_their_distance() -> None:
    scores = torch.tensor([[3.0, 0.0], [0.0, 3.0], [3.0, 0.0]]).log_softmax(-1)
    answers = Answers(scores, torch.tensor([0, 0, 0]), torch.tensor([1, 20, 70]))
    assert answers.accuracy == pytest.approx(2 / 3)
    near = answers.between(0, 64)
    assert near.accuracy == pytest.approx(1 / 2)
    other = Answers(scores.flip(-1), answers.target, answers.distance)
    assert other.between(0, 16).beside(answers.between(0, 16)) == (0, pytest.approx(3.0))


@pytest.mark.slow
def test_a_model_learns_to_answer_from_its_context() -> None:
    trained, asked = train("gdn", 200, [KV]), draw("needle", 128, 4, 32, random.Random(1), 64)
    cache = recode(prefill(trained, asked.before, KV), Codec.EXACT, lost)
    found, _ = answer(trained, asked, cache, KV)
    assert found.accuracy > 0.8


@pytest.mark.slow
def test_a_page_has_both_tables_of_a_model() -> None:
    text = measure("mamba2", steps=1, sequences=1, chats=1)
    assert text.startswith("### Mamba-2\n")
    assert text.count("\n|---") == 2
