"""Readers of KV events know where prompts can be resumed, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sglang.srt.disaggregation.kv_events import KVEventBatch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_hybrid.cache.resumable import READERS, ResumableView
from sglang_hybrid.core.tiers.places import tiers_of
from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.explain.messages import ResumableReq
from sglang_hybrid.extensions.router.index import ReplicaIndex
from sglang_hybrid.extensions.router.wire import apply_events, decode_batch
from sglang_hybrid.serving.tenants import tenant, tenant_names
from tests.cache.backends import options
from tests.cache.driver import Server, Sizes
from tests.cache.test_properties import CONFIGS, POLICIES, Run, operation
from tests.cache.tiers import SLOW, TieredServer, set_speeds
from tests.examples import DEEP, examples

MEDIA = ("GPU", "CPU_PINNED", "DISK")
Position = tuple[str, tuple[int, ...]]
"""A tenant's name and a prefix."""


@dataclass
class Block:
    tenant: str
    path: tuple[int, ...]
    parts: dict[str, str] = field(default_factory=dict)
    """The medium of each part of the block."""


def batch(events: Iterable[Any]) -> bytes:
    """The message in which events are published."""
    return msgspec.msgpack.encode([0.0, list(events), 0])


def sent(events: Iterable[Any]) -> list[dict[str, Any]]:
    """The events as readers receive them."""
    decoded: list[dict[str, Any]] = msgspec.msgpack.decode(batch(events))[1]
    return decoded


class Reader:
    """Knows what it was told, by the hash of each block. It keeps to docs/replicas.md, and asserts
    what is promised there.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.ends: set[int] = set()  # last hashes of what was stored
        self.joins = False  # a snapshot is being read, which has yet to tell of other blocks

    def apply(self, events: Iterable[Any]) -> None:
        for event in sent(events):
            getattr(self, event["type"])(event)

    def BlockStored(self, event: dict[str, Any]) -> None:
        parent, size = event["parent_block_hash"], event["block_size"]
        hashes, tokens, parts = event["block_hashes"], event["token_ids"], event["component_types"]
        assert len(tokens) == size * len(hashes)
        if parent is not None and parent not in self.ends:
            assert self.joins, "below a block that was never told"
            return
        path = () if parent is None else self.blocks[parent].path
        owner = event.get("tenant", "")
        assert parent is None or self.blocks[parent].tenant == owner
        for number, value in enumerate(hashes):
            path += tuple(tokens[number * size : (number + 1) * size])
            block = self.blocks.setdefault(value, Block(owner, path))
            assert (block.tenant, block.path) == (owner, path), "two blocks have one hash"
            if "full" in parts:
                block.parts.clear()
            block.parts |= dict.fromkeys(parts, event["medium"])
        self.ends.add(hashes[-1])

    def BlockRemoved(self, event: dict[str, Any]) -> None:
        hashes = event["block_hashes"]
        known = [self.blocks.pop(value) for value in hashes if value in self.blocks]
        assert (self.joins and not known) or hashes[-1] in self.ends, "an end that was never told"

    def AllBlocksCleared(self, _: dict[str, Any]) -> None:
        self.blocks.clear()
        self.ends.clear()

    def resumable(self) -> dict[Position, tuple[str, str]]:
        """The media of KV and state of each position that it takes for resumable."""
        return {
            (block.tenant, block.path): (block.parts["full"], block.parts["mamba"])
            for block in self.blocks.values()
            if "mamba" in block.parts
        }

    def check_plain(self) -> None:
        """A reader who does not know of states is told of no block without a state at its end or
        behind it.
        """
        ends = [path for _, path in self.resumable()]
        for block in self.blocks.values():
            assert any(end[: len(block.path)] == block.path for end in ends), block


def resumable(cache: Any) -> dict[Position, tuple[str, str]]:
    """The same as the records of the cache have it."""
    found = {}
    for node in cache.shadow_tree.tree.walk():
        kv, state = tiers_of(node)
        if kv is None or state is None:
            continue
        path: tuple[int, ...] = ()
        above = node
        while above.parent is not None:
            key = above.payload.key
            path = tuple(key.token_ids[: len(key)]) + path
            above = above.parent
        key = node.payload.key
        whose = tenant_names().name(tenant(key.extra_key, key.cache_salt))
        found[whose, path] = MEDIA[kv], MEDIA[state]
    return found


def check(reader: Reader, cache: Any) -> None:
    reader.apply(cache.take_events())
    assert reader.resumable() == resumable(cache)
    reader.check_plain()


WITH_STATES = [name for name in CONFIGS if "attention" not in name]


@pytest.mark.parametrize("config", WITH_STATES)
def test_readers_know_where_prompts_can_be_resumed(config: str) -> None:
    """Whatever happens, one from the beginning, and one who joins and takes a node at a time."""

    @settings(
        examples(15),
        phases=[Phase.generate],
        derandomize=DEEP == 1,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        policy=st.sampled_from([name for name in POLICIES if name != "sglang-lru"]),
        chunk=st.sampled_from([0, 16]),
        joins=st.integers(0, 30),
        every=st.integers(1, 4),
        operations=st.lists(operation, min_size=30, max_size=80),
    )
    def property(policy: str, chunk: int, joins: int, every: int, operations: list[Any]) -> None:
        run = Run(CONFIGS[config], policy, "judicious", chunk, enable_kv_cache_events=True)
        reader, late, index = Reader(), Reader(), ReplicaIndex()
        walk: Any = None
        for number, step in enumerate(operations):
            run.do(*step)
            if number % every:  # several steps may lie between two batches
                continue
            events = run.cache.take_events()
            reader.apply(events)
            assert reader.resumable() == resumable(run.cache)
            reader.check_plain()
            apply_events(index, "a", decode_batch(batch(events)))
            prompt = run.tokens(step[1], step[2])
            for at in index.resume(prompt):
                assert run.stored is not None
                assert at.position == run.stored.lookup(prompt[:-1])[1]
            if number >= joins:
                late.joins = True
                late.apply(events if walk is not None else [])
                walk = walk or run.cache.tree_core.state_events.walk()
                late.apply(next(walk, []))
        events = run.cache.take_events()
        reader.apply(events)
        if walk is not None:
            late.apply(events)
            for blocks in walk:
                late.apply(blocks)
            assert late.resumable() == reader.resumable() == resumable(run.cache)
        run.end()
        check(reader, run.cache)
        assert not reader.blocks

    property()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_moves_between_device_and_host_are_told(policy: str) -> None:
    source, reader = random.Random(5), Reader()
    sizes = Sizes(states=8, kv=256, rows=6, context=256)
    flags = options("reuse", hybrid_offload_watermark=1.0)
    at = TieredServer.on(sizes, flags, policy=policy, enable_kv_cache_events=True)
    set_speeds(at.cache, SLOW)
    shared = [source.sample(range(1_000), 60) for _ in range(4)]
    media = set()
    for _ in range(120):
        prompt = source.choice(shared)[: source.randrange(20, 60)] + source.sample(range(1_000), 20)
        at.serve(prompt, [3, 4], cache_salt=source.choice([None, None, "a", "b"]))
        for _ in range(source.randrange(3)):
            at.poll()
        if source.random() < 0.1:
            at.cache.evict(EvictParams(num_tokens=100, mamba_num=3))
        check(reader, at.cache)
        media |= set(reader.resumable().values())
    assert {("GPU", "GPU"), ("CPU_PINNED", "CPU_PINNED")} <= media
    at.flush()
    check(reader, at.cache)
    assert not reader.blocks


ROOM = Sizes(states=16, kv=1_024, rows=6, context=256)


def serving(**more: Any) -> tuple[Server, Reader]:
    return Server.on(ROOM, options("reuse"), enable_kv_cache_events=True, **more), Reader()


def stored(at: Server) -> list[Any]:
    return [event for event in at.cache.take_events() if hasattr(event, "token_ids")]


def test_a_state_that_goes_while_its_kv_stays_is_told() -> None:
    at, reader = serving()
    prompt = list(range(100, 140))
    at.serve(prompt, [3])
    at.serve([*prompt, 3, *range(200, 220)], [4])
    check(reader, at.cache)
    blocks, states = len(reader.blocks), len(reader.resumable())
    at.cache.evict(EvictParams(num_tokens=0, mamba_num=1))
    check(reader, at.cache)
    assert (len(reader.blocks), len(reader.resumable())) == (blocks, states - 1)


def test_a_cut_edge_is_told_up_to_the_cut() -> None:
    """Later events name its end: here that of the branch, and then both sides of it go."""
    at, reader = serving()
    shared = list(range(100, 130))
    at.serve([*shared, 1, 2, 3], [3])
    at.serve([*shared, 4, 5, 6], [3])
    at.serve([*shared, 7, 8, 9], [3])
    check(reader, at.cache)
    assert ("", tuple(shared)) in reader.resumable()
    at.cache.evict(EvictParams(num_tokens=10**6, mamba_num=10**6))
    check(reader, at.cache)
    assert not reader.blocks


def test_tenants_are_told_by_a_keyed_hash_and_share_no_block() -> None:
    at, reader = serving()
    prompt = list(range(100, 140))
    told = []
    for salt in (None, "first salt", "second salt"):
        at.serve(prompt, [3], cache_salt=salt)
        told += at.cache.take_events()
    assert b"salt" not in msgspec.msgpack.encode(told).replace(b"cache_salt", b"")
    reader.apply(told)
    names = {whose for whose, _ in reader.resumable()}
    assert names == {
        "",
        *(tenant_names().name((None, f"{nth} salt")) for nth in ("first", "second")),
    }
    assert len(reader.blocks) == 3 * 40


def test_the_format_of_dynamo_keeps_its_fields() -> None:
    at, _ = serving(dynamo_kv_event_format=True)
    at.serve(list(range(100, 140)), [3], cache_salt="a salt")
    assert {event.cache_salt for event in stored(at)} == {"a salt"}


def test_what_is_encoded_is_what_sglang_publishes() -> None:
    """Its own structures can decode it."""
    at, _ = serving()
    at.serve(list(range(100, 140)), [3])
    batch = KVEventBatch(ts=1.0, events=stored(at))
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
    assert sum(len(event.block_hashes) for event in decoded.events) == 40


def test_a_model_without_states_has_sglangs_events() -> None:
    at = Server.on(Sizes(states=0), options("reuse"), enable_kv_cache_events=True)
    assert at.cache.tree_core.state_events is None
    at.serve(list(range(100, 140)), [3])
    assert sum(len(event.block_hashes) for event in stored(at)) == 40


def test_nothing_is_recorded_where_events_are_off() -> None:
    at = Server.on(ROOM, options("reuse"))
    at.serve(list(range(100, 140)), [3])
    assert at.cache.take_events() == []
    assert at.cache.resumable is None
    (answer,) = [it for asked, it in at.cache.explainer.handlers() if asked is ResumableReq]
    assert "nothing of states" in answer(ResumableReq()).error


# Snapshots.


@pytest.fixture
def asked() -> tuple[Server, Callable[..., Any]]:
    at, _ = serving()
    for first in range(20):
        at.serve([first, *range(100, 140)], [3])
    at.cache.take_events()
    view: ResumableView = at.cache.resumable
    return at, lambda **more: view.answer(ResumableReq(**more))


def test_a_snapshot_has_pages(
    asked: tuple[Server, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    at, ask = asked
    monkeypatch.setattr("sglang_hybrid.cache.resumable.PAGE_TOKENS", 100)
    reader = Reader()
    answer = ask(cursor="one", begin=True)
    pages = 1
    while answer.more:
        reader.apply(answer.events)
        answer = ask(cursor="one")
        pages += 1
    reader.apply(answer.events)
    assert pages > 3
    assert reader.resumable() == resumable(at.cache)
    assert not answer.error and answer.seq == 1 and answer.prefill_tokens_per_second
    loads = at.cache.speeds.speeds.loads[Tier.HOST]
    assert answer.loads["CPU_PINNED"] == (
        loads.seconds(at.cache.cost.state_bytes),
        at.cache.cost.kv_bytes_per_token / loads.bandwidth,
    )


def test_room_is_what_takes_nothings_place() -> None:
    """Tokens that are free, while three state slots are."""
    at, _ = serving()
    view: ResumableView = at.cache.resumable
    slots, rooms = at.cache.req_to_token_pool.mamba_allocator, []
    for first in range(50):
        free = at.cache.token_to_kv_pool_allocator.available_size()
        rooms.append(view.answer(ResumableReq()).room)
        assert rooms[-1] == (free if slots.available_size() >= 3 else 0)
        at.serve([first, *range(100, 110)], [3])
    assert rooms[0] > rooms[1] > 0 == rooms[-1]


def test_a_page_says_of_which_batches_it_is_true(
    asked: tuple[Server, Callable[..., Any]],
) -> None:
    at, ask = asked
    before = ask()
    at.serve(list(range(200, 240)), [3])
    at.cache.take_events()
    after = ask()
    assert (after.seq, after.epoch) == (before.seq + 1, before.epoch)
    assert not after.events and not after.more


def test_only_so_many_snapshots_are_read_at_once(
    asked: tuple[Server, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ask = asked
    monkeypatch.setattr("sglang_hybrid.cache.resumable.PAGE_TOKENS", 1)
    for number in range(READERS + 1):
        assert ask(cursor=str(number), begin=True).more
    assert "begin anew" in ask(cursor="0").error
    assert ask(cursor="1").more and not ask(cursor="1").error
