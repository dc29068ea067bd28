"""Servers in bfloat16 on the CPU are as near to float32 as transformers' own bfloat16 is."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sglang_hybrid.extensions.cpu.models import ARCHITECTURES
from tests.reference import Reference
from tests.server.client import Serve, ask, cached, flush, logprobs, prompt_logprobs, random_prompt

PROMPT = 700
TURN = 40
FACTOR = 1.5
"""The factor by which our mean error may be larger than transformers' own."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow) for name in sorted(ARCHITECTURES)],
)
def served(
    request: pytest.FixtureRequest, model_directory: Callable[[str], Path], serve: Serve
) -> Iterator[tuple[str, Path]]:
    with serve("--dtype", "bfloat16", of=request.param) as server:
        yield server.url, model_directory(request.param)


def of_tokens(model: Path, dtype: torch.dtype, prompt: list[int]) -> torch.Tensor:
    """Transformers' log probability of each token of a prompt but the first."""
    scores = Reference(model, dtype).logprobs(prompt)
    return scores[:-1].gather(1, torch.tensor(prompt)[1:, None])[:, 0]


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).abs().mean())


def test_log_probabilities_cold_and_behind_a_hit(served: tuple[str, Path]) -> None:
    url, model = served
    flush(url)
    prompt = random_prompt(PROMPT, seed=1)
    first = ask(url, prompt, TURN)
    longer = prompt + first["output_ids"] + random_prompt(TURN, seed=2)
    second = ask(url, longer, TURN)
    assert cached(second) >= PROMPT
    whole = longer + second["output_ids"]
    flush(url)
    prefilled = prompt_logprobs(ask(url, whole, 1, logprob_start_len=0))

    exact = of_tokens(model, torch.float32, whole)
    rounding = error(of_tokens(model, torch.bfloat16, whole), exact)
    answers = torch.tensor([*logprobs(first), *logprobs(second)])
    begins = (len(prompt) - 1, len(longer) - 1)
    exact_answers = torch.cat([exact[begin : begin + TURN] for begin in begins])
    assert error(torch.tensor(prefilled), exact) < FACTOR * rounding
    assert error(answers, exact_answers) < FACTOR * rounding
