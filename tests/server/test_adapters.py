"""LoRA adapters on the CPU: answers are those of merged weights, and prefixes are apart."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import requests
from safetensors.numpy import load_file, save_file

from sglang_hybrid.core.records.tenant_names import KEY_VARIABLE
from sglang_hybrid.explain.prompt_route import PREFIX
from sglang_hybrid.extensions.router import Replicas
from sglang_hybrid.serving.server_process import event_flags
from tests.reference import Reference
from tests.server.client import (
    RECORD_KEY,
    TOLERANCE,
    Serve,
    ask,
    cached,
    logprobs,
    random_prompt,
    settle,
    until,
)

RANK, ALPHA = 4, 8
TARGETS = {
    "nemotron-h": ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj"),
    "transformer": ("q_proj", "v_proj", "o_proj", "down_proj"),
}
NAMES = {"first": 1, "second": 2}
"""Adapters, and the seeds of their weights."""

pytestmark = pytest.mark.slow


def write_adapter(model: Path, directory: Path, targets: tuple[str, ...], seed: int) -> None:
    """An adapter of random weights, and beside it `merged`: the model with these added."""
    source = np.random.default_rng(seed)
    merged = load_file(str(model / "model.safetensors"))
    weights = {}
    for name, value in merged.items():
        layer = name.removesuffix(".weight")
        if layer.split(".")[-1] not in targets:
            continue
        down = source.normal(0, 0.1, (RANK, value.shape[1])).astype(np.float32)
        up = source.normal(0, 0.1, (value.shape[0], RANK)).astype(np.float32)
        merged[name] = value + ALPHA / RANK * up @ down
        weights[f"base_model.model.{layer}.lora_A.weight"] = down
        weights[f"base_model.model.{layer}.lora_B.weight"] = up
    directory.mkdir()
    save_file(weights, str(directory / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    shutil.copytree(model, directory / "merged")
    save_file(merged, str(directory / "merged" / "model.safetensors"), {"format": "pt"})


@pytest.fixture(scope="module", params=list(TARGETS))
def served(
    request: pytest.FixtureRequest,
    model_directory: Callable[[str], Path],
    serve: Serve,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, dict[str | None, Reference]]]:
    """A server with two adapters, and what each should answer; None is no adapter."""
    model, root = model_directory(request.param), tmp_path_factory.mktemp("adapters")
    right: dict[str | None, Reference] = {None: Reference(model)}
    for name, seed in NAMES.items():
        write_adapter(model, root / name, TARGETS[request.param], seed)
        right[name] = Reference(root / name / "merged")
    adapters = [f"{name}={root / name}" for name in NAMES]
    flags = ["--enable-cache-report", "--radix-cache-backend", "hybrid"]
    with serve("--lora-paths", *adapters, *flags, of=request.param) as server:
        yield server.url, right


def test_each_adapter_answers_as_merged_weights_and_hits_its_own_prefixes(
    served: tuple[str, dict[str | None, Reference]],
) -> None:
    """They are asked in one batch, cold and cached; the base model's prefix is no adapter's."""
    url, right = served
    prompt = random_prompt(200, seed=7)
    names = list(right)
    scores = {name: model.greedy(prompt, 16)[1] for name, model in right.items()}
    assert scores["first"] != pytest.approx(scores["second"], abs=10 * TOLERANCE)
    assert scores["first"] != pytest.approx(scores[None], abs=10 * TOLERANCE)
    hits = []
    for wanted in ([None], ["first", "second"], names):
        answers = ask(url, [prompt] * len(wanted), lora_path=wanted)
        for name, answer in zip(wanted, answers, strict=True):
            assert logprobs(answer) == pytest.approx(scores[name], abs=TOLERANCE), name
            hits.append(cached(answer))
    assert hits == [0, 0, 0, *[len(prompt) - 1] * 3]
    prompt = random_prompt(100, seed=9)
    ask(url, prompt, 4, lora_path="first")
    for model, hit in (("x:first", len(prompt) - 1), ("x:second", 0), ("x", 0)):
        question = {"input_ids": prompt, "model": model}  # as chats name an adapter
        told = requests.post(url + "/hybrid_cache/explain", json=question, timeout=60).json()
        assert told["hit"] == hit, model


def test_routers_know_adapters_of_all_servers_that_have_them_from_the_same_path(
    model_directory: Callable[[str], Path], serve: Serve, tmp_path: Path
) -> None:
    """One server says whose a prompt is, as a picker asks it; another one resumes it."""
    write_adapter(model_directory("nemotron-h"), tmp_path / "one", TARGETS["nemotron-h"], seed=1)
    flags = ["--lora-paths", f"one={tmp_path / 'one'}", "--radix-cache-backend", "hybrid"]
    named = {KEY_VARIABLE: RECORD_KEY}
    with (
        serve(*flags, *event_flags(), environment=named) as first,
        serve(*flags, *event_flags(), environment=named) as second,
        closing(Replicas([second.url])) as replicas,
    ):
        until(lambda: second.url in replicas.followers)
        prompt = random_prompt(200, seed=8)
        for adapter in ("one", None):
            body = {"input_ids": prompt, "lora_path": adapter}
            told = requests.post(first.url + PREFIX + "/generate", json=body, timeout=60).json()
            found = []
            for _ in range(2):
                settle(replicas, second.url)
                (resumable,) = replicas.resume(told["input_ids"], told["tenant"])
                found.append(resumable.position)
                assert cached(ask(second.url, prompt, 4, lora_path=adapter)) == found[-1]
            assert found == [0, len(prompt) - 1]
