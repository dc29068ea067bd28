"""Counts of uses of files on disk outlive the server, and tell what is worth most after it."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_hybrid.core.returns.hazards import INTERVAL_BUCKETS
from sglang_hybrid.extensions.disk import object_store, store_start
from sglang_hybrid.extensions.disk.object_file import NAME_BYTES, BadFile
from sglang_hybrid.extensions.disk.object_store import ObjectStore
from sglang_hybrid.extensions.disk.uses_file import Uses, load_uses, save_uses
from tests.extensions.disk.objects import Clock, opened

SIZE = 64


def put(store: ObjectStore, *names: str, kind: str = "mamba") -> None:
    for name in names:
        assert store.put(kind, [name], [np.full(SIZE, len(name), dtype=np.uint8)])


def use(store: ObjectStore, *names: str, kind: str = "mamba") -> None:
    assert all(store.contains(kind, list(names)))


def taught(folder: Path, clock: Clock) -> None:
    """An hour in which `every minute` is used again and again; then `last` is written, and used by
    nobody.
    """
    store = opened(folder, now=clock)
    put(store, "every minute")
    for minute in range(60):
        clock.now += 61
        use(store, "every minute")
        put(store, f"once {minute}")
    clock.now += 5
    put(store, "last")
    for file in store._index.files():  # the file system has times of its own
        os.utime(file.path, (file.last_use, file.last_use))
    store.close()


def read_ahead(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, budget: int
) -> list[str]:
    """Names of the files that a start reads ahead within `budget` bytes."""
    read: list[Path] = []
    monkeypatch.setattr(store_start, "_advise", read.append)
    store = opened(folder, now=clock, warm_bytes=budget)
    store._starter.join()
    name = {
        store.folder.name("mamba", one).hex(): one
        for one in ("every minute", "last", *(f"once {minute}" for minute in range(60)))
    }
    store.close()
    return [name[path.name.split("-")[0]] for path in read]


def test_what_was_used_most_is_read_ahead_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file `last` would be first by recency."""
    clock = Clock(step=1e-3)
    taught(tmp_path / "disk", clock)
    clock.now += 5
    first, *rest = read_ahead(tmp_path / "disk", clock, monkeypatch, 1 << 20)
    assert first == "every minute"
    assert "last" in rest[:2]
    assert len(rest) == 61


def test_without_what_was_known_it_is_recency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(step=1e-3)
    taught(tmp_path / "disk", clock)
    for path in (tmp_path / "disk").glob("*/*/*.uses"):
        path.unlink()
    clock.now += 5
    assert read_ahead(tmp_path / "disk", clock, monkeypatch, 1 << 20)[0] == "last"


def test_a_slow_writing_is_the_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one, begun meanwhile, could end before it and be lost."""
    clock, may_end = Clock(step=1e-3), threading.Event()
    begun: list[Any] = []

    def write(*saved: Any) -> None:
        begun.append(saved)
        assert may_end.wait(60)

    monkeypatch.setattr(object_store, "save_uses", write)
    store = opened(tmp_path / "disk", now=clock)
    put(store, "one")
    for _ in range(3):
        clock.now += 61
        use(store, "one")
    assert len(begun) <= 1
    may_end.set()
    store.close()
    assert len(begun) == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "other model"])
def test_a_damaged_or_foreign_file_is_ignored_with_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    clock = Clock(step=1e-3)
    taught(tmp_path / "disk", clock)
    (path,) = (tmp_path / "disk").glob("*/*/*.uses")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-5] ^= 1
    path.write_bytes(content[:-1] if damage == "cut" else content)
    if damage == "other model":
        uses = load_uses(path, path.parent.name)
        assert uses is not None
        save_uses(path, "0" * 32, uses, 1.0)
    clock.now += 5
    with caplog.at_level(logging.WARNING):
        assert read_ahead(tmp_path / "disk", clock, monkeypatch, 1 << 20)[0] == "last"
    assert len(caplog.records) == 1
    assert "how often files were used is not known" in caplog.text


def test_what_was_used_again_and_again_outlasts_a_restart(tmp_path: Path) -> None:
    """A full disk forgets what was used once, though it is newer."""
    clock = Clock(step=1e-3)
    taught(tmp_path / "disk", clock)
    store = opened(tmp_path / "disk", now=clock)
    store.budget = store.used_bytes + 1
    for number in range(20):
        clock.now += 1
        put(store, f"new {number}")
    assert store.contains("mamba", ["every minute"]) == [True]
    assert store.counts.files_evicted >= 20
    store.close()


def test_uses_are_saved_while_serving(tmp_path: Path) -> None:
    """A server that is killed loses the last minute at most."""
    clock = Clock(step=1e-3)
    store = opened(tmp_path / "disk", now=clock)
    put(store, "one", "two")
    for _ in range(2):
        clock.now += 100
        use(store, "one")
    assert store._saver is not None
    store._saver.join()
    uses = load_uses(store.folder.uses, store.folder.identity)
    assert uses is not None
    name = store.folder.name("mamba", "one")
    assert uses.of_file()[name][0] >= 1
    store.clear()
    assert load_uses(store.folder.uses, store.folder.identity) is None
    store.close()


def test_tenants_are_apart_and_are_not_named(tmp_path: Path) -> None:
    """The same prompt of two tenants has keys of its own, and so have its uses."""
    clock = Clock(step=1e-3)
    store = opened(tmp_path / "disk", now=clock)
    put(store, "hash-of-alice", "hash-of-bob")
    for _ in range(3):
        clock.now += 100
        use(store, "hash-of-alice")
    store.close()
    path = store.folder.uses
    content = path.read_bytes()
    assert b"alice" not in content
    assert b"bob" not in content
    uses = load_uses(path, store.folder.identity)
    assert uses is not None
    assert list(uses.of_file()) == [store.folder.name("mamba", "hash-of-alice")]


@pytest.mark.parametrize(
    "change",
    [
        lambda uses: {"names": uses.names[:-1]},
        lambda uses: {"uses": 0 * uses.uses},
        lambda uses: {"buckets": uses.buckets + INTERVAL_BUCKETS},
        lambda uses: {"names": uses.names * 2},
        lambda uses: {"classes": replace(uses.classes, classes=uses.classes.classes[:0])},
    ],
    ids=["names", "uses", "buckets", "more names", "classes"],
)
def test_what_contradicts_itself_is_not_believed(
    tmp_path: Path, change: Callable[[Uses], dict[str, Any]]
) -> None:
    taught(tmp_path / "disk", Clock(step=1e-3))
    (path,) = (tmp_path / "disk").glob("*/*/*.uses")
    uses = load_uses(path, path.parent.name)
    assert uses is not None and len(uses.names) == NAME_BYTES
    save_uses(path, "id", replace(uses, **change(uses)), 1.0)
    with pytest.raises(BadFile, match="contradicts"):
        load_uses(path, "id")
