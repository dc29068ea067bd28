"""MiniCPM-SALA: lightning attention, and attention without positions every third layer."""

from __future__ import annotations

from sglang_hybrid.extensions.cpu.models.architectures.base import (
    BASE_CONFIG,
    Model,
    Scale,
    tiny_only,
)
from sglang_hybrid.extensions.cpu.models.weights import AttentionShape, Weights

GROUP = ("minicpm4", "lightning-attn", "lightning-attn")
LAYERS = 2 * len(GROUP)
HIDDEN = 128
MLP = 384
HEADS = 4
HEAD_DIM = 128
"""The least that SGLang's Triton kernel for lightning attention decodes with."""
ATTENTION = AttentionShape(heads=HEADS, kv_heads=2, head_dim=HEAD_DIM)
EMBEDDING_SCALE = 12
LOGIT_SCALE = 0.25

CONFIG = BASE_CONFIG | {
    "architectures": ["MiniCPMSALAForCausalLM"],
    "model_type": "minicpm_sala",
    "num_hidden_layers": LAYERS,
    "mixer_types": [*GROUP, *GROUP],
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "hidden_act": "silu",
    "num_attention_heads": ATTENTION.heads,
    "num_key_value_heads": ATTENTION.kv_heads,
    "head_dim": HEAD_DIM,
    "attn_use_rope": False,
    "attn_use_output_gate": True,
    "lightning_nh": HEADS,
    "lightning_nkv": HEADS,
    "lightning_head_dim": HEAD_DIM,
    "lightning_scale": "1/sqrt(d)",
    "lightning_use_rope": True,
    "qk_norm": True,
    "use_output_norm": True,
    "use_output_gate": True,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "scale_emb": EMBEDDING_SCALE,
    "scale_depth": 1.4,
    "dim_model_base": int(HIDDEN * LOGIT_SCALE),
    "tie_word_embeddings": False,
}
"""The config, without a ``sparse_config``, so that attention is dense."""


def minicpm_sala(seed: int, scale: Scale) -> Model:
    """A MiniCPM-SALA model with untied embeddings and dense attention."""
    tiny_only("minicpm-sala", scale)
    weights = Weights(seed)
    weights.embedding("model.embed_tokens.weight", HIDDEN, std=1.5 / EMBEDDING_SCALE)
    for index, kind in enumerate(CONFIG["mixer_types"]):
        layer = f"model.layers.{index}"
        weights.ones(f"{layer}.input_layernorm.weight", HIDDEN)
        mixer = _attention if kind == "minicpm4" else _lightning_attention
        mixer(weights, f"{layer}.self_attn")
        weights.ones(f"{layer}.post_attention_layernorm.weight", HIDDEN)
        weights.gated_mlp(f"{layer}.mlp", HIDDEN, MLP, gain=2.0)
    weights.ones("model.norm.weight", HIDDEN)
    weights.head("lm_head.weight", HIDDEN, scale=LOGIT_SCALE)
    return Model(CONFIG, weights)


def _attention(weights: Weights, prefix: str) -> None:
    weights.attention(prefix, HIDDEN, ATTENTION, gain=4.0)
    weights.linear(f"{prefix}.o_gate.weight", HEADS * HEAD_DIM, HIDDEN)


def _lightning_attention(weights: Weights, prefix: str) -> None:
    inner = HEADS * HEAD_DIM
    for part in "qkvz":  # z is the output gate
        weights.linear(f"{prefix}.{part}_proj.weight", inner, HIDDEN)
    for part in "qk":
        weights.ones(f"{prefix}.{part}_norm.weight", HEAD_DIM)
    weights.ones(f"{prefix}.o_norm.weight", inner)
    weights.linear(f"{prefix}.o_proj.weight", HIDDEN, inner, gain=4.0)
