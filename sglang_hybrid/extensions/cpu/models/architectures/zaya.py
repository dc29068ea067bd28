"""ZAYA1: attention whose queries and keys go through two short convolutions (compressed
convolutional attention), and experts that a small MLP chooses.
"""

from __future__ import annotations

import numpy as np

from sglang_hybrid.extensions.cpu.models.architectures.base import (
    BASE_CONFIG,
    Model,
    Scale,
    tiny_only,
)
from sglang_hybrid.extensions.cpu.models.weights import AttentionShape, Weights

BLOCKS = 4
"""Blocks of an attention layer and a layer of experts each."""
HIDDEN = 128
ATTENTION = AttentionShape(heads=4, kv_heads=2, head_dim=32)
TAPS = (2, 2)
"""Taps of the depthwise convolution and of the one inside each head."""
ROUTER = 64
EXPERTS = 4
EXPERT = 128
ROPE_THETA = 10000.0

SGLANGS_CONFIG = {
    "zaya_layers": ["a", EXPERTS] * BLOCKS,
    "num_query_groups": ATTENTION.kv_heads,
    "ffn_hidden_size": 2 * EXPERT,
    "zaya_mlp_expansion": ROUTER,
    "moe_router_topk": 1,
    "norm_epsilon": 1e-5,
    "rope_theta": ROPE_THETA,
    "partial_rotary_factor": 0.5,
}
"""The config that SGLang reads, as ZAYA1-base was released. It counts attention and experts as two
layers.
"""

CONFIG = (
    BASE_CONFIG
    | SGLANGS_CONFIG
    | {
        "architectures": ["ZayaForCausalLM"],
        "model_type": "zaya",
        "num_hidden_layers": BLOCKS,
        "hidden_size": HIDDEN,
        "num_attention_heads": ATTENTION.heads,
        "num_key_value_heads": ATTENTION.kv_heads,
        "head_dim": ATTENTION.head_dim,
        "cca_time0": TAPS[0],
        "cca_time1": TAPS[1],
        "num_experts": EXPERTS,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": EXPERT,
        "router_hidden_size": ROUTER,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "hybrid": {
                "rope_type": "default",
                "rope_theta": ROPE_THETA,
                "partial_rotary_factor": 0.5,
            }
        },
        "tie_word_embeddings": False,
    }
)
"""Both what transformers reads, as ZAYA1-8B was released, and what SGLang reads."""


def zaya(seed: int, scale: Scale) -> Model:
    """A ZAYA1 model with untied embeddings. Tensors have the names that SGLang reads.

    No token takes the skip expert: its bias is -1 and no other is negative. SGLang would add
    that token's hidden state, and transformers 5.19 nothing.
    """
    tiny_only("zaya", scale)
    weights = Weights(seed)
    weights.embedding("model.embed_tokens.weight", HIDDEN)
    for block in range(BLOCKS):
        layer = f"model.layers.{2 * block}"
        _residual_scale(weights, f"{layer}.res_scale", has_residual=block > 0)
        weights.ones(f"{layer}.input_norm.weight", HIDDEN)
        _attention(weights, f"{layer}.self_attn")
        layer = f"model.layers.{2 * block + 1}"
        _residual_scale(weights, f"{layer}.res_scale")
        weights.ones(f"{layer}.input_norm.weight", HIDDEN)
        _router(weights, f"{layer}.zaya_block.router", has_earlier=block > 0)
        for expert in range(EXPERTS):
            prefix = f"{layer}.zaya_block.experts.local_experts.{expert}"
            weights.linear(f"{prefix}.linear_fc1.weight", 2 * EXPERT, HIDDEN)  # gate, then up
            weights.linear(f"{prefix}.linear_fc2.weight", HIDDEN, EXPERT, gain=1.5)
    _residual_scale(weights, "model.res_scale")
    weights.ones("model.final_norm.weight", HIDDEN)
    weights.head("lm_head.weight", HIDDEN)
    return Model(CONFIG, weights)


def _residual_scale(weights: Weights, prefix: str, has_residual: bool = True) -> None:
    """Scales and biases of what a layer adds and, if it `has_residual`, of what it is added to."""
    for stream in ("hidden_states", "residual") if has_residual else ("hidden_states",):
        scale = f"{prefix}.{stream}_scale"
        weights.put(scale, 1.0 + weights.normal(scale, HIDDEN, std=0.1))
        weights.normal(f"{prefix}.{stream}_bias", HIDDEN, std=0.02)


def _attention(weights: Weights, prefix: str) -> None:
    queries = ATTENTION.heads * ATTENTION.head_dim
    keys = ATTENTION.kv_heads * ATTENTION.head_dim
    weights.linear(f"{prefix}.qkv.linear_q.weight", queries, HIDDEN)
    weights.linear(f"{prefix}.qkv.linear_k.weight", keys, HIDDEN)
    for part in ("val_proj1", "val_proj2"):  # of this token, and of the one before it
        weights.linear(f"{prefix}.qkv.{part}.weight", keys // 2, HIDDEN)
    channels = queries + keys
    weights.conv(f"{prefix}.qkv.conv_qk.0.weight", channels, TAPS[0])
    inputs = ATTENTION.head_dim * TAPS[1]
    within_heads = (channels, ATTENTION.head_dim, TAPS[1])
    weights.normal(f"{prefix}.qkv.conv_qk.1.weight", *within_heads, std=2.0 / inputs**0.5)
    for stage in (0, 1):
        weights.normal(f"{prefix}.qkv.conv_qk.{stage}.bias", channels, std=0.1)
    weights.put(f"{prefix}.qkv.temp", np.full(ATTENTION.kv_heads, 1.5))
    weights.linear(f"{prefix}.o_proj.weight", HIDDEN, queries, gain=2.0)


def _router(weights: Weights, prefix: str, has_earlier: bool) -> None:
    """has_earlier: whether it adds what an earlier block's router had."""
    weights.linear(f"{prefix}.down_proj.weight", ROUTER, HIDDEN)
    weights.normal(f"{prefix}.down_proj.bias", ROUTER, std=0.1)
    if has_earlier:
        weights.normal(f"{prefix}.router_states_scale", ROUTER, std=0.5)
    weights.ones(f"{prefix}.rmsnorm_eda.weight", ROUTER)
    for stage in (0, 2):
        weights.linear(f"{prefix}.router_mlp.{stage}.weight", ROUTER, ROUTER, gain=1.5)
        weights.normal(f"{prefix}.router_mlp.{stage}.bias", ROUTER, std=0.1)
    weights.linear(f"{prefix}.router_mlp.4.weight", EXPERTS + 1, ROUTER, gain=3.0)
    biases = f"{prefix}.balancing_biases"
    drawn = weights.normal(biases, EXPERTS, std=0.02)
    weights.put(biases, [*np.abs(drawn), -1.0])
