"""Nemotron-H: Mamba-2, attention without positions, and plain MLPs, one per layer."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hybrid.models.architectures.base import BASE_CONFIG, Model, Scale
from sglang_hybrid.models.weights import AttentionShape, Mamba2Shape, Weights


@dataclass(frozen=True)
class HybridSizes:
    """Sizes of a Nemotron-H.

    ``pattern`` has a letter per layer: M for Mamba-2, * for attention, - for an MLP of width
    ``mlp``. ``chunk`` is the number of tokens in a chunk of the recurrent scan.
    """

    pattern: str
    mamba: Mamba2Shape
    attention: AttentionShape
    mlp: int
    chunk: int


SIZES = {
    "tiny": HybridSizes(
        pattern="M-M*-M-*M",
        mamba=Mamba2Shape(hidden=128, heads=8, head_dim=32, groups=2, state=64),
        attention=AttentionShape(heads=4, kv_heads=2, head_dim=32),
        mlp=512,
        chunk=64,
    ),
    "25m": HybridSizes(
        pattern="M-M-M*-M-" * 2,
        mamba=Mamba2Shape(hidden=256, heads=8, head_dim=64, groups=2, state=128),
        attention=AttentionShape(heads=4, kv_heads=2, head_dim=64),
        mlp=1024,
        chunk=128,
    ),
    "100m": HybridSizes(
        pattern="M-M-M-*M-" * 4,
        mamba=Mamba2Shape(hidden=512, heads=16, head_dim=64, groups=2, state=128),
        attention=AttentionShape(heads=8, kv_heads=4, head_dim=64),
        mlp=2048,
        chunk=128,
    ),
    # nvidia/Nemotron-H-8B-Base-8K's config.json.
    "8b": HybridSizes(
        pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-",
        mamba=Mamba2Shape(hidden=4096, heads=128, head_dim=64, groups=8, state=128),
        attention=AttentionShape(heads=32, kv_heads=8, head_dim=128),
        mlp=21504,
        chunk=128,
    ),
}


def nemotron_h(seed: int, scale: Scale) -> Model:
    """A Nemotron-H model; the default of the project and the only one with larger scales.

    "8b" has the sizes of Nemotron-H-8B and no weights.
    """
    sizes = SIZES[scale]
    if scale == "8b":
        large = {"dtype": "bfloat16", "vocab_size": 131_072, "max_position_embeddings": 131_072}
        return Model(config(sizes) | large, None)
    return Model(config(sizes), _weights(sizes, seed))


def config(sizes: HybridSizes) -> dict[str, object]:
    """The content of ``config.json``, for a model of these sizes in float32."""
    return BASE_CONFIG | {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        # The pattern is the one spelling of the layers that transformers and SGLang both accept.
        "hybrid_override_pattern": sizes.pattern,
        "num_hidden_layers": len(sizes.pattern),
        "hidden_size": sizes.mamba.hidden,
        "intermediate_size": sizes.mlp,
        "mlp_hidden_act": "relu2",
        "num_attention_heads": sizes.attention.heads,
        "num_key_value_heads": sizes.attention.kv_heads,
        "head_dim": sizes.attention.head_dim,
        "mamba_num_heads": sizes.mamba.heads,
        "mamba_head_dim": sizes.mamba.head_dim,
        # SGLang reads both spellings in different places; transformers takes either.
        "n_groups": sizes.mamba.groups,
        "mamba_n_groups": sizes.mamba.groups,
        "ssm_state_size": sizes.mamba.state,
        "conv_kernel": sizes.mamba.conv_kernel,
        "expand": sizes.mamba.inner // sizes.mamba.hidden,
        "chunk_size": sizes.chunk,
        "use_conv_bias": True,
        # transformers clamps prefill steps to time_step_min, SGLang does not clamp at all.
        "time_step_min": 1e-9,
        "time_step_max": 0.1,
        "time_step_limit": [0.0, 1e9],
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "mamba_ssm_cache_dtype": "float32",
    }


def _weights(sizes: HybridSizes, seed: int) -> Weights:
    weights = Weights(seed)
    hidden = sizes.mamba.hidden
    weights.embedding("model.embeddings.weight", hidden)
    for index, kind in enumerate(sizes.pattern):
        layer = f"model.layers.{index}"
        mixer = f"{layer}.mixer"
        weights.ones(f"{layer}.norm.weight", hidden)
        if kind == "M":
            weights.mamba2(mixer, sizes.mamba, gain=2.5)
        elif kind == "*":
            weights.attention(mixer, hidden, sizes.attention, gain=1.5)
        else:
            weights.linear(f"{mixer}.up_proj.weight", sizes.mlp, hidden)
            weights.linear(f"{mixer}.down_proj.weight", hidden, sizes.mlp, gain=0.7)
    weights.ones("model.norm_f.weight", hidden)
    weights.head("lm_head.weight", hidden)
    return weights
