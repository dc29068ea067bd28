"""Qwen4-Exp's text model: Qwen3.5's mixers and Qwen3-Next's experts on several residual streams,
into which some layers put embeddings of the last tokens (PLE).
"""

from __future__ import annotations

from sglang_hybrid.extensions.cpu.models.architectures.base import (
    BASE_CONFIG,
    Model,
    Scale,
    tiny_only,
)
from sglang_hybrid.extensions.cpu.models.architectures.qwen3_5 import (
    ATTENTION,
    HIDDEN,
    LAYER_TYPES,
    delta_net,
)
from sglang_hybrid.extensions.cpu.models.architectures.qwen3_5 import CONFIG as QWEN3_5
from sglang_hybrid.extensions.cpu.models.architectures.qwen3_next import CONFIG as QWEN3_NEXT
from sglang_hybrid.extensions.cpu.models.architectures.qwen3_next import experts
from sglang_hybrid.extensions.cpu.models.weights import Weights

STREAMS = 2
WIDE = STREAMS * HIDDEN
LOW_RANK = 32
WITH_PLE = (2, 4)
"""Layers, counted from 1."""
NGRAM = 3
PLE_TAPS = 4
PLE = 64
HEADS_PER_NGRAM = 2
ROWS = {2: 4_224, 4: 4_352}
"""Rows of the n-grams' embeddings of each layer: for each of its four heads as many as the next
prime number from 1,024 on says that no head has yet, together a multiple of 128.
"""

TEXT = QWEN3_5 | {
    "model_type": "qwen4_exp_text",
    **{
        name: QWEN3_NEXT[name]
        for name in (
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "norm_topk_prob",
        )
    },
    "hc_count": STREAMS,
    "hc_lowrank": LOW_RANK,
    "ple_layer_ids": list(WITH_PLE),
    "ple_embed_dim": PLE,
    "ple_conv_kernel_size": PLE_TAPS,
    "ngram_size": NGRAM,
    "heads_per_ngram": HEADS_PER_NGRAM,
    "ngram_vocab_size_base": 1_024,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 1,
}

CONFIG = BASE_CONFIG | {
    "architectures": ["Qwen4ExpForConditionalGeneration"],
    "model_type": "qwen4_exp",
    "language_model_only": True,
    "text_config": TEXT,
}


def qwen4_exp(seed: int, scale: Scale) -> Model:
    """A Qwen4-Exp text model with untied embeddings, whose attention reads all tokens."""
    tiny_only("qwen4-exp", scale)
    weights = Weights(seed)
    weights.embedding("model.embed_tokens.weight", HIDDEN, std=1.5)
    for index, kind in enumerate(LAYER_TYPES):
        layer = f"model.layers.{index}"
        if index + 1 in WITH_PLE:
            _embeddings_of_ngrams(weights, f"{layer}.ple", ROWS[index + 1])
        _streams(weights, f"{layer}.attn_hyper_connection")
        if kind == "full_attention":
            weights.gated_attention(f"{layer}.self_attn", HIDDEN, ATTENTION, gain=1.5)
        else:
            delta_net(weights, f"{layer}.linear_attn")
        _streams(weights, f"{layer}.mlp_hyper_connection")
        experts(weights, f"{layer}.mlp")
    _streams(weights, "model.hyper_connection_mixer", inject=False)
    weights.head("lm_head.weight", HIDDEN)
    return Model(CONFIG, weights)


def _streams(weights: Weights, prefix: str, inject: bool = True) -> None:
    """The mixing of streams: the part that a layer reads of them, and the share of its output that
    each gets. The norm doubles what the gates of the sum, about a half, then halve.
    """
    weights.ones(f"{prefix}.hc_norm.weight", WIDE)
    weights.linear(f"{prefix}.input_mix_weight_down.weight", LOW_RANK, WIDE)
    weights.linear(f"{prefix}.input_mix_weight_up.weight", WIDE, LOW_RANK)
    if inject:
        weights.linear(f"{prefix}.block_inject_weight.weight", STREAMS, WIDE)


def _embeddings_of_ngrams(weights: Weights, prefix: str, rows: int) -> None:
    """Values of the last two and three tokens, gated by each stream, and their convolution over
    every third token.
    """
    heads = (NGRAM - 1) * HEADS_PER_NGRAM
    table = f"{prefix}.ple_embedding.ngram_embedding.shard_0.weight"
    weights.normal(table, rows, PLE // heads, std=1.0)
    weights.linear(f"{prefix}.key_proj.weight", WIDE, PLE)
    weights.linear(f"{prefix}.value_proj.weight", HIDDEN, PLE)
    for norm in ("key", "query", "conv"):
        weights.zeros(f"{prefix}.norm_{norm}.weight", WIDE)
    weights.conv(f"{prefix}.conv1d.weight", WIDE, PLE_TAPS)
