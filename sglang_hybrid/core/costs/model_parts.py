"""One layer out of a Hugging Face config, under any of the names that families give its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_hybrid.core.costs.layers import (
    Layer,
    attention,
    latent_attention,
    mamba1,
    mamba2,
    mlp,
    moe,
)

Config = Mapping[str, Any]
# Activations of an MLP with two matrices; every other one is taken for a gated MLP (three).
UNGATED_ACTIVATIONS = ("relu2", "relu")

LARGEST = 10**9
"""Largest size that a config may name."""

MOST_LAYERS = 10_000


def named(config: Config) -> str:
    """The name of `config` in errors."""
    return f"the config of model_type {config.get('model_type')!r}"


def first(config: Config, *names: str, default: Any = None) -> Any:
    """The first of `names` that the config sets; an error that names them if none is set and there
    is no default.
    """
    for name in names:
        value = config.get(name)
        if value is not None:
            return value
    if default is None:
        raise ValueError(f"{named(config)} lacks {' / '.join(names)}")
    return default


def integer(config: Config, *names: str, default: int | None = None) -> int:
    """`first`, which must be a whole number that a model's size can be. Raises ValueError."""
    return size(config, first(config, *names, default=default), *names)


def number(config: Config, *names: str, default: float) -> float:
    """`first`, which must be a number. Raises ValueError."""
    value = first(config, *names, default=default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"{named(config)} has {str(value)[:40]!r} as {' / '.join(names)}, which is no number"
        )
    return value


def size(config: Config, value: Any, *names: str) -> int:
    """`value`, that `config` has under one of `names`, as a size of a model. Raises ValueError."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if isinstance(value, bool) or not 0 <= number <= LARGEST:
        raise ValueError(
            f"{named(config)} has {str(value)[:40]!r} as {' / '.join(names)}, which is no size of "
            "a model"
        )
    return number


def layer_count(config: Config, *names: str) -> int:
    """The number of layers. Raises ValueError for more than any model has."""
    count = integer(config, *(names or ("num_hidden_layers",)))
    if count > MOST_LAYERS:
        raise ValueError(f"{named(config)} has {count} layers, which are more than a model has")
    return count


def mixer_kinds(config: Config, default: list[str]) -> list[str]:
    """Kind of mixer per layer, whatever the family calls the list."""
    names = {"mamba": "mamba", "linear_attention": "linear", "full_attention": "attention"}
    kinds = config.get("layer_types") or config.get("layers_block_type") or default
    if not isinstance(kinds, list | tuple):
        raise ValueError(
            f"{named(config)} has {str(kinds)[:40]!r} for its kinds of layers, which is no list"
        )
    return [names.get(str(kind), str(kind)) for kind in kinds]


def attention_of(config: Config, *, window: int = 0, gated: bool = False) -> Layer:
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    return attention(
        hidden,
        heads,
        integer(config, "num_key_value_heads", default=heads),
        integer(config, "head_dim", "attention_head_dim", default=hidden // heads),
        window=window,
        gated=gated,
    )


def latent_attention_of(config: Config) -> Layer:
    query_latent = config.get("q_lora_rank")
    return latent_attention(
        integer(config, "hidden_size"),
        integer(config, "num_attention_heads"),
        integer(config, "qk_nope_head_dim"),
        integer(config, "qk_rope_head_dim"),
        integer(config, "v_head_dim"),
        integer(config, "kv_lora_rank"),
        query_latent=None if query_latent is None else size(config, query_latent, "q_lora_rank"),
        gated=any(bool(config.get(name)) for name in ("mla_use_output_gate", "gated_attention")),
    )


def mlp_of(config: Config, inner: int | None = None) -> Layer:
    default = "relu2" if config.get("model_type") == "nemotron_h" else "silu"
    activation = first(config, "mlp_hidden_act", "hidden_act", default=default)
    return mlp(
        integer(config, "hidden_size"),
        integer(config, "intermediate_size") if inner is None else inner,
        gated=activation not in UNGATED_ACTIVATIONS,
    )


def moe_of(config: Config, inner: int, shared_inner: int = 0, *, gated: bool = True) -> Layer:
    names = ("moe_latent_size", "routed_expert_hidden_size")
    latent = next((config[name] for name in names if config.get(name) is not None), None)
    return moe(
        integer(config, "hidden_size"),
        inner,
        experts=integer(config, "num_local_experts", "num_experts", "n_routed_experts"),
        active=integer(config, "num_experts_per_tok", "num_experts_per_token"),
        gated=gated,
        shared_inner=shared_inner,
        latent=None if latent is None else size(config, latent, *names),
    )


def mamba2_of(config: Config) -> Layer:
    """Mamba-2 under any of the names that families give its fields."""
    hidden = integer(config, "hidden_size")
    heads = integer(config, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    inner = integer(config, "mamba_d_ssm", default=0)
    inner = inner or integer(config, "mamba_expand", "expand", default=2) * hidden
    head_dim = first(config, "mamba_head_dim", "mamba_d_head", "mamba_headdim", default="auto")
    if config.get("model_type") == "mamba2":
        head_dim = first(config, "head_dim", default="auto")
    return mamba2(
        hidden,
        heads,
        inner // heads if head_dim == "auto" else size(config, head_dim, "mamba_head_dim"),
        integer(config, "mamba_n_groups", "mamba_ngroups", "n_groups", default=1),
        integer(config, "mamba_d_state", "ssm_state_size", "state_size"),
        integer(config, "mamba_d_conv", "conv_kernel", default=4),
    )


def mamba1_of(config: Config) -> Layer:
    hidden = integer(config, "hidden_size")
    rank = first(config, "mamba_dt_rank", "time_step_rank", default="auto")
    inner = integer(config, "mamba_expand", "expand", default=2) * hidden
    if config.get("model_type") in ("mamba", "falcon_mamba"):
        inner = integer(config, "intermediate_size", default=inner)
    return mamba1(
        hidden,
        inner,
        integer(config, "mamba_d_state", "state_size"),
        integer(config, "mamba_d_conv", "conv_kernel", default=4),
        -(-hidden // 16) if rank == "auto" else size(config, rank, "mamba_dt_rank"),
    )
