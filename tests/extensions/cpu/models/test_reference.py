"""The models as transformers runs them: finite, sensitive to their state, cached consistently."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_hybrid.extensions.cpu.models import ARCHITECTURES
from sglang_hybrid.extensions.cpu.models.tokenizer import FIRST_TEXT_ID, VOCAB_SIZE
from tests.reference import (
    TWINS,
    Reference,
    copy_state,
    hf_greedy,
    hf_prompt_logprobs,
    load_reference,
    recurrent_layers,
    zero_state,
)
from tests.server.client import TOLERANCE

RECURRENT = [name for name in ARCHITECTURES if name != "transformer"]
LONG = 2200
SENSITIVE = 100 * TOLERANCE
"""Least change of a log probability that a wrong state must cause."""
REACH = {"lfm2": 8, "lfm2_moe": 8}
"""Tokens behind a wrong state of short convolutions that see it: two for each of four layers. What
comes later sees them only by attention."""
NOISE = 2e-4
"""Most change of a log probability that another order of float32 operations may cause."""


def random_ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(
        FIRST_TEXT_ID, VOCAB_SIZE, (count,), generator=generator
    ).tolist()
    return ids


IN_EVERY_RUN = ("nemotron-h", "transformer")
"""The others take a second of a core for each test; they change only with their own files."""


def in_every_run(names: Iterable[str]) -> list[Any]:
    """Parameters, of which most are slow."""
    return [
        pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.slow) for name in names
    ]


@pytest.fixture(scope="module", params=in_every_run(ARCHITECTURES))
def reference(request: pytest.FixtureRequest, model_dirs: dict[str, Path]) -> Reference:
    return load_reference(model_dirs[request.param])


@pytest.fixture(scope="module", params=in_every_run(RECURRENT))
def recurrent(request: pytest.FixtureRequest, model_dirs: dict[str, Path]) -> Reference:
    return load_reference(model_dirs[request.param])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transformers_finds_every_weight(name: str, model_dirs: dict[str, Path]) -> None:
    model = load_reference(model_dirs[name]).model
    if type(model) not in TWINS.values():
        _, report = type(model).from_pretrained(model_dirs[name], output_loading_info=True)
        assert not any(report.values()), report
    assert 5e5 < model.num_parameters() - model.get_input_embeddings().weight.numel() < 8e6


def test_logits_stay_sane_over_a_long_prompt(reference: Reference) -> None:
    with torch.no_grad():
        logits: Tensor = reference.model(torch.tensor([random_ids(LONG)])).logits[0]
    assert logits.isfinite().all()
    logits = logits[::10]
    spread = logits[:, FIRST_TEXT_ID:].std(-1)
    assert spread.min() > 3.0
    assert spread.max() < 5.0
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).median() > 0.4


def test_the_cache_agrees_with_one_pass(reference: Reference) -> None:
    ids = random_ids(700)
    expected = reference.logprobs(ids)
    for split in (1, 3, 64, 333):
        _, cache = reference.extend(ids[:split])
        end = split + 100
        found, _ = reference.extend(ids[split:end], cache)
        assert (found - expected[split:end]).abs().max() < NOISE


def test_greedy_agrees_with_one_pass(reference: Reference) -> None:
    prompt = random_ids(150, seed=1)
    tokens, logprobs = reference.greedy(prompt, 40)
    scores = reference.logprobs(prompt + tokens)[len(prompt) - 1 : -1]
    assert scores.argmax(-1).tolist() == tokens
    assert torch.tensor(logprobs) == pytest.approx(scores.max(-1).values, abs=NOISE)


def test_greedy_output_depends_on_the_prompt_and_is_text(reference: Reference) -> None:
    outputs = [reference.greedy(random_ids(30, seed=seed), 40)[0] for seed in range(3)]
    for tokens in outputs:
        assert min(tokens) >= FIRST_TEXT_ID
        assert len(set(tokens)) > 20
    assert len({token for tokens in outputs for token in tokens}) > 80


def changes(
    reference: Reference, ids: list[int], start: int, wrong: Any, right: Any
) -> tuple[float, Tensor]:
    """Change of the best token's log probability at once, and of the top 20 at each position."""
    expected, _ = reference.extend(ids[start:], copy.deepcopy(right))
    found, _ = reference.extend(ids[start:], wrong)
    top = expected.topk(20).indices
    moved = (found - expected).abs().gather(1, top)
    return float(moved[0, 0]), moved.max(-1).values


@pytest.mark.parametrize("start", [40, 150, 600])
def test_a_wrong_state_shows(recurrent: Reference, start: int) -> None:
    ids = random_ids(start + 32, seed=start)
    _, early = recurrent.extend(ids[: start - 1])
    _, right = recurrent.extend(ids[:start])

    zeroed = copy.deepcopy(right)
    zero_state(zeroed)
    one_off = copy.deepcopy(right)
    copy_state(early, one_off)
    for wrong in (zeroed, one_off):
        best, top = changes(recurrent, ids, start, wrong, right)
        assert best > SENSITIVE
        assert top[: REACH.get(recurrent.model.config.model_type)].min() > SENSITIVE


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1, 2], ids=["delta net's window", "window", "last tokens"])
def test_each_wrong_part_of_qwen4_exp_shows(part: int, model_dirs: dict[str, Path]) -> None:
    """It is one token too early, and the rest of the state is right."""
    reference = load_reference(model_dirs["qwen4-exp"])
    ids = random_ids(182, seed=150)
    _, early = reference.extend(ids[:149])
    _, right = reference.extend(ids[:150])
    wrong = copy.deepcopy(right)
    for source, target in zip(recurrent_layers(early), recurrent_layers(wrong), strict=True):
        if target.conv_states[part] is not None:
            target.conv_states[part].copy_(source.conv_states[part])
    best, top = changes(reference, ids, 150, wrong, right)
    assert min(best, top.min()) > SENSITIVE


def test_the_functions_match_the_class(model_dirs: dict[str, Path]) -> None:
    directory = model_dirs["nemotron-h"]
    ids = random_ids(50)
    tokens, logprobs = hf_greedy(directory, ids, 5)
    assert len(tokens) == len(logprobs) == 5
    found = hf_prompt_logprobs(directory, ids + tokens)
    assert len(found) == 54
    assert found[49:] == pytest.approx(logprobs, abs=NOISE)
