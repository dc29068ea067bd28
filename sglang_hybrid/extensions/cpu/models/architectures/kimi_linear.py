"""Kimi Linear: KDA, latent attention without positions every third layer, and experts."""

from __future__ import annotations

from sglang_hybrid.extensions.cpu.models.architectures.base import (
    BASE_CONFIG,
    MAX_LENGTH,
    Model,
    Scale,
    tiny_only,
)
from sglang_hybrid.extensions.cpu.models.weights import Weights

LAYERS = 6
ATTENTION_LAYERS = [3, 6]
"""Layers, counted from 1 as in the config."""
HIDDEN = 128
MLP = 384
HEADS = 4
KEY_DIM = 32
SHARED_KEY_DIM = 32
"""Size of the part of a key that all heads share; other models turn it by its position."""
VALUE_DIM = 32
LATENT = 256
"""Latent size; with the shared part one of the two that SGLang's Triton kernel decodes with."""
LINEAR_HEADS = 4
LINEAR_HEAD_DIM = 32
TAPS = 4
EXPERTS = 4
ACTIVE_EXPERTS = 2
EXPERT = 128

CONFIG = BASE_CONFIG | {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "model_max_length": MAX_LENGTH,
    "num_hidden_layers": LAYERS,
    "linear_attn_config": {
        "full_attn_layers": ATTENTION_LAYERS,
        "kda_layers": [i for i in range(1, LAYERS + 1) if i not in ATTENTION_LAYERS],
        "num_heads": LINEAR_HEADS,
        "head_dim": LINEAR_HEAD_DIM,
        "short_conv_kernel_size": TAPS,
    },
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "hidden_act": "silu",
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": None,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": KEY_DIM,
    "qk_rope_head_dim": SHARED_KEY_DIM,
    "v_head_dim": VALUE_DIM,
    "mla_use_nope": True,
    "rope_theta": 10000.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": EXPERT,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_experts": EXPERTS,
    "num_experts_per_token": ACTIVE_EXPERTS,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

LARGE = CONFIG | {
    "num_hidden_layers": 12,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12],
        "kda_layers": [i for i in range(1, 13) if i % 4],
        "num_heads": 12,
        "head_dim": 64,
        "short_conv_kernel_size": TAPS,
    },
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 512,
}
"""100 M parameters."""


def kimi_linear(seed: int, scale: Scale) -> Model:
    """A Kimi Linear model with untied embeddings; its first MLP is dense. The scale "100m" has no
    weights.
    """
    if scale == "100m":
        return Model(LARGE, None)
    tiny_only("kimi-linear", scale)
    weights = Weights(seed)
    weights.embedding("model.embed_tokens.weight", HIDDEN, std=1.5)
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        weights.ones(f"{layer}.input_layernorm.weight", HIDDEN)
        if index + 1 in ATTENTION_LAYERS:
            _latent_attention(weights, f"{layer}.self_attn")
        else:
            kimi_delta_attention(weights, f"{layer}.self_attn")
        weights.ones(f"{layer}.post_attention_layernorm.weight", HIDDEN)
        if index == 0:
            weights.gated_mlp(f"{layer}.mlp", HIDDEN, MLP, gain=1.0)
        else:
            _experts(weights, f"{layer}.block_sparse_moe")
    weights.ones("model.norm.weight", HIDDEN)
    weights.head("lm_head.weight", HIDDEN)
    return Model(CONFIG, weights)


def _latent_attention(weights: Weights, prefix: str) -> None:
    weights.linear(f"{prefix}.q_proj.weight", HEADS * (KEY_DIM + SHARED_KEY_DIM), HIDDEN, gain=1.5)
    weights.linear(f"{prefix}.kv_a_proj_with_mqa.weight", LATENT + SHARED_KEY_DIM, HIDDEN)
    weights.ones(f"{prefix}.kv_a_layernorm.weight", LATENT)
    weights.linear(f"{prefix}.kv_b_proj.weight", HEADS * (KEY_DIM + VALUE_DIM), LATENT, gain=1.5)
    weights.linear(f"{prefix}.o_proj.weight", HIDDEN, HEADS * VALUE_DIM, gain=1.5)


def kimi_delta_attention(weights: Weights, prefix: str) -> None:
    """KDA as Kimi Linear has it, whose gates are products of two small matrices."""
    inner = LINEAR_HEADS * LINEAR_HEAD_DIM
    for part in "qkv":
        weights.linear(f"{prefix}.{part}_proj.weight", inner, HIDDEN)
        weights.conv(f"{prefix}.{part}_conv1d.weight", inner, TAPS)
    weights.linear(f"{prefix}.b_proj.weight", LINEAR_HEADS, HIDDEN, gain=0.7)
    for gate in "fg":  # of the decay, and of the output
        weights.linear(f"{prefix}.{gate}_a_proj.weight", LINEAR_HEAD_DIM, HIDDEN)
        weights.linear(f"{prefix}.{gate}_b_proj.weight", inner, LINEAR_HEAD_DIM, gain=0.7)
    weights.decay_rates(f"{prefix}.A_log", 1, 1, LINEAR_HEADS, 1)
    weights.time_steps(f"{prefix}.dt_bias", inner)
    weights.ones(f"{prefix}.o_norm.weight", LINEAR_HEAD_DIM)
    weights.linear(f"{prefix}.o_proj.weight", HIDDEN, inner, gain=1.2)


def _experts(weights: Weights, prefix: str) -> None:
    weights.linear(f"{prefix}.gate.weight", EXPERTS, HIDDEN, gain=1.5)
    weights.normal(f"{prefix}.gate.e_score_correction_bias", EXPERTS, std=0.05)
    for expert in range(EXPERTS):
        for part in ("w1", "w3"):  # gate and up
            weights.linear(f"{prefix}.experts.{expert}.{part}.weight", EXPERT, HIDDEN)
        weights.linear(f"{prefix}.experts.{expert}.w2.weight", HIDDEN, EXPERT)
    weights.gated_mlp(f"{prefix}.shared_experts", HIDDEN, EXPERT, gain=1.0)
