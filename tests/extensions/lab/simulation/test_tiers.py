"""Tiers in a replay: worked examples, and random traffic beside a plain model of three tiers that
knows tokens and no tree.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.queue.orders import Window
from sglang_hybrid.core.queue.waiting import Bound
from sglang_hybrid.core.records.nodes import Node
from sglang_hybrid.core.server_settings import Split
from sglang_hybrid.core.tiers.places import copies_of
from sglang_hybrid.core.tiers.rates import TIERS, Link, Speeds, Tier
from sglang_hybrid.core.tiers.tier_pool import TierPool
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.core.victims.table import Table
from sglang_hybrid.extensions.lab.runner import Job, Runner
from sglang_hybrid.extensions.lab.simulation.prefill_time import PAPER
from sglang_hybrid.extensions.lab.simulation.tiers import tier_simulator
from sglang_hybrid.extensions.lab.simulation.tiers.losses import Loss, Losses
from sglang_hybrid.extensions.lab.simulation.tiers.tier_budgets import (
    ROW,
    CopyCodec,
    TierBudgets,
    TierCounts,
)
from sglang_hybrid.extensions.lab.simulation.tiers.tier_simulator import TieredSimulator
from sglang_hybrid.extensions.lab.simulation.timing import Timeline
from sglang_hybrid.extensions.lab.simulation.token_tree import prefix_hashes
from sglang_hybrid.extensions.lab.simulation.traces import generators
from sglang_hybrid.extensions.lab.systems import Setting, Spec, build_system, parse_spec, systems

COST = CostModel.paper_7b().with_sizes(kv_bytes_per_token=10, state_bytes=300)
DEVICE, HOST, DISK = TIERS
SPEEDS = Speeds.of(COST.flops(1) * 1e3, host=Link(1e5, 1e-4), disk=Link(4e4, 1e-3))
Prefix = tuple[int, ...]
Stored = tuple[dict[Tier, set[Prefix]], dict[Tier, set[Prefix]]]


def request(prompt: list[int], answer: list[int], arrival: float, tenant: str = "") -> Request:
    tokens = np.array(prompt + answer, dtype=np.int32)
    return Request(0, 0, arrival, tokens, len(prompt), tenant=tenant)


def numbers(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def build(
    name: str, sizes: tuple[int, int, int], requests: list[Request] | None = None
) -> TieredSimulator:
    tiers = TierBudgets.of(*sizes)
    setting = Setting(COST, None, requests or [], 16, tiers=tiers, speeds=SPEEDS)
    cache = build_system(parse_spec(name), setting)
    assert isinstance(cache, TieredSimulator)
    return cache


def traffic(seed: int, count: int) -> list[Request]:
    """Sequences over three tokens that grow out of one another, of two tenants."""
    rng = random.Random(seed)
    sequences: list[tuple[list[int], str]] = [([], "")]
    requests = []
    for step in range(count):
        base, tenant = rng.choice(sequences[-12:])
        tenant = tenant or rng.choice(["a", "b"])
        prompt = base[: rng.choice([len(base), rng.randrange(len(base) + 1)])]
        prompt = prompt + [rng.randrange(3) for _ in range(rng.randrange(1, 60))]
        answer = [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
        requests.append(request(prompt, answer, float(step), tenant))
        sequences.append((prompt + answer, tenant))
    return requests


class PlainTiers:
    """The KV and the states that each tier holds, by the whole prefix that leads there. It follows
    a simulator's placement event by event, and finds ways by trying everything.
    """

    def __init__(self, cache: TieredSimulator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache = cache
        self.kv: dict[Tier, set[Prefix]] = {tier: set() for tier in TIERS}
        self.states: dict[Tier, set[Prefix]] = {tier: set() for tier in TIERS}
        for name in ("add_kv", "drop_kv", "add_state", "drop_state"):
            monkeypatch.setattr(cache.memory.placement, name, self.following(name))

    def following(self, name: str) -> object:
        real = getattr(self.cache.memory.placement, name)

        def follow(node: Node, tier: Tier) -> None:
            prefix = self.prefix(node)
            if name.endswith("state"):
                change, held = {prefix}, self.states[tier]
            else:
                above = len(prefix) - node.tokens
                change, held = (
                    {prefix[:n] for n in range(above + 1, len(prefix) + 1)},
                    self.kv[tier],
                )
            real(node, tier)
            held.update(change) if name.startswith("add") else held.difference_update(change)

        return follow

    def prefix(self, node: Node) -> Prefix:
        edges, tenant = [], ""
        while node.parent is not None:
            edges.append(np.frombuffer(node.payload, np.int32).tolist())
            tenant = node.key[0] if isinstance(node.key, tuple) else tenant
            node = node.parent
        tokens = [token for edge in reversed(edges) for token in edge]
        return (hash(tenant), *tokens)

    def seconds(self, one: Request, depth: int, tiers: list[Tier]) -> float | None:
        """Seconds to resume `one` at `depth` from these tiers, the fastest that has a thing, and to
        compute the rest; None if it cannot.
        """
        tokens = (hash(one.tenant), *one.tokens[:depth].tolist())
        size = dict.fromkeys(TIERS, 0)
        if depth:
            for end in range(2, depth + 2):
                tier = next((t for t in tiers if tokens[:end] in self.kv[t]), None)
                if tier is None:
                    return None
                size[tier] += COST.kv_bytes_per_token
            tier = next((t for t in tiers if tokens in self.states[t]), None)
            if tier is None:
                return None
            size[tier] += COST.state_bytes
        loads = sum(SPEEDS.loads[t].seconds(size[t]) for t in (HOST, DISK))
        return loads + COST.savings(one.input_len, depth) / SPEEDS.prefill

    def check_room(self) -> None:
        for tier, room in self.cache.memory.room.items():
            kv, states = len(self.kv[tier]), len(self.states[tier])
            if isinstance(room, Split):
                assert kv <= room.kv_tokens
                assert states <= room.slots
            else:
                assert kv * COST.kv_bytes_per_token + states * COST.state_bytes <= room


SIZES = [(3_000, 5_000, 30_000), (6_000, 20_000, 0), (4_000, 0, 30_000)]


POLICIES = ["lru", "reuse", "marconi:alpha=1", "gdsf", "clairvoyant", "whether", "when"]
IN_EVERY_RUN = {("reuse", SIZES[0]), ("lru", SIZES[1]), ("lru", SIZES[2])}
"""The others take seconds each for the plain model."""


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(*row, marks=[] if row in IN_EVERY_RUN else pytest.mark.slow)
        for row in itertools.product(POLICIES, SIZES)
    ],
)
def test_random_traffic_finds_what_a_plain_model_of_three_tiers_holds(
    name: str, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = traffic(7, 80)
    cache = build(name, sizes, requests)
    plain = PlainTiers(cache, monkeypatch)
    tiers = list(cache.memory.room)
    hit_tokens = 0
    for one in requests:
        usable = range(one.input_len)
        found = {d: s for d in usable if (s := plain.seconds(one, d, tiers)) is not None}
        outcome = cache.serve(one)
        assert found[outcome.hit_len] == pytest.approx(min(found.values()))
        hit_tokens += outcome.hit_len
        plain.check_room()
        check_copies(cache)
    assert sum(cache.memory.counts.hit_tokens.values()) == hit_tokens
    assert all(cache.memory.counts.hit_tokens[tier] for tier in tiers)
    assert cache.memory.counts.written[tiers[1]]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ["lru", "reuse", "hicache"])
def test_what_is_lost_is_what_the_deepest_state_there_ever_was_would_have_saved(
    name: str, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "hicache":  # it plays no disk, and holds states at few positions
        sizes = (6_000, 8_000, 0)
    requests = traffic(9, 80)
    cache = build(name, sizes, requests)
    losses = cache.memory.losses = Losses()
    plain = PlainTiers(cache, monkeypatch)
    ever: set[Prefix] = set()
    lost = 0
    for one in requests:
        tokens = (hash(one.tenant), *one.tokens[: one.input_len - 1].tolist())
        had = max((d for d in range(1, len(tokens)) if tokens[: d + 1] in ever), default=0)
        outcome = cache.serve(one)
        assert losses.reachable[-1] >= max(had, outcome.hit_len)
        if losses.tokens[Loss.NO_ROOM] == 0:
            assert losses.reachable[-1] == max(had, outcome.hit_len)
        lost += losses.reachable[-1] - outcome.hit_len
        ever = ever.union(*plain.states.values())
    assert lost == sum(losses.tokens.values()) > 0
    lowest = list(cache.memory.room)[-1]
    assert losses.tokens[Loss.HOST if lowest is HOST else Loss.DISK]


def test_hits_that_are_lost_are_looked_for_only_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = Runner({"traffic": traffic(9, 80)})
    tiers = TierBudgets.of(3_000, 5_000)
    job = Job(Spec("lru"), "traffic", COST, None, tiers=tiers, losses=True)
    asked = runner.run(job)
    assert sum((asked.lost or {}).values()) > 0
    monkeypatch.setattr(tier_simulator, "prefix_hashes", None)
    not_asked = runner.run(replace(job, losses=False))
    assert not_asked.lost is None
    assert not_asked.hit_len.tolist() == asked.hit_len.tolist()


def test_a_hash_of_a_prefix_is_its_own() -> None:
    """Equal prefixes have equal hashes in any sequence; others and other tenants' have not."""
    one, other = np.arange(100, dtype=np.int32), np.arange(100, dtype=np.int32)
    other[60] = 7
    hashes, others = prefix_hashes(one), prefix_hashes(other)
    assert (hashes[:60] == others[:60]).all()
    assert not (hashes[60:] == others[60:]).any()
    assert (prefix_hashes(one[:30]) == hashes[:30]).all()
    assert not (prefix_hashes(one, "a") == hashes).any()
    zeros = prefix_hashes(np.zeros(1_000, dtype=np.int32))
    assert len(set(zeros.tolist())) == 1_000


def check_copies(cache: TieredSimulator) -> None:
    """Counts are those of a walk, KV has no gaps on the device and none over all tiers, and nothing
    stays pinned.
    """
    nodes = list(cache.tree.walk())
    for node in nodes:
        copies = copies_of(node)
        assert copies.kv
        assert not copies.pinned
        assert node.has_state == bool(copies.state)
        above = node.parent
        if copies.has_kv(DEVICE) and above is not cache.tree.root:
            assert above is not None
            assert copies_of(above).has_kv(DEVICE)
    for tier in cache.memory.room:
        kv = sum(n.tokens for n in nodes if copies_of(n).has_kv(tier))
        assert cache.memory.placement.kv_tokens[tier] == kv


@pytest.mark.parametrize("name", ["lru", "reuse", "marconi:alpha=1", "clairvoyant"])
def test_victims_are_the_lowest_of_all_whatever_the_tables_remember(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = traffic(3, 80)
    cache = build(name, (3_000, 4_000, 6_000), requests)
    evict, seen = cache.memory.evict, set()

    def evict_the_lowest(pool: TierPool, victim: Node) -> None:
        seen.add(pool.tier)
        units = [(node, pool.unit(node)) for node in sorted(cache.tree.walk(), key=lambda n: n.id)]
        there = {node: unit for node, unit in units if unit is not None}
        useless = [n for n, unit in there.items() if int(unit.saves * SPEEDS.prefill) <= 0]
        if pool.policy.stateless_first and useless:
            assert victim.last_used == min(node.last_used for node in useless)
            assert victim in useless
        elif not pool.policy.spares_forks:
            table = Table(pool.policy.columns)
            for node, unit in there.items():
                saved = int(unit.saves * SPEEDS.prefill)
                if unit.kv and pool.policy.bounded_by_prefix:
                    prefix = node.depth * COST.kv_bytes_per_token + COST.state_bytes
                    saved = min(saved, COST.flops(node.depth) * unit.freed // prefix)
                table.put(node, pool.policy.describe(node, saved, unit.freed))
            scores = pool.policy.scores(table, cache.tree.clock)
            assert pool.last_score == pytest.approx(scores.min())
            assert scores[table.row(victim)] == pytest.approx(scores.min())
        evict(pool, victim)

    monkeypatch.setattr(cache.memory, "evict", evict_the_lowest)
    for one in requests:
        cache.serve(one)
    assert seen == {*TIERS}


def session(turns: int) -> list[Request]:
    """One conversation that grows, and nothing else."""
    sequence: list[int] = []
    requests = []
    for turn in range(turns):
        sequence = sequence + numbers(100 * turn, 40)
        requests.append(request(sequence, numbers(100 * turn + 50, 10), float(turn)))
        sequence = sequence + numbers(100 * turn + 50, 10)
    return requests


def others(count: int, start: float) -> list[Request]:
    """Prompts that share nothing."""
    return [request(numbers(10_000 + 100 * n, 60), [1, 2, 3], start + n) for n in range(count)]


def test_what_the_device_forgot_is_loaded_from_the_host_and_then_from_the_disk() -> None:
    first, second, third = session(3)
    cache = build("lru", (3_000, 5_000, 0))
    hits = [cache.serve(first).hit_len, cache.serve(second).hit_len]
    for one in others(3, 5.0):
        cache.serve(one)
    assert cache.memory.placement.used(DEVICE, COST) <= 3_000
    hits.append(cache.serve(third).hit_len)
    assert hits == [0, 50, 100]
    assert cache.memory.counts.loads == {HOST: 1, DEVICE: 0}
    loaded = 100 * COST.kv_bytes_per_token + COST.state_bytes
    assert cache.memory.counts.loaded[HOST] == loaded
    assert cache.memory.counts.load_seconds == pytest.approx(SPEEDS.loads[HOST].seconds(loaded))


def test_a_victim_with_a_copy_below_is_freed_without_another() -> None:
    first, second, third = session(3)
    cache = build("lru", (3_000, 50_000, 0))
    for one in (first, second, *others(4, 5.0), third):
        cache.serve(one)
    written = cache.memory.counts.written[HOST]
    new = 50 * COST.kv_bytes_per_token + COST.state_bytes  # the third turn's own
    for one in others(4, 20.0):  # already on the host: found again, and nothing new but `third`
        cache.serve(one)
    assert cache.memory.counts.written[HOST] - written <= new + 2 * (63 * 10 + COST.state_bytes)


def test_a_state_inside_the_tree_is_demoted_and_found_there() -> None:
    cache = build("lru", (3_000, 50_000, 0))
    shared = numbers(0, 50)
    cache.serve(request(shared, [7], 0.0))
    cache.serve(request([*shared, 7, *numbers(500, 20)], [8], 1.0))
    (inner,) = [node for node in cache.tree.walk() if node.depth == 51]
    assert inner.children
    pool = cache.memory.pools[DEVICE][1]
    cache.memory.evict(pool, inner)
    assert copies_of(inner).state_tier is HOST
    assert copies_of(inner).kv_tier is DEVICE
    outcome = cache.serve(request([*shared, 7, *numbers(600, 20)], [9], 2.0))
    assert outcome.hit_len == 51
    assert cache.memory.counts.loaded[HOST] == COST.state_bytes


def test_what_finds_no_room_on_the_device_is_written_down_and_found() -> None:
    cache = build("lru", (1_200, 50_000, 0))
    long = numbers(0, 150)
    cache.serve(request(long, [7], 0.0))
    assert cache.memory.placement.used(DEVICE, COST) == 0
    outcome = cache.serve(request([*long, 7, *numbers(500, 5)], [8], 1.0))
    assert outcome.hit_len == 151


def test_a_copy_that_is_worth_less_than_what_is_there_is_not_written() -> None:
    cache = build("marconi:alpha=1000", (1_600, 1_600, 0))
    long, short = numbers(0, 90), numbers(1_000, 40)
    cache.serve(request(long, [7], 0.0))
    cache.serve(request(short, [8], 1.0))  # `long` goes down
    cache.serve(request(numbers(2_000, 90), [9], 2.0))  # `short` saves less: it is lost
    assert cache.serve(request([*long, 7, 1], [1], 3.0)).hit_len == 91
    assert cache.serve(request([*short, 8, 1], [1], 4.0)).hit_len == 0


def test_requests_that_overlap_wait_for_their_loads() -> None:
    requests = [*session(2), *others(4, 10.0)]
    last = request(session(3)[2].tokens.tolist()[:140], [1], 100.0)
    cache = build("lru", (3_000, 50_000, 0))
    served = Timeline([cache], PAPER).run([*requests, last])
    assert served[-1].outcome.hit_len == 100
    computed = PAPER.seconds(100, 40)
    loaded = SPEEDS.loads[HOST].seconds(100 * COST.kv_bytes_per_token + COST.state_bytes)
    assert served[-1].ttft == pytest.approx(computed + loaded)


@pytest.mark.parametrize("name", ["lru", "reuse", "hicache", "clairvoyant"])
@pytest.mark.parametrize("sizes", [(4_000, 12_000, 0), (3_000, 6_000, 12_000)])
def test_overlapping_requests_leave_every_tier_within_its_bytes(
    name: str, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = traffic(11, 60)
    cache = build(name, sizes, requests)
    plain = PlainTiers(cache, monkeypatch)
    Timeline([cache], PAPER, plain.check_room).run(requests)
    check_copies(cache)


def test_hicache_writes_everything_through_and_drops_by_recency() -> None:
    cache = build("hicache:grid=10,interval=10", (6_000, 60_000, 0))
    first, second = session(2)
    cache.serve(first)
    for tier in (DEVICE, HOST):
        assert cache.memory.placement.used(tier, COST) == 40 * 10 + COST.state_bytes
    assert cache.memory.counts.written[HOST] == cache.memory.placement.used(HOST, COST)
    for one in others(8, 5.0):
        cache.serve(one)
    assert cache.serve(second).hit_len == 40
    assert cache.memory.counts.loads[HOST] == 1


def test_hicache_splits_the_host_as_the_device() -> None:
    cache = build("hicache", (6_000, 60_000, 0))
    device, host = cache.memory.room[DEVICE], cache.memory.room[HOST]
    assert isinstance(device, Split)
    assert isinstance(host, Split)
    assert host.slots // device.slots == pytest.approx(10, abs=1)


def test_tiers_are_read_from_the_command_line() -> None:
    tiers = TierBudgets.parse("device=20GB,host=200GB@12GB/s,disk=2TB")
    assert tiers.sizes == (20 * 10**9, 200 * 10**9, 2 * 10**12)
    assert [tiers.links[tier].bandwidth for tier in (HOST, DISK)] == [12e9, 3e9]
    assert tiers.below(DEVICE) is HOST
    assert tiers.below(HOST) is DISK
    assert tiers.below(DISK) is None
    assert str(tiers) == "20 + 200 + 2000 GB"
    assert tiers.exact
    without_host = TierBudgets.parse("device=20GB,disk=2TB")
    assert without_host.below(DEVICE) is DISK


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("device=20GB", "need a device and a host or a disk"),
        ("host=20GB", "need a device and a host or a disk"),
        ("device=20GB,tape=1TB", "'tape=1TB' is no tier"),
        ("device=20GB,host=1TB,host=1TB", "is no tier"),
        ("device=20GB,host=1TB@25GB", "'25GB' is no bandwidth"),
        ("device=20GB@1GB/s,host=1TB", "the device needs no bandwidth"),
        ("device=20GB,host=much", "'much' is no size"),
        ("device=20GB,host=1TB:int4", "'int4' is no codec; there are exact, bf16, int8"),
        ("device=20GB:int8,host=1TB", "the device has no codec"),
    ],
)
def test_what_is_no_tier_is_one_sentence(text: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        TierBudgets.parse(text)


def test_each_tier_below_the_device_has_a_codec_of_its_own() -> None:
    tiers = TierBudgets.parse("device=20GB,host=200GB@25GB/s:bf16,disk=2TB:int8")
    assert [codec.value for codec in tiers.codecs] == ["exact", "bf16", "int8"]
    assert tiers.links[HOST].bandwidth == 25e9
    assert str(tiers) == "20 + 200 (bf16) + 2000 (int8) GB"
    served = CostModel(1, 1, (), kv_bytes_per_token=16_384, state_bytes=102_400)  # float32 states
    sized = tiers.with_copies(served)
    assert sized.copies == ((16_384, 102_400), (16_384, 51_200), (8_320, 26_000))
    assert tiers.inexact_in(served) == [(False, False), (False, True), (True, True)]
    half = tiers.with_copies(CostModel.paper_7b())  # states in FP16
    assert half.copies[HOST] == half.copies[DEVICE]
    assert tiers.inexact_in(CostModel.paper_7b())[HOST] == (False, False)


def in_codec(codec: str, requests: list[Request], disk: str = "") -> TieredSimulator:
    """A cache whose device holds one sequence, and whose host two as they are."""
    cost = COST.with_sizes(kv_bytes_per_token=256, state_bytes=256 * 30)
    below = f",disk=1GB@1GB/s:{disk}" if disk else ""
    tiers = TierBudgets.parse(f"device=45000,host=70000@1GB/s:{codec}{below}")
    speeds = Speeds.of(COST.flops(1) * 1e3, host=Link(1e9), disk=Link(1e9))
    setting = Setting(cost, None, requests, 16, tiers=tiers, speeds=speeds)
    cache = build_system(Spec("lru"), setting)
    assert isinstance(cache, TieredSimulator)
    return cache


def in_turn(sessions: int, turns: int) -> list[Request]:
    """Prompts of 80 tokens and their answers, each asked again after all others."""
    return [
        request(
            [*numbers(1_000 * session, 80), *[turn] * 5], [7, 8], float(turn * sessions + session)
        )
        for turn in range(turns)
        for session in range(sessions)
    ]


def test_smaller_copies_make_room_for_more_and_hits_on_them_are_counted_apart() -> None:
    """Three sessions in turn: the host holds two of them as they are, and all in int8."""
    requests = in_turn(3, 4)
    exact, small = in_codec("exact", requests), in_codec("int8", requests)
    found = [[cache.serve(one) for one in requests] for cache in (exact, small)]
    hits = [sum(one.hit_len for one in outcomes) for outcomes in found]
    assert hits[1] > hits[0]
    assert [sum(one.hit_len for one in each if one.exact) for each in found] == [hits[0], 0]
    assert exact.memory.counts.inexact_hits == exact.memory.counts.inexact_tokens == 0
    assert small.memory.counts.inexact_tokens == hits[1]
    assert small.memory.counts.inexact_hits == small.memory.counts.loads[HOST] == 6
    assert small.memory.counts.as_dict()["inexact_hits"] == 6
    for tier in small.memory.room:
        assert small.memory.placement.used(tier, small.cost) <= small.memory.room[tier]


def test_a_loaded_copy_takes_its_smaller_size_over_the_link() -> None:
    requests = in_turn(3, 2)
    loads = []
    for codec in ("exact", "int8"):
        cache = in_codec(codec, requests, disk=codec)
        for one in requests[:4]:
            cache.serve(one)
        loads.append(sum(cache.memory.counts.loaded.values()))
    assert loads[1] * 256 == loads[0] * 132


def test_what_is_computed_behind_a_smaller_copy_is_not_exact() -> None:
    """The copy is on the device again, and continued: nothing is loaded, but nothing is exact."""
    first, *others = in_turn(3, 1)
    cache = in_codec("int8", [])
    for one in (first, *others):
        cache.serve(one)
    again = request([*first.tokens[:87].tolist(), 9, 9], [5], 4.0)
    cache.serve(again)
    assert (cache.memory.counts.inexact_hits, cache.memory.counts.loads[HOST]) == (1, 1)
    later = request([*again.tokens.tolist(), 6, 6], [5], 5.0)
    assert cache.serve(later).hit_len == len(again.tokens)
    assert (cache.memory.counts.inexact_hits, cache.memory.counts.loads[HOST]) == (2, 1)


def test_what_never_left_the_device_is_exact() -> None:
    first, *_ = in_turn(1, 1)
    cache = in_codec("int8", [])
    cache.serve(first)
    again = request([*first.tokens.tolist(), 9, 9], [5], 4.0)
    assert cache.serve(again).hit_len == len(first.tokens)
    assert cache.memory.counts.inexact_hits == 0


@pytest.mark.parametrize("codec", list(CopyCodec))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_replayed_codec_is_as_large_as_the_server_s(codec: CopyCodec, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from sglang_hybrid.storage.codecs.codecs import Codec

    kind = getattr(torch, dtype)
    fitting = Codec(codec.value).fit(ROW, kind)
    assert codec.bytes_of(10 * ROW * kind.itemsize, kind.itemsize) == 10 * fitting.row_bytes(
        ROW, kind
    )
    assert codec.is_exact(kind.itemsize) == (fitting is Codec.EXACT)


def test_a_policy_without_tiers_says_which_have_them() -> None:
    assert "hicache" in systems(tiered=True)
    assert "hicache" not in systems(tiered=False)
    with pytest.raises(ValueError, match="not replayed in tiers; these are: lru"):
        build("sglang", (4_000, 12_000, 0))
    with pytest.raises(ValueError, match="not replayed without tiers"):
        build_system(Spec("hicache"), Setting(COST, 10_000, []))


def test_a_model_without_states_is_refused() -> None:
    attention = COST.with_sizes(kv_bytes_per_token=10, state_bytes=0)
    tiers = TierBudgets.of(1_000, 1_000)
    with pytest.raises(ValueError, match="models with states"):
        build_system(Spec("lru"), Setting(attention, None, [], tiers=tiers, speeds=SPEEDS))


def test_counts_are_summed_up() -> None:
    counts = TierCounts()
    counts.hit_tokens[HOST] += 40
    counts.written[HOST] += 1_000
    assert counts.written_per_hit_token == 25
    assert counts.as_dict()["written"] == {"device": 0, "host": 1_000, "disk": 0}
    assert TierCounts().written_per_hit_token == 0


def test_what_a_request_holds_may_go_with_the_kv_above_it() -> None:
    """Overlapping requests in tiers that hold little: what found no room on the device is in the
    tree only as long as a lower tier has it.
    """
    cost = CostModel.paper_7b()
    kind = generators.traffic("few-shot", sessions=80)
    requests = generators.generate("few-shot", kind, 2)
    tiers = TierBudgets.of(10**8, 10**8, 2 * 10**8)
    setting = Setting(cost, None, requests, tiers=tiers, speeds=tiers.speeds(cost, PAPER))
    timeline = Timeline(
        [build_system(Spec("lru"), setting)], PAPER, order=Window(64), bound=Bound(8, 30.0)
    )
    served = timeline.run(requests)
    assert len(served) == len(requests)
