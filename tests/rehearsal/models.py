"""Published sizes of hybrid models that people run, as the config.json of each has them.

Only what SGLang reads is here. Qwen4-Exp has no published sizes: it has Qwen3.5's with its own
model's defaults.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from sglang_hybrid.models import ensure_default_model

Config = dict[str, Any]

COMMON: Config = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}

NEMOTRON: Config = COMMON | {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "hidden_dropout": 0.0,
    "layer_norm_epsilon": 1e-5,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "num_hidden_layers": 52,
    "num_logits_to_keep": 1,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "sliding_window": None,
    "ssm_state_size": 128,
    "time_step_floor": 1e-4,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "use_bias": False,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131_072,
}

GATED_DELTA: Config = COMMON | {
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2_048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262_144,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "rms_norm_eps": 1e-6,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
}

QWEN35: Config = GATED_DELTA | {
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "mamba_ssm_dtype": "float32",
    "model_type": "qwen3_5_moe_text",
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rope_type": "default",
    },
    "vocab_size": 248_320,
}

VISION: Config = {
    "deepstack_visual_indexes": [],
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1_152,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 4_304,
    "num_heads": 16,
    "num_position_embeddings": 2_304,
    "out_hidden_size": 2_048,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def _with_vision(architecture: str, kind: str, text: Config) -> Config:
    return {
        "architectures": [architecture],
        "model_type": kind,
        "text_config": text,
        "vision_config": VISION | {"model_type": kind},
        "image_token_id": 248_056,
        "video_token_id": 248_057,
        "vision_start_token_id": 248_053,
        "vision_end_token_id": 248_054,
        "tie_word_embeddings": False,
    }


KIMI_ATTENTION = [4, 8, 12, 16, 20, 24, 27]

MODELS: dict[str, Config] = {
    "Nemotron-H-8B": NEMOTRON
    | {
        "attention_head_dim": 128,
        "head_dim": 128,
        "hidden_size": 4_096,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "intermediate_size": 21_504,
        "mamba_head_dim": 64,
        "mamba_num_heads": 128,
        "max_position_embeddings": 8_192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Nemotron-3-Nano": NEMOTRON
    | {
        "head_dim": 128,
        "hidden_size": 2_688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "intermediate_size": 1_856,
        "mamba_head_dim": 64,
        "mamba_num_heads": 64,
        "mamba_ssm_cache_dtype": "float32",
        "max_position_embeddings": 262_144,
        "moe_intermediate_size": 1_856,
        "moe_shared_expert_intermediate_size": 3_712,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_key_value_heads": 2,
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
    },
    "Qwen3-Next-80B": GATED_DELTA
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "decoder_sparse_step": 1,
        "intermediate_size": 5_120,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10_000_000,
        "vocab_size": 151_936,
    },
    "Qwen3.5-35B": _with_vision("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", QWEN35),
    "Qwen3.5-9B": QWEN35
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 4_096,
        "intermediate_size": 12_288,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
        "num_experts": 0,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    "Qwen4-Exp": _with_vision(
        "Qwen4ExpForConditionalGeneration",
        "qwen4_exp",
        QWEN35
        | {
            "model_type": "qwen4_exp_text",
            "hc_count": 4,
            "hc_lowrank": 320,
            "ngram_vocab_size_base": 200_000,
            "ple_layer_ids": [2, 22],
        },
    ),
    "Falcon-H1-7B": COMMON
    | {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 0.2,
        "attn_layer_indices": None,
        "embedding_multiplier": 1.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3_072,
        "intermediate_size": 12_288,
        "key_multiplier": 0.39,
        "lm_head_multiplier": 0.0195,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 128,
        "mamba_d_ssm": 3_072,
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 24,
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": False,
        "mamba_rms_norm": True,
        "mamba_use_mlp": True,
        "max_position_embeddings": 262_144,
        "mlp_bias": False,
        "mlp_multipliers": [1.0, 1.0],
        "num_attention_heads": 12,
        "num_hidden_layers": 44,
        "num_key_value_heads": 2,
        "projectors_bias": False,
        "rope_scaling": None,
        "rope_theta": 1e11,
        "ssm_in_multiplier": 1.0,
        "ssm_multipliers": [0.35, 0.25, 0.17, 0.5, 0.35],
        "ssm_out_multiplier": 0.23,
        "vocab_size": 130_048,
    },
    "Granite-4-H-Small": COMMON
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12,
        "hidden_act": "silu",
        "hidden_size": 4_096,
        "intermediate_size": 768,
        "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
        "logits_scaling": 16,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
        "mamba_proj_bias": False,
        "max_position_embeddings": 131_072,
        "normalization_function": "rmsnorm",
        "num_attention_heads": 32,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "num_local_experts": 72,
        "output_router_logits": False,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.22,
        "rope_scaling": None,
        "rope_theta": 10_000,
        "router_aux_loss_coef": 0.0,
        "shared_intermediate_size": 1_536,
        "tie_word_embeddings": True,
        "vocab_size": 100_352,
    },
    "Kimi-Linear-48B": COMMON
    | {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "first_k_dense_replace": 1,
        "head_dim": 72,
        "hidden_act": "silu",
        "hidden_size": 2_304,
        "intermediate_size": 9_216,
        "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": KIMI_ATTENTION,
            "head_dim": 128,
            "kda_layers": [i for i in range(1, 28) if i not in KIMI_ATTENTION],
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "max_position_embeddings": 1_048_576,
        "mla_use_nope": True,
        "model_max_length": 1_048_576,
        "moe_intermediate_size": 1_024,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 32,
        "num_expert_group": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_hidden_layers": 27,
        "num_key_value_heads": 32,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_scaling": None,
        "rope_theta": 10_000.0,
        "routed_scaling_factor": 2.446,
        "topk_group": 1,
        "use_grouped_topk": True,
        "v_head_dim": 128,
        "vocab_size": 163_840,
    },
    "LFM2-2.6B": COMMON
    | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": False,
        "block_dim": 2_048,
        "block_ff_dim": 10_752,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "block_norm_eps": 1e-5,
        "block_use_swiglu": True,
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": 2_048,
        "conv_dim_out": 2_048,
        "hidden_size": 2_048,
        "intermediate_size": 10_752,
        "layer_types": [
            "full_attention" if i in (2, 5, 9, 13, 17, 21, 25, 28) else "conv" for i in range(30)
        ],
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "num_attention_heads": 32,
        "num_heads": 32,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0,
        "use_pos_enc": True,
        "vocab_size": 65_536,
    },
    "Mamba-Codestral-7B": COMMON
    | {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "chunk_size": 256,
        "conv_kernel": 4,
        "expand": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 4_096,
        "intermediate_size": 8_192,
        "layer_norm_epsilon": 1e-5,
        "n_groups": 8,
        "num_heads": 128,
        "num_hidden_layers": 64,
        "residual_in_fp32": True,
        "rms_norm": True,
        "state_size": 128,
        "time_step_limit": [0.0, 1e9],
        "use_bias": False,
        "use_conv_bias": True,
        "vocab_size": 32_768,
    },
    "Falcon-Mamba-7B": COMMON
    | {
        "architectures": ["FalconMambaForCausalLM"],
        "model_type": "falcon_mamba",
        "conv_kernel": 4,
        "expand": 2,
        "hidden_act": "silu",
        "hidden_size": 4_096,
        "intermediate_size": 8_192,
        "layer_norm_epsilon": 1e-5,
        "mixer_rms_eps": 1e-6,
        "num_hidden_layers": 64,
        "residual_in_fp32": True,
        "state_size": 16,
        "time_step_rank": 256,
        "use_bias": False,
        "use_conv_bias": True,
        "vocab_size": 65_024,
    },
}


def write(name: str, folder: Path, **changed: Any) -> Path:
    """A folder with the configuration of a model, a tokenizer, and weights of nothing.

    changed: fields of the configuration that differ, as `quantization_config`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name] | changed))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ensure_default_model() / file, folder / file)
    save_file({"nothing": np.zeros(1, np.float32)}, str(folder / "model.safetensors"))
    return folder
