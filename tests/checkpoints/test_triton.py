"""SGLang's patched scans leave states at any positions: in Triton's interpreter, and on a GPU."""

import os
import subprocess
import sys

import pytest
import torch


@pytest.mark.parametrize(
    ("where", "which", "types"),
    [
        ("interpreter", "few", ["bfloat16"]),
        pytest.param("interpreter", "all", ["bfloat16"], marks=pytest.mark.slow),
        pytest.param("interpreter", "all", ["float16"], marks=pytest.mark.slow),
        ("GPU", "all", ["float16", "bfloat16"]),
    ],
)
def test_scans_leave_several_states_of_a_sequence_in_any_order(
    where: str, which: str, types: list[str]
) -> None:
    pytest.importorskip("triton")
    if where == "GPU" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    program = [sys.executable, "-m", "tests.checkpoints.launched_scans", which, *types]
    environment = {**os.environ, "TRITON_INTERPRET": "1" if where == "interpreter" else "0"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
