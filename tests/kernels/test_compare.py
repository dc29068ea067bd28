"""`sglang-hybrid kernels`: what it says without a GPU, and that both sides are the same states."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_hybrid.kernels import compare

ROOT = Path(__file__).parents[2]
WITHOUT_A_DEVICE = """
import os, sys, types
os.environ["TRITON_INTERPRET"] = "1"
import torch
from sglang_hybrid.kernels import compare, naive
from scripts.gpu_check import interpreter

def scan(x, dt, A, B, C, chunk, initial_states=None):
    start = None if initial_states is None else initial_states[0]
    states = naive.ssd(x[0], dt[0], A, B[0], C[0], initial_state=start)[1].float()
    chunks = -(-x.shape[1] // chunk)
    steps = torch.zeros(dt.shape[2], chunks * chunk)
    steps[:, : dt.shape[1]] = dt[0].T
    return None, None, steps.view(1, -1, chunks, chunk), None, states[None, :-1:chunk], states[-1:]

theirs = types.ModuleType("mamba_ssm.ops.triton.ssd_combined")
theirs._mamba_chunk_scan_combined_fwd = scan
for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
    sys.modules[name] = types.ModuleType(name)
sys.modules[theirs.__name__] = theirs
torch.manual_seed(0)
layer = compare.Layer("small", heads=2, width=32, size=16, groups=1, chunk=64)
print(compare.report(layer, 300, None, "cpu"))
"""


def test_it_needs_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert compare.main([]) == 1
    assert capsys.readouterr() == (
        "",
        "error: mamba-ssm's kernels need an NVIDIA GPU, and torch finds none\n",
    )


@pytest.mark.slow
def test_both_are_the_states_of_the_definition() -> None:
    """An exact scan of mamba-ssm's signature stands in its place."""
    command = [sys.executable, "-c", WITHOUT_A_DEVICE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    name, ours, theirs = done.stdout.split()
    assert name == "small" and float(ours) < 1e-2 and float(theirs) < 1e-6
