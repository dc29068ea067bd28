"""GigaChat 3.5: gated delta nets, gated latent attention every third layer, experts, and norms in
front of and behind each of them, which have gates of their own."""

from __future__ import annotations

from sglang_hybrid.extensions.cpu.models.architectures.base import (
    BASE_CONFIG,
    Model,
    Scale,
    tiny_only,
)
from sglang_hybrid.extensions.cpu.models.weights import DeltaNetShape, Weights

LAYERS = 6
ATTENTION_LAYERS = [2, 5]
HIDDEN = 128
MLP = 384
HEADS = 4
KEY_DIM = 32
TURNED_KEY_DIM = 32
"""Size of the part of a key that all heads share and that is turned by its position."""
VALUE_DIM = 32
QUERY_LATENT = 64
LATENT = 256
"""Latent size; with the shared part one of the two that SGLang's Triton kernel decodes with."""
DELTA_NET = DeltaNetShape(key_heads=2, value_heads=6, head_dim=32, taps=4)
"""Three value heads to a key head, as in the tiny Qwen3-Next."""
EXPERTS = 4
ACTIVE_EXPERTS = 2
EXPERT = 128
NORM_GATE = 16
"""Rank of the matrices that a norm's gate is made of, as SGLang has it."""

CONFIG = BASE_CONFIG | {
    "architectures": ["GigaChat35ForCausalLM"],
    "model_type": "gigachat3_5",
    "num_hidden_layers": LAYERS,
    "full_attention_layers": ATTENTION_LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "hidden_act": "silu",
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "rope_theta": 10000.0,
    "q_lora_rank": QUERY_LATENT,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": KEY_DIM,
    "qk_rope_head_dim": TURNED_KEY_DIM,
    "v_head_dim": VALUE_DIM,
    "head_dim": TURNED_KEY_DIM,
    "gated_attention": True,
    "use_mla_scaling_factor": True,
    "linear_conv_kernel_dim": DELTA_NET.taps,
    "linear_key_head_dim": DELTA_NET.head_dim,
    "linear_value_head_dim": DELTA_NET.head_dim,
    "linear_num_key_heads": DELTA_NET.key_heads,
    "linear_num_value_heads": DELTA_NET.value_heads,
    "linear_sigmoid_gate_scale": 2.0,
    "output_gate_type": "sigmoid",
    "norm_type": "ZeroCenteredGatedNorm",
    "layernorm_type": "pre_post",
    "layernorm_gating_weight": 2.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
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
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def gigachat_3_5(seed: int, scale: Scale) -> Model:
    """A GigaChat 3.5 model with untied embeddings; its first MLP is dense."""
    tiny_only("gigachat-3.5", scale)
    weights = Weights(seed)
    weights.embedding("model.embed_tokens.weight", HIDDEN, std=1.5)
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        for place in (
            *("input_layernorm", "post_self_attn_layernorm"),
            *("post_attention_layernorm", "post_feedforward_layernorm"),
        ):
            _gated_norm(weights, f"{layer}.{place}", HIDDEN)
        if index in ATTENTION_LAYERS:
            _latent_attention(weights, f"{layer}.self_attn")
        else:
            weights.delta_net(f"{layer}.self_attn", HIDDEN, DELTA_NET)
        if index == 0:
            weights.gated_mlp(f"{layer}.mlp", HIDDEN, MLP, gain=1.0)
        else:
            bias = "e_score_correction_bias"
            weights.experts(f"{layer}.mlp", HIDDEN, EXPERT, EXPERTS, bias)
    _gated_norm(weights, "model.norm", HIDDEN)
    weights.head("lm_head.weight", HIDDEN)
    return Model(CONFIG, weights)


def _gated_norm(weights: Weights, prefix: str, width: int) -> None:
    weights.zeros(f"{prefix}.weight", width)
    weights.linear(f"{prefix}.gate_up_projection.weight", NORM_GATE, width)
    weights.linear(f"{prefix}.gate_down_projection.weight", width, NORM_GATE)


def _latent_attention(weights: Weights, prefix: str) -> None:
    weights.linear(f"{prefix}.q_a_proj.weight", QUERY_LATENT, HIDDEN)
    _gated_norm(weights, f"{prefix}.q_a_layernorm", QUERY_LATENT)
    queries = HEADS * (KEY_DIM + TURNED_KEY_DIM)
    weights.linear(f"{prefix}.q_b_proj.weight", queries, QUERY_LATENT)
    weights.linear(f"{prefix}.kv_a_proj_with_mqa.weight", LATENT + TURNED_KEY_DIM, HIDDEN)
    _gated_norm(weights, f"{prefix}.kv_a_layernorm", LATENT)
    weights.linear(f"{prefix}.kv_b_proj.weight", HEADS * (KEY_DIM + VALUE_DIM), LATENT, gain=1.5)
    weights.linear(f"{prefix}.gate_proj.weight", HEADS * VALUE_DIM, HIDDEN)
    weights.linear(f"{prefix}.o_proj.weight", HIDDEN, HEADS * VALUE_DIM, gain=2.0)
