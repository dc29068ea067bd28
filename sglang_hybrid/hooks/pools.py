"""Hooks on SGLang's pools: their sizes and their classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_hybrid.core.extensions import extension

_planned: dict[int, Any] = {}
"""The one memory of a configurator between its two hooks, by the configurator's id: SGLang's class
has slots, and takes neither another attribute nor a weak reference."""


def plan_one_memory(derive: Callable[..., Any], configurator: Any, **config: Any) -> Any:
    """The sizes of pools, as they are reported where KV and states share one memory."""
    from sglang.srt.runtime_context import get_memory

    sizes = derive(configurator, **config)
    if get_memory().radix_cache_backend != "hybrid":
        return sizes
    from sglang_hybrid.serving.devices import serves_on_cpu

    if not serves_on_cpu():
        _check_asked_on_a_gpu(configurator)
        return sizes
    memory = extension("cpu.one_memory.pools").plan(configurator, sizes)
    if memory is None:
        return sizes
    _planned[id(configurator)] = memory
    return memory.reported


def _check_asked_on_a_gpu(configurator: Any) -> None:
    """Raises `StartupError` if one memory was asked for and there are two pools."""
    from sglang.srt.runtime_context import get_memory

    from sglang_hybrid.serving.config import HybridConfig
    from sglang_hybrid.serving.flag_values import Memory
    from sglang_hybrid.serving.startup import StartupError

    if HybridConfig.from_environment().hybrid_memory is not Memory.ONE:
        return
    if configurator.is_draft_worker or get_memory().enable_unified_memory:
        return
    has_states = configurator.mambaish_config is not None
    why = "there is no prefix cache" if has_states else "the model has no recurrent states"
    raise StartupError(f"--hybrid-memory one cannot be: {why}; use --hybrid-memory split.")


def build_in_one_memory(build: Callable[..., Any], configurator: Any, **named: Any) -> Any:
    """Both pools as large as the whole memory, with allocators that share its bytes."""
    memory = _planned.pop(id(configurator), None)
    if memory is None:
        return build(configurator, **named)
    with extension("cpu.one_memory.pools").as_large_as_the_budget(memory):
        pools = build(configurator, **{**named, "sizes": memory.sizes})
    return memory.share(pools)


def set_nothing_aside(begin: Callable[..., None], allocator: Any, requests: int) -> None:
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
    """As `smaller_kv`, for latent attention (MLA): what builds the pool, since the codec is known
    only then.
    """

    def build(*args: Any, **kwargs: Any) -> Any:
        return smaller_kv(pool)(*args, **kwargs)

    return build


def smaller_states(pool: type) -> Callable[..., Any]:
    """As `smaller_latents`, for states. Windows without values (lightning attention has no
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
