"""The Triton kernels, compiled ahead of time for real models: no register is spilled.

Needs no GPU: triton.compile takes a target, and brings the assembler and cuobjdump. What each
kernel takes is printed; `pytest -rP` shows it.
"""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from sglang_hybrid.kernels import checkpoint_states as cs  # noqa: E402
from sglang_hybrid.kernels import checkpoint_states_triton as kernels  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled"
)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TARGETS = [80, 90, 100]
NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
INTEGERS = {"cu_seqlens": "*i32", "sequences": "*i64", "ends": "*i64", "slots": "*i64"}

# Heads per group, P, N, chunk: the models' config.json on Hugging Face.
MAMBA2 = {
    "Nemotron-H-8B": (16, 64, 128, 128),
    "Falcon-H1-7B": (24, 128, 256, 256),
    "Granite-4.0-H": (128, 64, 128, 256),
    "smallest": (4, 32, 16, 64),
}
# Value heads per key head, Dk, Dv, one decay per channel.
DELTA = {"Qwen3-Next": (2, 128, 128, False), "Kimi-Linear": (1, 128, 128, True)}


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], target: int
) -> tuple[bytes, int]:
    """The cubin that a launch on contiguous tensors compiles, and its bytes of shared memory."""
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        kind = types.get(name, "i32")
        signature[name] = "constexpr" if name in constants else kind
        if signature[name].startswith("*") or (name.startswith("stride") and name not in constants):
            aligned[(i,)] = [["tt.divisibility", 16]]
    binary = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", target, 32),
        options={"num_warps": 4},
    )
    return binary.asm["cubin"], binary.metadata.shared


def assert_no_spills(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    target: int,
    tmp_path: Path,
) -> None:
    cubin, shared = compiled(kernel, types, constants, target)
    (tmp_path / "kernel.cubin").write_bytes(cubin)
    usage = subprocess.run(
        [CUOBJDUMP, "--dump-resource-usage", tmp_path / "kernel.cubin"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = map(int, found.groups())
    print(f"{kernel.__name__} sm_{target}: {registers} registers, {shared} bytes shared memory")
    assert stack == local == 0, f"{kernel.__name__} spills on sm_{target}: {usage}"


def ssd(name: str, dtype: torch.dtype, kept: torch.dtype, resumed: bool) -> tuple[Any, ...]:
    share, width, size, chunk = MAMBA2[name]
    types = {
        **INTEGERS,
        **dict.fromkeys(["x", "B"], NAMES[dtype]),
        **dict.fromkeys(["pool", "chunk_states", "initial_states"], NAMES[kept]),
        **dict.fromkeys(["dt", "A"], "*fp32"),
        "stride_pool": "i64",
    }
    constants = {
        "WIDTH": width,
        "SIZE": size,
        "CHUNK": chunk,
        "HEADS_PER_GROUP": share,
        "RESUMED": resumed,
        **dict.fromkeys(["stride_x_width", "stride_dt_token", "stride_B_size"], 1),
        **({} if resumed else {"initial_states": None}),
        **cs.ssd_tiles(width, size, dtype),
    }
    return kernels.ssd_state, types, constants


def delta(name: str, dtype: torch.dtype, kept: torch.dtype) -> tuple[Any, ...]:
    share, key, value, per_channel = DELTA[name]
    types = {
        **INTEGERS,
        **dict.fromkeys(["keys", "corrections", "chunk_states"], NAMES[dtype]),
        "pool": NAMES[kept],
        "decays": "*fp32",
        "chunk_offsets": "*i64",
        "unit": "fp32",
        "stride_pool": "i64",
    }
    constants = {
        "KEY": key,
        "VALUE": value,
        "CHUNK": cs.DELTA_CHUNK,
        "HEADS_PER_KEY": share,
        "PER_CHANNEL": per_channel,
        **cs.delta_tiles(value, key, dtype),
    }
    return kernels.delta_state, types, constants


def window(past: int, dtype: torch.dtype) -> tuple[Any, ...]:
    types = {
        **INTEGERS,
        **dict.fromkeys(["pool", "inputs"], NAMES[dtype]),
        "state_indices": "*i32",
        "resumed": "*i1",
        "stride_pool": "i64",
    }
    constants = {"PAST": past, "stride_pool_step": 1, "stride_inputs_channel": 1}
    return kernels.conv_window, types, {**constants, **cs.window_tiles(past)}


@pytest.mark.parametrize("target", TARGETS)
def test_what_servers_launch(target: int, tmp_path: Path) -> None:
    assert_no_spills(*ssd("Nemotron-H-8B", torch.bfloat16, torch.float32, True), target, tmp_path)
    assert_no_spills(*ssd("Falcon-H1-7B", torch.bfloat16, torch.float32, True), target, tmp_path)
    assert_no_spills(*delta("Qwen3-Next", torch.bfloat16, torch.float32), target, tmp_path)
    assert_no_spills(*window(3, torch.bfloat16), target, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kept", NAMES)
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("target", TARGETS)
def test_every_type(target: int, dtype: torch.dtype, kept: torch.dtype, tmp_path: Path) -> None:
    for name in MAMBA2:
        for resumed in (False, True):
            assert_no_spills(*ssd(name, dtype, kept, resumed), target, tmp_path)
    for name in DELTA:
        assert_no_spills(*delta(name, dtype, kept), target, tmp_path)
    for past in (1, 2, 3):
        assert_no_spills(*window(past, dtype), target, tmp_path)
