"""Answers told by later prompts; Mooncake as marconi-notes.md section 8 has it."""

from __future__ import annotations

import random
from functools import cache

import pytest

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.traffic.requests import (
    FreshTokens,
    Request,
    block_tokens,
    make_request,
)
from sglang_hybrid.extensions.lab.simulation.simulator import hit_rate
from sglang_hybrid.extensions.lab.simulation.traces.formats import read_trace
from sglang_hybrid.extensions.lab.simulation.traces.lines import Reading
from sglang_hybrid.extensions.lab.simulation.traces.stitch import stitched
from sglang_hybrid.extensions.lab.systems import Setting, build_system, parse_spec
from tests.examples import seeds
from tests.traces import TRACES

MOONCAKE = TRACES / "mooncake_conversation_trace.jsonl.gz"
PAPER = CostModel.paper_7b()


def request(at: int, blocks: list[int], input_len: int, answer: int, fresh: FreshTokens) -> Request:
    prompt = block_tokens(blocks, 4)[:input_len]
    return make_request(at, 0, float(at), prompt, fresh.take(answer))


def test_the_first_prompt_that_goes_on_tells_the_rest() -> None:
    """Prompts of 4 tokens a block: the second goes on from the first, the third from the second."""
    fresh = FreshTokens()
    first = request(0, [1, 2], 6, 3, fresh)
    short = request(1, [1, 3], 8, 1, fresh)  # known to 8 tokens, where `first` ends at 9
    second = request(2, [1, 4, 5], 12, 2, fresh)
    third = request(3, [1, 4, 5, 6], 16, 1, fresh)
    told = stitched([first, short, second, third], block=4)
    assert told[0].tokens.tolist() == second.tokens[:9].tolist()
    assert told[1].tokens.tolist() == short.tokens.tolist()
    assert told[2].tokens.tolist() == third.tokens[:14].tolist()
    assert told[3].tokens.tolist() == third.tokens.tolist()
    assert [one.input_len for one in told] == [6, 8, 12, 16]


def test_it_is_what_its_definition_says() -> None:
    for seed in seeds(20):
        rng, fresh = random.Random(seed), FreshTokens()
        made: list[Request] = []
        for at in range(rng.randrange(1, 30)):
            blocks = [rng.randrange(2) for _ in range(rng.randrange(1, 6))]
            length = rng.randrange(1, 4 * len(blocks) + 1)
            made.append(request(at, blocks, length, rng.randrange(9), fresh))
        for one, told in zip(made, stitched(made, block=4), strict=True):
            assert told.tokens.tolist() == plainly(one, made)


def plainly(one: Request, made: list[Request]) -> list[int]:
    """Tokens of a request, the unknown ones from the first later prompt that goes on from it."""
    known = one.input_len // 4 * 4
    tokens: list[int] = one.tokens.tolist()
    for later in made[one.session + 1 :]:
        goes_on = known and later.tokens[:known].tolist() == tokens[:known]
        if goes_on and known <= later.input_len // 4 * 4 >= len(tokens):
            beginning: list[int] = later.tokens[: len(tokens)].tolist()
            return beginning
    return tokens


@cache
def mooncake() -> list[Request]:
    if not MOONCAKE.exists():
        pytest.skip(f"../shared/traces/{MOONCAKE.name} is not here")
    return read_trace(MOONCAKE, Reading(2_000, 32_768, stitch=True))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("lru", 6.9),
        ("marconi:alpha=1", 7.0),
        ("clairvoyant:remember=0", 18.5),
        ("unbounded", 21.2),
    ],
)
def test_independent_numbers_of_mooncake(spec: str, expected: float) -> None:
    setting = Setting(PAPER, 40 * 10**9, mooncake())
    cache = build_system(parse_spec(spec), setting)
    rate = 100 * hit_rate([cache.serve(one) for one in mooncake()])
    assert rate == pytest.approx(expected, abs=0.2)
