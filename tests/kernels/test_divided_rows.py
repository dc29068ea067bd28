"""The kernels that code slots in place, compiled for real pools.

test_checkpoint_states.py runs them in the interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_hybrid.kernels import divided_rows
from tests.kernels.launches import Launch, noted
from tests.kernels.test_checkpoint_states import run
from tests.kernels.test_checkpoint_states_compiled import TARGETS, assert_no_spills

NAMES = ("encode_rows", "write_parts", "decode_rows")
POOLS = {
    "KV of Qwen3.5-35B": ([torch.zeros(1, 4, 2, 256, dtype=torch.bfloat16) for _ in range(20)], 2),
    "latents of Kimi-Linear-48B": (
        [torch.zeros(1, 4, 1, 576, dtype=torch.bfloat16)[..., :512] for _ in range(7)],
        2,
    ),
    "states of Nemotron-H-8B": ([torch.zeros(3, 2, 128, 64, 128)], 4),
}


def launches(name: str, first: int) -> list[Launch]:
    """The launches of coding and decoding slots whose lists begin at `first` of a tensor."""
    tensors, parts = POOLS[name]
    rows = tensors[0][0, 0, ..., 0].numel()
    layers = sum(map(len, tensors))
    scales = torch.empty(layers, tensors[0].shape[1], parts, rows, 2, dtype=torch.uint8)
    index = torch.zeros(8, dtype=torch.int64)[first:]

    def both() -> None:
        coded = divided_rows.DividedRows(tensors, scales, parts)
        coded.encode(index, index, index)
        coded.decode(index, index, index)

    return noted(both, divided_rows, NAMES)


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("target", TARGETS)
def test_compiled_for_real_pools(target: int, name: str, tmp_path: Path) -> None:
    """Three launches code and decode all layers, and spill no register."""
    found = launches(name, 0)
    assert [launch.name for launch in found] == list(NAMES)
    for launch in found:
        assert_no_spills(launch, target, tmp_path)


@pytest.mark.parametrize("name", POOLS)
def test_one_variant_wherever_a_list_begins(name: str) -> None:
    first, later = ([launch.variant() for launch in launches(name, at)] for at in (0, 1))
    assert first == later


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_kernels_on_a_gpu() -> None:
    run(["launched_divided_rows.py"], "not slow", 1, 120, gpu=True)
