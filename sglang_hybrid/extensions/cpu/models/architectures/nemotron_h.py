"""Nemotron-H and Nemotron 3: Mamba-2, attention without positions, and plain MLPs or experts, one
per layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_hybrid.extensions.cpu.models.architectures.base import (
    BASE_CONFIG,
    Model,
    Scale,
    tiny_only,
)
from sglang_hybrid.extensions.cpu.models.weights import AttentionShape, Mamba2Shape, Weights


@dataclass(frozen=True)
class Experts:
    """Sizes of a layer of experts: ``count``, of which ``active`` run per token, each of width
    ``inner`` in a space of ``latent`` numbers, beside a shared one of width ``shared``.
    """

    count: int
    active: int
    latent: int
    inner: int
    shared: int


@dataclass(frozen=True)
class HybridSizes:
    """Sizes of a Nemotron-H.

    ``pattern`` has a letter per layer: M for Mamba-2, * for attention, - for an MLP of width
    ``mlp``, E for ``experts``. ``chunk`` is the number of tokens in a chunk of the recurrent scan.
    """

    pattern: str
    mamba: Mamba2Shape
    attention: AttentionShape
    mlp: int
    chunk: int
    experts: Experts | None = None


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


WITH_EXPERTS = replace(
    SIZES["tiny"],
    pattern="MEM*-ME*M",
    experts=Experts(count=8, active=2, latent=64, inner=128, shared=192),
)


def nemotron_h(seed: int, scale: Scale) -> Model:
    """A Nemotron-H model; the default of the project and the one with most scales.

    "8b" has the sizes of Nemotron-H-8B and no weights.
    """
    sizes = SIZES[scale]
    if scale == "8b":
        large = {"dtype": "bfloat16", "vocab_size": 131_072, "max_position_embeddings": 131_072}
        return Model(config(sizes) | large, None)
    return Model(config(sizes), _weights(sizes, seed))


def nemotron_3(seed: int, scale: Scale) -> Model:
    """A Nemotron 3 model: a Nemotron-H with experts that work in a smaller space."""
    tiny_only("nemotron-3", scale)
    return Model(config(WITH_EXPERTS), _weights(WITH_EXPERTS, seed))


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
        **_experts_config(sizes.experts),
    }


def _experts_config(experts: Experts | None) -> dict[str, object]:
    if experts is None:
        return {}
    return {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "moe_latent_size": experts.latent,
        "moe_intermediate_size": experts.inner,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": experts.shared,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
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
        elif kind == "E":
            assert sizes.experts is not None
            _experts(weights, mixer, hidden, sizes.experts)
        else:
            weights.linear(f"{mixer}.up_proj.weight", sizes.mlp, hidden)
            weights.linear(f"{mixer}.down_proj.weight", hidden, sizes.mlp, gain=0.7)
    weights.ones("model.norm_f.weight", hidden)
    weights.head("lm_head.weight", hidden)
    return weights


def _experts(weights: Weights, mixer: str, hidden: int, experts: Experts) -> None:
    weights.linear(f"{mixer}.gate.weight", experts.count, hidden, gain=1.5)
    weights.normal(f"{mixer}.gate.e_score_correction_bias", experts.count, std=0.1)
    weights.linear(f"{mixer}.fc1_latent_proj.weight", experts.latent, hidden)
    weights.linear(f"{mixer}.fc2_latent_proj.weight", hidden, experts.latent, gain=0.7)
    for expert in range(experts.count):
        place = f"{mixer}.experts.{expert}"
        weights.linear(f"{place}.up_proj.weight", experts.inner, experts.latent)
        weights.linear(f"{place}.down_proj.weight", experts.latent, experts.inner)
    weights.linear(f"{mixer}.shared_experts.up_proj.weight", experts.shared, hidden)
    weights.linear(f"{mixer}.shared_experts.down_proj.weight", hidden, experts.shared, gain=0.7)
