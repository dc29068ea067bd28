"""Qwen3.5's text model: gated delta nets, gated attention every third layer, and dense MLPs."""

from __future__ import annotations

from sglang_hybrid.models.architectures.base import BASE_CONFIG, Model, Scale, tiny_only
from sglang_hybrid.models.weights import AttentionShape, Weights

LAYER_TYPES = ["linear_attention", "linear_attention", "full_attention"] * 2
HIDDEN = 128
MLP = 384
ATTENTION = AttentionShape(heads=4, kv_heads=2, head_dim=32)
KEY_HEADS = 2
VALUE_HEADS = 4
LINEAR_HEAD_DIM = 32
TAPS = 4

CONFIG = BASE_CONFIG | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": len(LAYER_TYPES),
    "layer_types": LAYER_TYPES,
    "full_attention_interval": 3,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "hidden_act": "silu",
    "num_attention_heads": ATTENTION.heads,
    "num_key_value_heads": ATTENTION.kv_heads,
    "head_dim": ATTENTION.head_dim,
    "attention_bias": False,
    "attn_output_gate": True,
    # A text's three rows of positions are the same; released models name their sections all the
    # same. They share the 32 / 4 / 2 frequencies of a head.
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000.0,
        "rope_type": "default",
    },
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": LINEAR_HEAD_DIM,
    "linear_value_head_dim": LINEAR_HEAD_DIM,
    "linear_conv_kernel_dim": TAPS,
    "mamba_ssm_dtype": "float32",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def qwen3_5(seed: int, scale: Scale) -> Model:
    """A Qwen3.5 text model with untied embeddings."""
    tiny_only("qwen3.5", scale)
    weights = Weights(seed)
    # As in Qwen3-Next, a large embedding keeps rounding errors from growing through the layers.
    weights.embedding("model.embed_tokens.weight", HIDDEN, std=1.5)
    for index, kind in enumerate(LAYER_TYPES):
        layer = f"model.layers.{index}"
        weights.zeros(f"{layer}.input_layernorm.weight", HIDDEN)
        if kind == "full_attention":
            weights.gated_attention(f"{layer}.self_attn", HIDDEN, ATTENTION, gain=1.5)
        else:
            delta_net(weights, f"{layer}.linear_attn")
        weights.zeros(f"{layer}.post_attention_layernorm.weight", HIDDEN)
        weights.gated_mlp(f"{layer}.mlp", HIDDEN, MLP, gain=1.0)
    weights.zeros("model.norm.weight", HIDDEN)
    weights.head("lm_head.weight", HIDDEN)
    return Model(CONFIG, weights)


def delta_net(weights: Weights, prefix: str) -> None:
    """A gated delta net, whose projections, unlike Qwen3-Next's, are stored one by one."""
    keys, values = KEY_HEADS * LINEAR_HEAD_DIM, VALUE_HEADS * LINEAR_HEAD_DIM
    weights.linear(f"{prefix}.in_proj_qkv.weight", 2 * keys + values, HIDDEN)
    weights.linear(f"{prefix}.in_proj_z.weight", values, HIDDEN)
    for gate in "ba":
        weights.linear(f"{prefix}.in_proj_{gate}.weight", VALUE_HEADS, HIDDEN, gain=0.7)
    weights.conv(f"{prefix}.conv1d.weight", 2 * keys + values, TAPS)
    weights.decay_rates(f"{prefix}.A_log", VALUE_HEADS)
    weights.time_steps(f"{prefix}.dt_bias", VALUE_HEADS)
    weights.ones(f"{prefix}.norm.weight", LINEAR_HEAD_DIM)
    weights.linear(f"{prefix}.out_proj.weight", HIDDEN, values, gain=1.2)
