"""The tiers below a server's device, for the tuner, which replays requests in the same tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.hicache_storage import PoolName

from sglang_hybrid.core.costs.cost import UNBOUNDED
from sglang_hybrid.core.server_settings import ServedTiers, Split
from sglang_hybrid.storage.codecs.in_use import host_codecs

if TYPE_CHECKING:
    from sglang_hybrid.cache.radix_cache import HybridRadixCache
    from sglang_hybrid.storage.store import Store


def served_tiers(cache: HybridRadixCache) -> ServedTiers | None:
    """The tiers of `cache` now; None where it has none, or no states."""
    pools = cache.host_pool_group
    if cache.ways is None or pools is None or not cache.is_mamba_enabled:
        return None
    kv, states = pools.get_pool(PoolName.KV), pools.get_pool(PoolName.MAMBA)
    store = disk_of(cache)
    disk = 0
    if store is not None and store.in_use:
        # Objects are as large as the host's copies, which a codec makes smaller.
        disk = store.budget * cache.cost.kv_bytes_per_token // int(kv.get_size_per_token())
        disk = disk or UNBOUNDED
    return ServedTiers(
        Split(int(kv.size), int(states.size)),
        cache.speeds.speeds,
        disk,
        at_once=bool(cache.copies_at_once),
        write_back=bool(cache.is_write_back),
        least_uses=1 if cache.is_write_back else int(cache.write_through_threshold),
        watermark=cache.options.hybrid_offload_watermark,
        least_read=int(cache.prefetch_threshold),
        exact=host_codecs() is None,
    )


def disk_of(cache: object) -> Store | None:
    """The store of the disk tier, if there is one by now."""
    backend = getattr(getattr(cache, "cache_controller", None), "storage_backend", None)
    store: Store | None = getattr(backend, "store", None)  # extensions/disk/file_backend.py
    return store
