"""The real server says what transformers' own torch implementation says, cache on and off."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_hybrid.models import ARCHITECTURES
from sglang_hybrid.server_process import ServerProcess
from tests.reference import hf_greedy, hf_prompt_logprobs
from tests.server.client import TOLERANCE, Answer, generate, random_prompt

LENGTHS = (1, 63, 64, 65, 700)
NEW_TOKENS = 32
PROMPTS = [random_prompt(length, seed=length) for length in LENGTHS]

WHOLE_WITHOUT_CACHE = ("--disable-radix-cache",)
CHUNKED_WITH_CACHE = ("--chunked-prefill-size", "128")


@dataclass(frozen=True)
class Expected:
    """What transformers answers to each of `PROMPTS`."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    prompt_logprobs: list[list[float]]


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def model(request: pytest.FixtureRequest, model_directory: Callable[[str], Path]) -> Path:
    return model_directory(request.param)


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    greedy = [hf_greedy(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    return Expected(
        tokens=[tokens for tokens, _ in greedy],
        logprobs=[logprobs for _, logprobs in greedy],
        prompt_logprobs=[hf_prompt_logprobs(model, prompt) for prompt in PROMPTS],
    )


@pytest.fixture(scope="module", params=[WHOLE_WITHOUT_CACHE, CHUNKED_WITH_CACHE], ids="-".join)
def server(request: pytest.FixtureRequest, model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(["--model-path", str(model), *request.param]) as running:
        yield running


def agree(answers: list[Answer], expected: Expected) -> None:
    for length, answer, tokens, logprobs in zip(
        LENGTHS, answers, expected.tokens, expected.logprobs, strict=True
    ):
        assert answer.prompt_tokens == length
        assert answer.tokens == tokens, f"prompt of {length}"
        if answer.logprobs:
            assert answer.logprobs == pytest.approx(logprobs, abs=TOLERANCE), f"prompt of {length}"


def test_logprobs_and_tokens_agree(server: ServerProcess, expected: Expected) -> None:
    answers = generate(server.url, PROMPTS, NEW_TOKENS, logprobs=True)
    agree(answers, expected)
    for answer, logprobs in zip(answers, expected.prompt_logprobs, strict=True):
        assert answer.prompt_logprobs == pytest.approx(logprobs, abs=TOLERANCE)


def test_a_second_visit_agrees_and_hits_only_with_the_cache(
    server: ServerProcess, expected: Expected, request: pytest.FixtureRequest
) -> None:
    agree(generate(server.url, PROMPTS, NEW_TOKENS), expected)
    again = generate(server.url, PROMPTS, NEW_TOKENS)
    agree(again, expected)
    if "disable" in request.node.name:
        assert [answer.cached_tokens for answer in again] == [0] * len(PROMPTS)
    else:
        assert again[-1].cached_tokens > 0
