"""Threads of the server's processes soon sleep when they wait, unless the user says other."""

import os
import subprocess
import sys

import pytest

from sglang_hybrid.extensions.cpu.activation import SPINS

PROGRAM = """
import os
from sglang_hybrid.extensions.cpu.activation import activate
activate()
os.execvp("env", ["env"])  # what a process that is started now sees
"""
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(
    ("users", "found"),
    [
        ({}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": str(SPINS)}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
        pytest.param(
            *({"OMP_WAIT_POLICY": "PASSIVE"}, {"OMP_WAIT_POLICY": "PASSIVE"}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "7"}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_openmp_reads(users: dict[str, str], found: dict[str, str]) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    environment |= {"CUDA_VISIBLE_DEVICES": "", **users}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    seen = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert {name: seen[name] for name in VARIABLES if name in seen} == found
