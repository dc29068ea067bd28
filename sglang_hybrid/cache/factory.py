"""`--radix-cache-backend hybrid`: what SGLang calls to have our cache built."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.registry import (
    TreeCacheBuildContext,
    create_unified_radix_cache,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_hybrid.cache.page_hashes import compile_hashes
from sglang_hybrid.cache.radix_cache import HybridRadixCache
from sglang_hybrid.cache.state_slots.slots import count_state_slots
from sglang_hybrid.cache.state_slots.spill_choice import states_spill
from sglang_hybrid.checkpoints.message_boundaries import learn_message_boundaries
from sglang_hybrid.checkpoints.scans import why_split
from sglang_hybrid.checkpoints.support import (
    WITHOUT_PAGES,
    receives_states,
    why_no_full_hits,
    why_unplanned,
)
from sglang_hybrid.explain.decision_log import grid
from sglang_hybrid.serving.advice import ServerSetup, advise, page_warnings
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.device_streams import host_is_device
from sglang_hybrid.serving.flag_values import FullHit
from sglang_hybrid.serving.ranks import of_all_stages
from sglang_hybrid.storage.codecs import in_use

if TYPE_CHECKING:
    from sglang_hybrid.storage.codecs.coded_rows import CodecPlan

logger = logging.getLogger(__name__)


def build_cache(context: TreeCacheBuildContext) -> UnifiedRadixCache:
    """The cache of a scheduler whose pools are there. context: what SGLang has for it."""
    from sglang.srt.runtime_context import get_schedule

    from sglang_hybrid.cache.sizes import cost_of_model

    options = HybridConfig.from_environment()
    in_use.set_codecs(*_codecs(options, context))
    cost = cost_of_model(context.model_config.hf_config)

    unplanned = why_unplanned(context.server_args) or ""
    judicious = options.is_judicious
    message_boundaries = (
        learn_message_boundaries(context.tp_worker) if judicious and not unplanned else None
    )
    runner = context.tp_worker.model_runner
    split = why_split(runner) if context.is_hybrid_ssm else None
    split = next(filter(None, of_all_stages(split, context.params)), None)
    if split and judicious and not unplanned and _rank() == 0:
        logger.info("sglang_hybrid: prefills are split where they leave a state, since %s.", split)
    if context.is_hybrid_ssm and judicious and not (split or unplanned) and runner.device == "cuda":
        from sglang_hybrid.checkpoints.compile_kernels import compile_kernels

        compile_kernels(runner, tell=_rank() == 0)
    compile_hashes(context.server_args)

    full_hits, without_full_hits = options.hybrid_full_hit is FullHit.ON, None
    if full_hits:
        prefills_are_split = "prefills are split" if split else None
        windows = "sliding windows" if context.is_hybrid_swa else None
        of_flags = why_no_full_hits(context.server_args, context.params)
        without_full_hits = prefills_are_split or unplanned or windows or of_flags

    def build(params: CacheInitParams) -> HybridRadixCache:
        tiers = bool(context.server_args.enable_hierarchical_cache)
        return cache_class(tiers=tiers)(
            params,
            options,
            cost,
            message_boundaries,
            one_pass=split is None,
            unplanned=unplanned,
            full_hits=full_hits and not without_full_hits,
            states_arrive=receives_states(context.server_args),
            spills=states_spill(context.server_args),
            rank=_rank(),
            priority_sign=_priority_sign(context.server_args),
        )

    cache: HybridRadixCache = create_unified_radix_cache(context, cache_class=build)
    overlaps = not get_schedule().disable_overlap_schedule
    cache.slots.steps_ahead = int(overlaps)
    if (overlaps or context.params.pp_size > 1) and not host_is_device():
        cache.forward_stream = runner.forward_stream
    if not context.disable_radix_cache:
        setup = _server_setup(context, cache)
        cache.report.advice = advise(setup)
        if without_full_hits:
            cache.report.advice.append(f"--hybrid-full-hit does nothing: {without_full_hits}.")
        receives = _rank() is not None and cache.is_mamba_enabled and context.params.pp_size == 1
        if receives and setup.divided:
            from sglang_hybrid.cache.tuning import Tuning

            cache.tuning = cache.tuning or Tuning(cache, cache.parts)
            cache.tuning.watch_splits(setup, None if _rank() else context.server_args)
    if cache.page is not None:
        server_args = context.server_args
        cache.report.advice += page_warnings(server_args.api_key, server_args.admin_api_key)
    for line in cache.report.advice if _rank() == 0 else ():
        logger.warning("sglang_hybrid: %s", line)
    return cache


def cache_class(*, tiers: bool) -> type[HybridRadixCache]:
    """The class of a cache with memory below the device, or without."""
    if not tiers:
        return HybridRadixCache
    from sglang_hybrid.cache.host_tier import HostTierCache

    return HostTierCache


def _codecs(
    options: HybridConfig, context: TreeCacheBuildContext
) -> tuple[CodecPlan | None, CodecPlan | None]:
    """Codecs of copies below the device, and of entries kept coded on the device; None: exact."""
    if not (options.hybrid_tier_codec.may_change or options.hybrid_device_codec.may_change):
        return None, None
    from sglang_hybrid.cache.tiers.codec_choice import choose_codecs, choose_device_codecs

    return choose_codecs(options, context), choose_device_codecs(options, context)


def _server_setup(context: TreeCacheBuildContext, cache: HybridRadixCache) -> ServerSetup:
    """The settings that this rank serves with, for advice."""
    from sglang.srt.mem_cache.allocation_sizing import get_mamba_tracking_slots
    from sglang.srt.runtime_context import (
        attention_backends,
        get_exec,
        get_parallel,
        get_schedule,
    )

    runner: Any = context.tp_worker.model_runner
    schedule, mamba = get_schedule(), get_exec().mamba
    asked, shards = schedule.max_running_requests, get_parallel().attn_dp_size
    return ServerSetup(
        slots=(count_state_slots() or 0) if cache.is_mamba_enabled else 0,
        held=1
        + get_mamba_tracking_slots(
            extra_buffer=mamba.enable_mamba_extra_buffer,
            overlap=not schedule.disable_overlap_schedule,
            lazy=mamba.enable_mamba_extra_buffer_lazy,
        ),
        counted=runner.kv_cache_configurator._calculate_mamba_ratio(),
        running=runner.max_running_requests,
        asked=asked and max(1, asked // shards),
        kv_tokens=cache.token_to_kv_pool_allocator.size,
        state_bytes=cache.cost.state_bytes,
        kv_bytes=max(1, cache.cost.kv_bytes_per_token),
        kv_costs=cache.cost.kv_bytes_per_token > 1,
        one_memory=cache.account is not None,
        context=context.model_config.context_len,
        page_size=cache.page_size,
        pages_needed=not set(attention_backends()) <= set(WITHOUT_PAGES),
        planned=cache.plans_checkpoints,
        unplanned=cache.unplanned,
        grid=grid(cache) if cache.is_mamba_enabled else 1,
        all_admitted=not cache.options.is_judicious,
        no_buffer=not mamba.enable_mamba_extra_buffer,
        no_buffer_asked=context.server_args.mamba_radix_cache_strategy == "no_buffer",
        sent_by=_sent_by(context.server_args),
        tuner_workers=cache.options.hybrid_tuner_workers,
        pinned=cache.options.pinning_flag,
        shards=shards,
        spills=cache.spilled is not None,
    )


def _sent_by(server_args: Any) -> str:
    """The method that sends prompts to ranks that do not have their prefix; "" if none does."""
    if server_args.dp_size == 1:
        return ""
    from sglang_hybrid.serving.data_parallel import ignores_prefixes

    return ignores_prefixes(server_args)


def _priority_sign(server_args: Any) -> int | None:
    """SGLang's `SchedulePolicy.priority_sign`; None where priorities are off."""
    if not server_args.enable_priority_scheduling:
        return None
    return 1 if server_args.schedule_low_priority_values_first else -1


def _rank() -> int | None:
    """This cache's number among those with requests of their own, None if another rank receives
    its requests (scheduler.py, ingest_requests).
    """
    from sglang.srt.runtime_context import get_parallel

    here = get_parallel()
    receives = here.pp_rank == 0 and here.attn_tp_rank == 0 and here.attn_cp_rank == 0
    return (here.attn_dp_rank or here.dp_rank or 0) if receives else None
