"""Mamba-2 without attention."""

from __future__ import annotations

from sglang_hybrid.extensions.cpu.models.architectures.base import (
    BASE_CONFIG,
    Model,
    Scale,
    tiny_only,
)
from sglang_hybrid.extensions.cpu.models.weights import Mamba2Shape, Weights

LAYERS = 6
# One group: transformers normalises over all channels, SGLang within each group.
MAMBA = Mamba2Shape(hidden=128, heads=8, head_dim=32, groups=1, state=64)

CONFIG = BASE_CONFIG | {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "num_hidden_layers": LAYERS,
    "hidden_size": MAMBA.hidden,
    "num_heads": MAMBA.heads,
    "head_dim": MAMBA.head_dim,
    "n_groups": MAMBA.groups,
    "state_size": MAMBA.state,
    "conv_kernel": MAMBA.conv_kernel,
    "expand": MAMBA.inner // MAMBA.hidden,
    "chunk_size": 64,
    "hidden_act": "silu",
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_limit": [0.0, 1e9],
    "layer_norm_epsilon": 1e-5,
    "residual_in_fp32": True,
    "tie_word_embeddings": False,
    # SGLang reads these two; transformers has no such fields and keeps them as extras.
    "intermediate_size": MAMBA.inner,
    "rms_norm": True,
}


def mamba2(seed: int, scale: Scale) -> Model:
    """A pure Mamba-2 model with untied embeddings."""
    tiny_only("mamba2", scale)
    weights = Weights(seed)
    weights.embedding("backbone.embeddings.weight", MAMBA.hidden)
    for index in range(LAYERS):
        layer = f"backbone.layers.{index}"
        weights.ones(f"{layer}.norm.weight", MAMBA.hidden)
        weights.mamba2(f"{layer}.mixer", MAMBA, gain=2.0)
    weights.ones("backbone.norm_f.weight", MAMBA.hidden)
    weights.head("lm_head.weight", MAMBA.hidden)
    return Model(CONFIG, weights)
