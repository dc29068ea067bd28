"""Qwen3.5: gated delta nets, gated attention every third layer, and dense MLPs; alone as a text
model, or behind a tower that reads images.
"""

from __future__ import annotations

from sglang_hybrid.extensions.cpu.models.architectures.base import (
    BASE_CONFIG,
    Model,
    Scale,
    tiny_only,
)
from sglang_hybrid.extensions.cpu.models.tokenizer import VISION_IDS
from sglang_hybrid.extensions.cpu.models.weights import AttentionShape, Weights

LAYER_TYPES = ["linear_attention", "linear_attention", "full_attention"] * 2
HIDDEN = 128
MLP = 384
ATTENTION = AttentionShape(heads=4, kv_heads=2, head_dim=32)
KEY_HEADS = 2
VALUE_HEADS = 4
LINEAR_HEAD_DIM = 32
TAPS = 4

VISION_HIDDEN = 64
VISION_MLP = 128
VISION_DEPTH = 2
PATCH_VALUES = 3 * 2 * 16 * 16
"""Values of a patch: colours, frames, rows and columns."""
MERGED = 4
"""Patches that become one token: two rows of two."""
GRID = 64
"""Learnt positions, 8 rows of 8, between which those of an image's patches are interpolated."""

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


VISION_CONFIG = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "dtype": CONFIG["dtype"],
    "vocab_size": CONFIG["vocab_size"],
    "bos_token_id": CONFIG["bos_token_id"],
    "tie_word_embeddings": False,
    "text_config": CONFIG,
    "vision_config": {
        "model_type": "qwen3_5",
        "depth": VISION_DEPTH,
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": VISION_MLP,
        "hidden_act": "gelu_pytorch_tanh",
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": GRID,
        "out_hidden_size": HIDDEN,
        "deepstack_visual_indexes": [],
    },
    **{f"{name}_token_id": token for name, token in VISION_IDS.items()},
}

_PATCHES = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
}
PROCESSORS = {
    "preprocessor_config.json": {
        "size": {"shortest_edge": 4096, "longest_edge": 1048576},
        "image_processor_type": "Qwen2VLImageProcessor",
    }
    | _PATCHES,
    "video_preprocessor_config.json": {
        "size": {"shortest_edge": 4096, "longest_edge": 1048576},
        "video_processor_type": "Qwen3VLVideoProcessor",
    }
    | _PATCHES,
}
"""Settings by which images become patches. Sizes are numbers of pixels: a token is 32 rows of 32.
"""


def qwen3_5(seed: int, scale: Scale) -> Model:
    """A Qwen3.5 text model with untied embeddings."""
    tiny_only("qwen3.5", scale)
    weights = Weights(seed)
    _text_model(weights, "model")
    return Model(CONFIG, weights)


def qwen3_5_vl(seed: int, scale: Scale) -> Model:
    """The same text model behind a vision tower, as Qwen3.5 is released."""
    tiny_only("qwen3.5-vl", scale)
    weights = Weights(seed)
    _text_model(weights, "model.language_model")
    weights.tensors["lm_head.weight"][list(VISION_IDS.values())] *= 0.1
    _vision_tower(weights, "model.visual")
    return Model(VISION_CONFIG, weights, PROCESSORS)


def _text_model(weights: Weights, model: str) -> None:
    # As in Qwen3-Next, a large embedding keeps rounding errors from growing through the layers.
    weights.embedding(f"{model}.embed_tokens.weight", HIDDEN, std=1.5)
    for index, kind in enumerate(LAYER_TYPES):
        layer = f"{model}.layers.{index}"
        weights.zeros(f"{layer}.input_layernorm.weight", HIDDEN)
        if kind == "full_attention":
            weights.gated_attention(f"{layer}.self_attn", HIDDEN, ATTENTION, gain=1.5)
        else:
            delta_net(weights, f"{layer}.linear_attn")
        weights.zeros(f"{layer}.post_attention_layernorm.weight", HIDDEN)
        weights.gated_mlp(f"{layer}.mlp", HIDDEN, MLP, gain=1.0)
    weights.zeros(f"{model}.norm.weight", HIDDEN)
    weights.head("lm_head.weight", HIDDEN)


def _vision_tower(weights: Weights, tower: str) -> None:
    """Patches, learnt positions, blocks of attention and MLP, and what makes tokens of patches."""
    patch = weights.linear(f"{tower}.patch_embed.proj.weight", VISION_HIDDEN, PATCH_VALUES, 4.0)
    weights.put(f"{tower}.patch_embed.proj.weight", patch.reshape(VISION_HIDDEN, 3, 2, 16, 16))
    weights.normal(f"{tower}.patch_embed.proj.bias", VISION_HIDDEN, std=0.1)
    weights.normal(f"{tower}.pos_embed.weight", GRID, VISION_HIDDEN, std=1.0)
    for index in range(VISION_DEPTH):
        block = f"{tower}.blocks.{index}"
        for norm in ("norm1", "norm2"):
            _layer_norm(weights, f"{block}.{norm}")
        _biased(weights, f"{block}.attn.qkv", 3 * VISION_HIDDEN, VISION_HIDDEN)
        _biased(weights, f"{block}.attn.proj", VISION_HIDDEN, VISION_HIDDEN)
        _biased(weights, f"{block}.mlp.linear_fc1", VISION_MLP, VISION_HIDDEN)
        _biased(weights, f"{block}.mlp.linear_fc2", VISION_HIDDEN, VISION_MLP)
    _layer_norm(weights, f"{tower}.merger.norm")
    wide = MERGED * VISION_HIDDEN
    _biased(weights, f"{tower}.merger.linear_fc1", wide, wide)
    _biased(weights, f"{tower}.merger.linear_fc2", HIDDEN, wide, gain=3.0)


def _layer_norm(weights: Weights, prefix: str) -> None:
    weights.ones(f"{prefix}.weight", VISION_HIDDEN)
    weights.normal(f"{prefix}.bias", VISION_HIDDEN, std=0.1)


def _biased(weights: Weights, prefix: str, rows: int, columns: int, gain: float = 1.5) -> None:
    weights.linear(f"{prefix}.weight", rows, columns, gain=gain)
    weights.normal(f"{prefix}.bias", rows, std=0.1)


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
