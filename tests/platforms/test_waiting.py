"""Threads of the server's processes sleep while they wait, unless the user says other."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os
from sglang_hybrid.platforms import activate
activate()
os.execvp("printenv", ["printenv", "OMP_WAIT_POLICY"])  # what a process that is started now sees
"""


@pytest.mark.parametrize(("users", "found"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_what_openmp_reads(users: str | None, found: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    if users is not None:
        environment["OMP_WAIT_POLICY"] = users
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == found
