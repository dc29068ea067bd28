"""The memory behind SGLang's allocator of KV, if KV and states share one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.allocator.unified_mamba import UnifiedMambaTokenToKVPoolAllocator

if TYPE_CHECKING:
    from sglang_hybrid.cache.memory.unified import UnifiedMemory


def shared_memory(allocator: Any) -> UnifiedMemory | None:
    """The memory behind SGLang's allocator of KV; None if KV has a pool of its own."""
    if not isinstance(allocator, UnifiedMambaTokenToKVPoolAllocator):
        return None
    from sglang_hybrid.cache.memory.unified import UnifiedMemory

    return UnifiedMemory(allocator)
