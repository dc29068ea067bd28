"""States at any position of a prefill: Triton kernels in the interpreter and on a GPU, and what is
refused.
"""

import importlib.util
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from sglang_hybrid.kernels import checkpoint_states as cs

HERE = Path(__file__).parent


def run(
    programs: list[str], marked: str, examples: int, timeout: int, *, gpu: bool = False
) -> None:
    """Runs the tests of ``programs`` in Triton's interpreter or on the GPU, with a fresh seed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked]
    command += [f"--hypothesis-seed={secrets.randbits(31)}", *(str(HERE / p) for p in programs)]
    print(*command)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "TRITON_INTERPRET": "0" if gpu else "1", "EXAMPLES": str(examples)},
        cwd=HERE.parents[1],
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]


def programs() -> list[str]:
    """The first needs no SGLang."""
    with_sglang = ["launched_with_sglang.py"] if importlib.util.find_spec("sglang") else []
    return ["launched_checkpoint_states.py", *with_sglang]


def test_our_kernels_in_the_interpreter() -> None:
    """States at any position are the recurrence's, no address is too large, rows of host memory,
    slots that are coded in place, transitions of segments.
    """
    parts = ("checkpoint_states", "addresses", "host_rows", "divided_rows", "composition")
    run([f"launched_{part}.py" for part in parts], "not slow", 4, 250)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_any_position_is_the_recurrence_at_length() -> None:
    run(programs(), "slow or not slow", 300, 1700)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_any_position_is_the_recurrence_on_a_gpu() -> None:
    run(programs(), "slow or not slow", 100, 280, gpu=True)


def targets(n: int) -> cs.Targets:
    return cs.Targets(*torch.zeros(3, n, dtype=torch.int64))


def mamba2(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arguments of save_ssd_states for 70 tokens in chunks of 64."""
    arguments = {
        "x": torch.zeros(70, 2, 32),
        "dt": torch.zeros(2, 2, 64),
        "A": torch.zeros(2),
        "B": torch.zeros(70, 1, 16),
        "chunk_states": torch.zeros(2, 2, 32, 16),
        "cu_seqlens": torch.tensor([0, 70]),
    }
    return {**arguments, **changes}


def test_nothing_is_launched_for_no_target() -> None:
    """Every launch would fail with tensors on the CPU."""
    cu_seqlens = torch.tensor([0, 70])
    cs.save_ssd_states(torch.zeros(3, 2, 32, 16), targets(0), **mamba2())
    cs.save_delta_states(
        torch.zeros(3, 2, 32, 32),
        targets(0),
        keys=torch.zeros(70, 1, 32),
        corrections=torch.zeros(70, 2, 32),
        decays=torch.zeros(70, 2),
        chunk_states=torch.zeros(2, 2, 32, 32),
        rows=torch.zeros(0, dtype=torch.int64),
        cu_seqlens=cu_seqlens,
    )
    cs.save_windows(
        torch.zeros(3, 8, 3),
        targets(0),
        inputs=torch.zeros(70, 8),
        state_indices=torch.tensor([0]),
        resumed=torch.tensor([False]),
        cu_seqlens=cu_seqlens,
    )


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="three lists of one length"):
        cs.Targets(torch.zeros(2), torch.zeros(3), torch.zeros(3))


def test_a_pool_of_another_shape_or_with_loose_rows_is_refused() -> None:
    for pool in (torch.zeros(3, 2, 16, 32), torch.zeros(3, 2, 16, 32).transpose(2, 3)):
        with pytest.raises(ValueError, match="pool"):
            cs.save_ssd_states(pool, targets(1), **mamba2())


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="70 tokens"):
        cs.save_ssd_states(
            torch.zeros(3, 2, 32, 16),
            targets(1),
            **mamba2(dt=torch.zeros(2, 1, 64), chunk_states=torch.zeros(1, 2, 32, 16)),
        )


def test_a_pool_of_other_windows_is_refused() -> None:
    with pytest.raises(ValueError, match="windows"):
        cs.save_windows(
            torch.zeros(3, 9, 3),
            targets(1),
            inputs=torch.zeros(70, 8),
            state_indices=torch.tensor([0]),
            resumed=torch.tensor([False]),
            cu_seqlens=torch.tensor([0, 70]),
        )
