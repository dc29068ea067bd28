"""Falcon-H1: every layer runs Mamba-2 and attention side by side, then a gated MLP."""

from __future__ import annotations

from sglang_hybrid.extensions.cpu.models.architectures.base import (
    BASE_CONFIG,
    Model,
    Scale,
    tiny_only,
)
from sglang_hybrid.extensions.cpu.models.weights import AttentionShape, Mamba2Shape, Weights

LAYERS = 4
HIDDEN = 128
MLP = 384
MAMBA = Mamba2Shape(hidden=HIDDEN, heads=8, head_dim=32, groups=2, state=64)
ATTENTION = AttentionShape(heads=4, kv_heads=2, head_dim=32)
LM_HEAD_MULTIPLIER = 0.125

CONFIG = BASE_CONFIG | {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "hidden_act": "silu",
    "num_attention_heads": ATTENTION.heads,
    "num_key_value_heads": ATTENTION.kv_heads,
    "head_dim": ATTENTION.head_dim,
    "rope_theta": 10000.0,
    "mamba_d_ssm": MAMBA.inner,
    "mamba_n_heads": MAMBA.heads,
    "mamba_d_head": MAMBA.head_dim,
    "mamba_n_groups": MAMBA.groups,
    "mamba_d_state": MAMBA.state,
    "mamba_d_conv": MAMBA.conv_kernel,
    "mamba_expand": MAMBA.inner // HIDDEN,
    "mamba_chunk_size": 64,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    # As released. With a norm, SGLang knows only "gate, then norm".
    "mamba_rms_norm": False,
    "mamba_norm_before_gate": False,
    "projectors_bias": False,
    "time_step_limit": [0.0, 1e9],
    # Multipliers other than one, so that a server that forgets one is noticed.
    "embedding_multiplier": 4.0,
    "lm_head_multiplier": LM_HEAD_MULTIPLIER,
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.9, 0.8, 1.1, 0.9, 0.7],
    "mlp_multipliers": [0.9, 0.6],
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def falcon_h1(seed: int, scale: Scale) -> Model:
    """A Falcon-H1 model with untied embeddings."""
    tiny_only("falcon-h1", scale)
    weights = Weights(seed)
    weights.embedding("model.embed_tokens.weight", HIDDEN, std=0.2)
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        weights.ones(f"{layer}.input_layernorm.weight", HIDDEN)
        weights.mamba2(f"{layer}.mamba", MAMBA, gain=3.0, norm=False)
        weights.attention(f"{layer}.self_attn", HIDDEN, ATTENTION, gain=1.5)
        weights.ones(f"{layer}.pre_ff_layernorm.weight", HIDDEN)
        weights.gated_mlp(f"{layer}.feed_forward", HIDDEN, MLP, gain=2.0)
    weights.ones("model.final_layernorm.weight", HIDDEN)
    weights.head("lm_head.weight", HIDDEN, scale=LM_HEAD_MULTIPLIER)
    return Model(CONFIG, weights)
