"""Tests that share a process, what that may not do, and what is said if it ends nevertheless."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from tests.server import forked

CRASHES = """
import ctypes, os, signal, time
import pytest

@pytest.mark.parametrize("number", range(6))
def test_of_{name}(number):
    if "{name}" == "b" and number == 3:
        ctypes.CDLL(None).kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    "ends",
    [
        lambda: os.kill(os.getpid(), signal.SIGTERM),
        lambda: os.kill(0, signal.SIGQUIT),
        lambda: os.killpg(0, signal.SIGKILL),
        lambda: os.killpg(os.getpgrp(), signal.SIGKILL),
        lambda: psutil.Process().kill(),
        lambda: os._exit(0),
    ],
    ids=["kill", "kill everybody", "this group", "this group by name", "psutil", "exit"],
)
def test_no_test_ends_its_own_process(ends: Callable[[], None]) -> None:
    with pytest.raises(AssertionError, match="would end the process"):
        ends()


FORKS = """
import os
from tests.conftest import nothing_ends_this_process

with nothing_ends_this_process():
    if (forked := os.fork()) == 0:
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
"""
"""A program of its own: a process that has run other tests may be too large to be forked."""


def test_other_processes_are_ended_as_ever() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        os.kill(child.pid, 0)
        child.kill()
    assert child.returncode == -signal.SIGKILL
    repository = Path(__file__).parents[1]
    assert subprocess.check_output([sys.executable, "-c", FORKS], cwd=repository) == b"7\n"


ONLY_XDIST = ("-p", "xdist.plugin", "-p", "no:cacheprovider")
NO_OTHERS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Other plugins of pytest take seconds of each of the three processes."""


def run_as_the_script(
    folder: Path, files: dict[str, str], *more: str
) -> subprocess.CompletedProcess[str]:
    """`files` are tested with the flags of scripts/test.sh, and our conftest."""
    script = Path(__file__).parents[1] / "scripts/test.sh"
    (flags,) = [line for line in script.read_text().splitlines() if "-m pytest" in line]
    given = [
        each for each in flags.split() if each.startswith(("--dist", "--no-", "--max", "load"))
    ]
    for name, text in {**files, "conftest.py": "from tests.conftest import *\n"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *ONLY_XDIST, "-n", "2", *given, *more, "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(script.parents[1]), **NO_OTHERS},
        capture_output=True,
        text=True,
        timeout=120,
    )


NOTE = """
import os
import pytest

@pytest.mark.slow
@pytest.mark.quick
def test_it():
    open(f"{__file__}.pid", "w").write(str(os.getpid()))
"""


@pytest.mark.parametrize("kind", ["quick", "slow"])
def test_quick_tests_that_ask_servers_are_in_one_process(tmp_path: Path, kind: str) -> None:
    names = [*(f"tests/server/test_{name}.py" for name in "abcd"), "tests/core/test_e.py"]
    files = dict.fromkeys(names, NOTE)
    assert run_as_the_script(tmp_path, files, "-m", kind).returncode == 0
    *servers, other = [(tmp_path / f"{name}.pid").read_text() for name in names]
    if kind == "slow":
        assert len({*servers}) == 2
    else:
        assert len({*servers}) == 1 and other not in servers


def test_a_worker_that_is_lost_ends_the_run_with_the_test_that_it_ran(tmp_path: Path) -> None:
    """Otherwise (without --max-worker-restart) xdist replaces it, and may then wait for ever."""
    run = run_as_the_script(
        tmp_path, {f"test_{name}.py": CRASHES.format(name=name) for name in "abcd"}
    )
    assert run.returncode == 1
    assert "crashed while running 'test_b.py::test_of_b[3]" in run.stdout
    assert "ended by signal 9" in run.stderr


def test_servers_of_several_tests_are_forked_from_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forked, "ForkServer", Mock(side_effect=lambda environment: Mock()))
    monkeypatch.setattr(forked, "kept", {})
    usual = {"PATH": "/bin"}
    varied = [usual | {"PYTEST_CURRENT_TEST": name, "SGLANG_HYBRID_DISK_MB": name} for name in "12"]
    one, two = map(forked.fork_server, varied)
    assert one is two
    assert forked.fork_server(usual | {"HOME": "/"}) is not one
    assert one.close.called  # type: ignore[attr-defined]
