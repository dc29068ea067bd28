"""What transformers answers to prompts of several lengths, and whether a server agrees."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.reference import load_reference
from tests.server.client import TOLERANCE, Answer, flush, generate, random_prompt

LENGTHS = (1, 63, 64, 65, 700)
NEW_TOKENS = 32
ATTEMPTS = 10


@dataclass(frozen=True)
class Expected:
    """A prompt, its greedy tokens, their log probabilities, and the prompt's but its first."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]


@cache
def expect(model: Path) -> list[Expected]:
    """What `model` should answer to one prompt of each length."""
    return [_decided(model, length) for length in LENGTHS]


def agree(answers: list[Answer], expected: list[Expected]) -> None:
    """Identical tokens, and log probabilities within the tolerance where they were asked for."""
    for answer, right in zip(answers, expected, strict=True):
        assert answer.prompt_tokens == len(right.prompt)
        assert answer.tokens == right.tokens
        if answer.logprobs:
            assert answer.logprobs == pytest.approx(right.logprobs, abs=TOLERANCE)
            assert answer.prompt_logprobs == pytest.approx(right.prompt_logprobs, abs=TOLERANCE)


def conversations_agree(url: str, expected: list[Expected]) -> None:
    """An earlier prompt and half of its answer get the other half, and come from the cache."""
    half = NEW_TOKENS // 2
    flush(url)
    agree(generate(url, [right.prompt for right in expected], NEW_TOKENS), expected)
    longer = generate(url, [right.prompt + right.tokens[:half] for right in expected], half)
    assert [answer.tokens for answer in longer] == [right.tokens[half:] for right in expected]
    assert longer[-1].cached_tokens > 0


def _decided(model: Path, length: int) -> Expected:
    """The first random prompt whose greedy tokens no difference within the tolerance can change.

    Tokens come from transformers' decoding, log probabilities from one pass over the whole.
    """
    reference = load_reference(model)
    for seed in range(length, length + ATTEMPTS):
        prompt = random_prompt(length, seed)
        tokens, _ = reference.greedy(prompt, NEW_TOKENS)
        scores = reference.logprobs(prompt + tokens)
        best = scores[length - 1 : -1].topk(2)
        lead = best.values[:, 0] - best.values[:, 1]
        if lead.min() <= 2 * TOLERANCE:
            continue
        assert best.indices[:, 0].tolist() == tokens, "transformers' decoding and prefill differ"
        targets = torch.tensor(prompt + tokens)[1:, None]
        chosen = scores[:-1].gather(1, targets)[:, 0].tolist()
        return Expected(prompt, tokens, chosen[length - 1 :], chosen[: length - 1])
    raise AssertionError(f"{ATTEMPTS} prompts of {length} tokens, all with greedy near-ties")
