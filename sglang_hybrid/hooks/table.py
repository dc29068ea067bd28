"""All hooks: a function of SGLang, when ours runs, and ours, whose docstring says what it does.

`scripts/port.py RELEASE --hook-hashes` prints `sglang-RELEASE.sha256`, which is beside this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sglang_hybrid.hooks import models, pools, scheduling, serving, states
from sglang_hybrid.hooks.hook import Hook, HookKind

_BEFORE, _AFTER, _AROUND, _REPLACE = HookKind


def _in(module: str, *rows: tuple[str, HookKind, Callable[..., Any]]) -> Iterator[Hook]:
    return (Hook(f"{module}:{name}", kind, ours) for name, kind, ours in rows)


HOOKS: tuple[Hook, ...] = (
    # The scheduler: who runs next, and what it hears and tells.
    *_in(
        "sglang.srt.managers.scheduler",
        ("Scheduler.get_prefill_adder_class", _AFTER, scheduling.bring_prefill_adder),
        ("Scheduler._process_hicache_events", _AFTER, scheduling.show_waiting_queue),
        ("Scheduler.init_request_dispatcher", _AFTER, scheduling.handle_our_requests),
        ("Scheduler._poll_timeout_aborts", _AFTER, scheduling.add_step_messages),
        ("Scheduler.run_batch", _AROUND, scheduling.time_prefill),
        ("Scheduler._create_generation_req", _AFTER, scheduling.take_cache_fields),
        ("Scheduler._try_apply_padded_mm_input_ids", _BEFORE, scheduling.tell_images_apart),
    ),
    *_in(
        "sglang.srt.managers.schedule_policy",
        ("SchedulePolicy._compute_prefix_matches", _BEFORE, scheduling.rank_what_changed),
    ),
    *_in(
        "sglang.srt.managers.schedule_batch",
        ("Req.__init__", _AFTER, scheduling.name_tenant),
        ("Req._compute_max_prefix_len", _AFTER, scheduling.compute_hidden_states),
        (
            "ScheduleBatch.cumulate_penalty_output_tokens",
            _AROUND,
            scheduling.count_newest_token,
        ),
    ),
    *_in(
        "sglang.srt.sampling.penaltylib.orchestrator",
        ("BatchedPenalizerOrchestrator.__init__", _AFTER, scheduling.count_earlier_tokens),
    ),
    *_in(
        "sglang.srt.constrained.base_grammar_backend",
        ("BaseGrammarBackend.__init__", _AFTER, scheduling.bound_grammars),
    ),
    *_in(
        "sglang.srt.constrained.xgrammar_backend",
        ("XGrammarGrammarBackend.__init__", _AFTER, scheduling.bound_compiler),
    ),
    *_in(
        "sglang.srt.session.session_controller",
        ("SessionController.close", _BEFORE, scheduling.tell_of_closed_session),
    ),
    *_in(
        "sglang.srt.managers.scheduler_components.profiler_manager",
        ("SchedulerProfilerManager._profile_batch_predicate", _AROUND, scheduling.outlive_profiler),
    ),
    *_in(
        "sglang.srt.managers.data_parallel_controller",
        ("DataParallelController.dispatching_with_trace", _BEFORE, scheduling.send_to_prefix),
    ),
    # Recurrent states: slots of a request, and which states a forward leaves.
    *_in(
        "sglang.srt.mem_cache.kv_cache_configurator",
        ("KVCacheConfigurator._calculate_mamba_ratio", _AROUND, states.count_slots),
    ),
    *_in(
        "sglang.srt.arg_groups.mamba_hook",
        ("validate_mamba_no_buffer", _BEFORE, states.accept_one_slot),
    ),
    *_in(
        "sglang.srt.managers.schedule_batch",
        ("ScheduleBatch.prepare_for_extend", _AFTER, states.plan_forward),
        (
            "ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend",
            _AROUND,
            states.track_nothing,
        ),
    ),
    *_in(
        "sglang.srt.runtime_context",
        ("mamba_track_grid", _AROUND, states.track_at_our_grid),
    ),
    *_in(
        "sglang.srt.model_executor.forward_batch_info",
        ("ForwardBatch.init_new", _AFTER, states.carry_tracks),
        ("ForwardBatch.init_new", _AFTER, states.shift_positions),
    ),
    *_in(
        "sglang.srt.layers.logits_processor",
        ("LogitsProcessor.forward", _BEFORE, states.leave_last_hidden),
    ),
    *_in(
        "sglang.srt.model_executor.model_runner",
        ("ModelRunner._forward_raw", _AROUND, states.answer_from_last_hidden),
    ),
    *_in(
        "sglang.srt.models.qwen4_exp",
        ("Qwen4ExpPLELayer._short_conv", _BEFORE, states.leave_ple_windows),
        ("_commit_ple_batch", _BEFORE, states.leave_ngram_contexts),
    ),
    *_in(
        "sglang.srt.layers.attention.linear.inkling_sconv_backend",
        (
            "InklingShortConvAttnBackend._refresh_extend_metadata",
            _AFTER,
            states.give_sconv_tracks,
        ),
    ),
    *_in(
        "sglang.srt.models.inkling_common.sconv",
        ("ShortConvolution._prepare_extend_sconv_cache", _BEFORE, states.leave_sconv_windows),
    ),
    *_in(
        "sglang.srt.models.inkling_common.attn",
        ("InklingAttention._fused_attn_prologue_extend", _BEFORE, states.leave_kv_windows),
    ),
    # Pools: their sizes and classes.
    *_in(
        "sglang.srt.mem_cache.allocator.token",
        ("TokenToKVPoolAllocator", _REPLACE, pools.keep_freed_slots),
    ),
    *_in(
        "sglang.srt.mem_cache.pool_host.mha",
        ("get_mha_host_pool_cls", _AFTER, pools.smaller_kv),
    ),
    *_in(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler",
        ("MambaPoolHost", _REPLACE, pools.smaller_states),
        ("MLATokenToKVPoolHost", _REPLACE, pools.smaller_latents),
    ),
    *_in(
        "sglang.srt.mem_cache.kv_cache_configurator",
        ("KVCacheConfigurator._derive_pool_sizes", _AROUND, pools.plan_one_memory),
        ("KVCacheConfigurator._init_pools", _AROUND, pools.build_in_one_memory),
    ),
    *_in(
        "sglang.srt.mem_cache.unified_memory_pool",
        ("UnifiedMambaSlotAllocator.alloc_group_begin", _AROUND, pools.set_nothing_aside),
    ),
    *_in(
        "sglang.srt.mem_cache.allocator.unified_mamba",
        (
            "UnifiedMambaTokenToKVPoolAllocator.set_host_transfer_move_gate",
            _AROUND,
            pools.move_behind_copies,
        ),
    ),
    # Models: configs, logits, updates of weights.
    *_in(
        "sglang.srt.configs.update_config",
        ("adjust_config_with_unaligned_cpu_tp", _AROUND, models.pad_only_heads),
    ),
    *_in(
        "sglang.srt.layers.linear",
        ("ColumnParallelBatchedLinear.__init__", _AROUND, models.take_the_served_type),
    ),
    *_in(
        "sglang.srt.layers.logits_processor",
        ("LogitsProcessor._compute_lm_head", _AROUND, models.multiply_by_lm_head),
    ),
    *_in(
        "sglang.srt.model_executor.model_runner_components.layer_setup",
        ("_resolve_pp_layer_range", _BEFORE, models.know_its_stage),
    ),
    *_in(
        "sglang.srt.model_executor.model_runner_components.weight_updater",
        ("_unsupported_derived_weight_cache_error", _AFTER, models.forget_old_weights),
    ),
    # Serving: requests, keys, and how a server ends.
    *_in(
        "sglang.srt.observability.req_time_stats",
        ("APIServerReqTimeStats.__getstate__", _AFTER, serving.send_arrival),
        ("DPControllerReqTimeStats.__getstate__", _AFTER, serving.send_arrival),
    ),
    *_in(
        "sglang.api.v1.api_types",
        ("decode_TokenIds", _AROUND, serving.take_token_ids),
    ),
    *_in(
        "sglang.srt.entrypoints.openai.serving_chat",
        ("OpenAIServingChat._render_and_encode_chat_template", _BEFORE, serving.render_anew),
        ("OpenAIServingChat._apply_jinja_template", _BEFORE, serving.leave_out_changing_lines),
        (
            "OpenAIServingChat._apply_conversation_template",
            _BEFORE,
            serving.leave_out_changing_lines,
        ),
        ("OpenAIServingChat.apply_reasoning_enabled", _AROUND, serving.accept_thinking),
    ),
    *_in(
        "sglang.srt.entrypoints.anthropic.serving",
        (
            "AnthropicServing._convert_to_chat_completion_request",
            _AROUND,
            serving.convert_messages,
        ),
    ),
    *_in(
        "sglang.srt.entrypoints.openai.serving_responses",
        ("OpenAIServingResponses._validate_model", _BEFORE, serving.take_default_model),
    ),
    *_in(
        "sglang.srt.entrypoints.http_server",
        ("kill_process_tree", _AROUND, serving.kill_process_tree),
        ("launch_server", _AROUND, serving.leave_nothing),
    ),
    *_in(
        "sglang.srt.sampling.watermarking.core",
        ("redact_watermark_secrets", _AFTER, serving.hide_keys),
        ("redact_watermark_command_line", _BEFORE, serving.hide_given_keys),
    ),
    *_in(
        "sglang.srt.utils.auth",
        ("_get_auth_level_from_app_and_scope", _BEFORE, serving.with_all_routes),
        ("app_has_admin_force_endpoints", _BEFORE, serving.with_all_routes),
        ("add_api_key_middleware", _AFTER, serving.take_x_api_key),
    ),
    *_in(
        "sglang.srt.managers.tokenizer_manager",
        ("TokenizerManager.sigterm_watchdog", _AROUND, serving.end_on_signal),
        ("TokenizerManager._init_req_state", _BEFORE, serving.refuse_used_ids),
        ("TokenizerManager.convert_to_span_attrs", _AFTER, serving.tell_span),
        ("TokenizerManager._send_one_request", _AROUND, serving.send_prompts),
        ("TokenizerManager._send_batch_request", _AROUND, serving.send_prompts),
        ("kill_process_tree", _AROUND, serving.kill_process_tree),
    ),
    *_in(
        "sglang.srt.managers.tokenizer_manager_score_mixin",
        (
            "TokenizerManagerScoreMixin._resolve_overrides_for_sequence",
            _BEFORE,
            serving.check_overrides,
        ),
    ),
    *_in(
        "sglang.srt.utils.request_logger",
        ("RequestLogger.log_received_request", _AROUND, serving.log_what_can_be),
    ),
    *_in(
        "sglang.srt.entrypoints.engine",
        ("kill_process_tree", _AROUND, serving.kill_process_tree),
        ("Engine._launch_subprocesses", _AFTER, serving.note_shared_memory),
    ),
    *_in(
        "sglang.srt.managers.io_struct",
        ("GenerateReqInput.regenerate_rid", _AROUND, serving.keep_owner),
    ),
    *_in(
        "sglang.srt.managers.load_snapshot",
        ("ShmLoadSnapshotWriter.__init__", _AROUND, serving.track_load_snapshots),
    ),
)
