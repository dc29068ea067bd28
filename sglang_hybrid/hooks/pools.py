"""Hooks on SGLang's pools: their allocators and their classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def reserve_no_states(begin: Callable[..., None], allocator: Any, requests: int) -> None:
    """SGLang's unified pool sets no states aside for requests that wait: it would take bytes from
    the KV, and move it.
    """
    from sglang.srt.runtime_context import get_memory

    ours = get_memory().radix_cache_backend == "hybrid"
    begin(allocator, 0 if ours else requests)


def move_behind_copies(gate: Callable[..., None], allocator: Any, blocked: Any) -> None:
    """Rows of SGLang's unified pool move while copies to and from the host are under way, behind
    them: the stream that moves rows waits for the last copy of each direction
    (unified_sub_pool.py, _wait_hicache_transfers). With SGLang's gate nothing moves until the
    scheduler has heard of the copies, and an eviction for one kind that takes the other kind's
    rows would take all of them.
    """
    from sglang.srt.runtime_context import get_memory

    if get_memory().radix_cache_backend != "hybrid":
        gate(allocator, blocked)


def keep_freed_slots(allocator: type) -> type:
    """Freed KV slots wait in a list until an allocation runs short."""
    from sglang_hybrid.cache.memory.freed_slots import with_freed_slots

    return with_freed_slots(allocator)


def smaller_kv(pool: type, *_: Any) -> type:
    """The class of KV's host pool: ours where copies below the device are to be smaller."""
    from sglang_hybrid.storage.codecs.coded_pools import coded_kv_pool

    return coded_kv_pool(pool)


def smaller_latents(pool: type) -> Callable[..., Any]:
    """The same as `smaller_kv` for latent attention (MLA), as a function that builds the pool: the
    codec is known only then.
    """

    def build(*args: Any, **kwargs: Any) -> Any:
        return smaller_kv(pool)(*args, **kwargs)

    return build


def smaller_states(pool: type) -> Callable[..., Any]:
    """The same as `smaller_latents` for states. Windows without values (lightning attention has no
    convolution) are left out: SGLang takes their rows for strided, stages them, takes the staged
    ones for strided, and so on until the server ends (pool_host/mamba.py:596).
    """

    def build(*args: Any, **kwargs: Any) -> Any:
        from sglang_hybrid.storage.codecs.coded_pools import coded_state_pool

        built = coded_state_pool(pool)(*args, **kwargs)
        if not any(built.conv_state_elem_sizes):
            built.conv_state_shapes, built.conv_state_elem_sizes = [], []
            built.conv_buffer = []
        return built

    return build
