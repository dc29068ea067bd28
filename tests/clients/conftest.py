"""The clients' environment, and a server at its defaults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import at_defaults
from tests.server.conftest import model_directory as model_directory
from tests.server.conftest import pytest_itemcollected as pytest_itemcollected
from tests.server.conftest import serve as serve

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-clients"
NODE = ENVIRONMENT / "npm"
PROGRAMS = Path(__file__).parent / "programs"

RunClient = Callable[..., dict[str, Any]]
"""Runs the named program of `programs/` against an address; what it printed. `own`: in the
environment of the tests, in place of the clients'. One for Node.js runs in NODE.
"""


@pytest.fixture(scope="package")
def default_server() -> Iterator[str]:
    """The address of a server that ends with the clients' tests: it holds two gigabytes."""
    with at_defaults() as running:
        yield running.url


@pytest.fixture(scope="session")
def run_client(request: pytest.FixtureRequest) -> RunClient:
    def run(name: str, url: str, own: bool = False) -> dict[str, Any]:
        if name.endswith(".mjs"):
            request.getfixturevalue("node_clients")
            return ask(["node", "--input-type=module", "-", url], NODE, PROGRAMS / name)
        if not own and not (ENVIRONMENT / ".complete").exists():
            pytest.skip("no .venv-clients: `scripts/test_slow.sh clients` makes it")
        python = sys.executable if own else str(ENVIRONMENT / "bin" / "python")
        return ask([python, f"{name}.py", url], PROGRAMS)

    def ask(command: list[str], folder: Path, program: Path | None = None) -> dict[str, Any]:
        done = subprocess.run(
            command,
            cwd=folder,
            input=None if program is None else program.read_text(),
            env={**os.environ, "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return printed

    return run


@pytest.fixture(scope="session")
def node_clients() -> None:
    """Skips where the clients that npm installs are missing."""
    if not (NODE / ".complete").exists():
        pytest.skip("no .venv-clients/npm: `scripts/test_slow.sh clients` makes it if npm is there")
