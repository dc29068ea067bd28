"""Our cache under SGLang's own ways to start: planned checkpoints, hit to the token. What a process
of SGLang has of ours is in tests/test_plugin.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import requests

from tests.server.client import Serve
from tests.server.engine_hits import HITS, REQUESTS, hit
from tests.server.test_shutdown import SHARED_MEMORY, shared_by

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("spawned")]
SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")


@pytest.mark.parametrize(
    "program",
    [(sys.executable, "-m", "sglang.launch_server"), SERVE],
    ids=["launch_server", "serve"],
)
def test_a_server(program: Sequence[str], serve: Serve) -> None:
    flags = ("--radix-cache-backend", "hybrid", "--device", "cpu")
    with serve(*flags, program=program) as server:
        answers = [requests.post(server.url + "/generate", json=body) for body in REQUESTS]
        memory = {number for process in server.processes() for number in shared_by(process)}
    assert memory
    assert not [it.name for it in os.scandir(SHARED_MEMORY) if it.inode() in memory]
    assert [hit(answer.json()) for answer in answers] == HITS


def test_an_engine(model_directory: Callable[[str], Path]) -> None:
    command = [sys.executable, "-m", "tests.server.engine_hits", str(model_directory("nemotron-h"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == HITS
