"""Ling: lightning attention (2.5) or KDA (3), latent attention every third layer, and experts."""

from __future__ import annotations

from collections.abc import Callable

from sglang_hybrid.extensions.cpu.models.architectures.base import (
    BASE_CONFIG,
    MAX_LENGTH,
    Model,
    Scale,
    tiny_only,
)
from sglang_hybrid.extensions.cpu.models.weights import Weights

LAYERS = 6
GROUP = 3
"""Layers of which the last has latent attention."""
HIDDEN = 128
MLP = 384
HEADS = 4
LINEAR_HEAD_DIM = 128
"""The smallest head that SGLang's Triton kernel decodes with."""
KEY_DIM = 32
TURNED_KEY_DIM = 32
"""Size of the part of a key that all heads share and that is turned by its position."""
VALUE_DIM = 32
LATENT = 256
"""Latent size; with the shared part one of the two that SGLang's Triton kernel decodes with."""
EXPERTS = 4
ACTIVE_EXPERTS = 2
EXPERT = 128
QUERY_LATENT = 64
"""Size of the latent queries of Ling 3."""
DELTA_HEAD_DIM = 32
TAPS = 4
"""Taps of the convolutions before KDA."""

_SHARED = BASE_CONFIG | {
    "model_type": "bailing_hybrid",
    "max_position_embeddings": MAX_LENGTH,
    "num_hidden_layers": LAYERS,
    "layer_group_size": GROUP,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "hidden_act": "silu",
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "rope_theta": 10000.0,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": KEY_DIM,
    "qk_rope_head_dim": TURNED_KEY_DIM,
    "v_head_dim": VALUE_DIM,
    "rope_interleave": True,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": EXPERT,
    "moe_router_enable_expert_bias": True,
    "norm_topk_prob": True,
    "num_experts": EXPERTS,
    "num_experts_per_tok": ACTIVE_EXPERTS,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "score_function": "sigmoid",
    "rms_norm_eps": 1e-6,
}
LIGHTNING = _SHARED | {
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "head_dim": LINEAR_HEAD_DIM,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "group_norm_size": HEADS,
    "q_lora_rank": None,
    "tie_word_embeddings": False,
}
DELTA = _SHARED | {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "head_dim": DELTA_HEAD_DIM,
    "short_conv_kernel_size": TAPS,
    "no_kda_lora": True,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "gated_attention_proj_granularity_type": "head_wise",
    "q_lora_rank": QUERY_LATENT,
    # SGLang gives a head of its own the type bfloat16, whatever the model's.
    "tie_word_embeddings": True,
}


def ling_2_5(seed: int, scale: Scale) -> Model:
    """A Ling 2.5 model with untied embeddings; its first MLP is dense."""
    tiny_only("ling-2.5", scale)
    weights = Weights(seed)
    weights.embedding("model.word_embeddings.weight", HIDDEN, std=1.5)
    weights.head("lm_head.weight", HIDDEN)
    _layers(weights, _lightning_attention, _latent_attention)
    return Model(LIGHTNING, weights)


def ling_3(seed: int, scale: Scale) -> Model:
    """A Ling 3 model with tied embeddings, KDA with bounded decays, and gated latent attention;
    its first MLP is dense.
    """
    tiny_only("ling-3", scale)
    weights = Weights(seed)
    weights.head("model.word_embeddings.weight", HIDDEN)
    _layers(weights, _kimi_delta_attention, _gated_latent_attention)
    return Model(DELTA, weights)


def _layers(
    weights: Weights,
    recurrent: Callable[[Weights, str], None],
    attention: Callable[[Weights, str], None],
) -> None:
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        weights.ones(f"{layer}.input_layernorm.weight", HIDDEN)
        mixer = recurrent if (index + 1) % GROUP else attention
        mixer(weights, f"{layer}.attention")
        weights.ones(f"{layer}.post_attention_layernorm.weight", HIDDEN)
        if index == 0:
            weights.gated_mlp(f"{layer}.mlp", HIDDEN, MLP, gain=1.0)
        else:
            weights.experts(f"{layer}.mlp", HIDDEN, EXPERT, EXPERTS, bias="expert_bias")
    weights.ones("model.norm.weight", HIDDEN)


def _lightning_attention(weights: Weights, prefix: str) -> None:
    inner = HEADS * LINEAR_HEAD_DIM
    weights.linear(f"{prefix}.query_key_value.weight", 3 * inner, HIDDEN)
    for part in ("query", "key"):
        weights.ones(f"{prefix}.{part}_layernorm.weight", LINEAR_HEAD_DIM)
    weights.linear(f"{prefix}.g_proj.weight", inner, HIDDEN)
    weights.ones(f"{prefix}.g_norm.weight", inner)
    weights.linear(f"{prefix}.dense.weight", HIDDEN, inner, gain=2.0)


def _kimi_delta_attention(weights: Weights, prefix: str) -> None:
    inner = HEADS * DELTA_HEAD_DIM
    for part in "qkv":
        weights.linear(f"{prefix}.{part}_proj.weight", inner, HIDDEN)
        weights.conv(f"{prefix}.{part}_conv1d.weight", inner, TAPS)
    weights.linear(f"{prefix}.b_proj.weight", HEADS, HIDDEN, gain=0.7)
    for gate in "fg":  # of the decay, and of the output
        weights.linear(f"{prefix}.{gate}_proj.weight", inner, HIDDEN, gain=0.7)
    weights.decay_rates(f"{prefix}.A_log", HEADS)
    weights.time_steps(f"{prefix}.dt_bias", inner)
    weights.ones(f"{prefix}.o_norm.weight", DELTA_HEAD_DIM)
    weights.linear(f"{prefix}.o_proj.weight", HIDDEN, inner, gain=1.2)


def _latent_attention(weights: Weights, prefix: str) -> None:
    weights.linear(f"{prefix}.q_proj.weight", HEADS * (KEY_DIM + TURNED_KEY_DIM), HIDDEN, gain=1.5)
    _keys_and_values(weights, prefix)
    weights.linear(f"{prefix}.dense.weight", HIDDEN, HEADS * VALUE_DIM, gain=1.5)


def _gated_latent_attention(weights: Weights, prefix: str) -> None:
    weights.linear(f"{prefix}.q_a_proj.weight", QUERY_LATENT, HIDDEN)
    weights.ones(f"{prefix}.q_a_layernorm.weight", QUERY_LATENT)
    queries = HEADS * (KEY_DIM + TURNED_KEY_DIM)
    weights.linear(f"{prefix}.q_b_proj.weight", queries, QUERY_LATENT, gain=1.5)
    _keys_and_values(weights, prefix)
    weights.linear(f"{prefix}.g_proj.weight", HEADS, HIDDEN)
    weights.linear(f"{prefix}.dense.weight", HIDDEN, HEADS * VALUE_DIM, gain=2.5)


def _keys_and_values(weights: Weights, prefix: str) -> None:
    weights.linear(f"{prefix}.kv_a_proj_with_mqa.weight", LATENT + TURNED_KEY_DIM, HIDDEN)
    weights.ones(f"{prefix}.kv_a_layernorm.weight", LATENT)
    weights.linear(f"{prefix}.kv_b_proj.weight", HEADS * (KEY_DIM + VALUE_DIM), LATENT, gain=1.5)
