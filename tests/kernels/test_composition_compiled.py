"""The kernel of transitions, compiled ahead of time for real layers: one launch a segment, no
register is spilled. test_checkpoint_states.py runs it in the interpreter.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from sglang_hybrid.kernels import composition, composition_triton
from tests.kernels.launches import Launch, noted
from tests.kernels.test_checkpoint_states import run
from tests.kernels.test_checkpoint_states_compiled import TARGETS, assert_no_spills

LAYERS = {"Qwen3-Next-80B": (16, 32, False), "Kimi-Linear-48B": (32, 32, True)}
"""Heads of keys, heads, and whether each channel has a decay; keys have 128 numbers."""


def launches(name: str, dtype: torch.dtype = torch.bfloat16, begin: int = 3) -> list[Launch]:
    """The launches of a segment that begins at this token of a batch."""
    key_heads, heads, by_channel = LAYERS[name]
    mixed = torch.zeros(90, 3 * 128 * heads, dtype=dtype)
    k = mixed[begin:, 128 * heads :][:, : 128 * key_heads].unflatten(-1, (key_heads, 128))
    g = torch.zeros(90, heads, *([128] if by_channel else []))[begin:]
    inputs = (k, g, torch.zeros(90, heads)[begin:], [0, 70])
    return noted(
        lambda: composition.delta_rule_transitions(*inputs, l2norm=True),
        composition_triton,
        ["delta_transition"],
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_kernel_on_a_gpu() -> None:
    run(["launched_composition.py"], "not slow", 50, 240, gpu=True)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LAYERS)
def test_it_is_compiled_for(name: str, dtype: torch.dtype, target: int, tmp_path: Path) -> None:
    """A GPU of this capability."""
    (launch,) = launches(name, dtype)
    assert_no_spills(launch, target, tmp_path)


@pytest.mark.parametrize("name", LAYERS)
def test_segments_anywhere_in_a_batch_need_one_variant(name: str) -> None:
    found = {launch.variant() for begin in (0, 1, 3, 16) for launch in launches(name, begin=begin)}
    assert len(found) == 1
