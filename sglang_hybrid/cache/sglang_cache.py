"""What our files ask of SGLang's side of a cache: its tree and its pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import (
        EvictParams,
        InsertParams,
        InsertResult,
        TreeLock,
    )
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    from sglang_hybrid.cache.queue.clock import StepClock


class SglangCache(Protocol):
    """SGLang's `UnifiedRadixCache`, as far as it is used outside `radix_cache.py`."""

    disable: bool
    step_clock: StepClock
    is_mamba_enabled: bool
    pp_size: int
    components: Mapping[ComponentType, Any]
    tree_core: Any
    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any

    @property
    def page_size(self) -> int: ...

    def insert(self, params: InsertParams) -> InsertResult: ...

    def lock(
        self, node_id: int, skip_lock_components: Sequence[ComponentType] = ()
    ) -> TreeLock | None: ...

    def unlock(self, lock: TreeLock | None) -> None: ...

    def evict_for_alloc(self, params: EvictParams) -> Any: ...

    def full_evictable_size(self) -> int: ...

    def mamba_evictable_size(self) -> int: ...
