"""Ling 2.5: lightning attention, latent attention every third layer, and experts."""

from __future__ import annotations

from sglang_hybrid.models.architectures.base import (
    BASE_CONFIG,
    MAX_LENGTH,
    Model,
    Scale,
    tiny_only,
)
from sglang_hybrid.models.weights import Weights

LAYERS = 6
GROUP = 3
"""Layers of which the last has latent attention."""
HIDDEN = 128
MLP = 384
HEADS = 4
LINEAR_HEAD_DIM = 128
"""The least that SGLang's Triton kernel decodes with."""
KEY_DIM = 32
TURNED_KEY_DIM = 32
"""Of the part of a key that all heads share and that is turned by its position."""
VALUE_DIM = 32
LATENT = 256
"""With the shared part one of the two sizes that SGLang's Triton kernel decodes with."""
EXPERTS = 4
ACTIVE_EXPERTS = 2
EXPERT = 128

CONFIG = BASE_CONFIG | {
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "model_type": "bailing_hybrid",
    "max_position_embeddings": MAX_LENGTH,
    "num_hidden_layers": LAYERS,
    "layer_group_size": GROUP,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "hidden_act": "silu",
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": LINEAR_HEAD_DIM,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "use_qk_norm": True,
    "group_norm_size": HEADS,
    "q_lora_rank": None,
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
    "tie_word_embeddings": False,
}


def ling_2_5(seed: int, scale: Scale) -> Model:
    """A Ling 2.5 model with untied embeddings; its first MLP is dense."""
    tiny_only("ling-2.5", scale)
    weights = Weights(seed)
    weights.embedding("model.word_embeddings.weight", HIDDEN, std=1.5)
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        weights.ones(f"{layer}.input_layernorm.weight", HIDDEN)
        if (index + 1) % GROUP:
            _lightning_attention(weights, f"{layer}.attention")
        else:
            _latent_attention(weights, f"{layer}.attention")
        weights.ones(f"{layer}.post_attention_layernorm.weight", HIDDEN)
        if index == 0:
            weights.gated_mlp(f"{layer}.mlp", HIDDEN, MLP, gain=1.0)
        else:
            _experts(weights, f"{layer}.mlp")
    weights.ones("model.norm.weight", HIDDEN)
    weights.head("lm_head.weight", HIDDEN)
    return Model(CONFIG, weights)


def _lightning_attention(weights: Weights, prefix: str) -> None:
    inner = HEADS * LINEAR_HEAD_DIM
    weights.linear(f"{prefix}.query_key_value.weight", 3 * inner, HIDDEN)
    for part in ("query", "key"):
        weights.ones(f"{prefix}.{part}_layernorm.weight", LINEAR_HEAD_DIM)
    weights.linear(f"{prefix}.g_proj.weight", inner, HIDDEN)
    weights.ones(f"{prefix}.g_norm.weight", inner)
    weights.linear(f"{prefix}.dense.weight", HIDDEN, inner, gain=2.0)


def _latent_attention(weights: Weights, prefix: str) -> None:
    weights.linear(f"{prefix}.q_proj.weight", HEADS * (KEY_DIM + TURNED_KEY_DIM), HIDDEN, gain=1.5)
    weights.linear(f"{prefix}.kv_a_proj_with_mqa.weight", LATENT + TURNED_KEY_DIM, HIDDEN)
    weights.ones(f"{prefix}.kv_a_layernorm.weight", LATENT)
    weights.linear(f"{prefix}.kv_b_proj.weight", HEADS * (KEY_DIM + VALUE_DIM), LATENT, gain=1.5)
    weights.linear(f"{prefix}.dense.weight", HIDDEN, HEADS * VALUE_DIM, gain=1.5)


def _experts(weights: Weights, prefix: str) -> None:
    weights.linear(f"{prefix}.gate.weight", EXPERTS, HIDDEN, gain=1.5)
    weights.normal(f"{prefix}.gate.expert_bias", EXPERTS, std=0.05)
    for expert in range(EXPERTS):
        weights.gated_mlp(f"{prefix}.experts.{expert}", HIDDEN, EXPERT, gain=1.0)
    weights.gated_mlp(f"{prefix}.shared_experts", HIDDEN, EXPERT, gain=1.0)
