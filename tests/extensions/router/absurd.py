"""Values that no replica and no client should send, in the places where they could."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Value = Any

EVENT = {
    "type": "BlockStored",
    "block_hashes": [2, 4],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "medium": "GPU",
    "component_types": ["full", "mamba"],
    "tenant": "",
}
PAGE = {
    "epoch": "e",
    "seq": 0,
    "block_size": 2,
    "cursor": None,
    "error": "",
    "events": [EVENT, {"type": "BlockRemoved", "block_hashes": [4]}],
    "prefill_tokens_per_second": 100.0,
    "waiting": 0,
    "room": 10,
    "loads": {"CPU_PINNED": [0.1, 0.001]},
}
ANSWER = {"ranks": [PAGE]}
INFO = {
    "kv_events": {"endpoint_host": "*", "endpoint_port_base": 1, "topic": "", "dp_size": 1},
}
BATCH = [0.5, PAGE["events"], 0]
PROMPT = {"input_ids": [1, 2, 3], "tenant": "", "reusable": 2}

VALUES: tuple[Value, ...] = (
    *(None, True, -1, 0, 1, 1.0, 0.5, -0.5, 300, 2**31, 2**63, 2**64, -(2**63), -(2**64)),
    *(1e-300, 5e-324, 1e9, 1e308, -1e308, 10**30, 10**400),
    *("", "a", "*", "\0", "[/]", "a\nb", "\u2028", "[::", "é" * 2_000, "x" * 70_000),
    *([], {}, [[]], [1, 1], [-1], [None], ["a"], [0.5], {"": 0}, {"a": [0, 0]}, [10**30]),
)

RAW = (
    *(b"", b"null", b"[]", b"{}", b"<html>", b'"a"', b"\xff\xfe", b"\0" * 100, b"1e999", b"NaN"),
    *(b"{" * 100_000, b"[" * 100_000, b'{"ranks": [' + b"[" * 50_000, b"\x1f\x8b\x08" + bytes(9)),
    *(b"9" * 100_000, b'"\\ud800"', b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000),
)
"""Bytes that are no answer at all."""


def replaced(whole: Value) -> Iterator[tuple[str, Value]]:
    """`whole` with each value in it replaced by each of VALUES, removed, or nested deep; and what
    was done.
    """
    for path in _paths(whole):
        at = ".".join(map(str, path))
        for value in VALUES:
            yield f"{at} is {str(value)[:20]!r}", _with(whole, path, value)
        if path and isinstance(path[-1], str):
            yield f"{at} is missing", _with(whole, path)


def as_json(whole: Value) -> Iterator[tuple[str, bytes]]:
    """All of these as JSON, and bytes that are none; and what was done."""
    text = json.dumps(whole)
    for said, changed in replaced(whole):
        yield said, json.dumps(changed).encode()
    for raw in RAW:
        yield f"bytes {raw[:12]!r}", raw
    for end in range(1, len(text), 7):
        yield f"the first {end} bytes", text[:end].encode()
    for bad in (b'"\xff"', b"1e999", b"NaN", b"-0", b"[" * 2_000 + b"]" * 2_000, b"9" * 5_000):
        for path in _paths(whole):
            marked = json.dumps(_with(whole, path, "HERE")).encode()
            yield f"{'.'.join(map(str, path))} is {bad[:12]!r}", marked.replace(b'"HERE"', bad)


def _paths(whole: Value) -> Iterator[tuple[str | int, ...]]:
    """The paths of all values within `whole`, its own, which is empty, first."""
    yield ()
    steps: Any = ()
    if isinstance(whole, dict):
        steps = whole.items()
    elif isinstance(whole, list):
        steps = enumerate(whole)
    for step, value in steps:
        for path in _paths(value):
            yield (step, *path)


_MISSING = object()


def _with(whole: Value, path: tuple[str | int, ...], value: Value = _MISSING) -> Value:
    """A copy of `whole` with this value at the path, or without any."""
    if not path:
        return value
    first, *rest = path
    copy: Any = dict(whole) if isinstance(whole, dict) else list(whole)
    if rest or value is not _MISSING:
        copy[first] = _with(whole[first], tuple(rest), value)
    else:
        del copy[first]
    return copy
