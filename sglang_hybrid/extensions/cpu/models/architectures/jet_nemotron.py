"""Jet-Nemotron: delta nets whose values pass a convolution with a kernel that is made of each token
(JetBlock), beside attention to all tokens and to a sliding window.
"""

from __future__ import annotations

from sglang_hybrid.extensions.cpu.models.architectures.base import (
    BASE_CONFIG,
    Model,
    Scale,
    tiny_only,
)
from sglang_hybrid.extensions.cpu.models.weights import AttentionShape, Weights

LAYER_TYPES = ["jet", "jet", "attn", "jet", "swa", "jet"]
HIDDEN = 128
MLP = 256
ATTENTION = AttentionShape(heads=4, kv_heads=2, head_dim=32)
WINDOW = 100
HEADS = 4
KEY_DIM, VALUE_DIM = 24, 64
TAPS = 4
REDUCTION = 8
"""Values of all heads for each number between the two matrices that make a kernel."""

CONFIG = BASE_CONFIG | {
    "architectures": ["JetNemotronForCausalLM"],
    "model_type": "jet_nemotron",
    "num_hidden_layers": len(LAYER_TYPES),
    "layer_types": LAYER_TYPES,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "hidden_act": "silu",
    "num_attention_heads": ATTENTION.heads,
    "num_key_value_heads": ATTENTION.kv_heads,
    "efficient_attention_config": {
        "swa": {"window_size": WINDOW},
        "jet": {
            "mode": "chunk",
            "expand_v": 2.6666666667,  # as released, where 96 becomes 256
            "num_heads": HEADS,
            "head_dim": KEY_DIM,
            "norm_eps": "1e-5",
            "conv_size": TAPS,
            "dconv_generator_reduction": REDUCTION,
            "dconv_implementation": "triton",
        },
    },
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def jet_nemotron(seed: int, scale: Scale) -> Model:
    """A Jet-Nemotron model with tied embeddings."""
    tiny_only("jet-nemotron", scale)
    weights = Weights(seed)
    weights.head("model.embed_tokens.weight", HIDDEN)
    for index, kind in enumerate(LAYER_TYPES):
        layer = f"model.layers.{index}"
        weights.ones(f"{layer}.input_layernorm.weight", HIDDEN)
        if kind == "jet":
            _jet_block(weights, f"{layer}.self_attn")
        else:
            _attention(weights, f"{layer}.self_attn")
        weights.ones(f"{layer}.post_attention_layernorm.weight", HIDDEN)
        weights.gated_mlp(f"{layer}.mlp", HIDDEN, MLP, gain=1.0)
    weights.ones("model.norm.weight", HIDDEN)
    return Model(CONFIG, weights)


def _attention(weights: Weights, prefix: str) -> None:
    weights.attention(prefix, HIDDEN, ATTENTION, gain=1.5)
    for part, heads in (
        ("q", ATTENTION.heads),
        ("k", ATTENTION.kv_heads),
        ("v", ATTENTION.kv_heads),
    ):
        weights.normal(f"{prefix}.{part}_proj.bias", heads * ATTENTION.head_dim, std=0.1)


def _jet_block(weights: Weights, prefix: str) -> None:
    keys, values = HEADS * KEY_DIM, HEADS * VALUE_DIM
    for part, rows in (("q", keys), ("k", keys), ("v", values), ("g", values)):
        weights.linear(f"{prefix}.{part}_proj.weight", rows, HIDDEN)
    for part in "ab":  # of the decay, and of the strength of writing
        weights.linear(f"{prefix}.{part}_proj.weight", HEADS, HIDDEN, gain=0.7)
    generator = f"{prefix}.dynamic_conv1d.kernel_generator"
    inner, taps = values // REDUCTION, values * TAPS
    weights.linear(f"{generator}.w1.weight", inner, HIDDEN, gain=2.0)
    weights.linear(f"{generator}.w2.weight", taps, inner, gain=0.4)
    weights.normal(f"{generator}.w2.bias", taps, std=1.0 / TAPS**0.5)
    weights.decay_rates(f"{prefix}.A_log", HEADS)
    weights.time_steps(f"{prefix}.dt_bias", HEADS)
    weights.ones(f"{prefix}.o_norm.weight", VALUE_DIM)
    weights.linear(f"{prefix}.o_proj.weight", HIDDEN, values, gain=1.2)
