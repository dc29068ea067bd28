"""Objects in a store that several servers share, with a client that is a dictionary."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from sglang_hybrid.extensions.disk import shared_store
from sglang_hybrid.extensions.disk.folder import KEY_VARIABLE
from sglang_hybrid.extensions.disk.shared_store import Joined, SharedStore, Unreachable, open_shared

FACTS = {"model": "m"}
CONFIG = "here"


class Client:
    """values: what is stored, by name. is_down: the master does not answer. calls: names of the
    functions that were called.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.is_down = self.is_closed = False
        self.calls: list[str] = []

    def is_exist(self, name: str) -> int:
        return -900 if self.is_down else int(name in self.values)

    def batch_is_exist(self, names: list[str]) -> list[int]:
        self.calls.append("batch_is_exist")
        return [self.is_exist(name) for name in names]

    def put_batch(self, names: list[str], values: list[bytes], config: Any) -> int:
        assert config == CONFIG
        self.calls.append("put_batch")
        if self.is_down:
            return -900
        for name, value in zip(names, values, strict=True):
            self.values.setdefault(name, value)
        return 0

    def get_batch(self, names: list[str]) -> list[bytes]:
        self.calls.append("get_batch")
        return [b"" if self.is_down else self.values.get(name, b"") for name in names]

    def close(self) -> None:
        self.is_closed = True


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def joined(client: Client, **given: Any) -> SharedStore:
    store = SharedStore(
        lambda: Joined(client, CONFIG), **{"facts": FACTS, "rank": "0-0-0", "secret": "s", **given}
    )
    store._joiner.join(10)
    return store


def page(number: int, size: int = 64) -> Any:
    return np.full(size, number, np.uint8)


def get(store: SharedStore, *keys: str, kind: str = "kv", size: int = 64) -> list[int | None]:
    """The first byte of each object, None where there is none."""
    buffers = [np.empty(size, np.uint8) for _ in keys]
    found = store.get(kind, keys, buffers)
    return [int(buffer[0]) if one else None for buffer, one in zip(buffers, found, strict=True)]


def test_what_one_server_puts_another_finds() -> None:
    client = Client()
    first, second = joined(client), joined(client)
    assert first.put("kv", ["a", "b"], [page(1), page(2)])
    assert second.contains("kv", ["a", "c", "b"]) == [True, False, True]
    assert get(second, "b", "c", "a") == [2, None, 1]
    assert second.knows("mamba", ["a"]) == [False]
    assert (second.info()["read"], first.info()["written"]) == (2, 2)


@pytest.mark.parametrize(
    "other", [{"secret": "another"}, {"rank": "1-0-0"}, {"facts": {"model": "n"}}]
)
def test_what_depends_on_something_else_has_another_name(other: dict[str, Any]) -> None:
    client = Client()
    joined(client).put("kv", ["a"], [page(1)])
    assert get(joined(client, **other), "a") == [None]
    assert not any(name == "a" for name in client.values)


def test_what_is_there_is_not_sent_again() -> None:
    client = Client()
    store = joined(client)
    for _ in range(2):
        assert store.put("kv", ["a"], [page(1)])
    assert client.calls.count("put_batch") == 1 and store.counts.written == 1


@pytest.mark.parametrize("damage", [lambda v: v[:-1], lambda v: b"\xff" + v[1:], lambda v: v * 2])
def test_what_is_damaged_is_not_there(damage: Any) -> None:
    client = Client()
    store = joined(client)
    store.put("kv", ["a", "b"], [page(1), page(2)])
    name = next(iter(client.values))
    client.values[name] = damage(client.values[name])
    assert get(store, "a", "b") == [None, 2]
    assert store.counts.objects_damaged == 1


def test_a_right_object_under_a_wrong_name_is_damaged() -> None:
    client = Client()
    store = joined(client)
    store.put("kv", ["a", "b"], [page(1), page(2)])
    first, second = client.values
    client.values[first] = client.values[second]
    assert get(store, "a", "b") == [None, 2]


def test_large_objects_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_store, "AT_ONCE", 200)
    client = Client()
    store = joined(client)
    keys = [str(number) for number in range(7)]
    store.put("kv", keys, [page(number) for number in range(7)])
    assert get(store, *keys) == list(range(7))
    assert client.calls.count("get_batch") == 4


def test_a_master_that_does_not_answer_is_not_asked_for_a_while() -> None:
    client, time = Client(), Time()
    store = joined(client, now=time)
    store.put("kv", ["a"], [page(1)])
    client.is_down = True
    client.calls.clear()
    for _ in range(3):
        assert get(store, "a") == [None]
        assert store.contains("kv", ["a"]) == [False]
        assert not store.put("kv", ["b"], [page(2)])
    assert client.calls == []
    assert store.info()["refused"] == "its master does not answer"
    assert store.info()["not_written"] == 3
    client.is_down = False
    assert get(store, "a") == [None]
    time.now += shared_store.RETRY_SECONDS
    assert get(store, "a") == [1]
    assert store.info()["refused"] == ""


@pytest.mark.parametrize("error", [Unreachable("no master"), TypeError("setup(): port is None")])
def test_until_it_is_joined_nothing_is_there(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(shared_store, "START_SECONDS", 0.01)
    client, may_join, asked = Client(), threading.Event(), threading.Semaphore(0)

    def join() -> Joined:
        asked.release()
        if not may_join.is_set():
            raise error
        return Joined(client, CONFIG)

    store = SharedStore(join, FACTS, "0-0-0", "s")
    assert get(store, "a") == [None] and not store.put("kv", ["a"], [page(1)])
    assert asked.acquire(timeout=10) and asked.acquire(timeout=10)
    assert store.info()["refused"] == str(error)
    may_join.set()
    store._joiner.join(10)
    assert store.put("kv", ["a"], [page(1)]) and get(store, "a") == [1]


def test_after_it_was_turned_off_or_closed_nothing_is_there() -> None:
    client = Client()
    store = joined(client)
    store.put("kv", ["a"], [page(1)])
    store.turn_off("weights changed")
    assert get(store, "a") == [None] and not store.in_use
    assert get(joined(client), "a") == [1]
    store.close()
    assert client.is_closed


@pytest.mark.parametrize(
    ("address", "key", "why"),
    [("mooncake://h:1", "", KEY_VARIABLE), ("mooncake://h", "k", "HOST:PORT")],
)
def test_what_is_missing_is_said(
    address: str, key: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(ValueError, match=why):
        open_shared(address, {}, FACTS, "0-0-0")
