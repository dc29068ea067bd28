"""Granite 4 hybrid (``granitemoehybrid``) in its dense form, with tied embeddings."""

from __future__ import annotations

from sglang_hybrid.extensions.cpu.models.architectures.base import (
    BASE_CONFIG,
    Model,
    Scale,
    tiny_only,
)
from sglang_hybrid.extensions.cpu.models.weights import AttentionShape, Mamba2Shape, Weights

LAYER_TYPES = ["mamba", "mamba", "attention", "mamba", "mamba", "attention"]
HIDDEN = 128
MLP = 384
# One group: transformers normalises over all channels, SGLang within each group.
MAMBA = Mamba2Shape(hidden=HIDDEN, heads=8, head_dim=32, groups=1, state=64)
ATTENTION = AttentionShape(heads=4, kv_heads=2, head_dim=32)
LOGITS_SCALING = 0.5

CONFIG = BASE_CONFIG | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "layer_types": LAYER_TYPES,
    "num_hidden_layers": len(LAYER_TYPES),
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "shared_intermediate_size": MLP,
    # Dense, like the small Granite 4 models: the "shared" MLP is the only one.
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "hidden_act": "silu",
    "num_attention_heads": ATTENTION.heads,
    "num_key_value_heads": ATTENTION.kv_heads,
    "attention_bias": False,
    "position_embedding_type": "nope",
    "mamba_n_heads": MAMBA.heads,
    "mamba_d_head": MAMBA.head_dim,
    "mamba_n_groups": MAMBA.groups,
    "mamba_d_state": MAMBA.state,
    "mamba_d_conv": MAMBA.conv_kernel,
    "mamba_expand": MAMBA.inner // HIDDEN,
    "mamba_chunk_size": 64,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": [0.0, 1e9],
    # Multipliers other than one, so that a server that forgets one is noticed.
    "embedding_multiplier": 0.5,
    "logits_scaling": LOGITS_SCALING,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def granite_hybrid(seed: int, scale: Scale) -> Model:
    """A dense Granite 4 hybrid model."""
    tiny_only("granite-hybrid", scale)
    weights = Weights(seed)
    weights.head("model.embed_tokens.weight", HIDDEN, scale=1.0 / LOGITS_SCALING)
    for index, kind in enumerate(LAYER_TYPES):
        layer = f"model.layers.{index}"
        weights.ones(f"{layer}.input_layernorm.weight", HIDDEN)
        if kind == "mamba":
            weights.mamba2(f"{layer}.mamba", MAMBA, gain=5.0)
        else:
            weights.attention(f"{layer}.self_attn", HIDDEN, ATTENTION, gain=3.0)
        weights.ones(f"{layer}.post_attention_layernorm.weight", HIDDEN)
        mlp = f"{layer}.shared_mlp"
        weights.linear(f"{mlp}.input_linear.weight", 2 * MLP, HIDDEN)
        weights.linear(f"{mlp}.output_linear.weight", HIDDEN, MLP, gain=4.0)
    weights.ones("model.norm.weight", HIDDEN)
    return Model(CONFIG, weights)
