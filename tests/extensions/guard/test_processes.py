"""Signals of child processes, and shared memory that is removed at the end."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
from uvicorn._subprocess import subprocess_started

from sglang_hybrid.extensions.guard import processes
from sglang_hybrid.extensions.guard.processes import (
    SGLANG_PROCESSES,
    ignore_signals_for_the_first_process,
    note_shared_memory,
    remove_shared_memory,
)

MAP_AND_WAIT = "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); "
MAP_AND_WAIT += "print('mapped', flush=True); sys.stdin.read()"


def tell_signals(answers: Connection, sglangs: bool) -> None:
    """Send, from a child process, whether it ignores SIGINT and SIGTERM."""
    if sglangs:
        tell_signals.__module__ = SGLANG_PROCESSES + "scheduler"
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:  # in the background of a shell, tests inherit that they are ignored
        signal.signal(number, signal.SIG_DFL)
    ignore_signals_for_the_first_process()
    answers.send([signal.getsignal(number) is signal.SIG_IGN for number in numbers])


@pytest.mark.parametrize("sglangs", [True, False])
def test_only_processes_of_sglang_ignore_signals(sglangs: bool) -> None:
    """An application that makes an engine in a child process must be able to terminate it."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=tell_signals, args=(theirs, sglangs))
    child.start()
    assert ours.poll(60)
    assert ours.recv() == [sglangs, sglangs]
    child.join(60)
    assert child.exitcode == 0


@pytest.fixture
def segment(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(processes, "_noted", set())
    monkeypatch.setattr(processes, "_told", set())
    path = Path("/dev/shm") / f"hybrid-test-{os.getpid()}"
    path.write_bytes(bytes(4096))
    return path


def test_shared_memory_is_removed(segment: Path) -> None:
    with segment.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        note_shared_memory()
    remove_shared_memory()
    assert not segment.exists()


def test_a_tokenizer_process_leaves_shared_memory_to_the_first(
    segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several would tell the resource tracker of the same, which is an error there."""
    with segment.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        note_shared_memory()
    worker = SimpleNamespace(_target=subprocess_started)
    monkeypatch.setattr(multiprocessing, "current_process", lambda: worker)
    remove_shared_memory()
    assert segment.exists()
    monkeypatch.undo()
    segment.unlink()


def test_shared_memory_that_another_process_uses_stays(
    segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(processes, "_tell_tracker", lambda *words: told.append(words))
    with segment.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        note_shared_memory()
    command = [sys.executable, "-c", MAP_AND_WAIT, str(segment)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == b"mapped\n"
        remove_shared_memory()
        assert segment.exists()
        other.stdin.close()
        other.wait(30)
    remove_shared_memory()
    assert not segment.exists()
    ours = [words for words in told if segment.name in words]  # servers of other tests have some
    assert ours == [("UNREGISTER", segment.name)], "a second time is an error in the tracker"
