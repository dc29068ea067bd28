"""What is kept of finished requests, and what is written to a file."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hybrid.replay.formats import Reading, read_trace
from sglang_hybrid.tuner.recorder import Recorder, TraceFile, compact
from tests.tuner.traffic import records, templates


def test_memory_is_bounded_and_the_latest_stay() -> None:
    some = records(templates(50))
    recorder = Recorder(max_bytes=10 * some[0].held_bytes)
    for record in some:
        recorder.add(record)
        assert recorder.held_bytes == sum(one.held_bytes for one in recorder.latest(100))
        assert recorder.held_bytes <= recorder.max_bytes
    assert recorder.latest(100) == some[-10:]
    assert recorder.latest(3) == some[-3:]


def test_a_request_larger_than_the_memory_is_not_kept() -> None:
    (record,) = records(templates(1))
    recorder = Recorder(max_bytes=record.held_bytes - 1)
    recorder.add(record)
    assert (len(recorder), recorder.held_bytes) == (0, 0)


def test_the_window_is_in_order_of_arrival() -> None:
    some = records(templates(5))
    recorder = Recorder(max_bytes=1 << 20)
    for record in reversed(some):
        recorder.add(record)
    assert recorder.latest(5) == some


def test_tokens_are_kept_as_they_are() -> None:
    assert compact(array("q", [1, 2, 3]), array("q", [4])).tolist() == [1, 2, 3, 4]


def test_a_file_is_a_trace_that_the_replay_reads(tmp_path: Path) -> None:
    some = records(templates(20))
    file = TraceFile(tmp_path / "trace.jsonl")
    some[5] = replace(some[5], tenant="0f")
    for record in (some[0], some[2], some[1], *some[3:]):  # in the order in which they ended
        file.add(record)
    file.close()
    assert file.written == 20
    read = read_trace(tmp_path / "trace.jsonl", Reading())
    assert [r.arrival for r in read] == [float(i) for i in range(20)]
    assert [r.tokens.tolist() for r in read] == [r.tokens.tolist() for r in some]
    assert [r.input_len for r in read] == [r.input_len for r in some]
    assert [r.tenant for r in read] == [r.tenant for r in some]


def test_only_its_owner_can_read_a_file(tmp_path: Path) -> None:
    there = tmp_path / "there.jsonl"
    there.write_text("open to all")
    there.chmod(0o644)
    for path in (there, tmp_path / "new.jsonl"):
        TraceFile(path).close()
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        TraceFile(tmp_path / "nowhere" / "trace.jsonl")
