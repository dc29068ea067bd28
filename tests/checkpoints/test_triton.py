"""SGLang's patched scans leave states at any positions; in Triton's interpreter, on the CPU."""

import os
import subprocess
import sys

import pytest


def test_scans_leave_several_states_of_a_sequence_in_any_order() -> None:
    pytest.importorskip("triton")
    program = [sys.executable, "-m", "tests.checkpoints.interpreted_scans"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
