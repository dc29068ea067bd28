"""The clients' environment, and a server at its defaults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import default_server as default_server
from tests.server.conftest import pytest_itemcollected as pytest_itemcollected

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-clients"
PROGRAMS = Path(__file__).parent / "programs"

RunClient = Callable[..., dict[str, Any]]
"""Runs the named program of `programs/` against an address; what it printed. `own`: in the
environment of the tests, in place of the clients'.
"""


@pytest.fixture(scope="session")
def run_client() -> RunClient:
    if not (ENVIRONMENT / ".complete").exists():
        pytest.skip("no .venv-clients: `scripts/test_slow.sh clients` makes it")

    def run(name: str, url: str, own: bool = False) -> dict[str, Any]:
        python = sys.executable if own else ENVIRONMENT / "bin" / "python"
        done = subprocess.run(
            [python, PROGRAMS / f"{name}.py", url],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return printed

    return run
