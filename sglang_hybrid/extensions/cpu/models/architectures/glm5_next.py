"""GLM-5-Next's text model: KDA with bounded decays, latent attention without positions every third
layer, and experts, on several residual streams (hyper-connections).
"""

from __future__ import annotations

from sglang_hybrid.extensions.cpu.models.architectures.base import (
    BASE_CONFIG,
    Model,
    Scale,
    tiny_only,
)
from sglang_hybrid.extensions.cpu.models.architectures.kimi_linear import (
    ACTIVE_EXPERTS,
    EXPERT,
    EXPERTS,
    HEADS,
    HIDDEN,
    LATENT,
    LINEAR_HEAD_DIM,
    LINEAR_HEADS,
    MLP,
    TAPS,
    VALUE_DIM,
    kimi_delta_attention,
)
from sglang_hybrid.extensions.cpu.models.weights import Weights

LAYER_TYPES = ["linear_attention", "linear_attention", "full_attention"] * 2
KEY_DIM = 64
QUERY_LATENT = 64
STREAMS = 4
LIMIT = 10.0
"""Limit of the factors of a SwiGLU layer, the only one for which SGLang has a kernel of experts."""
LOUD = 5.0
"""Size of what is limited, so that one value in twenty is."""

TEXT = BASE_CONFIG | {
    "model_type": "glm5_next_text",
    "num_hidden_layers": len(LAYER_TYPES),
    "layer_types": LAYER_TYPES,
    "mlp_layer_types": ["dense"] + ["sparse"] * (len(LAYER_TYPES) - 1),
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "hidden_act": "silu",
    "swiglu_limit": LIMIT,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": QUERY_LATENT,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": KEY_DIM,
    "qk_rope_head_dim": 0,
    "v_head_dim": VALUE_DIM,
    "linear_num_heads": LINEAR_HEADS,
    "linear_head_dim": LINEAR_HEAD_DIM,
    "linear_conv_kernel_dim": TAPS,
    "linear_lower_bound": -5.0,
    "moe_intermediate_size": EXPERT,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": ACTIVE_EXPERTS,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "mhc": True,
    "hc_mult": STREAMS,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

CONFIG = BASE_CONFIG | {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "model_type": "glm5_next",
    "language_model_only": True,
    "tie_word_embeddings": False,
    "text_config": TEXT,
    # SGLang makes a tower nevertheless. This one has no blocks and no weights, and reads nothing.
    "vision_config": {
        "model_type": "glm5_next_vision",
        "depth": 0,
        "hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 64,
        "projection_intermediate_size": 64,
        "out_hidden_size": HIDDEN,
        "swiglu_limit": LIMIT,
    },
}


def glm_5_next(seed: int, scale: Scale) -> Model:
    """A GLM-5-Next text model with untied embeddings, whose attention reads all tokens; its first
    MLP is dense.
    """
    tiny_only("glm-5-next", scale)
    weights = Weights(seed)
    text = "model.language_model"
    weights.embedding(f"{text}.embed_tokens.weight", HIDDEN, std=1.5)
    for index, kind in enumerate(LAYER_TYPES):
        layer = f"{text}.layers.{index}"
        weights.ones(f"{layer}.input_layernorm.weight", HIDDEN)
        if kind == "full_attention":
            _latent_attention(weights, f"{layer}.self_attn")
        else:
            kimi_delta_attention(weights, f"{layer}.self_attn")
            weights.decay_rates(f"{layer}.self_attn.A_log", LINEAR_HEADS)
        weights.ones(f"{layer}.post_attention_layernorm.weight", HIDDEN)
        if index == 0:
            weights.gated_mlp(f"{layer}.mlp", HIDDEN, MLP, gain=1.0)
        else:
            weights.experts(f"{layer}.mlp", HIDDEN, EXPERT, EXPERTS, "e_score_correction_bias")
        for place in ("attn", "ffn"):
            _streams(weights, f"{layer}.hc_{place}")
    _scale_to_limit(weights)
    weights.ones(f"{text}.norm.weight", HIDDEN)
    weights.head("lm_head.weight", HIDDEN)
    return Model(CONFIG, weights)


def _latent_attention(weights: Weights, prefix: str) -> None:
    weights.linear(f"{prefix}.q_a_proj.weight", QUERY_LATENT, HIDDEN)
    weights.ones(f"{prefix}.q_a_layernorm.weight", QUERY_LATENT)
    weights.linear(f"{prefix}.q_b_proj.weight", HEADS * KEY_DIM, QUERY_LATENT, gain=1.5)
    weights.linear(f"{prefix}.kv_a_proj_with_mqa.weight", LATENT, HIDDEN)
    weights.ones(f"{prefix}.kv_a_layernorm.weight", LATENT)
    weights.linear(f"{prefix}.kv_b_proj.weight", HEADS * (KEY_DIM + VALUE_DIM), LATENT, gain=1.5)
    weights.linear(f"{prefix}.o_proj.weight", HIDDEN, HEADS * VALUE_DIM, gain=1.5)


def _streams(weights: Weights, prefix: str) -> None:
    """The mixing of streams: the part that a layer reads of them, the share of its output that each
    gets, and their mixture.
    """
    mixes = (2 + STREAMS) * STREAMS
    weights.linear(f"{prefix}_fn", mixes, STREAMS * HIDDEN)
    weights.normal(f"{prefix}_base", mixes, std=0.5)
    weights.ones(f"{prefix}_scale", 3)


def _scale_to_limit(weights: Weights) -> None:
    """Multiply the limited factors of SwiGLU layers by `LOUD`, and divide their products again."""
    for name, tensor in weights.tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensor *= LOUD
        elif name.endswith("down_proj.weight"):
            tensor /= LOUD**2
