"""Records of finished requests."""

from __future__ import annotations

from array import array

from sglang_hybrid.core.traffic.recorder import Recorder, compact
from tests.extensions.lab.simulation.tuner.traffic import records, templates


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
    image = (5 << 31) + 7  # SGLang's ids of images have 62 bits
    assert compact(array("q", [1, image]), array("q", [4])).tolist() == [1, 7, 4]
