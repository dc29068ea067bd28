"""Falcon-Mamba: Mamba-1 without attention, with normalised B, C and time steps."""

from __future__ import annotations

import numpy as np

from sglang_hybrid.extensions.cpu.models.architectures.base import (
    BASE_CONFIG,
    Model,
    Scale,
    tiny_only,
)
from sglang_hybrid.extensions.cpu.models.weights import Weights

LAYERS = 4
HIDDEN = 128
INNER = 256
STATE = 16
RANK = 8
TAPS = 4

CONFIG = BASE_CONFIG | {
    "architectures": ["FalconMambaForCausalLM"],
    "model_type": "falcon_mamba",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "expand": INNER // HIDDEN,
    "state_size": STATE,
    "time_step_rank": RANK,
    "conv_kernel": TAPS,
    "hidden_act": "silu",
    "use_bias": False,
    "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5,
    "mixer_rms_eps": 1e-6,
    "residual_in_fp32": True,
    "tie_word_embeddings": False,
}


def falcon_mamba(seed: int, scale: Scale) -> Model:
    """A Falcon-Mamba model with untied embeddings."""
    tiny_only("falcon-mamba", scale)
    weights = Weights(seed)
    weights.embedding("backbone.embeddings.weight", HIDDEN)
    for index in range(LAYERS):
        layer = f"backbone.layers.{index}"
        weights.ones(f"{layer}.norm.weight", HIDDEN)
        _mixer(weights, f"{layer}.mixer")
    weights.ones("backbone.norm_f.weight", HIDDEN)
    weights.head("lm_head.weight", HIDDEN)
    return Model(CONFIG, weights)


def _mixer(weights: Weights, prefix: str) -> None:
    weights.linear(f"{prefix}.in_proj.weight", 2 * INNER, HIDDEN)
    weights.conv(f"{prefix}.conv1d.weight", INNER, TAPS)
    weights.normal(f"{prefix}.conv1d.bias", INNER, std=0.1)
    weights.linear(f"{prefix}.x_proj.weight", RANK + 2 * STATE, INNER)
    weights.linear(f"{prefix}.dt_proj.weight", INNER, RANK, gain=0.6)
    weights.time_steps(f"{prefix}.dt_proj.bias", INNER)
    rates = np.log(np.arange(1, STATE + 1))
    weights.put(f"{prefix}.A_log", np.tile(rates, (INNER, 1)))
    # Below the usual one, so that what the state recalls outweighs the skip path.
    weights.put(f"{prefix}.D", np.full(INNER, 0.3))
    weights.linear(f"{prefix}.out_proj.weight", HIDDEN, INNER, gain=4.0)
