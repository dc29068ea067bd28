"""Jobs in worker processes: their results, and workers that die, hang or need too much."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sglang_hybrid.extensions.lab.simulation.tuner.candidates import CANDIDATES, search
from sglang_hybrid.extensions.lab.simulation.workers import Limits, run_all, run_jobs
from tests.extensions.lab.simulation.tuner.traffic import templates, window

NOT_MUCH = Limits(memory=512 << 20)


def add(shared: int, job: int, count_step: Callable[[], None]) -> int:
    for _ in range(job):
        count_step()
    return shared + job


def fail(how: str, job: int, count_step: Callable[[], None]) -> int:
    """The second job goes wrong."""
    if job == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hangs":
            time.sleep(600)
        if how == "needs too much":
            len(bytes(1 << 30))
        raise ValueError("odd")
    return job


def report_and_hang(path: str, job: int, count_step: Callable[[], None]) -> None:
    Path(path + ".part").write_text(str(os.getpid()))
    os.rename(path + ".part", path)
    time.sleep(600)


@pytest.mark.parametrize("workers", [1, 2, 9])
def test_results_are_in_the_jobs_order_and_every_step_is_counted(workers: int) -> None:
    steps: list[int] = []
    assert run_all(add, 10, [3, 1, 2], workers, steps.append) == [13, 11, 12]
    assert sum(steps) == 6


@pytest.mark.parametrize(
    "how, limits, said",
    [
        ("dies", Limits(), "status -9"),
        ("hangs", Limits(seconds=3), "not done after 3 seconds"),
        ("raises", Limits(), "odd"),
        ("needs too much", NOT_MUCH, "more than 512 MiB"),
    ],
)
def test_a_failing_worker_is_one_failure(how: str, limits: Limits, said: str) -> None:
    children = psutil.Process().children()
    done = run_jobs(fail, how, [0, 1, 2], limits)
    (failure,) = done.failures
    assert said in str(failure)
    assert isinstance(failure, ValueError if how == "raises" else ChildProcessError)
    assert done.results == {0: 0}, "what it did before counts"
    assert psutil.Process().children() == children
    assert len(os.listdir("/proc/self/fd")) < 100


def test_other_workers_do_what_a_dead_one_left() -> None:
    done = run_jobs(fail, "dies", list(range(6)), Limits(workers=2))
    assert len(done.failures) == 1
    assert done.results == {job: job for job in (0, 2, 3, 4, 5)}


@pytest.mark.parametrize(
    "how, error, said", [("dies", ChildProcessError, "use fewer"), ("raises", ValueError, "odd")]
)
def test_the_first_failure_ends_all_where_every_result_is_needed(
    how: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        run_all(fail, how, list(range(6)), 2)


def test_a_search_names_what_was_raised() -> None:
    found = search(window(templates(20)), CANDIDATES[:2], Limits(), raise_odd)
    assert found.failures == ["ValueError: odd"]
    assert not found.hits


def raise_odd(*_: object) -> None:
    raise ValueError("odd")


def test_a_worker_imports_neither_torch_nor_sglang() -> None:
    room = "sglang_hybrid.extensions.lab.simulation"
    code = f"import sys, {room}.workers as w, {room}.tuner.tuner"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    rooms = {name.split(".")[0] for name in done.stdout.split()}
    assert "numpy" in rooms
    assert not rooms & {"torch", "sglang"}


def test_a_worker_has_the_lowest_priority_and_ends_with_its_server(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    code = f"""
        from tests.extensions.lab.simulation.test_workers import Limits, report_and_hang, run_jobs
        run_jobs(report_and_hang, {str(noted)!r}, [0], Limits())
    """
    server = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    try:
        deadline = time.monotonic() + 60
        while not noted.exists():
            assert time.monotonic() < deadline and server.poll() is None
            time.sleep(0.05)
        worker = psutil.Process(int(noted.read_text()))
        assert worker.nice() == 19
    finally:
        server.kill()
        server.wait()
    psutil.wait_procs([worker], timeout=20)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
