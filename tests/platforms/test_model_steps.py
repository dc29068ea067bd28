"""SGLang's models decode alike in one native call and layer by layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVED = ("nemotron-h", "falcon-h1", "granite-hybrid", "mamba2", "falcon-mamba", "transformer")

PROGRAM = """
import json, sys
from sglang_hybrid import patching
patching.install()
from scripts.bench import profile
from sglang_hybrid.models import ensure_default_model

if __name__ == "__main__":
    import torch
    name, *flags = sys.argv[1:]
    runner = profile.load(ensure_default_model(name), flags)
    from sglang_hybrid.platforms.cpu_ops import model_steps
    described, taken = model_steps.described, []

    def as_described(*asked):
        taken.append(described(*asked))
        return taken[-1]

    def steps(count):
        torch.manual_seed(count)
        runner.clear()
        token, _, batch = runner.extend(profile.requests(count, 37))
        for _ in range(6):
            token, logits = runner.decode(forced[count], batch)[:2]
            yield logits.float().log_softmax(-1)

    forced = {count: torch.arange(500, 500 + count) for count in (1, 2, 7)}
    error = 0.0
    for count in forced:
        found = []
        for choose in (as_described, lambda *asked: None):
            model_steps.described = choose
            found.append(torch.stack(list(steps(count))))
        error = max(error, float((found[0] - found[1]).abs().max()))
    print(json.dumps([sum(one is not None for one in taken), error]))
"""


STEPS = 18
"""Decode steps of the program."""


def decoded(name: str, *flags: str) -> tuple[int, float]:
    """How many steps were one call, and the largest difference of a log probability."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    native, error = json.loads(done.stdout.splitlines()[-1])
    return native, error


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_all_layers_in_one_call(name: str) -> None:
    native, error = decoded(name)
    assert native == STEPS
    assert error < 1e-3


@pytest.mark.slow
def test_in_bfloat16() -> None:
    native, error = decoded("nemotron-h", "--dtype", "bfloat16")
    assert native == STEPS
    assert error < 0.5


@pytest.mark.slow
def test_another_model_is_computed_layer_by_layer() -> None:
    native, error = decoded("qwen3-next")
    assert native == 0
    assert error == 0


@pytest.mark.slow
def test_adapters_are_computed_layer_by_layer() -> None:
    flags = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "down_proj")
    native, error = decoded("transformer", *flags)
    assert native == 0
    assert error == 0
