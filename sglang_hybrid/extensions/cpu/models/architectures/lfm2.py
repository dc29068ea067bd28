"""LFM2: short convolutions with two gates, attention in some layers, and dense MLPs or experts."""

from __future__ import annotations

from sglang_hybrid.extensions.cpu.models.architectures.base import (
    BASE_CONFIG,
    Model,
    Scale,
    tiny_only,
)
from sglang_hybrid.extensions.cpu.models.weights import AttentionShape, Weights

LAYERS = ("conv", "conv", "full_attention", "conv", "full_attention", "conv")
HIDDEN = 128
INNER = 256
ATTENTION = AttentionShape(heads=4, kv_heads=2, head_dim=32)
TAPS = 3
DENSE = 2
"""Layers of LFM2-MoE with a dense MLP, which come first."""
EXPERTS = 4
ACTIVE_EXPERTS = 2
EXPERT = 128

CONFIG = BASE_CONFIG | {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "num_hidden_layers": len(LAYERS),
    "layer_types": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "block_auto_adjust_ff_dim": False,
    "num_attention_heads": ATTENTION.heads,
    "num_key_value_heads": ATTENTION.kv_heads,
    "rope_theta": 10000.0,
    "conv_L_cache": TAPS,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
EXPERTS_CONFIG = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "num_dense_layers": DENSE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": ACTIVE_EXPERTS,
    "moe_intermediate_size": EXPERT,
    "use_expert_bias": True,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}


def lfm2(seed: int, scale: Scale) -> Model:
    """An LFM2 model with untied embeddings."""
    tiny_only("lfm2", scale)
    return Model(CONFIG, _weights(seed, dense=len(LAYERS)))


def lfm2_moe(seed: int, scale: Scale) -> Model:
    """An LFM2-MoE model with untied embeddings."""
    tiny_only("lfm2-moe", scale)
    return Model(CONFIG | EXPERTS_CONFIG, _weights(seed, dense=DENSE))


def _weights(seed: int, dense: int) -> Weights:
    weights = Weights(seed)
    weights.embedding("model.embed_tokens.weight", HIDDEN)
    for index, kind in enumerate(LAYERS):
        layer = f"model.layers.{index}"
        weights.ones(f"{layer}.operator_norm.weight", HIDDEN)
        if kind == "conv":
            _short_conv(weights, f"{layer}.conv")
        else:
            _attention(weights, f"{layer}.self_attn")
        weights.ones(f"{layer}.ffn_norm.weight", HIDDEN)
        if index < dense:
            _mlp(weights, f"{layer}.feed_forward", INNER)
        else:
            _experts(weights, f"{layer}.feed_forward")
    weights.ones("model.embedding_norm.weight", HIDDEN)
    weights.head("lm_head.weight", HIDDEN)
    return weights


def _short_conv(weights: Weights, prefix: str) -> None:
    weights.linear(f"{prefix}.in_proj.weight", 3 * HIDDEN, HIDDEN)
    weights.conv(f"{prefix}.conv.weight", HIDDEN, TAPS)
    weights.linear(f"{prefix}.out_proj.weight", HIDDEN, HIDDEN, gain=1.5)


def _attention(weights: Weights, prefix: str) -> None:
    weights.attention(prefix, HIDDEN, ATTENTION, gain=1.5, output="out_proj")
    for norm in ("q_layernorm", "k_layernorm"):
        weights.ones(f"{prefix}.{norm}.weight", ATTENTION.head_dim)


def _mlp(weights: Weights, prefix: str, inner: int) -> None:
    weights.linear(f"{prefix}.w1.weight", inner, HIDDEN)
    weights.linear(f"{prefix}.w3.weight", inner, HIDDEN)
    weights.linear(f"{prefix}.w2.weight", HIDDEN, inner)


def _experts(weights: Weights, prefix: str) -> None:
    weights.linear(f"{prefix}.gate.weight", EXPERTS, HIDDEN, gain=1.5)
    weights.normal(f"{prefix}.expert_bias", EXPERTS, std=0.1)
    for expert in range(EXPERTS):
        _mlp(weights, f"{prefix}.experts.{expert}", EXPERT)
