"""A plain Llama transformer with tied embeddings: the control without recurrent states."""

from __future__ import annotations

from sglang_hybrid.models.architectures.base import BASE_CONFIG, Model, Scale, tiny_only
from sglang_hybrid.models.weights import AttentionShape, Weights

LAYERS = 4
HIDDEN = 128
MLP = 384
ATTENTION = AttentionShape(heads=4, kv_heads=2, head_dim=32)

CONFIG = BASE_CONFIG | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "hidden_act": "silu",
    "num_attention_heads": ATTENTION.heads,
    "num_key_value_heads": ATTENTION.kv_heads,
    "head_dim": ATTENTION.head_dim,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def transformer(seed: int, scale: Scale) -> Model:
    """A Llama model."""
    tiny_only("transformer", scale)
    weights = Weights(seed)
    weights.head("model.embed_tokens.weight", HIDDEN)
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        weights.ones(f"{layer}.input_layernorm.weight", HIDDEN)
        weights.attention(f"{layer}.self_attn", HIDDEN, ATTENTION, gain=3.0)
        weights.ones(f"{layer}.post_attention_layernorm.weight", HIDDEN)
        weights.gated_mlp(f"{layer}.mlp", HIDDEN, MLP, gain=3.0)
    weights.ones("model.norm.weight", HIDDEN)
    return Model(CONFIG, weights)
