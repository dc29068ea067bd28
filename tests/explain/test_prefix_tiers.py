"""Tiers that store prefixes: of the tree as it is, and of each tenant's own prefixes only."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sglang_hybrid.explain.messages import ResidencyReq
from sglang_hybrid.explain.prefix_tiers import PrefixTiers, fastest
from tests.cache.driver import Server
from tests.cache.test_rules import evict_states, run
from tests.explain.test_explain import server

PREFIXES = [(-1, run(20)), (0, run(40)[20:]), (1, run(60)[40:]), (0, run(9, 5))]
"""Prefixes of 20, 40 and 60 tokens, and one that leaves them after 20."""


def places(it: Server, prefixes: Any = PREFIXES, **whose: str) -> list[tuple[str, str | None]]:
    return PrefixTiers(it.cache).answer(ResidencyReq(prefixes=prefixes, **whose)).places


def serve(it: Server, salt: str | None = None) -> None:
    """States at 20 and 40 of a prompt of 50 tokens."""
    req = it.arrive(run(50), 1.0, cache_salt=salt, declared=[20, 40])
    assert it.admit(req)
    while not it.prefill_step(req):
        pass
    it.decode(req, run(3, 7))
    it.finish(req)


NOTHING = ("nowhere", "nowhere")
STORED = ("device", "device")


def test_each_prefix_has_the_tier_of_its_kv_and_of_its_state() -> None:
    it = server()
    assert places(it) == [NOTHING] * 4
    serve(it)
    assert places(it) == [STORED, STORED, NOTHING, NOTHING]
    between = places(it, [(-1, run(30))])
    assert between == [("device", "nowhere")], "KV passes there, and no state is kept"
    while evict_states(it):
        pass
    assert all(state != "device" for _, state in places(it))


def test_a_tenant_is_told_of_its_own() -> None:
    it = server()
    serve(it, salt="a")
    assert places(it) == [NOTHING] * 4
    assert places(it, cache_salt="a")[:2] == [STORED] * 2
    assert places(it, cache_salt="b") == places(it, extra_key="a") == [NOTHING] * 4


def test_asking_changes_nothing() -> None:
    it = server()
    serve(it)
    records = [
        (record.depth, record.hits, record.last_used) for record in it.cache.shadow_tree.tree.walk()
    ]
    places(it)
    it.check()
    assert records == [
        (record.depth, record.hits, record.last_used) for record in it.cache.shadow_tree.tree.walk()
    ]


def test_without_states_kv_is_all_there_is() -> None:
    it = server("lru", states=0)
    it.serve(run(50), run(3, 7))
    assert places(it) == [("device", None)] * 2 + [("nowhere", None)] * 2


class Disk:
    """A third tier with KV of some pages, and states at the ends of some. asked: how many pages."""

    def __init__(self, kv: list[str], states: list[str]) -> None:
        self.objects = {PoolName.KV: kv, PoolName.MAMBA: states}
        self.asked = 0

    def knows(self, kind: PoolName, keys: list[str]) -> list[bool]:
        self.asked += len(keys)
        return [key in self.objects[kind] for key in keys]


class SglangsDisk:
    """A third tier of SGLang's own."""

    def __init__(self, kv: list[str]) -> None:
        self.kv = kv

    def batch_exists(self, keys: list[str]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self.kv), len(keys))


def pages_of(length: int, salt: str | None = None) -> list[str]:
    key = RadixKey(array("q", run(length)), None, cache_salt=salt)
    return list(get_storage_hash_str(key, page_size=1))


def test_what_only_the_disk_has() -> None:
    it = server()
    pages = pages_of(40)
    it.cache.cache_controller = SimpleNamespace(storage_backend=Disk(pages, [pages[39]]))
    assert places(it) == [("disk", "nowhere"), ("disk", "disk"), NOTHING, NOTHING]
    assert places(it, cache_salt="b") == [NOTHING] * 4
    it.cache.cache_controller = SimpleNamespace(storage_backend=Disk(pages_of(40, "b"), []))
    assert places(it) == [NOTHING] * 4
    assert places(it, cache_salt="b") == [("disk", "nowhere")] * 2 + [NOTHING] * 2
    it.cache.cache_controller = SimpleNamespace(storage_backend=SglangsDisk(pages))
    assert places(it) == [("disk", "nowhere")] * 2 + [NOTHING] * 2


def test_a_prefix_is_looked_up_behind_the_one_above_it() -> None:
    it = server()
    disk = Disk(pages_of(60), [])
    it.cache.cache_controller = SimpleNamespace(storage_backend=disk)
    chain = [(number - 1, run(60)[number : number + 1]) for number in range(60)]
    assert places(it, chain) == [("disk", "nowhere")] * 60
    assert disk.asked == 60 + 60, "each page once, and a state behind each"
    disk.objects[PoolName.KV] = disk.objects[PoolName.KV][:10]
    disk.asked = 0
    assert places(it, chain) == [("disk", "nowhere")] * 10 + [NOTHING] * 50
    assert disk.asked == 11 + 10, "nothing is behind what is not there"


def test_a_prefix_that_ends_within_a_page() -> None:
    it = server()
    it.cache.page_size = 4
    key = RadixKey(array("q", run(24)), None)
    disk = Disk(list(get_storage_hash_str(key, page_size=4)), [])
    it.cache.cache_controller = SimpleNamespace(storage_backend=disk)
    parts = [(-1, run(3)), (0, run(10)[3:]), (1, run(22)[10:]), (2, run(30)[22:])]
    assert places(it, parts) == [NOTHING] + [("disk", "nowhere")] * 2 + [NOTHING]


def test_the_fastest_of_several_ranks() -> None:
    here = [("device", "nowhere"), ("host", "host"), ("nowhere", None)]
    there = [("host", "disk"), ("disk", "device"), ("nowhere", None)]
    assert fastest([here, [], there]) == [("device", "disk"), ("host", "device"), ("nowhere", None)]
    assert fastest([[], []]) == []
