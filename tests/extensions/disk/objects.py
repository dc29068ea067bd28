"""Stores of objects for tests: a clock, folders that are opened and closed, numbered contents."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sglang_hybrid.extensions.disk.folder import RankFolder
from sglang_hybrid.extensions.disk.object_file import Bytes
from sglang_hybrid.extensions.disk.object_store import ObjectStore
from sglang_hybrid.extensions.disk.store_start import open_store

FACTS = {"weights": "1234", "dtype": "float32"}
RANK = "rank-0-0-0-0"
SIZE = 100

Open = Callable[..., ObjectStore]


class Clock:
    """Seconds that pass by themselves: `step` at each look."""

    def __init__(self, step: float = 1.0) -> None:
        self.now, self._step = 1_000_000.0, step

    def __call__(self) -> float:
        self.now += self._step
        return self.now


def opened(
    folder: Path,
    facts: dict[str, str] = FACTS,
    rank: str = RANK,
    now: Callable[[], float] | None = None,
    **more: int,
) -> ObjectStore:
    """A store that has found what is there."""
    store = open_store(RankFolder(folder, facts, rank), now=now or Clock(), **more)
    assert store.ready.wait(20), "the start waits for something"
    return store


def content(number: int, size: int = SIZE) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


def put(store: ObjectStore, *numbers: int, kind: str = "kv", size: int = SIZE) -> bool:
    """True if these objects, in one file, are on disk."""
    return store.put(kind, [f"k{n}" for n in numbers], [content(n, size) for n in numbers])


def put_each(store: ObjectStore, numbers: range) -> None:
    """Each in a file of its own."""
    for number in numbers:
        assert put(store, number)


def held(store: ObjectStore, *numbers: int, kind: str = "kv", size: int = SIZE) -> list[int]:
    """A mask of the objects that are found; each must have the content that was put."""
    buffers = [np.zeros(size, np.uint8) for _ in numbers]
    found = store.get(kind, [f"k{n}" for n in numbers], buffers)
    for number, buffer, there in zip(numbers, buffers, found, strict=True):
        assert not there or (buffer == content(number, size)).all()
    return [number for number, there in zip(numbers, found, strict=True) if there]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [it.getMessage() for it in caplog.records if it.levelno >= logging.WARNING]
