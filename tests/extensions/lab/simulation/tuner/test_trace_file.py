"""The content of a recording, and the effect of a bad file or a full disk on it."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hybrid.core.traffic.recorder import FinishedRequest
from sglang_hybrid.extensions.lab.simulation.traces.formats import read_trace
from sglang_hybrid.extensions.lab.simulation.traces.lines import Reading
from sglang_hybrid.extensions.lab.simulation.tuner import trace_file
from sglang_hybrid.extensions.lab.simulation.tuner.trace_file import (
    RecordingError,
    TraceFile,
    check,
)
from tests.extensions.lab.simulation.tuner.traffic import records, templates


def record(path: Path, some: Sequence[FinishedRequest]) -> TraceFile:
    """`some` written to `path`, which is closed."""
    file = TraceFile(path)
    for one in some:
        file.add(one)
    file.close()
    return file


def arrivals(path: Path) -> list[float]:
    return [request.arrival for request in read_trace(path, Reading(), "recorded")]


def test_a_file_is_a_trace_that_the_replay_reads(tmp_path: Path) -> None:
    some = records(templates(20))
    file = TraceFile(tmp_path / "trace.jsonl")
    some[5] = replace(some[5], tenant="0f", hit_len=3)
    for record in (some[0], some[2], some[1], *some[3:]):  # in the order in which they ended
        file.add(record)
    file.close()
    assert file.written == 20
    read = read_trace(tmp_path / "trace.jsonl", Reading())
    assert [r.arrival for r in read] == [float(i) for i in range(20)]
    assert [r.tokens.tolist() for r in read] == [r.tokens.tolist() for r in some]
    assert [r.input_len for r in read] == [r.input_len for r in some]
    assert [r.tenant for r in read] == [r.tenant for r in some]
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").open()]
    assert (lines[5]["hit"], lines[6]["hit"]) == (3, some[6].hit_len)
    assert {type(line["input_ids"]) for line in lines} == {str}, "packed"


def test_only_its_owner_can_read_a_file(tmp_path: Path) -> None:
    there = tmp_path / "there.jsonl"
    there.touch()
    there.chmod(0o644)
    for path in (there, tmp_path / "new.jsonl"):
        TraceFile(path).close()
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_recording_goes_on_where_it_ended(tmp_path: Path) -> None:
    path, some = tmp_path / "trace.jsonl", records(templates(6))
    record(path, some[:3])
    now = time.time()
    os.utime(path, (now, now - 100))
    file = record(path, some[3:])
    assert file.written == 3
    seen = arrivals(path)
    assert seen[:3] == [0.0, 1.0, 2.0]
    assert seen[3] == pytest.approx(2.0 + 100, abs=60) and seen[3] > 100
    assert [b - a for a, b in itertools.pairwise(seen[3:])] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("last_bytes", [1, 1 << 20])
def test_a_torn_line_is_removed_when_a_recording_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    last_bytes: int,
) -> None:
    """Lines may be longer than the part of a file that is read at first."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(trace_file, "LAST_BYTES", last_bytes)
    path, some = tmp_path / "trace.jsonl", records(templates(4))
    record(path, some[:3])
    path.write_bytes(path.read_bytes()[:-10])
    record(path, some[3:])
    seen = arrivals(path)
    assert len(seen) == 3 and seen[:2] == [0.0, 1.0] and seen[2] >= 1.0
    assert "was torn and is removed" in caplog.text


def test_a_file_of_one_torn_line_is_a_recording(tmp_path: Path) -> None:
    path, some = tmp_path / "trace.jsonl", records(templates(2))
    record(path, some[:1])
    path.write_bytes(path.read_bytes()[:20])
    record(path, some[1:])
    assert arrivals(path) == [0.0]


def test_a_recording_that_does_not_end_in_lines_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.jsonl"
    record(path, records(templates(2)))
    os.truncate(path, 5 << 20)
    monkeypatch.setattr(trace_file, "MOST_BYTES", 1 << 20)
    with pytest.raises(RecordingError, match="it ends with no line of a recording"):
        TraceFile(path)


def no_directory(path: Path) -> Path:
    return path / "nowhere" / "trace.jsonl"


def directory(path: Path) -> Path:
    return path


def packed(path: Path) -> Path:
    return path / "trace.jsonl.gz"


def something_else(path: Path) -> Path:
    (path / "thesis.txt").write_text("mine\n")
    return path / "thesis.txt"


def pipe(path: Path) -> Path:
    os.mkfifo(path / "pipe")
    return path / "pipe"


def nested(path: Path) -> Path:
    (path / "deep").write_text('{"t": 1, "x": ' + "[" * 10**5 + "]" * 10**5 + "}\n")
    return path / "deep"


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (pipe, "is a pipe or a socket; give the name of a file"),
        (nested, "exists and is no recording"),
        (no_directory, "there is no directory .*nowhere; make it"),
        (directory, "is a directory; give the name of a file"),
        (packed, "are not compressed; give a name without .gz"),
        (something_else, r"thesis.txt exists and is no recording"),
    ],
)
def test_where_nothing_can_be_recorded(
    tmp_path: Path, where: Callable[[Path], Path], said: str
) -> None:
    path = where(tmp_path)
    for attempt in (check, TraceFile):
        with pytest.raises(RecordingError, match=said):
            attempt(path)
    if path.name == "thesis.txt":
        assert path.read_text() == "mine\n"


def test_two_servers_do_not_record_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    first = TraceFile(path)
    with pytest.raises(RecordingError, match="another server records in"):
        TraceFile(path)
    first.close()
    TraceFile(path).close()


def test_a_full_disk_costs_the_requests_of_that_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk takes half of a line, nothing of another one, and is then as large as it was."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(trace_file, "RETRY_SECONDS", 0.0)
    path, some = tmp_path / "trace.jsonl", records(templates(5))
    write, room = os.write, [10**9, 50, 0, 0, 10**9, 10**9]

    def limited(descriptor: int, data: memoryview) -> int:
        allowed = room.pop(0)
        if not allowed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:allowed])

    monkeypatch.setattr(os, "write", limited)
    file = record(path, some)
    assert (file.written, file.left_out, file.failure) == (3, 2, "")
    assert arrivals(path) == [0.0, 3.0, 4.0]
    assert [line.getMessage() for line in caplog.records] == [
        f"sglang_hybrid: {path} cannot be written (No space left on device); requests are left out "
        "of it until it can.",
        f"sglang_hybrid: {path} is written again; 2 requests are not in it.",
    ]


def test_a_disk_that_stays_full_is_said_in_the_report() -> None:
    """/dev/full takes nothing, ever."""
    file = record(Path("/dev/full"), records(templates(50)))
    assert file.info() == {
        "file": "/dev/full",
        "written": 0,
        "left_out": 50,
        "failure": "No space left on device",
    }
