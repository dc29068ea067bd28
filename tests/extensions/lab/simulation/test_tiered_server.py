"""A server with tiers, replayed: request after request it hits what `HybridRadixCache` hits above
host memory, and no tier ever holds more than it has room for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.server_settings import ServedTiers, Serving, Split
from sglang_hybrid.core.specs import Spec, make_policies
from sglang_hybrid.core.tiers.places import copies_of
from sglang_hybrid.core.tiers.rates import Link, Speeds, Tier
from sglang_hybrid.core.traffic.recorder import FinishedRequest, RequestWindow
from sglang_hybrid.core.traffic.requests import Request, make_request
from sglang_hybrid.extensions.lab.simulation.server_simulator import ServerSimulator
from sglang_hybrid.extensions.lab.simulation.system_names import parse_spec
from sglang_hybrid.extensions.lab.simulation.tiers.tiered_server import TieredServerSimulator
from sglang_hybrid.extensions.lab.simulation.tuner.candidates import TokensFound, replay
from sglang_hybrid.extensions.lab.simulation.tuner.tuner import Rules, Tuner
from sglang_hybrid.extensions.lab.simulation.workers import packed, unpack
from tests.extensions.lab.simulation.tuner.traffic import (
    conversations,
    fashions,
    records,
    requests,
    templates,
)

REQUESTS = requests(templates(60) + fashions(60) + conversations(60) + templates(60, seed=1))
SPEEDS = Speeds.of(1e6, Link(1e9), Link(1e8))
POOLS = Split(kv_tokens=3_200, slots=6)
ONE_STATE = 4_096
COST = CostModel(linear=1_000, quadratic=3, windows=(), kv_bytes_per_token=8, state_bytes=ONE_STATE)


def simulator(
    name: str,
    below: ServedTiers,
    memory: Split | int = POOLS,
    cost: CostModel = COST,
) -> TieredServerSimulator:
    serving = Serving(chunk=64, grid=64, one_memory=isinstance(memory, int))
    policies = make_policies(parse_spec(name))
    return TieredServerSimulator(cost, memory, *policies, below, 16, serving)


def sizes_of_pools(*, one_memory: bool) -> Any:
    """The `Sizes` of a `HybridRadixCache` that holds what POOLS says."""
    from tests.cache.driver import Sizes

    longest = max(len(request.tokens) for request in REQUESTS) + 64
    sizes = Sizes(POOLS.kv_tokens, POOLS.slots, grid=64, context=longest)
    return replace(sizes, one_memory=True, state_tokens=ONE_STATE // 8) if one_memory else sizes


def check(cache: TieredServerSimulator) -> None:
    """Each tier holds what a walk counts, within its room; KV has no gap on the device or on the
    host, and nothing is left pinned or locked.
    """
    memory, placement = cache.memory, cache.memory.placement
    nodes = list(cache.tree.walk())
    for tier, room in memory.room.items():
        kv = sum(node.tokens for node in nodes if copies_of(node).has_kv(tier))
        states = sum(copies_of(node).has_state(tier) for node in nodes)
        assert (kv, states) == (
            placement.kv_tokens[tier],
            placement.states[tier],
        )
        if isinstance(room, Split):
            assert kv <= room.kv_tokens
            assert states <= room.slots
        else:
            assert kv * cache.cost.kv_bytes_per_token + states * cache.cost.state_bytes <= room
    for node in nodes:
        copies, above = copies_of(node), node.parent
        assert copies.kv
        assert not copies.pinned
        assert not node.kv_locked
        assert node.has_state == bool(copies.state & placement.counted)
        if above is not None and above is not cache.tree.root:
            for tier in (Tier.DEVICE, Tier.HOST):
                assert copies_of(above).has_kv(tier) or not copies.has_kv(tier)
    assert not memory.kv_in_use
    assert not memory.slots_in_use


SLOW = pytest.mark.slow
PARITY = [
    pytest.param("reuse", "write_through", False, id="reuse"),
    *(
        pytest.param(name, writes, one_memory, marks=SLOW)
        for name in ("reuse", "lru", "marconi:1")
        for writes in ("write_through", "write_through_selective", "write_back")
        for one_memory in (False, True)
        if (name, writes, one_memory) != ("reuse", "write_through", False)
    ),
]


@pytest.mark.parametrize(("name", "writes", "one_memory"), PARITY)
def test_the_simulator_is_the_server(name: str, writes: str, *, one_memory: bool) -> None:
    pytest.importorskip("sglang")
    from sglang_hybrid.cache.tiers.served_tiers import served_tiers
    from sglang_hybrid.core.specs import PolicySwitch
    from sglang_hybrid.extensions.lab.simulation.system_names import parse_spec
    from sglang_hybrid.serving.config import HybridConfig
    from tests.cache.tiers import PollingServer, build_tiered_cache

    sizes = sizes_of_pools(one_memory=one_memory)
    options = HybridConfig(hybrid_offload_watermark=1.0)
    cache: Any = build_tiered_cache(sizes, options, policy=writes, ratio=2.0)
    cache.speeds.speeds, cache.speeds.poll = SPEEDS, lambda: []
    cache.parts.use_policy(PolicySwitch(1, parse_spec(name), "a test"))
    below = served_tiers(cache)
    assert below is not None
    assert below.speeds is SPEEDS
    server = PollingServer(cache, sizes, 64)
    ours = simulator(name, below, sizes.budget if one_memory else POOLS, cache.cost)
    theirs, found = [], []
    for request in REQUESTS:
        theirs += server.play([request])
        server.poll()
        found.append(ours.serve(request).hit_len)
        check(ours)
    assert found == theirs
    alone = ServerSimulator(
        cache.cost, ours.budget, *make_policies(parse_spec(name)), 16, ours.serving
    )
    assert [alone.serve(request).hit_len for request in REQUESTS] != theirs
    assert server.loads == ours.memory.counts.loads[Tier.HOST] > 0


@pytest.fixture
def coded() -> Iterator[None]:
    """Copies below the device are bf16."""
    pytest.importorskip("sglang")
    from sglang_hybrid.storage.codecs import in_use
    from sglang_hybrid.storage.codecs.codecs import Codec
    from sglang_hybrid.storage.codecs.coded_rows import CodecPlan

    in_use.set_codecs(CodecPlan.uniform(Codec.BF16))
    yield
    in_use.set_codecs(CodecPlan())


@pytest.mark.usefixtures("coded")
@pytest.mark.parametrize("writes", ["write_through", pytest.param("write_back", marks=SLOW)])
@pytest.mark.parametrize("one_memory", [False, pytest.param(True, marks=SLOW)])
def test_with_a_codec_the_simulator_hits_and_marks_what_the_server_does(
    writes: str, *, one_memory: bool
) -> None:
    """More of the smaller copies fit, and the same requests resume from what is not exact."""
    from sglang_hybrid.cache.tiers.served_tiers import served_tiers
    from sglang_hybrid.core.specs import PolicySwitch
    from sglang_hybrid.serving.config import HybridConfig
    from tests.cache.tiers import PollingServer, build_tiered_cache

    class MarkingServer(PollingServer):
        def admit(self, req: Any) -> bool:
            joined = super().admit(req)
            if joined and req.prefix_len:
                core = self.cache.tree_core
                inexact.append(not core.is_exact(core.node_by_id(req.last_node)))
            elif joined:
                inexact.append(False)
            return joined

    inexact: list[bool] = []
    sizes = sizes_of_pools(one_memory=one_memory)
    options = HybridConfig(hybrid_offload_watermark=1.0)
    cache: Any = build_tiered_cache(sizes, options, policy=writes, ratio=2.0)
    below = served_tiers(cache)
    assert below is not None
    assert not below.exact
    cache.speeds.speeds, cache.speeds.poll = SPEEDS, lambda: []
    cache.parts.use_policy(PolicySwitch(1, Spec("reuse"), "a test"))
    memory = sizes.budget if one_memory else POOLS
    ours = simulator("reuse", replace(below, speeds=SPEEDS), memory, cache.cost)
    server = MarkingServer(cache, sizes, 64)
    hits, marks = [], []
    for request in REQUESTS:
        before = ours.memory.counts.inexact_hits
        hits.append((server.play([request])[0], ours.serve(request).hit_len))
        server.poll()
        marks.append(ours.memory.counts.inexact_hits > before)
        check(ours)
    assert [theirs for theirs, _ in hits] == [found for _, found in hits]
    assert marks == inexact
    assert any(marks)
    assert any(hit and not mark for (hit, _), mark in zip(hits, marks, strict=True))


@SLOW
@pytest.mark.parametrize("name", ["reuse", "lru", "marconi:1"])
@pytest.mark.parametrize("one_memory", [False, True])
def test_above_a_disk_the_simulator_hits_about_what_the_server_hits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, one_memory: bool
) -> None:
    """They differ in this: KV that the server reads from its disk is a new node of its tree."""
    pytest.importorskip("sglang")
    from sglang_hybrid.cache.tiers.served_tiers import served_tiers
    from sglang_hybrid.core.specs import PolicySwitch
    from sglang_hybrid.extensions.disk import file_backend
    from sglang_hybrid.extensions.lab.simulation.system_names import parse_spec
    from sglang_hybrid.serving.config import HybridConfig
    from tests.cache.disk import disk_server

    monkeypatch.setattr(file_backend, "served_model", lambda: {"weights": "some"})
    sizes = sizes_of_pools(one_memory=one_memory)
    options = HybridConfig(hybrid_offload_watermark=1.0)
    with disk_server(tmp_path / "disk", sizes, options, ratio=1.5) as server:
        cache: Any = server.cache
        cache.speeds.speeds, cache.speeds.poll = SPEEDS, lambda: []
        cache.parts.use_policy(PolicySwitch(1, parse_spec(name), "a test"))
        below = served_tiers(cache)
        assert below is not None
        assert below.disk > 0
        ours = simulator(name, below, sizes.budget if one_memory else POOLS, cache.cost)
        theirs, found = [], []
        for request in REQUESTS:
            theirs.append(serve_from_disk(server, request))
            found.append(ours.serve(request).hit_len)
            check(ours)
        read = server.store.info()["read"]
    assert read > 0
    alone = simulator(name, replace(below, disk=0), ours.budget, cache.cost)
    without_disk = sum(alone.serve(request).hit_len for request in REQUESTS)
    assert sum(theirs) > without_disk
    assert sum(found) == pytest.approx(sum(theirs), rel=0.05)
    if not name.startswith("marconi"):  # whose scores change with every candidate there is
        assert sum(one != other for one, other in zip(found, theirs, strict=True)) < 20


def serve_from_disk(server: Any, request: Request) -> int:
    """The hit length of `request`, served alone with what the disk has of it."""
    req = server.read(request.tokens[: request.input_len].tolist(), request.arrival)
    assert server.admit(req)
    hit = int(req.prefix_len)
    while not server.prefill_step(req):
        server.poll()
    server.decode(req, request.tokens[request.input_len :].tolist())
    server.finish(req)
    server.settle()
    return hit


def test_the_tuner_of_a_server_knows_its_tiers() -> None:
    pytest.importorskip("sglang")
    from tests.cache.backends import options
    from tests.cache.driver import FULL, MAMBA, Sizes
    from tests.cache.tiers import build_tiered_cache

    flags = options("auto", hybrid_tuner_workers=1, hybrid_offload_watermark=0.8)
    cache: Any = build_tiered_cache(Sizes(512, 16), flags, policy="write_back", rank=0)
    below = cache.tuning.tuner._tiers()
    assert below == ServedTiers(
        Split(cache.host_room(FULL), cache.host_room(MAMBA)),
        cache.speeds.speeds,
        write_back=True,
        watermark=0.8,
        at_once=False,
    )
    assert below.host.slots > 0


def test_where_running_requests_leave_nothing_nothing_is_found() -> None:
    cache = simulator("lru", ServedTiers(Split(1_000, 5), SPEEDS), Split(0, 0))
    assert not any(cache.serve(request).hit_len for request in sessions(2, 2))
    assert not cache.memory.counts.written


def traffic(seed: int, count: int) -> list[Request]:
    """Sequences over three tokens that continue, branch from and repeat one another."""
    source = random.Random(seed)
    sequences: list[list[int]] = [[]]
    made = []
    for number in range(count):
        base = source.choice(sequences[-12:])
        prompt = base[: source.choice([len(base), source.randrange(len(base) + 1)])]
        prompt = prompt[:500] + [source.randrange(3) for _ in range(source.randrange(1, 60))]
        answer = [source.randrange(3) for _ in range(source.randrange(1, 20))]
        tenant = source.choice(["a", "b"])
        made.append(replace(make_request(number, 0, number + 1.0, prompt, answer), tenant=tenant))
        sequences.append(prompt + answer)
    return made


@pytest.mark.parametrize("name", ["reuse", "lru"])
@pytest.mark.parametrize(
    ("memory", "disk", "write_back"),
    [(POOLS, 60_000, False), (25_000, 60_000, True), (POOLS, 0, True)],
)
def test_no_tier_holds_more_than_it_has_room_for(
    name: str, memory: Split | int, disk: int, *, write_back: bool
) -> None:
    host = Split(kv_tokens=1_500, slots=6)
    below = ServedTiers(host, SPEEDS, disk, write_back, watermark=0.5, least_read=8)
    cache = simulator(name, below, memory)
    for request in traffic(5, 150):
        outcome = cache.serve(request)
        assert outcome.hit_len <= outcome.kv_len < request.input_len
        check(cache)
    assert cache.memory.counts.written[Tier.HOST]
    assert bool(cache.memory.counts.written[Tier.DISK]) == bool(disk)


def sessions(count: int, turns: int) -> list[Request]:
    """Conversations that are continued in turn."""
    said: list[list[int]] = [[1_000 * number] * 20 for number in range(count)]
    made = []
    for turn in range(turns):
        for number in range(count):
            said[number] = said[number] + [turn * 100 + number] * 80
            made.append(make_request(number, turn, len(made) + 1.0, said[number], [7, 8, 9]))
            said[number] = said[number] + [7, 8, 9]
    return made


def test_each_tier_finds_more() -> None:
    """Twelve conversations: some fit on the device, more on the host, all on the disk. What an
    answer ends with is computed anew.
    """
    small = Split(kv_tokens=900, slots=3)
    host = Split(kv_tokens=2_000, slots=6)
    found = []
    for disk in (0, 10_000_000):
        cache = simulator("lru", ServedTiers(host, SPEEDS, disk, least_read=1), small)
        found.append([cache.serve(request).hit_len for request in sessions(12, 4)])
    large = simulator("lru", ServedTiers(Split(100_000, 500), SPEEDS), small)
    on_host = [large.serve(request).hit_len for request in sessions(12, 4)]
    assert sum(found[0]) == 0
    assert found[1] == on_host
    assert sum(on_host) == sum(r.input_len - 81 for r in sessions(12, 4) if r.turn)


def test_a_state_that_only_the_disk_has_is_read_though_the_host_has_its_kv() -> None:
    """A prompt branches off where a conversation's first answer ended; others came since."""
    below = ServedTiers(Split(100_000, 2), SPEEDS, 10_000_000, least_read=1)
    cache = simulator("lru", below, Split(kv_tokens=900, slots=3))
    asked, answered = [1] * 100, [7, 8, 9]
    whole = asked + answered + [2] * 80
    for number, prompt in enumerate([asked, whole, [3] * 100, [4] * 100, [5] * 100, [6] * 100]):
        cache.serve(make_request(number, 0, number + 1.0, prompt, answered))
    branch = make_request(9, 0, 9.0, [*asked, *answered[:2], *[10] * 80], answered)
    assert cache.serve(branch).hit_len == len(asked) + 2


def test_a_short_find_on_the_disk_is_not_read() -> None:
    small = Split(kv_tokens=900, slots=3)
    below = ServedTiers(Split(1_000, 3), SPEEDS, 10_000_000, least_read=256)
    cache = simulator("lru", below, small)
    hits = [cache.serve(request).hit_len for request in sessions(12, 4)]
    assert all(hit == 0 or hit >= 256 for hit in hits)
    assert any(hits)


def test_a_window_in_tiers_is_packed_and_replayed_in_them() -> None:
    below = ServedTiers(Split(100_000, 500), SPEEDS)
    window = RequestWindow(REQUESTS, COST, POOLS, 120, 16, Serving(64, 64), below)
    with packed(window) as descriptor:
        read = unpack(descriptor)
    assert read.tiers == below
    hits = [sum(o.hit_len for o in replay(one, Spec("lru"))) for one in (window, read)]
    alone = sum(o.hit_len for o in replay(replace(window, tiers=None), Spec("lru")))
    assert hits[0] == hits[1] > alone


def test_the_tuner_compares_in_the_tiers_there_are_when_it_searches() -> None:
    tiers = [ServedTiers(Split(1_000, 5), SPEEDS), ServedTiers(Split(1_000, 5), SPEEDS, disk=77)]
    windows: list[RequestWindow] = []

    def search(window: RequestWindow, *_: object) -> TokensFound:
        windows.append(window)
        return TokensFound(window.counted_tokens)

    tuner = Tuner(
        COST,
        Rules(window=4),
        serving=Serving(),
        tiers=lambda: tiers[len(windows)],
        search=search,
    )
    recorded: list[FinishedRequest] = records(templates(30))
    for record in recorded:
        tuner.on_request_end(record, evicted=True)
        tuner.wait()
        tuner.poll()
        if len(windows) == len(tiers):
            break
    assert [window.tiers for window in windows] == tiers
