"""Divides the host's room between KV and states, by the number of checkpoints, and checks that the
machine has so much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.pool_host.base import host_memory_budget_bytes
from sglang.srt.runtime_context import get_memory

from sglang_hybrid.cache.memory.shared import shared_memory
from sglang_hybrid.core.server_settings import Split
from sglang_hybrid.serving.startup import StartupError

if TYPE_CHECKING:
    from sglang_hybrid.cache.radix_cache import HybridRadixCache
    from sglang_hybrid.core.costs.cost import CostModel


FEWEST_STATES = 8
"""State slots that even a small host has, as far as the device has so many."""


def share_host_room(cache: HybridRadixCache, cost: CostModel) -> None:
    """Tell SGLang what its device pools count for when it sizes those of the host.

    By itself it makes both as large as their device pools times --hicache-ratio, or divides
    --hicache-size as their bytes are divided: with pools that share one memory both would count
    for all of it, and where states are large most of the host would hold states. Here the host
    holds what `CostModel.states_to_kv` says.

    Raises `StartupError` for a model without KV, beside which SGLang keeps states; and if the
    machine has less memory than --hicache-ratio asks for (--hicache-size was checked before).
    """
    allocator, pool = cache.token_to_kv_pool_allocator, cache.req_to_token_pool.mamba_pool
    kv_pool = allocator.get_kvcache()
    kv_pool = getattr(kv_pool, "full_kv_pool", kv_pool)
    if not kv_pool.layer_num:
        raise StartupError(
            "--enable-hierarchical-cache keeps states beside KV, and this model has no KV; leave "
            "the flag out, and raise --max-mamba-cache-size to keep more states."
        )
    if not cost.kv_bytes_per_token or not cost.state_bytes:
        return
    memory_of_both = shared_memory(allocator)
    if memory_of_both is not None:
        budget = memory_of_both.account.budget
    else:
        budget = allocator.size * cost.kv_bytes_per_token + pool.size * cost.state_bytes
    share = Split.of(budget, cost)
    slots = max(share.slots, min(FEWEST_STATES, int(pool.size)))
    left = max(0, budget - slots * cost.state_bytes) // cost.kv_bytes_per_token
    tokens = max(cache.page_size, left - left % cache.page_size)
    kv_pool.host_capacity_tokens = tokens
    kv_pool.host_capacity_bytes = tokens * cost.kv_bytes_per_token
    pool.host_capacity_tokens = slots
    pool.host_capacity_bytes = pool.host_capacity_tokens * cost.state_bytes
    memory = get_memory()  # what is in force, also without either flag
    exact = not cache.options.smaller_copies
    if exact and memory.hicache_ratio and not memory.hicache_size:
        ratio = memory.hicache_ratio
        asked = ratio * (kv_pool.host_capacity_bytes + pool.host_capacity_bytes)
        asked /= cache.pp_size  # `cost` counts the layers of all stages
        from sglang_hybrid.serving.preflight import check_host_room

        check_host_room(f"--hicache-ratio {ratio:g}", asked, host_memory_budget_bytes())
