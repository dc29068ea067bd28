"""SGLang's models decode alike in one native call and layer by layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.platforms  # noqa: F401 (finds our platform; that cannot be imported before it)
import torch
from torch import nn

from sglang_hybrid.extensions.cpu.native.library import library
from sglang_hybrid.extensions.cpu.native.model_step import MOST_ROWS, Unserved
from sglang_hybrid.extensions.cpu.ops import linear, model_steps
from tests.kernels.naive_layers import RMSNorm

ROOT = Path(__file__).parents[3]
SERVED = ("nemotron-h", "falcon-h1", "granite-hybrid", "mamba2", "falcon-mamba", "transformer")

PROGRAM = """
import json, sys
from sglang_hybrid.hooks import patching
patching.install()
from tests.extensions.cpu.model_runner import load, requests
from sglang_hybrid.extensions.cpu.models import ensure_tiny_model

if __name__ == "__main__":
    import torch
    name, *flags = sys.argv[1:]
    runner = load(ensure_tiny_model(name), flags)
    from sglang_hybrid.extensions.cpu.ops import linear, model_steps
    find, taken = model_steps.find_description, []

    def as_described(*asked):
        taken.append(find(*asked))
        return taken[-1]

    def steps(count):
        torch.manual_seed(count)
        runner.clear()
        token, _, batch = runner.extend(requests(count, 37))
        for _ in range(6):
            token, logits = runner.decode(forced[count], batch)[:2]
            yield logits.float().log_softmax(-1)

    forced = {count: torch.arange(500, 500 + count) for count in (1, 2, 7)}
    error = 0.0
    for count in forced:
        found = []
        for choose in (as_described, lambda *asked: None):
            model_steps.find_description = choose
            found.append(torch.stack(list(steps(count))))
        error = max(error, float((found[0] - found[1]).abs().max()))
    print(json.dumps([sum(one is not None for one in taken), error]))
"""


STEPS = 18
"""Decode steps of the program."""


def decoded(name: str, *flags: str) -> tuple[int, float]:
    """The number of steps that were one call, and the largest difference of a log probability."""
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


def a_batch(**other: Any) -> SimpleNamespace:
    """The fields that the choice reads of a batch of three sequences that decode."""
    plain = {
        "forward_mode": SimpleNamespace(is_decode=lambda: True),
        "batch_size": 3,
        "spec_info": None,
        "encoder_lens": None,
        "input_ids": torch.zeros(3),
        "positions": torch.zeros(3),
    }
    return SimpleNamespace(**plain | other)


@pytest.mark.parametrize(
    "other",
    [
        {"forward_mode": SimpleNamespace(is_decode=lambda: False)},
        {"batch_size": MOST_ROWS + 1, "input_ids": torch.zeros(MOST_ROWS + 1)},
        {"spec_info": object()},
        {"encoder_lens": torch.zeros(3)},
        {"input_ids": torch.zeros(6)},
        {"positions": torch.zeros(3, 3)},
    ],
    ids=["prefill", "many", "speculation", "encoder", "several tokens", "several positions"],
)
def test_batches_that_sglang_computes(other: dict[str, Any]) -> None:
    model = SimpleNamespace()
    assert model_steps._is_plain_decode(model, a_batch())
    assert not model_steps._is_plain_decode(model, a_batch(**other))


def test_models_that_sglang_computes() -> None:
    captured = SimpleNamespace(layers_to_capture={3})
    of_a_pipeline = SimpleNamespace(pp_group=SimpleNamespace(world_size=2))
    assert not model_steps._is_plain_decode(captured, a_batch())
    assert not model_steps._is_plain_decode(of_a_pipeline, a_batch())


def test_a_model_is_described_again_after_an_update_of_weights_and_for_another_backend() -> None:
    backend = SimpleNamespace()
    known = model_steps._Known(backend, linear.changes(), None)
    assert model_steps._is_current(known, backend)
    assert not model_steps._is_current(known, SimpleNamespace(other=True))
    linear.unpack(nn.Linear(2, 2))  # as before weights are updated
    assert not model_steps._is_current(known, backend)


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
def test_a_layer_of_another_kind_leaves_the_model_to_sglang() -> None:
    backend = SimpleNamespace()
    model = nn.Module()
    model.norm_f, model.layers = RMSNorm(8), [nn.Linear(8, 8)]
    found = model_steps._describe(model_steps.describe_nemotron_h, library(), model, backend)
    assert found is None


def test_a_model_with_a_hook_is_not_described() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(print)
    with pytest.raises(Unserved, match="a Linear with a hook"):
        model_steps.Description(None, model, None)  # type: ignore[arg-type]
