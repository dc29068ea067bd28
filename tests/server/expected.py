"""Answers of transformers to prompts of several lengths, and whether a server agrees."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reference import load_reference
from tests.server.client import (
    TOLERANCE,
    ask,
    cached,
    flush,
    logprobs,
    prompt_logprobs,
    random_prompt,
)

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
    """The right answers of `model` to one prompt of each length."""
    return [_decided(model, length) for length in LENGTHS]


def agree(url: str, expected: list[Expected], *, prompts: bool = False) -> list[dict[str, Any]]:
    """The records of all prompts, sent as one batch: identical tokens, and log probabilities within
    the tolerance. prompts: those of the prompts, too, for which nothing is taken from the cache.
    """
    start = {"logprob_start_len": 0} if prompts else {}
    records: list[dict[str, Any]] = ask(url, [one.prompt for one in expected], NEW_TOKENS, **start)
    for record, right in zip(records, expected, strict=True):
        assert record["meta_info"]["prompt_tokens"] == len(right.prompt)
        assert record["output_ids"] == right.tokens
        assert logprobs(record) == pytest.approx(right.logprobs, abs=TOLERANCE)
        if prompts:
            assert prompt_logprobs(record) == pytest.approx(right.prompt_logprobs, abs=TOLERANCE)
    return records


def conversations_agree(url: str, expected: list[Expected]) -> None:
    """An earlier prompt and half of its answer get the other half, and come from the cache."""
    half = NEW_TOKENS // 2
    flush(url)
    agree(url, expected)
    longer = ask(url, [right.prompt + right.tokens[:half] for right in expected], half)
    assert [record["output_ids"] for record in longer] == [one.tokens[half:] for one in expected]
    assert cached(longer[-1]) > 0


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
