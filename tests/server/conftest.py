"""Tiny models, built once per run, servers of them, one that several modules ask, and the marks."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from sglang_hybrid.core.records.tenant_names import KEY_VARIABLE
from sglang_hybrid.extensions.cpu.models import build_tiny_model
from sglang_hybrid.extensions.cpu.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.serving.server_process import ServerProcess, event_flags
from tests.server.client import RECORD_KEY, Serve, flush
from tests.server.divided import Divide, Divided

if TYPE_CHECKING:
    from tests.server.draft_heads import Headed


SPAWNED = {"TEST_SERVERS": "spawn"}
"""Variables of a server whose processes start as in production (tests/forking/sitecustomize.py)."""


@pytest.fixture(scope="module")
def spawned() -> Iterator[None]:
    """Servers of this module have SPAWNED."""
    with mock.patch.dict(os.environ, SPAWNED):
        yield


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from an architecture's name to the directory of its tiny model."""
    root = tmp_path_factory.mktemp("models")

    def directory(architecture: str) -> Path:
        path = root / architecture
        return path if path.exists() else build_tiny_model(architecture, path)

    return directory


@pytest.fixture(scope="session")
def serve(model_directory: Callable[[str], Path]) -> Serve:
    def make(*flags: str, of: str = DEFAULT_ARCHITECTURE, **more: Any) -> ServerProcess:
        return ServerProcess(["--model-path", str(model_directory(of)), *flags], **more)

    return make


@pytest.fixture
def seed(record_property: Callable[[str, object], None]) -> int:
    """A seed of random traffic: another one in each run, printed where the test fails and named in
    the table of what the slow tests showed.
    """
    drawn = random.randrange(2**32)
    print(f"seed {drawn}")
    record_property("seed", drawn)
    return drawn


@pytest.fixture(scope="session")
def headed(
    model_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> "Headed":
    """The trained model with a draft head, and what it says without one."""
    from tests.server.draft_heads import with_draft_head

    return with_draft_head(model_directory("trained"), tmp_path_factory.mktemp("headed") / "model")


@pytest.fixture(scope="session")
def divide(model_directory: Callable[[str], Path]) -> Divide:
    def make(*flags: str, of: str = DEFAULT_ARCHITECTURE, **more: Any) -> Divided:
        return Divided(["--model-path", str(model_directory(of)), *flags], **more)

    return make


def at_defaults() -> ServerProcess:
    """A server at its defaults that reports cached tokens, counts metrics, stores responses, has a
    page, and publishes where prompts can be resumed. Its weights are random: a state that is wrong
    shows in what they say, and not in a learnt sentence. Its processes are spawned, as users' are.
    """
    flags = ["--enable-cache-report", "--enable-metrics", "--enable-response-store"]
    flags += ["--hybrid-ui", "text", *event_flags()]
    named = {KEY_VARIABLE: RECORD_KEY, **SPAWNED, "SGLANG_HYBRID_DRAIN_SECONDS": "3"}
    flags += ["--hybrid-default-model", DEFAULT_ARCHITECTURE]
    return ServerProcess(flags, environment=named)


@pytest.fixture(scope="session")
def default_process() -> Iterator[ServerProcess]:
    with at_defaults() as running:
        yield running


@pytest.fixture(scope="session")
def default_server(default_process: ServerProcess) -> str:
    """Its address."""
    return default_process.url


@pytest.fixture
def default_process_to_end(default_process: ServerProcess) -> ServerProcess:
    """The same server, for the one test that ends it: tests/conftest.py lets it be the last."""
    return default_process


@pytest.fixture
def url(default_server: str) -> str:
    """The default server's address, its cache empty."""
    flush(default_server)
    return default_server


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.server)
