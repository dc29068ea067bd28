"""Messages of a server are taken as they are promised, or refused as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.extensions.router import index, wire
from sglang_hybrid.extensions.router.index import LostMessages, ReplicaIndex
from sglang_hybrid.extensions.router.load import ReplicaLoad
from sglang_hybrid.extensions.router.reader import OutOfStep, ReplicaReader
from sglang_hybrid.extensions.router.resumable import Resumable
from sglang_hybrid.extensions.router.wire import (
    Malformed,
    apply_events,
    decode_batch,
    decode_page,
    decode_page_events,
    decode_prompt,
    decode_server_info,
)
from tests.extensions.router import absurd
from tests.extensions.router.server import stored


def page(**fields: Any) -> bytes:
    return msgspec.json.encode({"ranks": [absurd.PAGE | fields]})


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([0.0, events, 0])


@pytest.mark.parametrize(
    "fields",
    [
        {"prefill_tokens_per_second": -1000.0},
        {"prefill_tokens_per_second": 1e-300},
        {"prefill_tokens_per_second": 1e300},
        {"waiting": -1},
        {"waiting": 10**400},
        {"room": -5},
        {"loads": {"CPU_PINNED": [-1.0, 0.0]}},
        {"loads": {"CPU_PINNED": [1e308, 0.0]}},
        {"seq": -5},
        {"seq": 10**30},
        {"block_size": 1.0},
        {"epoch": None},
        {"cursor": "another", "events": []},
    ],
)
def test_a_page_beyond_its_bounds_is_malformed(fields: dict[str, Any]) -> None:
    assert decode_page(page(), 0).waiting == 0
    with pytest.raises(Malformed, match="a message is no page of a snapshot"):
        decode_page(page(**fields), 0)


@pytest.mark.parametrize(
    "content",
    [
        b'{"ranks": [{"epoch": "\xff", "seq": 0}]}',
        b'{"ranks": [{"epoch": "e", "seq": 0, "events": [{"a": ' + b"[" * 100_000,
        b'{"ranks": [{"epoch": "e", "seq": 0, "prefill_tokens_per_second": 1e999}]}',
        b'{"ranks": []}',
        b'{"ranks": [' + b'{"epoch": "e", "seq": 0},' * 299 + b'{"epoch": "e", "seq": 0}]}',
        b"<html>",
    ],
)
def test_what_is_no_page_is_malformed(content: bytes) -> None:
    with pytest.raises(Malformed):
        decode_page(content, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": 2.0},
        {"block_size": 0},
        {"block_size": -1},
        {"token_ids": [1.5, 2]},
        {"token_ids": [2**64 - 1, 2]},
        {"token_ids": "ab"},
        {"token_ids": [1, 2, 3]},
        {"block_hashes": {"0": 1}},
        {"block_hashes": "ab"},
        {"block_hashes": [[1]]},
        {"block_hashes": []},
        {"tenant": ["a"]},
        {"type": ["BlockStored"]},
        {"type": "BlockRemoved", "block_hashes": [[1]]},
    ],
)
@pytest.mark.parametrize("in_page", [False, True])
def test_an_event_of_other_types_changes_nothing(fields: dict[str, Any], in_page: bool) -> None:
    event = stored([1, 2]) | fields
    found = ReplicaIndex()
    with pytest.raises(Malformed):
        if in_page:
            events = decode_page_events(decode_page(page(events=[event]), 0))
        else:
            events = decode_batch(batch(event))
        apply_events(found, "a", events)
    assert found.resume([1, 2, 3]) in ([], [Resumable("a", 0, Tier.DEVICE, 0)])
    found.check_integrity()


def test_what_a_newer_server_says_beside_is_left_out() -> None:
    told = {"type": "OfANewerServer", "block_hashes": "other"}
    (event,) = decode_batch(msgspec.msgpack.encode([1, [told, stored([1, 2])], 0, "more"]))
    assert isinstance(event, wire.BlockStored)
    assert decode_server_info(b'{"more": 1}').kv_events is None


@pytest.mark.parametrize(
    "fields",
    [
        {"endpoint_host": "a\0b"},
        {"endpoint_host": "a\nb"},
        {"endpoint_host": "[::"},
        {"endpoint_host": ""},
        {"endpoint_port_base": 10**20},
        {"endpoint_port_base": 0},
        {"endpoint_port_base": 65_535, "dp_size": 2},
        {"dp_size": 0},
        {"dp_size": -1},
        {"dp_size": 300},
        {"topic": "x" * 2_000},
    ],
)
def test_a_publisher_that_cannot_be_is_malformed(fields: dict[str, Any]) -> None:
    told = absurd.INFO["kv_events"]
    for host in ("*", "::1", "[::1]", "10.0.0.1", "a-b.c_d"):
        good = msgspec.json.encode({"kv_events": told | {"endpoint_host": host}})
        assert decode_server_info(good).kv_events is not None
    with pytest.raises(Malformed):
        decode_server_info(msgspec.json.encode({"kv_events": told | fields}))


def test_a_replica_holds_no_more_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MOST_TOKENS", 4)
    found = ReplicaIndex()
    apply_events(found, "a", decode_batch(batch(stored([1, 2]), stored([3, 4]))))
    with pytest.raises(Malformed, match="holds more than 4 tokens"):
        apply_events(found, "a", decode_batch(batch(stored([5, 6]))))
    apply_events(found, "b", decode_batch(batch(stored([5, 6]))))  # another one may
    found.check_integrity()
    found.clear("a")
    apply_events(found, "a", decode_batch(batch(stored([5, 6]))))


def test_blocks_of_no_whole_size_are_no_blocks() -> None:
    """They are refused also for callers that fill an index of their own."""
    found = ReplicaIndex()
    found.store("honest", parent=None, hashes=[1], tokens=[1], block_size=1, tenant="t")
    with pytest.raises(TypeError):
        found.store("liar", parent=None, hashes=[1], tokens=[1], block_size=1.0, tenant="u")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        found.store("liar", parent=None, hashes=["a"], tokens=[1], block_size=1)  # type: ignore[list-item]
    assert [each.position for each in found.resume([1, 2], "t")] == [1]
    found.store("honest", parent=None, hashes=[5], tokens=[5], block_size=1, tenant="u")
    found.check_integrity()


def test_no_absurd_message_does_anything_but_fail() -> None:
    """Each value of each message, absurd in each way: what another replica holds is as it was."""
    found = ReplicaIndex()
    apply_events(found, "honest", decode_batch(batch(stored([1, 2]), stored([3, 4], parent=2))))
    before = found.resume([1, 2, 3, 4, 5])
    load = ReplicaLoad()
    cases = failed = 0

    def read(content: bytes) -> None:
        page = decode_page(content, 0)
        reader = ReplicaReader(found, "liar")
        reader.begin(page)
        load.on_status(page.waiting, page.prefill_tokens_per_second, page.room, {})
        assert load.seconds(10) > 0

    def follow(content: bytes) -> None:
        apply_events(found, "liar", decode_batch(content))

    def msgpack(whole: Any) -> list[bytes]:
        encoded = list(absurd.RAW)
        for _, changed in absurd.replaced(whole):
            try:
                encoded.append(msgspec.msgpack.encode(changed))
            except OverflowError:  # it has no larger integers
                continue
        return encoded

    messages: list[tuple[Callable[[bytes], Any], list[bytes]]] = [
        (read, [content for _, content in absurd.as_json(absurd.ANSWER)]),
        (decode_server_info, [content for _, content in absurd.as_json(absurd.INFO)]),
        (decode_prompt, [content for _, content in absurd.as_json(absurd.PROMPT)]),
        (follow, msgpack(absurd.BATCH)),
    ]
    for take, contents in messages:
        for content in contents:
            cases += 1
            try:
                take(content)
            except (Malformed, LostMessages, OutOfStep):
                failed += 1
            assert found.resume([1, 2, 3, 4, 5])[0] == before[0]
            found.clear("liar")
    found.check_integrity()
    assert cases > 2_000 and failed > cases / 2
