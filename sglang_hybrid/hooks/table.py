"""All hooks: a function of SGLang, when ours runs, ours, whose docstring says what it does, and
what it is needed for.

`scripts/port.py RELEASE --hook-hashes` prints `sglang-RELEASE.sha256`, which is beside this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sglang_hybrid.hooks import models, pools, scheduling, serving, states
from sglang_hybrid.hooks.hook import Hook, HookKind
from sglang_hybrid.hooks.needs import Need

_BEFORE, _AFTER, _AROUND, _REPLACE = HookKind


def _in(module: str, *rows: tuple[str, HookKind, Callable[..., Any], Need]) -> Iterator[Hook]:
    return (Hook(f"{module}:{name}", kind, ours, need) for name, kind, ours, need in rows)


HOOKS: tuple[Hook, ...] = (
    # The scheduler: who runs next, and what it hears and tells.
    *_in(
        "sglang.srt.managers.scheduler",
        ("Scheduler.get_prefill_adder_class", _AFTER, scheduling.provide_prefill_adder, Need.CACHE),
        ("Scheduler._process_hicache_events", _AFTER, scheduling.show_waiting_queue, Need.CACHE),
        ("Scheduler.init_request_dispatcher", _AFTER, scheduling.handle_our_requests, Need.CACHE),
        ("Scheduler._poll_timeout_aborts", _AFTER, scheduling.add_step_messages, Need.CACHE),
        ("Scheduler.run_batch", _AROUND, scheduling.time_prefill, Need.SPEEDS),
        ("Scheduler._create_generation_req", _AFTER, scheduling.take_cache_fields, Need.CACHE),
        (
            "Scheduler._try_apply_padded_mm_input_ids",
            _BEFORE,
            scheduling.set_image_identities,
            Need.CACHE,
        ),
    ),
    *_in(
        "sglang.srt.managers.schedule_policy",
        (
            "SchedulePolicy._compute_prefix_matches",
            _BEFORE,
            scheduling.rank_changed,
            Need.QUICKER,
        ),
    ),
    *_in(
        "sglang.srt.managers.schedule_batch",
        ("Req.__init__", _AFTER, scheduling.name_tenant, Need.CACHE),
        (
            "Req._compute_max_prefix_len",
            _AFTER,
            scheduling.compute_hidden_states,
            Need.HIDDEN_STATES,
        ),
        (
            "ScheduleBatch.cumulate_penalty_output_tokens",
            _AROUND,
            scheduling.count_newest_token,
            Need.PENALTIES,
        ),
    ),
    *_in(
        "sglang.srt.sampling.penaltylib.orchestrator",
        (
            "BatchedPenalizerOrchestrator.__init__",
            _AFTER,
            scheduling.count_earlier_tokens,
            Need.PENALTIES,
        ),
    ),
    *_in(
        "sglang.srt.constrained.base_grammar_backend",
        ("BaseGrammarBackend.__init__", _AFTER, scheduling.bound_grammars, Need.GRAMMARS),
    ),
    *_in(
        "sglang.srt.constrained.xgrammar_backend",
        ("XGrammarGrammarBackend.__init__", _AFTER, scheduling.bound_compiler, Need.GRAMMARS),
    ),
    *_in(
        "sglang.srt.session.session_controller",
        (
            "SessionController.close",
            _BEFORE,
            scheduling.tell_of_closed_session,
            Need.CLOSED_SESSIONS,
        ),
    ),
    *_in(
        "sglang.srt.managers.scheduler_components.profiler_manager",
        (
            "SchedulerProfilerManager._profile_batch_predicate",
            _AROUND,
            scheduling.survive_profiler_errors,
            Need.SCHEDULERS_GO_ON,
        ),
    ),
    *_in(
        "sglang.srt.managers.data_parallel_controller",
        (
            "DataParallelController.dispatching_with_trace",
            _BEFORE,
            scheduling.send_to_prefix,
            Need.DATA_PARALLEL,
        ),
    ),
    # Recurrent states: slots of a request, and which states a forward leaves.
    *_in(
        "sglang.srt.mem_cache.kv_cache_configurator",
        ("KVCacheConfigurator._calculate_mamba_ratio", _AROUND, states.count_slots, Need.CACHE),
    ),
    *_in(
        "sglang.srt.arg_groups.mamba_hook",
        ("validate_mamba_no_buffer", _BEFORE, states.accept_one_slot, Need.ONE_SLOT),
    ),
    *_in(
        "sglang.srt.managers.schedule_batch",
        ("ScheduleBatch.prepare_for_extend", _AFTER, states.plan_forward, Need.CACHE),
        ("ScheduleBatch.prepare_for_decode", _AFTER, states.plan_decode, Need.CACHE),
        ("ScheduleBatch.mix_with_running", _AFTER, states.carry_copies, Need.CACHE),
        (
            "ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend",
            _AROUND,
            states.disable_tracking,
            Need.CACHE,
        ),
    ),
    *_in(
        "sglang.srt.runtime_context",
        ("mamba_track_grid", _AROUND, states.track_at_our_grid, Need.CACHE),
    ),
    *_in(
        "sglang.srt.model_executor.forward_batch_info",
        ("ForwardBatch.init_new", _AFTER, states.carry_tracks, Need.CACHE),
        ("ForwardBatch.init_new", _AFTER, states.shift_positions, Need.CACHE),
    ),
    *_in(
        "sglang.srt.layers.logits_processor",
        ("LogitsProcessor.forward", _BEFORE, states.leave_last_hidden, Need.FULL_HITS),
    ),
    *_in(
        "sglang.srt.model_executor.model_runner",
        ("ModelRunner._forward_raw", _AROUND, states.answer_from_last_hidden, Need.FULL_HITS),
    ),
    *_in(
        "sglang.srt.models.qwen4_exp",
        ("Qwen4ExpPLELayer._short_conv", _BEFORE, states.leave_ple_windows, Need.QWEN4_EXP),
        ("_commit_ple_batch", _BEFORE, states.leave_ngram_contexts, Need.QWEN4_EXP),
    ),
    *_in(
        "sglang.srt.layers.attention.linear.inkling_sconv_backend",
        (
            "InklingShortConvAttnBackend._refresh_extend_metadata",
            _AFTER,
            states.give_sconv_tracks,
            Need.INKLING,
        ),
    ),
    *_in(
        "sglang.srt.models.inkling_common.sconv",
        (
            "ShortConvolution._prepare_extend_sconv_cache",
            _BEFORE,
            states.leave_sconv_windows,
            Need.INKLING,
        ),
    ),
    *_in(
        "sglang.srt.models.inkling_common.attn",
        (
            "InklingAttention._fused_attn_prologue_extend",
            _BEFORE,
            states.leave_kv_windows,
            Need.INKLING,
        ),
    ),
    # Pools: their allocators and classes.
    *_in(
        "sglang.srt.mem_cache.allocator.token",
        ("TokenToKVPoolAllocator", _REPLACE, pools.keep_freed_slots, Need.QUICKER),
    ),
    *_in(
        "sglang.srt.mem_cache.pool_host.mha",
        ("get_mha_host_pool_cls", _AFTER, pools.smaller_kv, Need.SMALLER_COPIES),
    ),
    *_in(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler",
        ("MambaPoolHost", _REPLACE, pools.smaller_states, Need.HOST_COPIES),
        ("MLATokenToKVPoolHost", _REPLACE, pools.smaller_latents, Need.SMALLER_COPIES),
    ),
    *_in(
        "sglang.srt.mem_cache.unified_memory_pool",
        (
            "UnifiedMambaSlotAllocator.alloc_group_begin",
            _AROUND,
            pools.reserve_no_states,
            Need.UNIFIED_MEMORY,
        ),
    ),
    *_in(
        "sglang.srt.mem_cache.allocator.unified_mamba",
        (
            "UnifiedMambaTokenToKVPoolAllocator.set_host_transfer_move_gate",
            _AROUND,
            pools.move_behind_copies,
            Need.UNIFIED_MEMORY,
        ),
    ),
    # Models: configs, logits, updates of weights.
    *_in(
        "sglang.srt.configs.update_config",
        ("adjust_config_with_unaligned_cpu_tp", _AROUND, models.pad_only_heads, Need.NO_ATTENTION),
    ),
    *_in(
        "sglang.srt.layers.linear",
        (
            "ColumnParallelBatchedLinear.__init__",
            _AROUND,
            models.use_serving_dtype,
            Need.KDA_GATES,
        ),
    ),
    *_in(
        "sglang.srt.layers.logits_processor",
        ("LogitsProcessor._compute_lm_head", _AROUND, models.multiply_by_lm_head, Need.QUICKER),
    ),
    *_in(
        "sglang.srt.model_executor.model_runner_components.layer_setup",
        ("_resolve_pp_layer_range", _BEFORE, models.use_own_layers, Need.STAGES),
    ),
    *_in(
        "sglang.srt.model_executor.model_runner_components.weight_updater",
        ("_unsupported_derived_weight_cache_error", _AFTER, models.forget_old_weights, Need.CACHE),
    ),
    *_in(
        "sglang.srt.managers.scheduler_components.weight_updater",
        (
            "SchedulerWeightUpdaterManager.release_memory_occupation",
            _BEFORE,
            models.forget_released_weights,
            Need.CACHE,
        ),
    ),
    # Serving: requests, keys, and how a server ends.
    *_in(
        "sglang.srt.observability.req_time_stats",
        ("APIServerReqTimeStats.__getstate__", _AFTER, serving.send_arrival, Need.SPEEDS),
        ("DPControllerReqTimeStats.__getstate__", _AFTER, serving.send_arrival, Need.SPEEDS),
    ),
    *_in(
        "sglang.api.v1.api_types",
        ("decode_TokenIds", _AROUND, serving.take_token_ids, Need.QUICKER),
    ),
    *_in(
        "sglang.srt.entrypoints.openai.serving_chat",
        (
            "OpenAIServingChat._render_and_encode_chat_template",
            _BEFORE,
            serving.render_anew,
            Need.PROMPTS,
        ),
        (
            "OpenAIServingChat._apply_jinja_template",
            _BEFORE,
            serving.leave_out_changing_lines,
            Need.CLIENTS,
        ),
        (
            "OpenAIServingChat._apply_conversation_template",
            _BEFORE,
            serving.leave_out_changing_lines,
            Need.CLIENTS,
        ),
        (
            "OpenAIServingChat.apply_reasoning_enabled",
            _AROUND,
            serving.accept_thinking,
            Need.PROMPTS,
        ),
    ),
    *_in(
        "sglang.srt.entrypoints.anthropic.serving",
        (
            "AnthropicServing._convert_to_chat_completion_request",
            _AROUND,
            serving.convert_messages,
            Need.PROMPTS,
        ),
    ),
    *_in(
        "sglang.srt.entrypoints.openai.serving_responses",
        (
            "OpenAIServingResponses._validate_model",
            _BEFORE,
            serving.take_default_model,
            Need.CLIENTS,
        ),
    ),
    *_in(
        "sglang.srt.entrypoints.http_server",
        ("kill_process_tree", _AROUND, serving.kill_process_tree, Need.ENDS),
        ("launch_server", _AROUND, serving.end_processes_at_exit, Need.ENDS),
    ),
    *_in(
        "sglang.srt.sampling.watermarking.core",
        ("redact_watermark_secrets", _AFTER, serving.hide_keys, Need.KEYS),
        ("redact_watermark_command_line", _BEFORE, serving.hide_given_keys, Need.KEYS),
    ),
    *_in(
        "sglang.srt.utils.auth",
        ("_get_auth_level_from_app_and_scope", _BEFORE, serving.with_all_routes, Need.CACHE),
        ("app_has_admin_force_endpoints", _BEFORE, serving.with_all_routes, Need.CACHE),
        ("add_api_key_middleware", _AFTER, serving.take_x_api_key, Need.CLIENTS),
    ),
    *_in(
        "sglang.srt.managers.tokenizer_manager",
        ("TokenizerManager.sigterm_watchdog", _AROUND, serving.end_on_signal, Need.ENDS),
        ("TokenizerManager._init_req_state", _BEFORE, serving.refuse_used_ids, Need.CHECKS),
        ("TokenizerManager.convert_to_span_attrs", _AFTER, serving.tell_span, Need.REPORTS),
        ("TokenizerManager._send_one_request", _AROUND, serving.send_prompts, Need.PROMPTS),
        ("TokenizerManager._send_batch_request", _AROUND, serving.send_prompts, Need.PROMPTS),
        ("kill_process_tree", _AROUND, serving.kill_process_tree, Need.ENDS),
    ),
    *_in(
        "sglang.srt.managers.tokenizer_manager_score_mixin",
        (
            "TokenizerManagerScoreMixin._resolve_overrides_for_sequence",
            _BEFORE,
            serving.check_overrides,
            Need.CHECKS,
        ),
    ),
    *_in(
        "sglang.srt.utils.request_logger",
        (
            "RequestLogger.log_received_request",
            _AROUND,
            serving.skip_unloggable,
            Need.CHECKS,
        ),
    ),
    *_in(
        "sglang.srt.entrypoints.engine",
        ("kill_process_tree", _AROUND, serving.kill_process_tree, Need.ENDS),
        ("Engine._launch_subprocesses", _AFTER, serving.note_shared_memory, Need.ENDS),
    ),
    *_in(
        "sglang.srt.managers.io_struct",
        ("GenerateReqInput.regenerate_rid", _AROUND, serving.keep_owner, Need.CACHE),
    ),
    *_in(
        "sglang.srt.managers.load_snapshot",
        ("ShmLoadSnapshotWriter.__init__", _AROUND, serving.track_load_snapshots, Need.ENDS),
    ),
)
