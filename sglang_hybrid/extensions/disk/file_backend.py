"""`--hicache-storage-backend file`: SGLang's third tier, on our store of objects.

SGLang's own `file` backend writes one unchecked file per page under a name that is the hash of the
tokens, model name and rank; a file of another type or layout, or half a page, becomes KV.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from sglang_hybrid.extensions.disk.folder import RankFolder, disk_folder
from sglang_hybrid.extensions.disk.object_file import MOST_OBJECTS, Bytes
from sglang_hybrid.extensions.disk.served_model import Unidentified, served_model
from sglang_hybrid.extensions.disk.shared_store import open_shared
from sglang_hybrid.extensions.disk.store_start import open_store
from sglang_hybrid.extensions.disk.tier_folder import FolderError
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import SHARED
from sglang_hybrid.storage import weights
from sglang_hybrid.storage.store import Store

logger = logging.getLogger(__name__)

FREE_SHARE = 0.05
"""Share of the file system that is left free."""


class FileBackend(HiCacheStorage):
    """KV pages and states of one rank on disk.

    Keys are SGLang's: hashes of a prompt's tokens up to the end of a page, which begin with the
    tenant's extra key and salt. Where the folder cannot be used the backend holds nothing, and the
    log says why; a server never ends for that.

    Our settings say where objects are kept (what SGLang's settings name if they say nothing, or
    mooncake://HOST:PORT for a store that several servers share), how much all ranks may use
    together (0: all but a share of the disk), and what a starting rank reads ahead.
    """

    def __init__(self, storage_config: HiCacheStorageConfig) -> None:
        # Each rank has a folder of its own, so each writes there what all of them have (MLA's KV).
        storage_config.is_mla_model = False
        self.config = storage_config
        self.registered_pools: dict[str, Any] = {}
        self.store: Store | None = None

    def on_host_pools_registered(self) -> None:
        """All pools are known now, and with them what an object of each looks like."""
        pools = {PoolName.KV: self.mem_pool_host, **self.registered_pools}
        if not torch.accelerator.is_available():
            for pool in pools.values():
                pool.pin_memory = False  # there is none; SGLang would ask for it page by page
        try:
            self.store = self._open(pools)
        except (FolderError, Unidentified, OSError, ValueError) as error:
            logger.warning("sglang_hybrid: the disk tier is off: %s.", error)
        except Exception:
            logger.exception("sglang_hybrid: the disk tier is off.")
        else:
            weights.watch(self.store)

    def _open(self, pools: dict[str, Any]) -> Store:
        config = self.config
        if config.dcp_size > 1:
            raise Unidentified("KV whose tokens ranks divide (--dcp-size) is not kept on disk")
        facts = {
            **served_model(),
            "pools": {
                str(name): _pool_facts(pool, config.pp_size) for name, pool in sorted(pools.items())
            },
            "ranks": [config.tp_size, config.pp_size, config.attn_cp_size, config.dcp_size],
        }
        options = HybridConfig.from_environment()
        named, extra = options.hybrid_disk_folder, config.extra_config or {}
        if named.startswith(SHARED):
            return open_shared(named, extra, facts, _part(config))
        top = disk_folder(named, extra)
        folder = RankFolder(top, facts, _rank(config))
        disk = os.statvfs(folder.path)
        ranks = _ranks(config)
        return open_store(
            folder,
            (options.hybrid_disk_mb << 20) // ranks,
            int(FREE_SHARE * disk.f_blocks * disk.f_frsize),
            options.hybrid_warm_start << 20,
            ranks,
        )

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> list[torch.Tensor | None]:
        if self.store is None:
            return [None] * len(keys)
        found = self.store.get(PoolName.KV, keys, [_bytes(page) for page in target_locations])
        return [
            page if there else None for page, there in zip(target_locations, found, strict=True)
        ]

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return self._put(PoolName.KV, keys, values)

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return self.batch_set([key], [value])

    def exists(self, key: str) -> bool:
        return self.holds(PoolName.KV, [key])[0]

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        return _leading(self.holds(PoolName.KV, keys))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Lengths of the prompt, in pages, of which KV and every other pool are on disk."""
        pages = _leading(self.holds(PoolName.KV, keys))
        hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
        restorable = list(range(1, pages + 1))
        for transfer in pool_transfers or ():
            there = self.holds(transfer.name, keys[:pages])
            if transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
                lengths = set(range(1, _leading(there) + 1))
            elif transfer.hit_policy is PoolHitPolicy.TRAILING_PAGES:
                lengths = _lengths_with_full_tail(there, len(transfer.keys or ()) or 1)
            else:  # SGLang's own file backend refuses these pools as well
                raise ValueError(f"The disk tier has no pools with hits by {transfer.hit_policy}.")
            if lengths:
                hits[transfer.name] = max(lengths)
            restorable = [length for length in restorable if length in lengths]
        return PoolTransferResult(max(restorable, default=0), hits, restorable)

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {transfer.name: self._get_pages(transfer) for transfer in transfers}

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {transfer.name: self._set_pages(transfer) for transfer in transfers}

    def clear(self) -> None:
        if self.store is not None:
            self.store.clear()

    def close(self) -> None:
        if self.store is not None:
            self.store.close()

    def _get_pages(self, transfer: PoolTransfer) -> list[bool]:
        pool, keys = self.registered_pools[transfer.name], transfer.keys or []
        places = _places(transfer, pool)
        if self.store is None or len(places) != len(keys):
            return [False] * len(keys)
        pages = [pool.get_dummy_flat_data_page() for _ in keys]
        found = self.store.get(transfer.name, keys, [_bytes(page) for page in pages])
        for place, page, there in zip(places, pages, found, strict=True):
            if there:
                pool.set_from_flat_data_page(place, page)
        return found

    def _set_pages(self, transfer: PoolTransfer) -> list[bool]:
        pool, keys = self.registered_pools[transfer.name], transfer.keys or []
        places = _places(transfer, pool)
        if len(places) != len(keys):
            return [False] * len(keys)
        pages = [pool.get_data_page(place, flat=True) for place in places]
        return [self._put(transfer.name, keys, pages)] * len(keys)

    def _put(self, kind: str, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> bool:
        """True if the pages were taken. SGLang logs each page that was not, so a disk that takes
        nothing takes all of them: the store has said why, once, and counts them.
        """
        if self.store is not None:
            for first in range(0, len(keys), MOST_OBJECTS):
                part = slice(first, first + MOST_OBJECTS)
                self.store.put(kind, keys[part], [_bytes(page) for page in pages[part]])
        return True

    def holds(self, kind: str, keys: Sequence[str]) -> list[bool]:
        """True if objects of this kind are on disk, by key; they count as used."""
        return [False] * len(keys) if self.store is None else self.store.contains(kind, keys)

    def knows(self, kind: str, keys: Sequence[str]) -> list[bool]:
        """The same as `holds`, without counting a use."""
        return [False] * len(keys) if self.store is None else self.store.knows(kind, keys)


def _rank(config: HiCacheStorageConfig) -> str:
    from sglang.srt.runtime_context import get_parallel

    return f"rank-{_part(config)}-{config.dp_rank or get_parallel().dp_rank or 0}"


def _part(config: HiCacheStorageConfig) -> str:
    """The part of the model that a rank has: the same in each data-parallel replica."""
    return f"{config.tp_rank}-{config.pp_rank}-{config.attn_cp_rank}"


def _ranks(config: HiCacheStorageConfig) -> int:
    """Ranks that share the budget."""
    from sglang.srt.runtime_context import get_parallel

    replicas: int = max(1, get_parallel().dp_size or 1)
    return int(config.tp_size * config.pp_size * max(1, config.attn_cp_size) * replicas)


_SHAPE = (
    *("layout", "page_size", "dtype", "storage_format_tag", "layer_num", "head_num", "head_dim"),
    *("kv_lora_rank", "qk_rope_head_dim"),
    *("temporal_dtype", "temporal_state_shape", "conv_state_shapes"),
)
_LAYERS = ("start_layer", "end_layer")
"""Layers of a stage, of several ones: one has all, and SGLang's unified pool names another end."""


def _pool_facts(pool: Any, stages: int) -> dict[str, Any]:
    """The layout of one page of a host pool."""
    page = pool.get_dummy_flat_data_page()
    names = (*_SHAPE, *_LAYERS) if stages > 1 else _SHAPE
    return {
        "class": type(pool).__name__,
        "page_bytes": page.numel() * page.element_size(),
        **{name: str(getattr(pool, name, None)) for name in names},
    }


def _places(transfer: PoolTransfer, pool: Any) -> list[int]:
    """First index of each page in the host pool; none if keys and indices do not fit together."""
    indices, size = transfer.host_indices, getattr(pool, "page_size", 1) or 1
    if indices is None or indices.numel() != len(transfer.keys or ()) * size:
        logger.error("sglang_hybrid: %s has other indices than keys.", transfer.name)
        return []
    places: list[int] = indices[::size].tolist()
    return places


def _bytes(page: torch.Tensor) -> Bytes:
    flat = page.contiguous().flatten().view(torch.uint8).numpy()
    return np.asarray(flat)


def _leading(there: Sequence[bool]) -> int:
    return next((number for number, one in enumerate(there) if not one), len(there))


def _lengths_with_full_tail(there: Sequence[bool], tail: int) -> set[int]:
    """Lengths whose last `tail` pages are all there (fewer where the prompt has fewer)."""
    found, run = set(), 0
    for length, one in enumerate(there, start=1):
        run = run + 1 if one else 0
        if run >= min(tail, length):
            found.add(length)
    return found
