"""Layers of each kind: FLOPs per token, and bytes of KV and states.

FLOPs count a multiply and an add as two. Norms, activations, gates and biases are left out: they
are below one percent. A mixer's or an MLP's parts are separate `Layer`s; a decoder block with both
is two of them, a parallel block three.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Layer:
    """Cost of one mixer or MLP.

    per_token: FLOPs for every token, whatever its position. per_pair: FLOPs for every (query, key)
    pair; causal, so token i has min(i, window) keys, itself included. window: number of keys a
    query sees; 0 means all earlier ones. kv_values: numbers stored per token. ssm_values,
    conv_values: numbers in one state, however long the prefix.
    """

    per_token: int
    per_pair: int = 0
    window: int = 0
    kv_values: int = 0
    ssm_values: int = 0
    conv_values: int = 0


def attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    window: int = 0,
    gated: bool = False,
    input_width: int | None = None,
) -> Layer:
    """Softmax attention with grouped keys and values; `gated` adds an output gate (Qwen3-Next).

    input_width: width of what is projected to q, k and v where it is not `hidden` (Zamba2
    concatenates two streams).
    """
    width = hidden if input_width is None else input_width
    query, kv = heads * head_dim, kv_heads * head_dim
    projections = 2 * width * (query * (2 if gated else 1) + 2 * kv) + 2 * query * hidden
    return Layer(projections, per_pair=4 * query, window=window, kv_values=2 * kv)


def latent_attention(
    hidden: int,
    heads: int,
    nope_dim: int,
    rope_dim: int,
    value_dim: int,
    latent: int,
    *,
    query_latent: int | None = None,
    gated: bool = False,
) -> Layer:
    """Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1): a token's keys
    and values are projections of `latent` numbers, which are stored with one key of `rope_dim` for
    all heads. Pairs are counted as a prefill without a prefix computes them, on projected keys.

    query_latent: width that queries are projected through, where they are. `gated` adds an output
    gate (Kimi K3).
    """
    query = heads * (nope_dim + rope_dim)
    to_query = hidden * query
    if query_latent is not None:
        to_query = hidden * query_latent + query_latent * query
    stored, values = latent + rope_dim, heads * value_dim
    projections = to_query + hidden * stored + latent * (heads * nope_dim + values)
    outputs = values * hidden * (2 if gated else 1)
    return Layer(2 * (projections + outputs), per_pair=2 * (query + values), kv_values=stored)


def mamba1(hidden: int, inner: int, state: int, conv_kernel: int, dt_rank: int) -> Layer:
    """Selective scan with one decay per channel and state dimension: 8 FLOPs per state value and
    token.
    """
    projections = 2 * hidden * 2 * inner + 2 * inner * (dt_rank + 2 * state) + 2 * dt_rank * inner
    per_token = projections + 2 * conv_kernel * inner + 8 * inner * state + 2 * inner * hidden
    return Layer(per_token, ssm_values=inner * state, conv_values=inner * (conv_kernel - 1))


def mamba2(
    hidden: int, heads: int, head_dim: int, groups: int, state: int, conv_kernel: int
) -> Layer:
    """Scalar decay per head: decay, outer product, sum and read-out are 5 FLOPs per state value and
    token.
    """
    inner = heads * head_dim
    conv_width = inner + 2 * groups * state
    projections = 2 * hidden * (inner + conv_width + heads) + 2 * inner * hidden
    return Layer(
        projections + 2 * conv_kernel * conv_width + 5 * inner * state,
        ssm_values=inner * state,
        conv_values=conv_width * (conv_kernel - 1),
    )


def gated_delta_net(
    hidden: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, conv_kernel: int
) -> Layer:
    """Delta rule with a scalar decay: read, correct, decay and read-out are 7 FLOPs per state value
    and token.
    """
    keys, values = key_heads * key_dim, value_heads * value_dim
    conv_width = 2 * keys + values
    state = value_heads * key_dim * value_dim
    projections = 2 * hidden * (conv_width + values + 2 * value_heads) + 2 * values * hidden
    return Layer(
        projections + 2 * conv_kernel * conv_width + 7 * state,
        ssm_values=state,
        conv_values=conv_width * (conv_kernel - 1),
    )


def jet_block(
    hidden: int, heads: int, key_dim: int, value_dim: int, conv_kernel: int, reduction: int
) -> Layer:
    """Jet-Nemotron's gated delta net: its values pass a convolution whose taps two matrices make of
    each token, with a `reduction`-th of the values between them. SGLang's window has room for
    queries and keys, too.
    """
    layer = gated_delta_net(hidden, heads, heads, key_dim, value_dim, conv_kernel)
    keys, values = heads * key_dim, heads * value_dim
    inner = values // reduction
    generator = 2 * hidden * inner + 2 * inner * values * conv_kernel
    unconvolved = 2 * conv_kernel * 2 * keys
    return replace(layer, per_token=layer.per_token + generator - unconvolved)


def kimi_delta_attention(
    hidden: int,
    heads: int,
    head_dim: int,
    conv_kernel: int,
    *,
    full_rank_gate: bool = False,
    full_rank_decay: bool = False,
) -> Layer:
    """Delta rule with a decay per channel, 7 FLOPs per state value and token; decay and output gate
    are projected through `head_dim` numbers each (Kimi Team 2025, "Kimi Linear", section 4), or
    directly: the gate with `full_rank_gate` (Kimi K3), the decay with `full_rank_decay` (Ling 3).
    """
    inner = heads * head_dim
    state = inner * head_dim
    full_rank, low_rank = hidden * inner, hidden * head_dim + head_dim * inner
    gate = full_rank if full_rank_gate else low_rank
    decay = full_rank if full_rank_decay else low_rank
    projections = hidden * (3 * inner + heads) + decay + gate + inner * hidden
    return Layer(
        2 * projections + 2 * conv_kernel * 3 * inner + 7 * state,
        ssm_values=state,
        conv_values=3 * inner * (conv_kernel - 1),
    )


def lightning_attention(hidden: int, heads: int, head_dim: int, *, gated: bool = True) -> Layer:
    """Linear attention with one constant decay per head (Qin et al. 2024, "Lightning Attention-2")
    and, where it is `gated`, an output gate: decay, outer product, sum and read-out are 5 FLOPs per
    state value and token. Its state has no convolution.
    """
    inner = heads * head_dim
    state = inner * head_dim
    return Layer(2 * hidden * (5 if gated else 4) * inner + 5 * state, ssm_values=state)


def short_conv(hidden: int, kernel: int) -> Layer:
    """LFM2's gated short convolution: three projections in, a depthwise convolution, one out."""
    return Layer(8 * hidden * hidden + 2 * kernel * hidden, conv_values=hidden * (kernel - 1))


def convolutional_attention(
    hidden: int, heads: int, kv_heads: int, head_dim: int, taps: tuple[int, int]
) -> Layer:
    """Compressed convolutional attention (ZAYA1): queries and keys go through a depthwise
    convolution and one inside each head. Half of the values are those of the token before, so a
    state has the last hidden state beside the inputs of the convolutions.

    taps: kernel sizes of the two convolutions.
    """
    layer = attention(hidden, heads, kv_heads, head_dim)
    channels = (heads + kv_heads) * head_dim
    convolutions = 2 * taps[0] * channels + 2 * taps[1] * channels * head_dim
    return replace(
        layer,
        per_token=layer.per_token + convolutions,
        conv_values=channels * (sum(taps) - 2) + hidden,
    )


def mlp(hidden: int, inner: int, *, gated: bool) -> Layer:
    """Dense MLP: up and down projection, and a gate where the activation has one."""
    return Layer((6 if gated else 4) * hidden * inner)


def moe(
    hidden: int,
    inner: int,
    *,
    experts: int,
    active: int,
    gated: bool,
    shared_inner: int = 0,
    latent: int | None = None,
) -> Layer:
    """Mixture of experts: router, `active` experts per token, a shared expert of `shared_inner`.

    latent: width the experts work in where they are wrapped by a down and an up projection
    (Nemotron-H).
    """
    matmuls = 6 if gated else 4
    width = hidden if latent is None else latent
    wrap = 0 if latent is None else 4 * hidden * latent
    return Layer(
        2 * hidden * experts + wrap + matmuls * (active * width * inner + hidden * shared_inner)
    )
