"""Reads a Hugging Face config into a list of layers: one reader per family of hybrid models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import cycle

from sglang_hybrid.core.costs.layers import (
    Layer,
    attention,
    convolutional_attention,
    gated_delta_net,
    jet_block,
    kimi_delta_attention,
    lightning_attention,
    mlp,
    short_conv,
)
from sglang_hybrid.core.costs.model_parts import (
    Config,
    attention_of,
    first,
    integer,
    latent_attention_of,
    layer_count,
    mamba1_of,
    mamba2_of,
    mixer_kinds,
    mlp_of,
    moe_of,
    named,
    number,
    size,
)

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GIGACHAT_NORM_RANK = 16
"""The width between the two matrices of a norm's gate (SGLang's models/gigachat35.py:45)."""


@dataclass(frozen=True)
class ModelLayers:
    """The layers of a model, bytes per SSM state value, and what had to be guessed."""

    layers: tuple[Layer, ...]
    ssm_value_bytes: int
    assumed: str = ""


def read_layers(config: Config) -> ModelLayers:
    """Layers of `config`, or of its `text_config`. An unknown family is read as a decoder of
    attention and MLP. Raises ValueError, in one sentence, for a config that cannot be read,
    whatever it holds.
    """
    try:
        return _read(config)
    except (ArithmeticError, AttributeError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{named(config)} cannot be read ({reason})") from error


def _read(config: Config) -> ModelLayers:
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {"model_type": config.get("model_type"), **text}
    family = str(config.get("model_type", ""))
    dtype = str(first(config, "mamba_ssm_dtype", "mamba_ssm_cache_dtype", default="float32"))
    ssm_value_bytes = DTYPE_BYTES.get(dtype, 4)
    reader = FAMILIES.get(family.removesuffix("_text"))
    if reader is not None:
        return ModelLayers(tuple(reader(config)), ssm_value_bytes)
    assumed = f"model_type {family!r} is not known: every layer was taken for attention and an MLP"
    assumed = "" if family in PLAIN_DECODERS else assumed
    return ModelLayers(tuple(_decoder(config)), ssm_value_bytes, assumed)


def _nemotron_h(config: Config) -> list[Layer]:
    """One mixer *or* one MLP per layer, spelt out in a pattern: M Mamba-2, * attention, - MLP, E
    experts.
    """
    letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    spelt = [letters[c] for c in config.get("hybrid_override_pattern", "") if c in letters]
    kinds = mixer_kinds(config, spelt)
    if not kinds:
        raise ValueError("the config of model_type 'nemotron_h' lacks hybrid_override_pattern")
    layers = []
    for kind in kinds:
        if kind in ("mamba", "linear"):
            layers.append(mamba2_of(config))
        elif kind == "attention":
            layers.append(attention_of(config))
        elif kind == "mlp":
            layers.append(mlp_of(config))
        elif kind == "moe":
            shared = integer(config, "moe_shared_expert_intermediate_size", default=0)
            shared *= integer(config, "n_shared_experts", default=1)
            layers.append(
                moe_of(config, integer(config, "moe_intermediate_size"), shared, gated=False)
            )
        else:
            raise ValueError(f"the config of model_type 'nemotron_h' has an unknown layer {kind!r}")
    return layers


def _falcon_h1(config: Config) -> list[Layer]:
    """Every block runs Mamba-2 and attention side by side, then an MLP."""
    block = [mamba2_of(config), attention_of(config), mlp_of(config)]
    return block * layer_count(config)


def _granite(config: Config) -> list[Layer]:
    shared = integer(config, "shared_intermediate_size", default=0)
    if integer(config, "num_local_experts", default=0):
        feed_forward = moe_of(config, integer(config, "intermediate_size"), shared)
    else:
        feed_forward = mlp_of(config, shared or None)
    return _blocks(config, mixer_kinds(config, []), mamba2_of, feed_forward)


def _bamba(config: Config) -> list[Layer]:
    with_attention = set(config.get("attn_layer_indices") or ())
    count = layer_count(config)
    kinds = ["attention" if i in with_attention else "mamba" for i in range(count)]
    return _blocks(config, kinds, mamba2_of, mlp_of(config))


def _jamba(config: Config) -> list[Layer]:
    period, offset = integer(config, "attn_layer_period"), integer(config, "attn_layer_offset")
    expert_period = integer(config, "expert_layer_period", default=2)
    expert_offset = integer(config, "expert_layer_offset", default=1)
    many = integer(config, "num_experts", default=1) > 1
    layers = []
    for i in range(layer_count(config)):
        layers.append(attention_of(config) if i % period == offset else mamba1_of(config))
        sparse = many and i % expert_period == expert_offset
        layers.append(
            moe_of(config, integer(config, "intermediate_size")) if sparse else mlp_of(config)
        )
    return layers


def _delta_net_of(config: Config) -> Layer:
    return gated_delta_net(
        integer(config, "hidden_size"),
        integer(config, "linear_num_key_heads"),
        integer(config, "linear_num_value_heads"),
        integer(config, "linear_key_head_dim"),
        integer(config, "linear_value_head_dim"),
        integer(config, "linear_conv_kernel_dim", default=4),
    )


def _qwen3_next(config: Config) -> list[Layer]:
    """Qwen3-Next and Qwen3.5: gated delta net, and gated attention in every fourth block."""
    interval = integer(config, "full_attention_interval", default=4)
    count = layer_count(config)
    kinds = mixer_kinds(
        config, ["linear" if (i + 1) % interval else "attention" for i in range(count)]
    )
    delta = _delta_net_of(config)
    dense_only = set(config.get("mlp_only_layers") or ())
    sparse_step = integer(config, "decoder_sparse_step", default=1)
    layers = []
    for i, kind in enumerate(kinds):
        layers.append(delta if kind == "linear" else attention_of(config, gated=True))
        if config.get("num_experts") and i not in dense_only and (i + 1) % sparse_step == 0:
            shared = integer(config, "shared_expert_intermediate_size", default=0)
            layers.append(moe_of(config, integer(config, "moe_intermediate_size"), shared))
        else:
            layers.append(mlp_of(config))
    return layers


def _qwen4_exp(config: Config) -> list[Layer]:
    """Qwen4-Exp: Qwen3.5's layers on `hc_count` residual streams, which every mixer and MLP reads
    through a mix of low rank. Layers that `ple_layer_ids` counts from 1 add embeddings of n-grams.
    With an indexer, attention reads `indexer_budget` tokens, chosen by keys of blocks.
    """
    hidden, streams = integer(config, "hidden_size"), integer(config, "hc_count", default=4)
    wide = hidden * streams
    mix = Layer(4 * wide * integer(config, "hc_lowrank", default=320))
    inject = Layer(2 * wide * streams)
    index = _block_index(config) if config.get("indexer_n_heads") else None
    layers = []
    for layer in _qwen3_next(config):
        if index is not None and layer.kv_values:
            layers.append(index)
            layer = replace(layer, window=integer(config, "indexer_budget"))
        layers += [mix, layer, inject]
    width = integer(config, "ple_embed_dim", default=hidden)
    taps = integer(config, "ple_conv_kernel_size", default=4)
    ngrams = Layer(
        2 * width * (wide + hidden) + 2 * taps * wide,
        conv_values=wide * (taps - 1) * integer(config, "ngram_size", default=3),
    )
    return [*layers, mix, *[ngrams] * len(set(config.get("ple_layer_ids") or ()))]


def _block_index(config: Config) -> Layer:
    """The indexer, which chooses the tokens that sparse attention reads: a key of
    `indexer_compress_ratio` tokens each, which all queries so far are compared with.
    """
    queries, keys = integer(config, "indexer_n_heads"), integer(config, "indexer_kv_heads")
    head_dim, ratio = (
        integer(config, name) for name in ("indexer_head_dim", "indexer_compress_ratio")
    )
    return Layer(
        2 * integer(config, "hidden_size") * (queries + keys) * head_dim,
        per_pair=2 * queries * head_dim // ratio,
        kv_values=keys * head_dim // ratio,
    )


def _kimi_linear(config: Config) -> list[Layer]:
    """Kimi Linear and the text model of Kimi K3: KDA in the layers that `linear_attn_config` names,
    counted from 1, and latent attention in the others.
    """
    hidden, linear = integer(config, "hidden_size"), config.get("linear_attn_config")
    if not isinstance(linear, Mapping):
        raise ValueError(f"{named(config)} lacks linear_attn_config")
    delta = kimi_delta_attention(
        hidden,
        integer(linear, "num_heads"),
        integer(linear, "head_dim"),
        integer(linear, "short_conv_kernel_size", default=4),
        full_rank_gate=bool(linear.get("use_full_rank_gate")),
    )
    with_delta = set(linear.get("kda_layers") or ())
    kinds = ["linear" if i + 1 in with_delta else "" for i in range(layer_count(config))]
    return _blocks_with_latent_attention(config, kinds, delta)


def _blocks_with_latent_attention(config: Config, kinds: list[str], linear: Layer) -> list[Layer]:
    """Blocks of a linear layer, where the kind says so, or of latent attention, and of experts or,
    in the first blocks, an MLP, as DeepSeek-V3 has them.
    """
    dense = integer(config, "first_k_dense_replace", default=0)
    every = integer(config, "moe_layer_freq", default=1)
    has_experts = config.get("num_experts") or config.get("n_routed_experts")
    layers = []
    for i, kind in enumerate(kinds):
        layers.append(linear if kind.startswith("linear") else latent_attention_of(config))
        if has_experts and i >= dense and i % every == 0:
            inner = integer(config, "moe_intermediate_size")
            shared = inner * integer(config, "num_shared_experts", "n_shared_experts", default=0)
            layers.append(moe_of(config, inner, shared))
        else:
            layers.append(mlp_of(config))
    return layers


def _glm5_next(config: Config) -> list[Layer]:
    """GLM-5 Next: KDA, and latent attention in every fourth block. With hyper-connections (`mhc`) a
    matrix makes of `hc_mult` residual streams how each mixer and MLP reads, writes and mixes them.
    What finds the keys that a query sees (an index, in some sizes) is left out.
    """
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping):
        heads, head_dim = integer(linear, "num_heads"), integer(linear, "head_dim")
        with_delta = set(linear.get("kda_layers") or ())
    else:
        heads, head_dim = integer(config, "linear_num_heads"), integer(config, "linear_head_dim")
        with_delta = {i for i in range(layer_count(config)) if i % 4 != 3}
    taps = integer(config, "linear_conv_kernel_dim", default=4)
    delta = kimi_delta_attention(integer(config, "hidden_size"), heads, head_dim, taps)
    kinds = ["linear" if i in with_delta else "" for i in range(layer_count(config))]
    layers = _blocks_with_latent_attention(config, mixer_kinds(config, kinds), delta)
    if not config.get("mhc"):
        return layers
    streams = integer(config, "hc_mult", default=4)
    mixes = Layer(2 * (2 + streams) * streams * streams * integer(config, "hidden_size"))
    return [*layers, *[mixes] * len(layers)]


def _bailing(config: Config) -> list[Layer]:
    """Ling and Ring: latent attention ends each group of blocks; the others have KDA (Ling 3, which
    says the width of a convolution) or lightning attention (2.5).
    """
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    head_dim = integer(config, "head_dim", default=hidden // heads)
    taps = config.get("short_conv_kernel_size")
    full = bool(config.get("no_kda_lora"))
    linear = (
        lightning_attention(hidden, heads, head_dim)
        if taps is None
        else kimi_delta_attention(
            *(hidden, heads, head_dim, size(config, taps, "short_conv_kernel_size")),
            full_rank_gate=full,
            full_rank_decay=full,
        )
    )
    group, count = config.get("layer_group_size", 1), layer_count(config)
    if isinstance(group, list):  # 1 is a linear layer
        kinds = ["linear" if one == 1 else "" for one in group]
    else:
        every = size(config, group, "layer_group_size")
        kinds = ["linear" if (i + 1) % every else "" for i in range(count)]
    return _blocks_with_latent_attention(config, kinds, linear)


def _gigachat(config: Config) -> list[Layer]:
    """GigaChat 3.5: gated delta nets, and gated latent attention in the blocks that are named.
    Norms in front of layers, behind them and of latents have gates, which two matrices make.
    """
    named_ones = set(config.get("full_attention_layers") or ())
    kinds = ["" if i in named_ones else "linear" for i in range(layer_count(config))]
    delta = _delta_net_of(config)
    layers = _blocks_with_latent_attention(config, mixer_kinds(config, kinds), delta)
    if "Gated" not in str(config.get("norm_type", "ZeroCenteredGatedNorm")):
        return layers
    norms = 2 if config.get("layernorm_type", "pre_post") == "pre_post" else 1
    beside = norms * integer(config, "hidden_size")
    latents = integer(config, "kv_lora_rank") + integer(config, "q_lora_rank", default=0)
    return [
        replace(
            layer,
            per_token=layer.per_token
            + 4 * GIGACHAT_NORM_RANK * (beside + (latents if layer.kv_values else 0)),
        )
        for layer in layers
    ]


def _jet_nemotron(config: Config) -> list[Layer]:
    """Jet-Nemotron: JetBlocks, attention, and attention to a window, each with an MLP. In SGLang a
    query sees the keys of a window and its own.
    """
    efficient = config.get("efficient_attention_config")
    jet = efficient.get("jet") if isinstance(efficient, Mapping) else None
    if not isinstance(efficient, Mapping) or not isinstance(jet, Mapping):
        raise ValueError(f"{named(config)} lacks efficient_attention_config")
    key_dim = integer(jet, "head_dim")
    block = jet_block(
        integer(config, "hidden_size"),
        integer(jet, "num_heads"),
        key_dim,
        size(jet, key_dim * number(jet, "expand_v", default=2.0), "expand_v"),
        integer(jet, "conv_size", default=4),
        integer(jet, "dconv_generator_reduction", default=8),
    )
    layers = []
    for kind in mixer_kinds(config, []):
        if kind == "swa":
            window = integer(efficient.get("swa") or {}, "window_size") + 1
            layers.append(attention_of(config, window=window))
        else:
            layers.append(block if kind == "jet" else attention_of(config))
        layers.append(mlp_of(config))
    return layers


def _minicpm_sala(config: Config) -> list[Layer]:
    """MiniCPM-SALA: `mixer_types` says which blocks have lightning attention, and is repeated if it
    is short. Attention counts as dense: where it is sparse, SGLang has no prefix cache.
    """
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    lightning = lightning_attention(
        hidden,
        integer(config, "lightning_nh", default=heads),
        integer(config, "lightning_head_dim", "head_dim", default=hidden // heads),
        gated=bool(config.get("use_output_gate")),
    )
    whole = attention_of(config, gated=bool(config.get("attn_use_output_gate")))
    kinds = mixer_kinds({"layer_types": config.get("mixer_types")}, ["minicpm4"])
    layers = []
    for kind, _ in zip(cycle(kinds), range(layer_count(config)), strict=False):
        layers += [lightning if kind.startswith("lightning") else whole, mlp_of(config)]
    return layers


def _lfm2(config: Config) -> list[Layer]:
    count, hidden = layer_count(config), integer(config, "hidden_size")
    with_attention = set(config.get("full_attn_idxs") or ())
    kinds = mixer_kinds(
        config, ["attention" if i in with_attention else "conv" for i in range(count)]
    )
    conv = short_conv(hidden, integer(config, "conv_L_cache", default=3))
    inner = integer(config, "block_ff_dim", "intermediate_size")
    if config.get("model_type") == "lfm2" and config.get("block_auto_adjust_ff_dim", True):
        factor = number(config, "block_ffn_dim_multiplier", default=1.0)
        inner = size(config, factor * (2 * inner // 3), "block_ffn_dim_multiplier")
        multiple = integer(config, "block_multiple_of", default=256)
        inner = -(-inner // multiple) * multiple
    dense = integer(config, "num_dense_layers", default=2) if config.get("num_experts") else count
    layers = []
    for i, kind in enumerate(kinds):
        layers.append(attention_of(config) if kind == "attention" else conv)
        sparse = i >= dense
        layers.append(
            moe_of(config, integer(config, "moe_intermediate_size"))
            if sparse
            else mlp_of(config, inner)
        )
    return layers


def _zaya(config: Config) -> list[Layer]:
    """ZAYA1: blocks of compressed convolutional attention and of experts, which an MLP of three
    layers chooses; one more choice is no expert. Releases count a block as one layer, or as two
    with the sizes under other names (ZAYA1-base).
    """
    hidden, router = (
        integer(config, "hidden_size"),
        integer(config, "router_hidden_size", "zaya_mlp_expansion", default=256),
    )
    mixer = convolutional_attention(
        hidden,
        integer(config, "num_attention_heads"),
        integer(config, "num_key_value_heads"),
        integer(config, "head_dim", "kv_channels"),
        (
            integer(config, "cca_time0", default=2),
            integer(config, "cca_time1", default=2),
        ),
    )
    experts = integer(config, "num_experts")
    skips = bool(config.get("zaya_use_mod", True))
    chooser = Layer(2 * (hidden * router + 2 * router * router + router * (experts + skips)))
    inner = integer(config, "moe_intermediate_size", default=0)
    as_one = bool(inner)
    inner = inner or integer(config, "ffn_hidden_size") // 2
    active = integer(config, "num_experts_per_tok", "moe_router_topk", default=1)
    chosen = Layer(6 * active * hidden * inner)
    kinds = config.get("zaya_layers") or ["a", experts] * (
        layer_count(config) if as_one else layer_count(config) // 2
    )
    if not isinstance(kinds, list | tuple):
        raise ValueError(
            f"{named(config)} has {str(kinds)[:40]!r} as zaya_layers, which is no list"
        )
    layers = []
    for kind in kinds:
        layers += [mixer] if kind == "a" else [chooser, chosen]
    return layers


def _inkling(config: Config) -> list[Layer]:
    """Inkling: attention, some of it in windows, whose scores have a bias for each distance up to
    an extent; short convolutions over keys, values and the outputs of attention and MLP. A slot of
    SGLang has room for keys and values of both kinds of attention, at each layer.
    """
    hidden = integer(config, "hidden_size")
    taps = integer(config, "sconv_kernel_size", default=4) if config.get("use_sconv") else 0
    window = integer(config, "sliding_window_size", default=512)
    distances = integer(config, "d_rel", default=16)
    whole, sliding = attention_of(config), attention_of(_windowed(config), window=window)
    channels = whole.kv_values + sliding.kv_values + 2 * hidden

    def mixer(layer: Layer, heads: int, extent: int) -> Layer:
        bias = 2 * heads * distances * (hidden + extent)
        convolved = 2 * taps * (layer.kv_values + 2 * hidden)
        kept = channels * (taps - 1) if taps else 0
        return replace(layer, per_token=layer.per_token + bias + convolved, conv_values=kept)

    heads = integer(config, "num_attention_heads")
    extent = integer(config, "rel_extent", default=1024)
    everywhere = mixer(whole, heads, extent)
    heads = integer(config, "swa_num_attention_heads", default=heads)
    nearby = mixer(sliding, heads, window)
    inner = integer(config, "intermediate_size")
    dense = integer(config, "dense_intermediate_size", default=inner)
    shared = integer(config, "n_shared_experts", default=0) * inner
    shared *= integer(config, "shared_experts_size", default=1)
    local = config.get("local_layer_ids") or ()
    first_sparse = integer(config, "dense_mlp_idx", default=0)
    layers = []
    for i in range(layer_count(config)):
        layers.append(nearby if i in local else everywhere)
        sparse = i >= first_sparse
        layers.append(moe_of(config, inner, shared) if sparse else mlp_of(config, dense))
    return layers


def _windowed(config: Config) -> Config:
    """`config` with the heads of Inkling's attention in windows, where it names others."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    given = {name: config.get(f"swa_{name}") for name in names}
    return {**config, **{name: value for name, value in given.items() if value is not None}}


def _zamba2(config: Config) -> list[Layer]:
    """Mamba-2 everywhere; a `hybrid` layer runs a shared attention block on [hidden, embedding]
    before it.
    """
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    shared = [
        attention(
            hidden,
            heads,
            integer(config, "num_key_value_heads", default=heads),
            2 * hidden // heads,
            input_width=2 * hidden,
        ),
        mlp(hidden, integer(config, "intermediate_size", default=4 * hidden), gated=True),
        Layer(2 * hidden * hidden),
    ]
    layers = []
    for kind in mixer_kinds(config, []):
        layers.extend(shared if kind == "hybrid" else [])
        layers.append(mamba2_of(config))
    return layers


def _pure(mixer: Callable[[Config], Layer]) -> Callable[[Config], list[Layer]]:
    def read(config: Config) -> list[Layer]:
        return [mixer(config)] * layer_count(config, "num_hidden_layers", "n_layer")

    return read


def _blocks(
    config: Config, kinds: list[str], mixer: Callable[[Config], Layer], feed_forward: Layer
) -> list[Layer]:
    """Blocks of one mixer and one MLP."""
    if not kinds:
        raise ValueError(f"{named(config)} lacks layer_types")
    layers = []
    for kind in kinds:
        layers += [attention_of(config) if kind == "attention" else mixer(config), feed_forward]
    return layers


def _decoder(config: Config) -> list[Layer]:
    """A plain decoder; sliding windows where `layer_types` says so, experts where the config has
    some.
    """
    count = layer_count(config, "num_hidden_layers", "n_layer")
    kinds = mixer_kinds(config, ["attention"] * count)
    window = integer(config, "sliding_window", default=0)
    if config.get("num_local_experts") or config.get("num_experts"):
        inner = integer(config, "moe_intermediate_size", "intermediate_size")
        feed_forward = moe_of(
            config, inner, integer(config, "shared_expert_intermediate_size", default=0)
        )
    else:
        feed_forward = mlp_of(config)
    whole, sliding = attention_of(config), attention_of(config, window=window)
    mixers = [sliding if kind == "sliding_attention" else whole for kind in kinds]
    return [layer for mixer in mixers for layer in (mixer, feed_forward)]


FAMILIES: dict[str, Callable[[Config], list[Layer]]] = {
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granite,
    "bamba": _bamba,
    "mamba2": _pure(mamba2_of),
    "mamba": _pure(mamba1_of),
    "falcon_mamba": _pure(mamba1_of),
    "jamba": _jamba,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_next,
    "qwen3_5_moe": _qwen3_next,
    "qwen4_exp": _qwen4_exp,
    "kimi_linear": _kimi_linear,
    "glm5_next": _glm5_next,
    "bailing_hybrid": _bailing,
    "gigachat3_5": _gigachat,
    "jet_nemotron": _jet_nemotron,
    "minicpm_sala": _minicpm_sala,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "inkling_model": _inkling,
    "inkling_mm_model": _inkling,
    "zamba2": _zamba2,
    "zaya": _zaya,
}
PLAIN_DECODERS = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "granite", "gemma2"}
