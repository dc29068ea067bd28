"""A run of scripts/quickstart.py that is ended leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import signal, sys
from types import SimpleNamespace
sys.path.insert(0, "scripts")
import quickstart

class Server:
    url, log = "http://127.0.0.1:1", "a log"

    def __init__(self, *flags, port):
        self.process = SimpleNamespace(wait=signal.pause)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        print("the server was ended", flush=True)

sys.argv = ["quickstart"]
quickstart.ServerProcess = Server
quickstart.send_requests, quickstart.print_table = lambda url: [], lambda rows: None
sys.exit(quickstart.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_its_server_ends_with_it(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while "until Ctrl-C" not in (line := process.stdout.readline()):
        assert line, "it ended before"
    process.send_signal(number)
    told, _ = process.communicate(timeout=60)
    assert told == "the server was ended\n"
    assert process.returncode == 128 + number
