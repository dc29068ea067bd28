"""Trace readers: what they read, and how they refuse what they cannot."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from sglang_hybrid.simulation.traces.requests import read_compact, read_mooncake

FIRST = '{"session": 0, "turn": 0, "t": 0.5, "base": null, "new": [1, 2, 3], "out": [4, 5]}\n'
SECOND = '{"session": 0, "turn": 1, "t": 2, "base": [0, 4], "new": [9], "out": []}\n'


def test_compact(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress((FIRST + SECOND).encode()))
    first, second = read_compact(path)
    assert (first.tokens.tolist(), first.input_len, first.arrival) == ([1, 2, 3, 4, 5], 3, 0.5)
    assert (second.tokens.tolist(), second.input_len, second.turn) == ([1, 2, 3, 4, 9], 5, 1)
    assert len(read_compact(path, limit=1)) == 1


def test_mooncake(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [0, 7]}\n'
        '{"timestamp": 5, "input_length": 40000, "output_length": 2, "hash_ids": [0]}\n'
        '{"timestamp": 1500, "input_length": 520, "output_length": 1, "hash_ids": [0, 8]}\n'
    )
    first, second = read_mooncake(path)
    assert (len(first.tokens), first.input_len, second.arrival) == (602, 600, 1.5)
    assert (first.tokens[:512] == second.tokens[:512]).all()
    assert first.tokens[512] != second.tokens[512]
    assert len({*first.tokens[600:].tolist(), *second.tokens[520:].tolist()}) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FIRST + '{"session": 0, "tu', r"trace.jsonl:2: not JSON"),
        (FIRST + '{"session": 0}\n', r"trace.jsonl:2: not a line of a compact trace"),
        (FIRST + SECOND.replace("[0, 4]", "[5, 4]"), r"trace.jsonl:2: not a line of a compact"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_compact(path)
