"""SGLang's unified radix cache unit kit on our backend, under each of its cache configs.

The wheel has the kit's configs, builders, steps, assertions and its lock fuzzer
(sglang/test/kits/unified_radix_cache), but not the test methods over them, which stay in SGLang's
repository. So the tests here are ours and the kit's machinery does the work. SGLang's invariant
check and that of the shadow tree run after every one.

What of the kit does not run here:

| kit | why |
|---|---|
| hicache.py, storage.py, load_back.py, the HiCache parts of mixins.py | they order the host by recency, which ours does not: tests/cache/test_tiers.py |
| core.py: UnifiedRadixCacheInt8MambaCheckpointFixtures | the backend refuses `--enable-int8-mamba-checkpoint` |
| core.py: session_radix_cache_test_values() with True | what an open session refers to is evicted by value, not last: tests/cache/test_hints.py |
| core.py: PagedFullComponent, SWADraftHistoryFixtures, SWAWindowUnderBigramKeyFixtures, ...HoldBackFixtures; insert_walk.py: raw setters | they replace or poke values inside a component; the paths belong to SGLang's SWA and speculative decoding, which we inherit unchanged |
| core.py: UnifiedLRUListBoundedRefreshFixtures | tests SGLang's list class, which no backend replaces |
| rust_unified_tree_core_inspector.py | needs the Rust sources, which the wheel does not have |
| the order of SGLang's state LRU | is not ours under other policies: tested under `sglang-lru` only |
| unified_radix_cache_kit.py | needs a server: tests/server |
"""  # noqa: E501

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.test.kits.unified_radix_cache", reason="the kit came with 0.5.23")

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.test.kits.unified_radix_cache import core, fixtures, insert_walk, kv_events
from sglang.test.kits.unified_radix_cache.config import CONFIGS, CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import (
    build_fixture,
    match_prefix,
    node_children,
    node_device_lock_ref,
    node_device_value,
)
from sglang.test.kits.unified_radix_cache.mixins import UnifiedRadixCacheFixtures
from sglang.test.mem_cache_utils import finish_req
from sglang.test.test_utils import CustomTestCase

from tests.cache.backends import POLICIES
from tests.cache.kit import use_policy

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
SWA_CONFIGS = [cfg for cfg in CONFIGS if cfg.has_swa]


IN_EVERY_RUN = ("reuse", "sglang-lru")
"""Our order and SGLang's, each with a tree of its own. The others differ from `reuse` in scores
alone.
"""


@pytest.fixture(
    params=[
        pytest.param(policy, marks=[] if policy in IN_EVERY_RUN else pytest.mark.slow)
        for policy in POLICIES
    ]
)
def policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_policy(monkeypatch, request.param)
    return str(request.param)


def every(configs: list[CacheConfig]) -> Any:
    return pytest.mark.parametrize("cfg", configs, ids=[cfg.label for cfg in configs])


def steps(kit: type, cfg: CacheConfig) -> Any:
    """The kit's steps `kit`, bound to `cfg`."""
    return type(kit.__name__, (kit, CustomTestCase), {"cfg": cfg, "_rid": 0})()


class Cache:
    """One fixture of the kit with its steps."""

    def __init__(self, cfg: CacheConfig) -> None:
        self.cfg = cfg
        self.kit = steps(UnifiedRadixCacheFixtures, cfg)
        self.cache, self.allocator, self.pool = build_fixture(cfg)
        self.free = self._free()

    def _free(self) -> dict[str, int]:
        free = {"kv": self.allocator.available_size()}
        if self.cfg.has_mamba:
            free["states"] = self.pool.mamba_allocator.available_size()
        return free

    def sequence(self, start: int, pages: int) -> list[int]:
        return list(self.kit._make_seq(start, pages))

    def insert(self, tokens: list[int]) -> Any:
        return self.kit._insert(self.cache, self.allocator, self.pool, tokens)

    def hit(self, tokens: list[int]) -> int:
        return int(match_prefix(self.cache, tokens).device_prefix_len)

    def check(self) -> None:
        self.cache.sanity_check()

    def evict_all(self) -> None:
        self.cache.evict(EvictParams(num_tokens=10**9, swa_num_tokens=10**9, mamba_num=10**9))
        self.check()

    def accounts(self) -> dict[str, int]:
        tree = self.cache.tree_core
        accounts = {"kv": tree.full_evictable_size() + tree.full_protected_size()}
        if self.cfg.has_mamba:
            accounts["states"] = tree.mamba_evictable_size() + tree.mamba_protected_size()
        return {name: size + self._free()[name] for name, size in accounts.items()}


def window_pages(cfg: CacheConfig) -> int:
    """Pages that a sequence needs so that its end stays inside the window."""
    return 1 if not cfg.has_swa else -(-cfg.sliding_window_size // cfg.page_size) + 1


@every(CONFIGS)
def test_what_was_inserted_is_matched(policy: str, cfg: CacheConfig) -> None:
    it = Cache(cfg)
    tokens = it.sequence(1, max(3, window_pages(cfg)))
    it.insert(tokens)
    assert it.hit(tokens) == len(tokens)
    assert it.hit([*tokens, 7]) == len(tokens)
    assert it.hit([9_999_999, *tokens]) == 0
    assert it.accounts()["kv"] == it.free["kv"]
    it.check()


@every(CONFIGS)
def test_branches_split_nodes_and_every_branch_is_found(policy: str, cfg: CacheConfig) -> None:
    it = Cache(cfg)
    pages = window_pages(cfg)
    trunk = it.sequence(1, 2 * pages)
    branches = [trunk[: pages * cfg.page_size] + it.sequence(k * 10**5, pages) for k in (1, 2, 3)]
    for tokens in (trunk, *branches):
        if it.allocator.available_size() < len(tokens):
            pytest.skip("the config's pool is too small for four branches")
        it.insert(tokens)
        it.check()
    for tokens in (trunk, *branches):
        assert it.hit(tokens) == len(tokens)
        it.check()
    partial = it.hit(trunk[: cfg.page_size] + it.sequence(77 * 10**5, 1))
    if not cfg.has_swa:
        assert partial == (0 if cfg.has_mamba else cfg.page_size)
    it.check()


@every(CONFIGS)
def test_evicting_everything_gives_everything_back(policy: str, cfg: CacheConfig) -> None:
    it = Cache(cfg)
    for k in range(3):
        it.insert(it.sequence(1, 1) + it.sequence(1_000 * (k + 1), 1 + k))
    it.check()
    assert it.accounts()["kv"] == it.free["kv"]
    it.evict_all()
    assert it.allocator.available_size() == it.free["kv"]
    assert not node_children(it.cache, it.cache.root_node_handle())
    if cfg.has_mamba:
        tracking = 3 * it.pool.mamba_initial_tracking_slots  # the kit's requests never return them
        assert it.pool.mamba_allocator.available_size() == it.free["states"] - tracking


@every(CONFIGS)
def test_what_is_held_is_not_evicted(policy: str, cfg: CacheConfig) -> None:
    it = Cache(cfg)
    tokens = it.sequence(1, max(2, window_pages(cfg)))
    it.insert(tokens)
    it.insert(it.sequence(5_000, 2))
    node = match_prefix(it.cache, tokens).last_device_node
    lock = it.cache.inc_lock_ref(node)
    it.check()
    it.evict_all()
    assert it.hit(tokens) == len(tokens)
    assert it.hit(it.sequence(5_000, 2)) == 0
    it.cache.dec_lock_ref(node, lock.to_dec_params())
    it.evict_all()
    assert it.hit(tokens) == 0


@every(CONFIGS)
def test_a_held_node_is_split(policy: str, cfg: CacheConfig) -> None:
    it = Cache(cfg)
    pages = window_pages(cfg)
    tokens = it.sequence(1, 3 * pages)
    it.insert(tokens)
    node = match_prefix(it.cache, tokens).last_device_node
    lock = it.cache.inc_lock_ref(node)
    it.hit(tokens[: pages * cfg.page_size] + it.sequence(4_000, 1))
    it.check()
    it.cache.dec_lock_ref(node, lock.to_dec_params())
    it.check()
    it.evict_all()
    assert it.allocator.available_size() == it.free["kv"]


@every(CONFIGS)
def test_flush_forgets_everything(policy: str, cfg: CacheConfig) -> None:
    it = Cache(cfg)
    tokens = it.sequence(1, max(2, window_pages(cfg)))
    it.insert(tokens)
    it.cache.reset()
    it.allocator.clear()
    it.pool.clear()
    it.check()
    assert it.hit(tokens) == 0
    it.insert(tokens)
    assert it.hit(tokens) == len(tokens)
    it.evict_all()


@every([cfg for cfg in SWA_CONFIGS if cfg.page_size == 1])
@pytest.mark.parametrize("seed", [0, 1])
def test_lock_fuzz(policy: str, cfg: CacheConfig, seed: int) -> None:
    """The kit's own fuzzer; it checks the tree and the shadow tree after each step."""
    if cfg.has_mamba:  # its requests never return their slots
        cfg = replace(cfg, max_num_reqs=120, mamba_cache_size=120)
    steps(insert_walk.SegmentLockFuzzFixtures, cfg)._run_seed(seed, steps=60)


@every([cfg for cfg in SWA_CONFIGS if cfg.page_size == 1])
def test_a_receipt_releases_only_its_own_node(policy: str, cfg: CacheConfig) -> None:
    kit = steps(insert_walk.SegmentLockProtocolFixtures, cfg)
    cache, allocator, leaf = kit._leaf_with_lock_path()
    receipt = cache.inc_lock_ref(leaf)
    other = cache.root_node_handle()
    kit._assert_unanchored_release_rejected(
        cache,
        allocator,
        leaf,
        lambda: cache.dec_lock_ref(other, receipt.to_dec_params()),
        lambda: cache.dec_lock_ref(leaf, receipt.to_dec_params()),
    )
    cache.sanity_check()


@every([cfg for cfg in SWA_CONFIGS if cfg.page_size == 1 and not cfg.has_mamba])
def test_a_window_that_was_evicted_is_recovered(policy: str, cfg: CacheConfig) -> None:
    kit = steps(insert_walk.ResumableInsertWalkSWAFixtures, cfg)
    for lock in (False, True):
        result, length = kit._recover_swa_tombstone_with_tracking(lock_full=lock)
        assert result.prefix_len == length


@pytest.mark.parametrize("component", [MAMBA, SWA])
def test_evict_for_alloc_stops_at_the_first_sufficient_victim(policy: str, component: Any) -> None:
    kit = steps(core.UnifiedRadixAllocationEvictionRealComponentsFixtures, CONFIGS[0])
    kit._SHORTFALL = 3
    cache, *nodes = kit._build_internal_chain(component, False)
    result, drains = kit._evict_for_alloc_after_first_drain(cache, component)
    assert drains == 1
    gone = [n for n in nodes if not alive(cache, n) or not has(cache, n, component)]
    assert len(gone) == 1
    if component is MAMBA:
        assert result.mamba_num_evicted == 1
    if policy == "sglang-lru":
        assert gone == [nodes[0]]
    cache.sanity_check()


def test_a_match_refreshes_only_the_state_it_uses(policy: str) -> None:
    cfg = CacheConfig(components=(FULL, MAMBA), mamba_cache_size=8)
    it = Cache(cfg)
    order = steps(core.UnifiedMambaLRUMatchRefreshFixtures, cfg)
    for length in (2, 4, 6):
        it.insert(list(range(1, length + 1)))
    deep, middle, shallow = order._mamba_lru_mru_to_lru(it.cache)
    it.hit([1, 2, 3, 4, 99])
    assert order._mamba_lru_mru_to_lru(it.cache) == [middle, deep, shallow]
    it.check()


def test_branch_points_land_on_the_checkpoint_grid(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang tracks the states here. The kit empties a node without calling the tree, so the shadow
    tree is not compared.
    """
    use_policy(monkeypatch, policy, "all")
    kit = steps(core.MambaCheckpointGridFixtures, overshoot_config())
    assert kit._branching_seqlen(tree_page_size=64, full_hit_length=192) == 192


def overshoot_config() -> CacheConfig:
    return CacheConfig(
        components=(FULL, MAMBA), enable_mamba_extra_buffer=True, mamba_cache_size=30, page_size=1
    )


@pytest.mark.parametrize("previous", [None, 8])
def test_a_finished_request_falls_back_to_its_previous_state(
    policy: str, previous: int | None
) -> None:
    it = Cache(overshoot_config())
    kit = steps(core.MambaFinishedOvershootCheckpointFixtures, it.cfg)
    req, tokens = kit._build_req(it.allocator, it.pool, previous)
    req.last_node = it.cache.root_node_handle()
    req.lock = None
    finish_req(it.cache, req, 10)  # the latest state is of 12 tokens
    assert it.hit(tokens) == (previous or 0)
    it.check()
    if previous is not None:
        assert it.pool.mamba_allocator.available_size() == it.free["states"] - 1


@every([cfg for cfg in CONFIGS if cfg.components == (FULL,) and cfg.page_size <= 16])
def test_kv_events_tell_what_was_stored_and_removed(policy: str, cfg: CacheConfig) -> None:
    kit = steps(kv_events.UnifiedRadixCacheKVEventsFixtures, cfg)
    cache, allocator, _ = build_fixture(cfg, enable_kv_cache_events=True)
    tokens = list(range(1, 2 * cfg.page_size + 1))
    kit._insert(cache, allocator, tokens)
    stored = kit._event_hashes(kit._stored_events(cache))
    assert len(stored) == 2
    cache.evict(EvictParams(num_tokens=len(tokens)))
    removed = kit._event_hashes(kit._removed_events(cache))
    assert sorted(map(str, removed)) == sorted(map(str, stored))
    cache.sanity_check()


def test_a_disabled_cache_stores_nothing(policy: str) -> None:
    params = core.DisabledUnifiedRadixCacheFixtures()._params(True)
    cache = fixtures.UnifiedRadixCache(params)
    assert cache.insert(InsertParams(key=RadixKey(array("q", [1])), value=None)).prefix_len == 0
    assert match_prefix(cache, [1, 2]).device_prefix_len == 0
    cache.sanity_check()


def test_streaming_sessions_hold_their_turns(policy: str) -> None:
    it = Cache(CONFIGS[0])
    kit = steps(insert_walk.StreamingSessionLockLifecycleFixtures, it.cfg)
    kit._later_turn(it.cache, it.allocator, it.pool)
    assert it.accounts()["kv"] <= it.free["kv"]
    it.check()


def test_states_are_the_only_thing_that_a_state_shortage_takes(policy: str) -> None:
    cfg = CacheConfig(components=(FULL, MAMBA), mamba_cache_size=8)
    it = Cache(cfg)
    for length in (2, 4, 6):
        it.insert(list(range(1, length + 1)))
    chain = it.kit._path_chain(it.cache, match_prefix(it.cache, list(range(1, 7))).last_device_node)
    it.cache.evict(EvictParams(mamba_num=1))
    it.check()
    states = [alive(it.cache, n) and has(it.cache, n, MAMBA) for n in chain]
    assert sum(states) == 2
    lock_refs = [node_device_lock_ref(it.cache, n, FULL) for n in chain if alive(it.cache, n)]
    assert not any(lock_refs)


def alive(cache: Any, node: int) -> bool:
    return bool(cache.tree_core.contains_node(node))


def has(cache: Any, node: int, component: Any) -> bool:
    return isinstance(node_device_value(cache, node, component), torch.Tensor)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """SGLang logs the whole tree when its check fails; the assertion says enough."""
    caplog.set_level("CRITICAL")
    yield
