"""What SGLang reads from disk comes into the tree as nodes that only the host has."""

from __future__ import annotations

from array import array

import pytest
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_hybrid.core.tiers.places import copies_of
from sglang_hybrid.core.tiers.rates import Tier
from tests.cache.backends import options
from tests.cache.driver import Sizes
from tests.cache.tiers import TieredServer, build_tiered_cache

SIZES = {
    "two pools": Sizes(states=7, kv=160, rows=6, context=128),
    "one memory": Sizes(states=7, kv=160, rows=6, context=128, one_memory=True, state_bytes=160),
}


@pytest.mark.parametrize("writes", ["write_through", "write_back"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_nodes_that_only_the_host_has(sizes: Sizes, writes: str) -> None:
    """One at the root, and one that cuts it."""
    cache = build_tiered_cache(sizes, options("reuse"), policy=writes)
    server = TieredServer(cache, sizes)
    tree = cache.tree_core
    one, two = list(range(5, 35)), [*range(5, 20), *range(50, 60)]
    for tokens in (one, two):
        host = cache.cache_controller.mem_pool_host.alloc(len(tokens))
        hashes = [f"{token:064x}" for token in tokens]
        key = RadixKey(array("q", tokens))
        result = tree.insert_host(tree.root_node.id, key, host, hashes)
        assert not result.host_insert_dropped
        cache.cache_controller.mem_pool_host.free(host[: result.prefix_len])
        server.check()
    records = [record for record in cache.shadow_tree.tree.walk() if record.parent is not None]
    assert sorted(record.depth for record in records) == [15, 25, 30]
    for record in records:
        assert copies_of(record).has_kv(Tier.HOST) and not copies_of(record).has_kv(Tier.DEVICE)
