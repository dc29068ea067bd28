"""The names of SGLang that the CPU platform replaces, and their replacements.

Only names that SGLang reaches on an out-of-tree platform without an accelerator are listed.
``binder.py`` sets them when their modules are imported; ``mamba`` must be bound before ``mamba1``
is imported, which takes the convolutions from it.
"""

from dataclasses import dataclass
from typing import Any

from sglang_hybrid.extensions.cpu.ops import (
    draft_steps,
    draft_trees,
    gated_delta,
    host_copies,
    kimi_delta,
    latent_attention,
    lightning,
    linear,
    mamba1,
    mamba2,
    model_steps,
    moe,
    served_type,
    states,
    steps,
    tracking,
    transfer_streams,
    unified_pool,
)


@dataclass(frozen=True)
class Binding:
    """``module.attribute`` (dotted for a class member) becomes ``function``, a module or a value.

    ``creates`` marks a name that SGLang's module has on other platforms, or patched, only. A
    function that ``wraps`` is called with SGLang's and returns what stands for it.
    """

    module: str
    attribute: str
    function: Any
    creates: bool = False
    wraps: bool = False


_MAMBA = "sglang.srt.layers.attention.mamba.mamba"
_MAMBA1 = "sglang.srt.layers.attention.mamba.mamba1"
_BACKEND = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
_GDN_BACKEND = "sglang.srt.layers.attention.linear.gdn_backend"
_GDN_KERNELS = "sglang.srt.layers.attention.linear.kernels.gdn_triton"
_KDA_BACKEND = "sglang.srt.layers.attention.linear.kda_backend"
_KDA_KERNELS = "sglang.srt.layers.attention.linear.kernels.kda_triton"
_LIGHTNING = "sglang.srt.layers.attention.linear.lightning_backend"
_LATENT = "sglang.srt.models.deepseek_common.attention_backend_handler"
_GATED_NORM = "sglang.kernels.ops.attention.fla.fused_norm_gate"
_GATED_LAYERNORM = "sglang.kernels.ops.attention.fla.layernorm_gated"
_NATIVE_MOE = "sglang.srt.layers.moe.fused_moe_native"
_ALLOCATION = "sglang.srt.mem_cache.allocation"
_UNQUANTIZED = "sglang.srt.layers.quantization.unquant"
_LINEAR, _EMBEDDING = "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"
_QWEN2_MOE = "sglang.srt.models.qwen2_moe"
_MODELS = "sglang.srt.models"
_NEMOTRON_H = f"{_MODELS}.nemotron_h"
_LAYERNORM = "sglang.srt.layers.layernorm"
_QWEN3_NEXT = "sglang.srt.models.qwen3_next"
_QWEN3_5 = "sglang.srt.models.qwen3_5"
_HOST = "sglang.srt.mem_cache.pool_host"
_DRAFTS = "sglang.kernels.ops.speculative"
_MOONCAKE = "sglang.srt.disaggregation.mooncake.conn"
_SCATTER = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
_DIRECT = {
    "transfer_kv_direct": host_copies.direct,
    "transfer_kv_per_layer_direct_pf_lf": host_copies.per_layer_direct_pf_lf,
    "transfer_kv_all_layer_direct_lf_pf": host_copies.all_layer_direct_lf_pf,
}
_ROWS = _DIRECT | {
    "transfer_kv_per_layer_mla": host_copies.rows_per_layer,
    "transfer_kv_all_layer_mla": host_copies.rows_all_layer,
    "transfer_kv_per_layer_mla_pf_lf": host_copies.rows_pf_lf,
    "transfer_kv_all_layer_mla_lf_pf": host_copies.rows_lf_pf,
}
_COPIES = {
    "mha": _ROWS  # keys and values of different widths are copied one by one
    | {
        "transfer_kv_per_layer": host_copies.per_layer,
        "transfer_kv_all_layer": host_copies.all_layer,
        "transfer_kv_per_layer_pf_lf": host_copies.per_layer_pf_lf,
        "transfer_kv_all_layer_lf_pf": host_copies.all_layer_lf_pf,
    },
    "mla": _ROWS,
    "mamba": _DIRECT
    | {
        "transfer_kv_mamba_pf_lf": host_copies.rows_pf_lf,
        "transfer_kv_mamba_lf_pf": host_copies.mamba_lf_pf,
    },
}
"""SGLang's copies between device and host pools, by the module of the host pool."""

_STRIDED = {
    "mha": {
        "one_layer": host_copies.strided_one_layer,
        "all_layer": host_copies.strided_all_layers,
    },
    "mla": {
        "one_layer_mla": host_copies.strided_one_layer_mla,
        "all_layer_mla": host_copies.strided_all_layers_mla,
    },
}
"""The copies between rows that do not follow at once, in SGLang's unified pool."""

_DRAFT_BINDINGS: tuple[Binding, ...] = (
    Binding(
        "sglang.srt.arg_groups.speculative_hook",
        "_disable_overlap_schedule_for_cpu",
        draft_steps.leave_overlap,
    ),
    Binding(
        f"{_DRAFTS}.cache_locs",
        "fill_front_out_cache_loc_func",
        draft_steps.fill_front_out_cache_loc,
    ),
    Binding(
        f"{_DRAFTS}.eagle", "fill_accept_out_cache_loc_func", draft_steps.fill_accept_out_cache_loc
    ),
    Binding(f"{_DRAFTS}.gather_spec_extras", "gather_spec_extras", draft_steps.gather_rows),
    Binding(f"{_DRAFTS}.eagle", "fill_bonus_tokens_func", draft_steps.last_accepted),
    Binding(
        f"{_DRAFTS}.cache_locs", "assign_draft_cache_locs_contiguous_func", draft_steps.draft_slots
    ),
    Binding(f"{_DRAFTS}.spec_tree", "build_tree_kernel_efficient_func", draft_trees.build_tree),
    Binding(
        "sglang.srt.speculative.draft_utils",
        "DraftBackendFactory._create_backend",
        draft_steps.draft_backend,
        wraps=True,
    ),
    Binding(f"{_DRAFTS}.spec_tree", "verify_tree_greedy_func", draft_trees.accept_greedy),
    Binding(
        f"{_DRAFTS}.verify_sampling",
        "tree_speculative_sampling_target_only",
        draft_trees.accept_sampled,
    ),
    Binding("sglang.kernels.ops.sampling.renorm", "top_k_renorm_prob", draft_trees.keep_top_k),
    Binding("sglang.kernels.ops.sampling.renorm", "top_p_renorm_prob", draft_trees.keep_top_p),
    Binding(
        "sglang.srt.mem_cache.memory_pool",
        "MHATokenToKVPool._init_kv_copy_and_warmup",
        draft_steps.move_rows_in_torch,
        wraps=True,
    ),
    Binding(_SCATTER, "scatter_mamba_states_after_mtp_verify", draft_steps.scatter_accepted_states),
    Binding(_ALLOCATION, "assign_req_to_token_pool_func", draft_steps.give_slots),
    Binding(f"{_MODELS}.lfm2", "causal_conv1d_update_triton", mamba2.causal_conv1d_update),
)
"""Bindings for speculative decoding."""

_UNIFIED = "sglang.srt.mem_cache.allocator.unified_sub_pool"

_UNIFIED_BINDINGS: tuple[Binding, ...] = (
    Binding(
        "sglang.srt.mem_cache.kv_cache_configurator",
        "reject_out_of_tree_path",
        unified_pool.rejected,
        wraps=True,
    ),
    *(
        Binding("sglang.srt.arg_groups.kv_cache_hook", name, unified_pool.with_ours, wraps=True)
        for name in ("_SPEC_MHA_AUDITED_BACKENDS", "TRANSLATED_MHA_RAILS")
    ),
    Binding(_UNIFIED, "alloc_extend_kernel", unified_pool.place_extended),
    Binding(_UNIFIED, "alloc_decode_kernel", unified_pool.place_decoded),
    *(
        Binding(f"{_HOST}.{module}", f"{pool}.__init__", host_copies.with_strides, wraps=True)
        for module, pool in (("mha", "MHATokenToKVPoolHost"), ("mla", "MLATokenToKVPoolHost"))
    ),
    *(
        Binding(f"{_HOST}.{module}", f"jit_transfer_hicache_{name}", function)
        for module, copies in _STRIDED.items()
        for name, function in copies.items()
    ),
)
"""Bindings for SGLang's unified pool of KV and states."""

BINDINGS: tuple[Binding, ...] = (
    *_DRAFT_BINDINGS,
    *_UNIFIED_BINDINGS,
    Binding(_UNQUANTIZED, f"{_LINEAR}.apply", linear.apply),
    Binding(_UNQUANTIZED, f"{_LINEAR}.process_weights_after_loading", linear.pack),
    Binding(_UNQUANTIZED, f"{_LINEAR}.restore_weights_before_loading", linear.unpack),
    Binding(_UNQUANTIZED, f"{_LINEAR}.forget_derived_weights", linear.unpack, creates=True),
    Binding(_UNQUANTIZED, f"{_EMBEDDING}.process_weights_after_loading", linear.pack_lm_head),
    Binding(_UNQUANTIZED, f"{_EMBEDDING}.restore_weights_before_loading", linear.unpack),
    Binding(_UNQUANTIZED, f"{_EMBEDDING}.forget_derived_weights", linear.unpack, creates=True),
    Binding(_UNQUANTIZED, f"{_EMBEDDING}.lm_head_product", linear.lm_head_product, creates=True),
    Binding(_ALLOCATION, "get_last_loc_triton", states.last_slots),
    Binding(_MAMBA, "causal_conv1d_fn", mamba2.causal_conv1d_fn, creates=True),
    Binding(_MAMBA, "causal_conv1d_fn_triton", mamba2.causal_conv1d_fn, creates=True),
    Binding(_MAMBA, "causal_conv1d_update", mamba2.causal_conv1d_update, creates=True),
    Binding(_MAMBA, "causal_conv1d_update_triton", mamba2.causal_conv1d_update, creates=True),
    Binding(_MAMBA, "mamba_chunk_scan_combined", mamba2.mamba_chunk_scan_combined),
    Binding(_MAMBA, "selective_state_update", mamba2.selective_state_update),
    Binding(_MAMBA, "MambaMixer2.forward", steps.mixer_forward, wraps=True),
    Binding(_LAYERNORM, "RMSNorm.forward_native", steps.norm_forward, wraps=True),
    Binding(_NEMOTRON_H, "NemotronHMLP.forward", steps.mlp_forward, wraps=True),
    Binding(_NEMOTRON_H, "NemotronHModel.forward", model_steps.nemotron_h_forward, wraps=True),
    Binding(f"{_MODELS}.llama", "LlamaModel.forward", model_steps.llama_forward, wraps=True),
    Binding(
        f"{_MODELS}.granitemoehybrid",
        "GraniteMoeHybridModel.forward",
        model_steps.granite_hybrid_forward,
        wraps=True,
    ),
    Binding(
        f"{_MODELS}.falcon_h1", "FalconH1Model.forward", model_steps.falcon_h1_forward, wraps=True
    ),
    Binding(f"{_MODELS}.mamba2", "Mamba2Model.forward", model_steps.mamba2_forward, wraps=True),
    Binding(
        f"{_MODELS}.falcon_mamba",
        "FalconMambaModel.forward",
        model_steps.mamba1_forward,
        wraps=True,
    ),
    Binding(_BACKEND, "track_mamba_states_if_needed", tracking.track_mamba_states_if_needed),
    Binding(_BACKEND, "track_mamba_states_all_layers", tracking.track_mamba_states_all_layers),
    Binding(_MAMBA1, "selective_state_update", mamba2.selective_state_update),
    Binding(_MAMBA1, "MambaMixer1._selective_scan", mamba1.selective_scan),
    Binding(f"{_MODELS}.lfm2", "causal_conv1d_fn", mamba2.causal_conv1d_fn),
    Binding(f"{_MODELS}.lfm2", "causal_conv1d_update", mamba2.causal_conv1d_update),
    Binding(f"{_MODELS}.lfm2_moe", "causal_conv1d_fn", mamba2.causal_conv1d_fn),
    Binding(f"{_MODELS}.lfm2_moe", "causal_conv1d_update", mamba2.causal_conv1d_update),
    Binding(_GDN_BACKEND, "causal_conv1d_fn", mamba2.causal_conv1d_fn),
    Binding(_GDN_BACKEND, "causal_conv1d_update", mamba2.causal_conv1d_update),
    Binding(_GDN_BACKEND, "fused_gdn_gating", gated_delta.fused_gdn_gating),
    Binding(_GDN_KERNELS, "chunk_gated_delta_rule", gated_delta.chunk_gated_delta_rule),
    Binding(
        _GDN_KERNELS,
        "fused_recurrent_gated_delta_rule_packed_decode",
        gated_delta.fused_recurrent_gated_delta_rule_packed_decode,
    ),
    Binding(
        _GDN_KERNELS,
        "fused_sigmoid_gating_delta_rule_update",
        gated_delta.fused_sigmoid_gating_delta_rule_update,
    ),
    Binding(
        _GDN_KERNELS,
        "fused_recurrent_gdn_replayssm_decode",
        gated_delta.fused_recurrent_gdn_replayssm_decode,
    ),
    Binding(
        f"{_MODELS}.jet_nemotron", "chunk_gated_delta_rule", gated_delta.chunk_gated_delta_rule
    ),
    Binding(
        f"{_MODELS}.jet_nemotron",
        "fused_recurrent_gated_delta_rule_update",
        gated_delta.fused_recurrent_gated_delta_rule_update,
    ),
    Binding(_KDA_BACKEND, "causal_conv1d_fn", mamba2.causal_conv1d_fn),
    Binding(_KDA_BACKEND, "causal_conv1d_update", mamba2.causal_conv1d_update),
    Binding(_KDA_KERNELS, "chunk_kda", kimi_delta.chunk_kda),
    Binding(
        _KDA_KERNELS,
        "fused_recurrent_kda_packed_decode",
        kimi_delta.fused_recurrent_kda_packed_decode,
    ),
    Binding(
        _KDA_KERNELS,
        "fused_sigmoid_gating_delta_rule_update",
        kimi_delta.fused_sigmoid_gating_delta_rule_update,
    ),
    Binding(
        _KDA_KERNELS,
        "fused_recurrent_linear_replayssm_decode",
        gated_delta.fused_recurrent_gdn_replayssm_decode,
    ),
    Binding(
        _LATENT, "AttentionBackendRegistry.get_handler", latent_attention.always_on_latent_keys
    ),
    Binding(
        "sglang.srt.layers.rotary_embedding.factory",
        "get_rope_wrapper",
        latent_attention.turn_in_torch,
        wraps=True,
    ),
    Binding(
        f"{_MODELS}.bailing_moe_linear",
        "DsV3MLA.__init__",
        latent_attention.without_cuda_rotation,
        wraps=True,
    ),
    Binding(_LIGHTNING, "seg_la_fwd", lightning.seg_la_fwd),
    Binding(_LIGHTNING, "save_lightning_states", lightning.save_lightning_states, creates=True),
    Binding(_GATED_NORM, "rms_norm_gated", gated_delta.rms_norm_gated),
    Binding(_GATED_LAYERNORM, "layernorm_fn", gated_delta.layernorm_fn),
    Binding(_NATIVE_MOE, "moe_forward_native", moe.moe_forward_native),
    Binding(f"{_MODELS}.deepseek_v2", "silu_and_mul_clamp", moe.silu_and_mul_clamp),
    Binding(f"{_MODELS}.deepseek_v2", "DeepseekV2MoE.__init__", moe.scaled_once, wraps=True),
    Binding(_QWEN2_MOE, "fused_gate_sigmoid_mul_add", moe.fused_gate_sigmoid_mul_add),
    Binding(
        _QWEN3_NEXT, "fused_qkvzba_split_reshape_cat", gated_delta.fused_qkvzba_split_reshape_cat
    ),
    Binding(
        _QWEN3_5,
        "fused_qkvzba_split_reshape_cat_contiguous",
        gated_delta.fused_qkvzba_split_reshape_cat_contiguous,
    ),
    Binding(_QWEN3_5, "fused_sigmoid_mul", gated_delta.fused_sigmoid_mul),
    *(
        Binding(f"{_MODELS}.qwen4_exp", name, served_type.in_served_type, wraps=True)
        for name in ("HyperConnectionConfig", "VocabParallelEmbedding")
    ),
    # indices that a copy engine writes into pinned memory
    Binding(_MOONCAKE, "MooncakeKVSender.supports_host_tensor_indices", False, creates=True),
    Binding("sglang.srt.mem_cache.l2_transfer", "device_module", transfer_streams),
    Binding("sglang.srt.managers.cache_controller", "device_module", transfer_streams),
    Binding(f"{_HOST}.common", "_cuda_host_register", host_copies.no_registration),
    *(
        Binding(f"{_HOST}.{module}", name, function, creates=True)
        for module, copies in _COPIES.items()
        for name, function in copies.items()
    ),
)

STAND_INS = {f"{_DRAFTS}.reconstruct_tree": draft_trees}
"""SGLang's modules whose import needs `sgl_kernel`, and those that take their place."""
