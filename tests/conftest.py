"""The order of test files, and which of them stay in one process. A run does not end silently in
the middle: no test ends the process that runs it, and a worker that ends for another reason says
how.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakSet

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from sglang_hybrid.serving.server_process import ServerProcess
from sglang_hybrid.storage import weights
from tests.server import forked

HERE = Path(__file__).parent

SERVERS = "tests/server/"
"""Files that ask servers. The quick tests share one; each of the slow ones has its own."""

MODELS = "tests/extensions/cpu/models/"
"""Files that use models of every architecture, which each process builds."""

TOGETHER = {"tests/test_keys.py": "tests/entered.py", "tests/test_plugin.py": "tests/entered.py"}
"""Files that share what a module keeps, and the module."""

FORKING = HERE / "forking"
"""A folder for PYTHONPATH: servers fork their processes (`sitecustomize.py` there)."""

ENDS_IT = "default_process_to_end"
"""The fixture of a test that ends the server which they share."""


# A busy machine is no failure: hypothesis would count 200 ms for an example as one.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_configure() -> None:
    """Servers are forked, and fork their processes, unless a test says `TEST_SERVERS=spawn`, or the
    machine has a GPU: CUDA does not outlive a fork.
    """
    if os.path.exists("/dev/nvidiactl"):
        os.environ["TEST_SERVERS"] = "spawn"
    ServerProcess.start = forked.start  # type: ignore[method-assign]
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(FORKING), os.environ.get("PYTHONPATH")))
    )


@contextmanager
def nothing_ends_this_process() -> Iterator[None]:
    """`os._exit` here, and signals to this process or to its group, raise AssertionError instead.
    SGLang sends them where something fails (utils/common.py, kill_process_tree).
    """
    ours = os.getpid()
    kill, kill_group, leave = os.kill, os.killpg, os._exit

    def refuse(what: str) -> None:
        if os.getpid() == ours:  # and not in a child process that was forked
            raise AssertionError(f"{what} would end the process that runs the tests")

    def checked_kill(pid: int, number: int) -> None:
        if number and pid in (ours, 0, -1, -os.getpgrp()):
            refuse(f"signal {number} to {pid}")
        kill(pid, number)

    def checked_kill_group(group: int, number: int) -> None:
        if number and group in (0, os.getpgrp()):
            refuse(f"signal {number} to group {group}")
        kill_group(group, number)

    def checked_leave(status: int) -> None:
        refuse(f"os._exit({status})")
        leave(status)

    with mock.patch.multiple(os, kill=checked_kill, killpg=checked_kill_group, _exit=checked_leave):
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that ask servers come first, and then those of this folder, each of which takes long:
    of two processes that share the files, none is left alone with these at the end. The test that
    ends the shared server is the last test that asks it.
    """

    def place(item: pytest.Item) -> int:
        if item.get_closest_marker("server") is not None:
            return int(ENDS_IT in getattr(item, "fixturenames", ()))
        return 2 if item.path.parent == HERE else 3

    items.sort(key=place)


class FilesTogether(LoadFileScheduling):
    """A file's tests stay in one process, and those of files that share something."""

    def _split_scope(self, nodeid: str) -> str:
        scope: str = super()._split_scope(nodeid)
        shared = (MODELS,) if self.config.option.markexpr == "slow" else (SERVERS, MODELS)
        folders = (folder for folder in shared if scope.startswith(folder))
        return next(folders, TOGETHER.get(scope, scope))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return FilesTogether(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    with nothing_ends_this_process():
        return (yield)


@pytest.fixture(autouse=True)
def of_this_test_alone() -> Iterator[None]:
    """An update of weights waits for no cache of an earlier test, whose copies nobody ends."""
    with mock.patch.multiple(weights, _stores=WeakSet(), _caches=WeakSet(), _changed=False):
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser; a test is skipped where there is none."""
    from tests.browser import opened

    with opened() as found:
        yield found


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """xdist has lost a worker; the test that it ran is named with the failures."""
    if error:
        status = node.gateway._io.popen.wait(10)
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        print(f"\n{node.gateway.id} ended {how}.", file=sys.stderr, flush=True)
