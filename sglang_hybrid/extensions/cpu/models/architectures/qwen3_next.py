"""Qwen3-Next: gated delta nets, gated attention every third layer, and a mixture of experts."""

from __future__ import annotations

from sglang_hybrid.extensions.cpu.models.architectures.base import (
    BASE_CONFIG,
    Model,
    Scale,
    tiny_only,
)
from sglang_hybrid.extensions.cpu.models.weights import AttentionShape, DeltaNetShape, Weights

LAYERS = 6
ATTENTION_INTERVAL = 3
HIDDEN = 128
ATTENTION = AttentionShape(heads=4, kv_heads=2, head_dim=32)
DELTA_NET = DeltaNetShape(key_heads=2, value_heads=6, head_dim=32, taps=4)
"""Three value heads to a key head: SGLang then splits the projections with plain torch; for one,
two and four it has a Triton kernel only.
"""
EXPERTS = 4
ACTIVE_EXPERTS = 2
EXPERT = 128

CONFIG = BASE_CONFIG | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": LAYERS,
    # SGLang knows only the interval, so the list of layer types is left out.
    "full_attention_interval": ATTENTION_INTERVAL,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * EXPERT,
    "hidden_act": "silu",
    "num_attention_heads": ATTENTION.heads,
    "num_key_value_heads": ATTENTION.kv_heads,
    "head_dim": ATTENTION.head_dim,
    "attention_bias": False,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": DELTA_NET.key_heads,
    "linear_num_value_heads": DELTA_NET.value_heads,
    "linear_key_head_dim": DELTA_NET.head_dim,
    "linear_value_head_dim": DELTA_NET.head_dim,
    "linear_conv_kernel_dim": DELTA_NET.taps,
    # SGLang has no dense form of this architecture.
    "num_experts": EXPERTS,
    "num_experts_per_tok": ACTIVE_EXPERTS,
    "moe_intermediate_size": EXPERT,
    "shared_expert_intermediate_size": EXPERT,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

LARGE = CONFIG | {
    "num_hidden_layers": 12,
    "full_attention_interval": 4,
    "hidden_size": 768,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
"""100 M parameters."""


def qwen3_next(seed: int, scale: Scale) -> Model:
    """A Qwen3-Next model with untied embeddings; the scale "100m" has no weights."""
    if scale == "100m":
        return Model(LARGE, None)
    tiny_only("qwen3-next", scale)
    weights = Weights(seed)
    # A delta net normalises what it recalls, so its state is loud anyway; a large embedding keeps
    # rounding errors from growing through the layers.
    weights.embedding("model.embed_tokens.weight", HIDDEN, std=1.5)
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        weights.zeros(f"{layer}.input_layernorm.weight", HIDDEN)
        if (index + 1) % ATTENTION_INTERVAL == 0:
            weights.gated_attention(f"{layer}.self_attn", HIDDEN, ATTENTION, gain=1.5)
        else:
            weights.delta_net(f"{layer}.linear_attn", HIDDEN, DELTA_NET)
        weights.zeros(f"{layer}.post_attention_layernorm.weight", HIDDEN)
        experts(weights, f"{layer}.mlp")
    weights.zeros("model.norm.weight", HIDDEN)
    weights.head("lm_head.weight", HIDDEN)
    return Model(CONFIG, weights)


def experts(weights: Weights, prefix: str) -> None:
    """A router, its experts, and one that all tokens share, with a gate."""
    weights.linear(f"{prefix}.gate.weight", EXPERTS, HIDDEN, gain=1.5)
    for expert in range(EXPERTS):
        weights.gated_mlp(f"{prefix}.experts.{expert}", HIDDEN, EXPERT, gain=1.0)
    weights.gated_mlp(f"{prefix}.shared_expert", HIDDEN, EXPERT, gain=1.0)
    weights.linear(f"{prefix}.shared_expert_gate.weight", 1, HIDDEN)
