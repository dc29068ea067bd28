"""A plain Llama transformer with tied embeddings: the control without recurrent states."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hybrid.extensions.cpu.models.architectures.base import (
    BASE_CONFIG,
    Model,
    Scale,
    tiny_only,
)
from sglang_hybrid.extensions.cpu.models.weights import AttentionShape, Weights


@dataclass(frozen=True)
class _TransformerSizes:
    layers: int
    hidden: int
    mlp: int
    attention: AttentionShape


SIZES: dict[Scale, _TransformerSizes] = {
    "tiny": _TransformerSizes(4, 128, 384, AttentionShape(heads=4, kv_heads=2, head_dim=32)),
    "100m": _TransformerSizes(12, 768, 2048, AttentionShape(heads=12, kv_heads=4, head_dim=64)),
}


def transformer(seed: int, scale: Scale) -> Model:
    """A Llama model."""
    if scale not in SIZES:
        tiny_only("transformer", scale)
    sizes = SIZES[scale]
    weights = Weights(seed)
    weights.head("model.embed_tokens.weight", sizes.hidden)
    for index in range(sizes.layers):
        layer = f"model.layers.{index}"
        weights.ones(f"{layer}.input_layernorm.weight", sizes.hidden)
        weights.attention(f"{layer}.self_attn", sizes.hidden, sizes.attention, gain=3.0)
        weights.ones(f"{layer}.post_attention_layernorm.weight", sizes.hidden)
        weights.gated_mlp(f"{layer}.mlp", sizes.hidden, sizes.mlp, gain=3.0)
    weights.ones("model.norm.weight", sizes.hidden)
    return Model(_config(sizes), weights)


def _config(sizes: _TransformerSizes) -> dict[str, object]:
    return BASE_CONFIG | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.mlp,
        "hidden_act": "silu",
        "num_attention_heads": sizes.attention.heads,
        "num_key_value_heads": sizes.attention.kv_heads,
        "head_dim": sizes.attention.head_dim,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
