"""The Triton kernels, compiled ahead of time for real models: no register is spilled.

Needs no GPU: triton.compile takes a target, and brings the assembler and cuobjdump. Compiled are
the variants that prefills launch. What each kernel takes is printed; `pytest -rP` shows it.
"""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from tests.kernels.launches import Launch, noted  # noqa: E402
from tests.kernels.model_layers import LAYERS, Layer, prefill  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled"
)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TARGETS = [80, 90, 100]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SERVED = [
    *("Nemotron-H-8B", "Falcon-H1-7B", "Qwen3-Next-80B", "Kimi-Linear-48B", "Ling-2.5"),
    *("MiniCPM-SALA", "LFM2-2.6B", "Jet-Nemotron-2B"),
]
MORE = {"smallest": Layer(8, 32, 2, 16, 64, 0)}


def launches(layer: Layer) -> list[Launch]:
    """The launches of a prefill that resumes."""
    return noted(lambda: prefill(layer, [100], [7], [(0, 70), (0, 100)]))


def assert_no_spills(launch: Launch, target: int, tmp_path: Path) -> None:
    binary = launch.compiled(target)
    (tmp_path / "kernel.cubin").write_bytes(binary.asm["cubin"])
    usage = subprocess.run(
        [CUOBJDUMP, "--dump-resource-usage", tmp_path / "kernel.cubin"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = map(int, found.groups())
    shared = binary.metadata.shared
    print(f"{launch.name} sm_{target}: {registers} registers, {shared} bytes shared memory")
    assert stack == local == 0, f"{launch.name} spills on sm_{target}: {usage}"


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("target", TARGETS)
def test_what_servers_launch(target: int, name: str, tmp_path: Path) -> None:
    for launch in launches(LAYERS[name]):
        assert_no_spills(launch, target, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("states", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", TARGETS)
def test_every_type(target: int, dtype: torch.dtype, states: torch.dtype, tmp_path: Path) -> None:
    for layer in (LAYERS | MORE).values():
        for launch in launches(replace(layer, dtype=dtype, states=states)):
            assert_no_spills(launch, target, tmp_path)
