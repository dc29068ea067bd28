"""SGLang's pools in one memory: built as large as the whole budget each, on reserved pages.

What the two pools of a split would have taken together is the budget (hooks/pools.py). Line
references are to sglang 0.5.23, mem_cache/kv_cache_configurator.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_hybrid.core.memory.account import Account, MemoryKind
from sglang_hybrid.extensions.cpu.one_memory.allocators import (
    OneMemoryPages,
    OneMemorySlots,
    OneMemoryTokens,
)
from sglang_hybrid.extensions.cpu.one_memory.granules import GranulePool
from sglang_hybrid.extensions.cpu.one_memory.pages import (
    Planes,
    Reserved,
    reserve,
    rows_of_whole_pages,
)
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import Eviction, Memory
from sglang_hybrid.serving.startup import StartupError

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

logger = logging.getLogger(__name__)

LEAST_SHARE = 16
"""A request and the states it needs must fit into the memory with this many tokens at least."""


def why_two_pools(configurator: KVCacheConfigurator) -> str | None:
    """The reason why KV and states of this model runner cannot share a memory; None if they can.
    `server_args` has what was given, and not what SGLang resolved.
    """
    from sglang.srt.runtime_context import get_exec

    from sglang_hybrid.checkpoints.support import plans_checkpoints, why_unplanned

    flags, options = configurator.server_args, HybridConfig.from_environment()
    model, text = configurator.mambaish_config, configurator.model_config.hf_text_config
    features = get_exec()
    reasons = {
        "the model has no recurrent states": model is None,
        f"checkpoints are not planned ({why_unplanned(flags) or 'admission or cache'})": not (
            plans_checkpoints(flags)
        ),
        "drafts of speculative decoding have states of their own": (
            flags.speculative_algorithm is not None
        ),
        "each stage of a pipeline has layers, and so sizes, of its own": flags.pp_size > 1,
        "with disaggregated prefill other servers reach the pools by their addresses": (
            flags.disaggregation_mode != "null"
        ),
        "--hybrid-eviction sglang-lru is SGLang's own order, which knows two pools": (
            options.policy is Eviction.SGLANG_LRU
        ),
        "the model has no KV": model is not None and not model.full_attention_layer_ids,
        "the model's KV has a pool for windows, or an index beside it": (
            configurator.is_hybrid_swa
            or any(getattr(text, name, None) for name in ("index_topk", "indexer_n_heads"))
        ),
        "--mamba-full-memory-ratio, which may be left out, divides the memory": (
            flags.mamba_full_memory_ratio is not None
        ),
        "--enable-memory-saver moves pools itself": features.features.enable_memory_saver,
        "states are also kept in another format": features.mamba.enable_int8_mamba_checkpoint,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class OneMemory:
    """One memory for the pools of a model runner, before and after they are built.

    Args:
        configurator: SGLang's, which knows layers and sizes.
        sizes: its sizes of two pools.
        slots: state slots of the two pools.
    """

    def __init__(self, configurator: KVCacheConfigurator, sizes: Any, slots: int) -> None:
        from sglang.srt.runtime_context import get_parallel

        model, parallel = configurator.model_config, get_parallel()
        if configurator.use_mla_backend:  # keys and values of all heads in one row
            rows = [model.kv_lora_rank + model.qk_rope_head_dim]
        else:
            heads = model.get_num_kv_heads(parallel.attn_tp_size, parallel.attn_dcp_size)
            rows = [heads * model.head_dim] * 2
        rows = [values * configurator.kv_cache_dtype.itemsize for values in rows]
        layer_info = configurator.layer_info
        layers = [
            layer
            for layer in configurator.mambaish_config.full_attention_layer_ids
            if layer_info.start_layer <= layer < layer_info.end_layer
        ]
        self.page = int(configurator.pool_page_size)
        self.token_bytes = len(layers) * sum(rows)
        self.state_layers = len(configurator._get_mamba_layer_ids_for_req_pool())
        state = configurator.mambaish_config.mamba2_cache_params.mamba_cache_per_req
        tokens = sizes.max_total_num_tokens
        self.budget = tokens * self.token_bytes + slots * state
        self.granule = math.lcm(self.page, *map(rows_of_whole_pages, rows))  # tokens
        self.granules = self.budget // (self.granule * self.token_bytes)
        self.slots = self.budget // state
        needed = 1 + slots_of_a_request(configurator)
        self.longest = (self.budget - needed * state) // self.token_bytes - self.granule
        self.longest -= self.longest % self.page
        if self.longest < max(LEAST_SHARE, self.page):
            raise StartupError(
                f"one memory of {self.budget:,} bytes ({tokens:,} KV tokens and {slots:,} state "
                f"slots) does not hold one request: {needed} states of {state:,} bytes and its KV; "
                "raise --max-total-tokens or --max-mamba-cache-size."
            )
        try:
            reserve(2 * self.budget).close()
        except OSError as error:
            raise StartupError(
                f"the system reserves no addresses for two times {self.budget:,} bytes "
                f"({error.strerror}); use --hybrid-memory split."
            ) from None
        # The first granule holds the row that padding is written to.
        kv = (self.granules + 1) * self.granule - self.page
        self.sizes = msgspec.structs.replace(sizes, max_total_num_tokens=kv)
        self.reported = msgspec.structs.replace(sizes, max_total_num_tokens=int(self.longest))
        self.reserved = Reserved(states=(self.state_layers, self.slots + 1))

    def share(self, pools: Any) -> Any:
        """Replace the allocators of `pools` by those of one memory."""
        from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

        kv_pool, states = pools.token_to_kv_pool, pools.req_to_token_pool.mamba_pool
        if not isinstance(kv_pool, HybridLinearKVPool):
            raise StartupError(
                f"--hybrid-memory one cannot share a pool of class {type(kv_pool).__name__}; use "
                "--hybrid-memory split."
            )
        full = kv_pool.full_kv_pool
        buffers = full.kv_buffer if kv_pool.use_mla else [*full.k_buffer, *full.v_buffer]
        kv = Planes([self.reserved.plane(buffer, 0) for buffer in buffers], self.granule)
        tensors = [*states.mamba_cache.conv, states.mamba_cache.temporal]
        slots = Planes([self.reserved.plane(tensor, 1) for tensor in tensors if tensor.numel()], 1)
        state_bytes = sum(tensor[:, 0].nbytes for tensor in tensors)
        on_pages = sum(plane.row_bytes for plane in slots.planes)
        account = Account(self.budget)
        kv_ids = GranulePool(
            account,
            MemoryKind.KV,
            granules=self.granules,
            per_granule=self.granule // self.page,
            id_bytes=self.page * sum(plane.row_bytes for plane in kv.planes),
            give_back=kv.give_back,
        )
        slot_ids = GranulePool(
            account,
            MemoryKind.STATES,
            granules=self.slots,
            per_granule=1,
            id_bytes=state_bytes,
            padding=on_pages - state_bytes,
            give_back=slots.give_back,
        )
        before = pools.token_to_kv_pool_allocator
        allocator: OneMemoryTokens | OneMemoryPages
        if self.page == 1:
            allocator = OneMemoryTokens(kv_ids, slot_ids, before.dtype, kv_pool)
        else:
            allocator = OneMemoryPages(kv_ids, slot_ids, self.page, before.dtype, kv_pool)
        pools.req_to_token_pool.mamba_allocator = OneMemorySlots(slot_ids)
        logger.info(
            "sglang_hybrid: KV and states share one memory of %s bytes: at most %s KV tokens of %s "
            "bytes, in granules of %d, or %s states of %s bytes.",
            f"{self.budget:,}",
            f"{kv_ids.ids * self.page:,}",
            f"{self.token_bytes:,}",
            self.granule,
            f"{slot_ids.ids:,}",
            f"{on_pages:,}",
        )
        return msgspec.structs.replace(pools, token_to_kv_pool_allocator=allocator)


def slots_of_a_request(configurator: KVCacheConfigurator) -> int:
    """State slots that a running request holds."""
    from sglang.srt.mem_cache.allocation_sizing import get_mamba_tracking_slots
    from sglang.srt.runtime_context import get_exec, get_schedule

    mamba = get_exec().mamba
    tracking: int = get_mamba_tracking_slots(
        extra_buffer=mamba.enable_mamba_extra_buffer,
        overlap=not get_schedule().disable_overlap_schedule,
        lazy=mamba.enable_mamba_extra_buffer_lazy,
    )
    return 1 + tracking


def plan(configurator: KVCacheConfigurator, sizes: Any) -> OneMemory | None:
    """One memory for what is about to be built; None: two pools. Raises `StartupError` if one
    memory was asked for and cannot be; under `auto` the reason is a line in the log.
    """
    from sglang.srt.runtime_context import get_memory, get_parallel, get_schedule

    asked = HybridConfig.from_environment().hybrid_memory
    if asked is Memory.SPLIT or configurator.is_draft_worker:
        return None
    if get_memory().enable_unified_memory:
        return None  # one memory, of SGLang's
    why = why_two_pools(configurator)
    if why is None:
        try:
            return OneMemory(configurator, sizes, get_schedule().max_mamba_cache_size)
        except StartupError as error:
            if asked is Memory.ONE:
                raise
            why = str(error).rstrip(".")
    if asked is Memory.ONE:
        raise StartupError(f"--hybrid-memory one cannot be: {why}; use --hybrid-memory split.")
    if configurator.mambaish_config is not None and get_parallel().attn_tp_rank == 0:
        logger.info("sglang_hybrid: KV and states have a pool each: %s.", why)
    return None


@contextmanager
def as_large_as_the_budget(memory: OneMemory | None) -> Iterator[None]:
    """Within it, SGLang builds pools of `memory`'s sizes on reserved pages."""
    if memory is None:
        yield
        return
    from sglang.srt.runtime_context import get_context, get_schedule

    slots = get_schedule().max_mamba_cache_size
    get_context().override("sglang_hybrid.one_memory", max_mamba_cache_size=memory.slots)
    try:
        with memory.reserved:
            yield
    finally:
        get_context().override("sglang_hybrid.one_memory", max_mamba_cache_size=slots)
