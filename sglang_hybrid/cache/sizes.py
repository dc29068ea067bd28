"""Costs of the served model: FLOPs from its config, bytes from the pools that were allocated."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang_hybrid.cache.memory.shared import shared_memory
from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.serving.ranks import of_all_stages

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

logger = logging.getLogger(__name__)

EVERY_TOKEN_ALIKE = CostModel(
    linear=1, quadratic=0, windows=(), kv_bytes_per_token=1, state_bytes=0
)


def cost_of_model(hf_config: Any) -> CostModel | None:
    """FLOPs of a transformers config; None, and one warning, if it cannot be read."""
    try:
        cost = CostModel.from_config(hf_config.to_dict())
    except ValueError as error:
        logger.warning(
            "sglang_hybrid: %s; eviction counts every token of the model as the same work.", error
        )
        return None
    if cost.assumed:
        logger.warning("sglang_hybrid: the cost of this model is a guess: %s.", cost.assumed)
    return cost


def measured_cost(cost: CostModel | None, params: CacheInitParams) -> CostModel:
    """`cost` with the bytes of one KV token and one state of this rank's pools. Of a pipeline's
    stages, which have layers of their own and must decide alike, all count.
    """
    cost = cost or EVERY_TOKEN_ALIKE
    allocator = params.token_to_kv_pool_allocator
    memory = shared_memory(allocator)
    if memory is not None:
        return cost.with_sizes(
            kv_bytes_per_token=memory.token_bytes, state_bytes=memory.state_bytes
        )
    kv_bytes = 0
    if allocator is not None:
        pool, size = allocator.get_kvcache(), allocator.size
        if hasattr(pool, "swa_kv_pool"):  # a prefix holds one window there, and all its tokens here
            pool, size = pool.full_kv_pool, allocator.size_full
        kv_bytes = _total(pool.get_kv_size_bytes()) // max(1, int(size))
    state_bytes = 0
    pool = getattr(params.req_to_token_pool, "mamba_pool", None)
    if pool is not None:  # tensors are [layers, slots, ...]
        tensors = [*pool.mamba_cache.conv, pool.mamba_cache.temporal]
        state_bytes = sum(tensor.nbytes // tensor.shape[1] for tensor in tensors)
        for beside in pool._slot_siblings:  # what a model keeps per slot: tensors are [slots, ...]
            rows = [entry[1] for entry in beside.iter_transfer_state_entries()]
            state_bytes += sum(tensor.nbytes // tensor.shape[0] for tensor in rows)
    stages = of_all_stages((kv_bytes, state_bytes), params)
    kv_bytes, state_bytes = map(sum, zip(*stages, strict=True))
    return cost.with_sizes(
        kv_bytes_per_token=kv_bytes or cost.kv_bytes_per_token or 1,
        state_bytes=state_bytes or cost.state_bytes,
    )


def _total(sizes: int | tuple[int, ...]) -> int:
    return int(sum(sizes) if isinstance(sizes, tuple) else sizes)  # numpy integers otherwise
