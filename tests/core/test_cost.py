"""The cost model: the paper's closed forms, each layer kind by hand, each family's config."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.costs.layers import Layer, attention, lightning_attention, mlp, short_conv
from sglang_hybrid.core.costs.model_config import FAMILIES, read_layers
from tests.rehearsal.models import MODELS

NEMOTRON = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M*-",
    "hidden_size": 64,
    "intermediate_size": 256,
    "mlp_hidden_act": "relu2",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
    "conv_kernel": 4,
}
MAMBA2_64 = 2 * 64 * (128 + 256 + 8) + 2 * 128 * 64 + 2 * 4 * 256 + 5 * 128 * 32
GRANITE = {
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "shared_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
}


def test_paper_7b_closed_forms() -> None:
    paper = CostModel.paper_7b()
    assert paper.state_bytes == 26_787_840
    assert paper.kv_bytes_per_token == 65_536
    assert paper.flops(1) == 13_087_211_520 + 65_536
    assert paper.flops(1000) == 13_087_211_520 * 1000 + 65_536 * 1000**2
    assert paper.state_bytes / paper.kv_bytes_per_token == 408.75


def test_paper_figure_3b() -> None:
    """10 K tokens with a state per block of 16: 17.4 GB, 3.3 times a Transformer's KV."""
    paper = CostModel.paper_7b()
    hybrid = 625 * paper.state_bytes + 10_000 * paper.kv_bytes_per_token
    assert round(hybrid / 1e9, 1) == 17.4
    transformer = CostModel.paper(
        hidden=4096, state=128, ssm_layers=0, attention_layers=32, mlp_layers=32
    )
    assert round(hybrid / (10_000 * transformer.kv_bytes_per_token), 1) == 3.3


@pytest.mark.parametrize(("tokens", "efficiency"), [(1024, 1.43e5), (8192, 1.98e5), (32768, 2.3e5)])
def test_paper_flop_efficiency(tokens: int, efficiency: float) -> None:
    paper = CostModel.paper_7b()
    size = paper.state_bytes + tokens * paper.kv_bytes_per_token
    assert paper.flops(tokens) / size == pytest.approx(efficiency, rel=0.005)


def test_attention_is_causal_with_grouped_heads() -> None:
    model = CostModel.from_layers([attention(64, 4, 2, 16)])
    by_token = sum(2 * 64 * (64 + 64) + 2 * 64 * 64 + 4 * 64 * (i + 1) for i in range(10))
    assert model.flops(10) == by_token
    assert model.kv_bytes_per_token == 2 * 2 * 2 * 16
    assert model.state_bytes == 0


@given(length=st.integers(0, 300), window=st.integers(1, 100))
def test_sliding_window_counts_every_pair(length: int, window: int) -> None:
    model = CostModel.from_layers([Layer(7, per_pair=4, window=window), Layer(0, per_pair=8)])
    pairs = sum(4 * min(i + 1, window) + 8 * (i + 1) for i in range(length))
    assert model.flops(length) == 7 * length + pairs
    assert model.flops(np.array([float(length)]))[0] == model.flops(length)


def test_savings_and_measured_sizes() -> None:
    paper = CostModel.paper_7b()
    assert paper.savings(1000, 400) == paper.flops(1000) - paper.flops(400)
    measured = paper.with_sizes(kv_bytes_per_token=7, state_bytes=11)
    assert (measured.kv_bytes_per_token, measured.state_bytes) == (7, 11)
    assert measured.flops(123) == paper.flops(123)


def test_nemotron_h_by_hand() -> None:
    model = CostModel.from_config(NEMOTRON)
    attn = 2 * 64 * (64 + 2 * 32) + 2 * 64 * 64
    assert model.linear == 2 * MAMBA2_64 + attn + 2 * 64 + 2 * (4 * 64 * 256)
    assert model.quadratic == 2 * 64
    assert model.kv_bytes_per_token == 2 * (2 * 2 * 16)
    assert model.state_bytes == 2 * (4 * 128 * 32 + 2 * 3 * 256)
    assert model.assumed == ""


def test_nemotron_h_spells_its_layers_two_ways() -> None:
    spelt = {**NEMOTRON, "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"]}
    del spelt["hybrid_override_pattern"]
    assert CostModel.from_config(spelt) == CostModel.from_config(NEMOTRON)
    new = ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"]
    assert CostModel.from_config({**spelt, "layers_block_type": new}) == CostModel.from_config(
        spelt
    )


def test_nemotron_h_experts_have_no_gate_and_may_work_in_a_latent_space() -> None:
    config = {
        **NEMOTRON,
        "hybrid_override_pattern": "E",
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 96,
    }
    assert CostModel.from_config(config).linear == 2 * 64 * 8 + 4 * 64 * (2 * 48 + 96)
    latent = CostModel.from_config({**config, "moe_latent_size": 16})
    assert latent.linear == 2 * 64 * 8 + 4 * 64 * 16 + 4 * (2 * 16 * 48 + 64 * 96)


def test_ssm_dtype_and_nested_text_config() -> None:
    half = CostModel.from_config({**NEMOTRON, "mamba_ssm_dtype": "bfloat16"})
    assert half.state_bytes == 2 * (2 * 128 * 32 + 2 * 3 * 256)
    nested = CostModel.from_config({"model_type": "some_vl", "text_config": NEMOTRON})
    assert nested == CostModel.from_config(NEMOTRON)


def test_granite_dense_and_with_experts() -> None:
    attn = 2 * 64 * (64 + 2 * 32) + 2 * 64 * 64 + 2 * 64
    dense = CostModel.from_config(GRANITE)
    assert dense.linear == MAMBA2_64 + attn + 2 * (6 * 64 * 128)
    sparse = CostModel.from_config({**GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2})
    assert sparse.linear == MAMBA2_64 + attn + 2 * (2 * 64 * 8 + 6 * 64 * (2 * 96 + 128))


def test_falcon_h1_runs_both_mixers_in_every_layer() -> None:
    config = {
        **GRANITE,
        "model_type": "falcon_h1",
        "num_hidden_layers": 3,
        "mamba_d_ssm": 128,
        "head_dim": 16,
    }
    attn = 2 * 64 * (64 + 2 * 32) + 2 * 64 * 64 + 2 * 64
    model = CostModel.from_config(config)
    assert model.linear == 3 * (MAMBA2_64 + attn + 6 * 64 * 96)
    assert model.state_bytes == 3 * (4 * 128 * 32 + 2 * 3 * 256)


def test_qwen3_next_interval_gate_and_shared_expert() -> None:
    config = {
        "model_type": "qwen3_next",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "intermediate_size": 100,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    delta = 2 * 64 * (96 + 32 + 8) + 2 * 32 * 64 + 2 * 4 * 96 + 7 * 4 * 16 * 8
    attn = 2 * 64 * (2 * 64 + 2 * 32) + 2 * 64 * 64 + 2 * 64
    moe = 2 * 64 * 8 + 6 * 64 * (2 * 48 + 32)
    model = CostModel.from_config(config)
    assert model.linear == 3 * delta + attn + 4 * moe
    assert model.state_bytes == 3 * (4 * 4 * 16 * 8 + 2 * 3 * 96)
    dense = CostModel.from_config({**config, "num_experts": 0, "model_type": "qwen3_5_text"})
    assert dense.linear == 3 * delta + attn + 4 * (6 * 64 * 100)


def test_qwen4_exp_streams_ngrams_and_sparse_attention() -> None:
    config = {
        **MODELS["Qwen3.5-9B"],
        "model_type": "qwen4_exp_text",
        "hc_count": 2,
        "hc_lowrank": 32,
    }
    hidden, layers, attentions = 4_096, 32, 8
    plain = CostModel.from_config(MODELS["Qwen3.5-9B"])
    model = CostModel.from_config(config)
    mix, inject = 2 * (2 * hidden * 32 + 32 * 2 * hidden), 2 * 2 * hidden * 2
    assert model.assumed == ""
    assert model.linear - plain.linear == (2 * layers + 1) * mix + 2 * layers * inject
    assert model.state_bytes == plain.state_bytes
    assert model.kv_bytes_per_token == plain.kv_bytes_per_token
    more = {"ple_layer_ids": [2, 22], "ple_embed_dim": 64, "ngram_size": 3}
    ngrams = CostModel.from_config({**config, **more})
    each = 2 * (64 * 2 * hidden + 64 * hidden) + 2 * 4 * 2 * hidden
    assert ngrams.linear - model.linear == 2 * each
    assert ngrams.state_bytes - model.state_bytes == 2 * 2 * (2 * hidden * 3 * 3)
    indexer = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128}
    indexer |= {"indexer_budget": 2_048, "indexer_compress_ratio": 4}
    kinds = ["linear_attention"] * 3 + ["indexed_attention"]
    sparse = CostModel.from_config({**config, **indexer, "layer_types": kinds * 8})
    assert sparse.windows == ((2_048, attentions * 4 * 16 * 256),)
    scores = attentions * 2 * 4 * 128 // 4
    assert sparse.quadratic == scores // 2
    projected = attentions * 2 * hidden * 5 * 128
    assert sparse.flops(1) - model.flops(1) == projected + scores
    assert sparse.kv_bytes_per_token - model.kv_bytes_per_token == attentions * 2 * 128 // 4


KIMI: dict[str, Any] = {
    "model_type": "kimi_linear",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2],
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
    },
    "num_attention_heads": 4,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "kv_lora_rank": 32,
    "intermediate_size": 100,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
}


def test_kimi_linear_and_k3_by_hand() -> None:
    model = CostModel.from_config(KIMI)
    kda = 2 * (64 * (3 * 64 + 4) + 2 * (64 * 16 + 16 * 64) + 64 * 64)
    kda += 2 * 4 * 3 * 64 + 7 * 4 * 16 * 16
    mla = 2 * (64 * 4 * 24 + 64 * 40 + 32 * 4 * (16 + 12) + 4 * 12 * 64)
    moe = 2 * 64 * 8 + 6 * 64 * (2 * 48 + 48)
    pair = 2 * 4 * (24 + 12)
    assert model.linear == 2 * kda + mla + pair // 2 + 6 * 64 * 100 + 2 * moe
    assert model.quadratic == pair // 2
    assert model.kv_bytes_per_token == 2 * 40
    assert model.state_bytes == 2 * (4 * 4 * 16 * 16 + 2 * 3 * 3 * 64)
    assert model.assumed == ""
    through = CostModel.from_config({**KIMI, "q_lora_rank": 20})
    assert through.linear - model.linear == 2 * (64 * 20 + 20 * 4 * 24 - 64 * 4 * 24)
    linear = KIMI["linear_attn_config"]
    k3 = {
        "linear_attn_config": {**linear, "use_full_rank_gate": True},
        "mla_use_output_gate": True,
        "routed_expert_hidden_size": 16,
    }
    gates = 2 * 2 * (64 * 64 - 2 * 64 * 16) + 2 * 64 * 4 * 12
    latent = 2 * (4 * 64 * 16 + 6 * 2 * 48 * (16 - 64))
    assert CostModel.from_config({**KIMI, **k3}).linear - model.linear == gates + latent
    dense = CostModel.from_config({**KIMI, "num_experts": None})
    assert dense.linear == model.linear - 2 * moe + 2 * 6 * 64 * 100
    with pytest.raises(ValueError, match="'kimi_linear' lacks linear_attn_config"):
        CostModel.from_config({**KIMI, "linear_attn_config": None})


def test_other_models_of_latent_attention_by_hand() -> None:
    """GLM-5 Next, Ling and GigaChat: the blocks of Kimi Linear under other names."""
    kimi = CostModel.from_config(KIMI)
    common = {name: KIMI[name] for name in KIMI if name != "linear_attn_config"}
    experts = {"num_experts": None, "n_routed_experts": 8, "n_shared_experts": 1}
    delta = {"linear_num_heads": 4, "linear_head_dim": 16, "linear_conv_kernel_dim": 4}
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    glm = {**common, **experts, **delta, "model_type": "glm5_next_text", "layer_types": kinds}
    assert CostModel.from_config({"model_type": "glm5_next", "text_config": glm}) == kimi
    streams = CostModel.from_config({**glm, "mhc": True, "hc_mult": 2})
    assert streams.linear - kimi.linear == 6 * 2 * (2 + 2 + 4) * 2 * 64
    counted = {"linear_attn_config": {**KIMI["linear_attn_config"], "kda_layers": [0, 2]}}
    assert CostModel.from_config({**glm, **counted, "layer_types": None}) == kimi

    ling = {**common, "model_type": "bailing_hybrid", "layer_group_size": [1, 0, 1]}
    assert CostModel.from_config({**ling, "short_conv_kernel_size": 4}) == kimi
    full = CostModel.from_config({**ling, "short_conv_kernel_size": 4, "no_kda_lora": True})
    assert full.linear - kimi.linear == 2 * 2 * 2 * (64 * 64 - 2 * 64 * 16)
    lightning = CostModel.from_config({**ling, "layer_group_size": 2, "num_hidden_layers": 4})
    assert lightning.state_bytes == 2 * 4 * 4 * 16 * 16
    assert lightning.kv_bytes_per_token == 2 * 2 * 40
    ends_with = CostModel.from_config({**ling, "layer_group_size": 3})
    begins_with = CostModel.from_config({**ling, "layer_group_size": [1, 1, 0]})
    assert ends_with == begins_with
    one = lightning_attention(64, 4, 16)
    assert one.per_token == 2 * 64 * 5 * 64 + 5 * 4 * 16 * 16

    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    heads |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    giga = {**common, **experts, **heads, "model_type": "gigachat3_5", "gated_attention": True}
    found = CostModel.from_config({**giga, "full_attention_layers": [1]})
    assert found.state_bytes == 2 * (4 * 4 * 16 * 16 + 2 * 3 * (2 * 2 * 16 + 4 * 16))
    assert found.kv_bytes_per_token == kimi.kv_bytes_per_token
    ungated = {**giga, "full_attention_layers": [1], "gated_attention": False}
    assert found.linear - CostModel.from_config(ungated).linear == 2 * 64 * 4 * 12
    plain = {**giga, "full_attention_layers": [1], "norm_type": "LlamaRMSNorm"}
    widths = 4 * 3 * 64 + 32  # four norms a block, and one of the latent
    assert found.linear - CostModel.from_config(plain).linear == 4 * 16 * widths
    assert found == CostModel.from_config({**giga, "layer_types": kinds})
    for model in (kimi, lightning, found):
        assert model.assumed == ""


@pytest.mark.parametrize(
    ("name", "parameters", "state_bytes", "kv_bytes"),
    [
        # Counted tensor by tensor: an MoE layer 1,819,607,296, KDA 39,514,272, MLA 29,114,880.
        ("Kimi-Linear-48B", 49_122_681_728, 20 * (4 * 32 * 128**2 + 2 * 3 * 3 * 4096), 7 * 2 * 576),
        # The files of LFM2-2.6B hold 2.57 billion; its head is its embedding.
        ("LFM2-2.6B", 2.57e9, 22 * 2 * 2 * 2048, 8 * 2 * 2 * 8 * 64),
        # Its files hold 9.48 billion.
        ("MiniCPM-SALA", 9.48e9, 24 * 4 * 32 * 128**2, 8 * 2 * 2 * 2 * 128),
        # Counted tensor by tensor in transformers' class of its defaults.
        ("ZAYA1-base", 8_840_488_784, 40 * 2 * (2 * 1280 + 2048), 40 * 2 * 2 * 2 * 128),
        ("Qwen3.5-9B", 9e9, 24 * (4 * 32 * 128**2 + 2 * 3 * 8192), 8 * 2 * 2 * 4 * 256),
        ("Qwen3.5-35B", 35e9, 30 * (4 * 32 * 128**2 + 2 * 3 * 8192), 10 * 2 * 2 * 2 * 256),
    ],
)
def test_published_sizes(name: str, parameters: float, state_bytes: int, kv_bytes: int) -> None:
    """A token costs two FLOPs per parameter, if all experts are active; the embedding and the head
    are no part of the cost.
    """
    config = MODELS[name].get("text_config", MODELS[name])
    model = CostModel.from_config(config)
    assert model.assumed == ""
    assert (model.state_bytes, model.kv_bytes_per_token) == (state_bytes, kv_bytes)
    experts = config.get("num_experts")
    everything = {"num_experts_per_tok": experts, "num_experts_per_token": experts}
    all_active = CostModel.from_config({**config, **everything})
    embeddings = (
        (1 if config["tie_word_embeddings"] else 2) * config["vocab_size"] * config["hidden_size"]
    )
    assert all_active.linear / 2 + embeddings == pytest.approx(parameters, rel=0.01)


def test_jet_nemotron_by_hand() -> None:
    base = MODELS["Jet-Nemotron-2B"]
    projections = 2 * 1536 * (2 * 1152 + 2 * 3072 + 2 * 12) + 2 * 3072 * 1536
    taps = 2 * 1536 * 384 + 2 * 384 * 4 * 3072
    scan = 2 * 4 * 3072 + 7 * 12 * 96 * 256
    attention = 2 * 1536 * (1536 + 2 * 256) + 2 * 1536 * 1536
    pair = 4 * 12 * 128
    model = CostModel.from_config(base)
    blocks = 24 * (projections + taps + scan) + 4 * attention + 28 * 6 * 1536 * 8960
    assert model.linear == blocks + 2 * pair // 2
    assert model.quadratic == 2 * pair // 2
    assert model.windows == ((1153, 2 * pair),)
    assert model.state_bytes == 24 * (4 * 12 * 96 * 256 + 2 * 3 * (2 * 1152 + 3072))
    assert model.kv_bytes_per_token == 4 * 2 * 2 * 2 * 128
    assert model.assumed == ""
    without = {name: base[name] for name in base if name != "efficient_attention_config"}
    for config in (without, {**base, "efficient_attention_config": {"swa": {}}}):
        with pytest.raises(ValueError, match="'jet_nemotron' lacks efficient_attention_config"):
            CostModel.from_config(config)


def test_minicpm_by_hand() -> None:
    """Short lists of mixers repeat; lightning attention has a width of its own; gates may lack."""
    config = {
        "model_type": "minicpm_sala",
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mixer_types": ["attn", "lightning_attn"],
    }
    model = CostModel.from_config(config)
    assert model.state_bytes == 2 * 4 * 4 * 16 * 16
    assert model.kv_bytes_per_token == 3 * 2 * 2 * 2 * 16
    gated = CostModel.from_config(config | {"use_output_gate": True, "attn_use_output_gate": True})
    assert gated.linear - model.linear == 5 * 2 * 64 * 64
    wider = CostModel.from_config(config | {"lightning_nh": 2, "lightning_head_dim": 64})
    assert wider.state_bytes == 2 * 4 * 2 * 64 * 64
    assert wider.linear - model.linear == 2 * (2 * 64 * 4 * 64 + 5 * (2 * 64**2 - 4 * 16**2))
    whole = CostModel.from_config({**config, "mixer_types": None})
    assert whole.state_bytes == 0 and whole.kv_bytes_per_token == 5 * 2 * 2 * 2 * 16
    with pytest.raises(ValueError, match="has '7' for its kinds of layers, which is no list"):
        CostModel.from_config({**config, "mixer_types": 7})


def test_zaya_by_hand() -> None:
    """One config counts a block as two layers, the other as one."""
    base = MODELS["ZAYA1-base"]
    attention = 2 * 2048 * (1024 + 2 * 256) + 2 * 1024 * 2048
    convolutions = 2 * 2 * 1280 + 2 * 2 * 1280 * 128
    router = 2 * (2048 * 256 + 256 * 256 + 256 * 256 + 256 * 17)
    expert = 2 * (2048 * 4096 + 2048 * 2048)
    pair = 4 * 8 * 128
    model = CostModel.from_config(base)
    assert model.linear == 40 * (attention + convolutions + router + expert + pair // 2)
    assert model.quadratic == 40 * pair // 2
    assert model.state_bytes == 368_640
    assert model.kv_bytes_per_token == 40_960
    assert model.assumed == ""
    renamed = {"ffn_hidden_size", "zaya_mlp_expansion", "num_query_groups", "moe_router_topk"}
    common = {name: base[name] for name in base if name not in renamed}
    sizes = {"num_hidden_layers": 40, "moe_intermediate_size": 2048, "router_hidden_size": 256}
    assert CostModel.from_config({**common, **sizes}) == model
    assert CostModel.from_config({**base, "zaya_layers": ["a", 16] * 40}) == model
    without = CostModel.from_config({**base, "zaya_use_mod": False})
    assert model.linear - without.linear == 40 * 2 * 256
    with pytest.raises(ValueError, match="'zaya' has '7' as zaya_layers, which is no list"):
        CostModel.from_config({**base, "zaya_layers": 7})


def test_mamba_families() -> None:
    mamba2 = {
        "model_type": "mamba2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "state_size": 32,
        "conv_kernel": 4,
    }
    assert CostModel.from_config(mamba2).linear == 2 * MAMBA2_64
    mamba1 = {
        "model_type": "falcon_mamba",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "state_size": 16,
        "time_step_rank": "auto",
    }
    scan = 4 * 64 * 128 + 2 * 128 * (4 + 32) + 2 * 4 * 128 + 8 * 128 + 8 * 128 * 16 + 2 * 128 * 64
    model = CostModel.from_config(mamba1)
    assert model.linear == 2 * scan
    assert model.state_bytes == 2 * (4 * 128 * 16 + 2 * 3 * 128)
    assert model.kv_bytes_per_token == 0


def test_inkling_by_hand() -> None:
    """Two layers of attention over all tokens and one of a window of 8, the first with an MLP."""
    text = {
        "model_type": "inkling_model",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "swa_num_key_value_heads": 4,
        "local_layer_ids": [1],
        "sliding_window_size": 8,
        "rel_extent": 32,
        "d_rel": 2,
        "use_sconv": True,
        "sconv_kernel_size": 4,
        "dense_mlp_idx": 1,
        "dense_intermediate_size": 128,
        "intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
    }
    model = CostModel.from_config({"model_type": "inkling_mm_model", "text_config": text})
    assert model == CostModel.from_config(text)
    assert model.assumed == ""
    assert model.windows == ((8, 4 * 64),)
    assert model.quadratic == 2 * 4 * 64 / 2
    # Windows of three inputs: keys and values of both kinds, and two outputs, at each layer.
    assert model.state_bytes == 3 * 2 * 3 * (2 * 32 + 2 * 64 + 2 * 64)
    assert model.kv_bytes_per_token == 2 * (2 * 2 * 32 + 2 * 64)
    whole = 2 * 64 * (64 + 2 * 32) + 2 * 64 * 64 + 2 * 4 * 2 * (64 + 32) + 2 * 4 * (2 * 32 + 2 * 64)
    local = 2 * 64 * (64 + 2 * 64) + 2 * 64 * 64 + 2 * 4 * 2 * (64 + 8) + 2 * 4 * (2 * 64 + 2 * 64)
    experts = 2 * 64 * 8 + 6 * 3 * 64 * 24
    pairs = 2 * 4 * 64 // 2
    assert model.linear == 2 * whole + local + 6 * 64 * 128 + 2 * experts + pairs
    assert CostModel.from_config({**text, "use_sconv": False}).state_bytes == 0


def test_jamba_bamba_lfm2_and_zamba2_read() -> None:
    common = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    jamba = {
        **common,
        "model_type": "jamba",
        "num_hidden_layers": 8,
        "intermediate_size": 96,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    layers = read_layers(jamba).layers
    assert sum(layer.per_pair > 0 for layer in layers) == 1
    assert sum(layer.per_token == 2 * 64 * 4 + 6 * 64 * 2 * 96 for layer in layers) == 4
    bamba = {
        **GRANITE,
        "model_type": "bamba",
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "layer_types": None,
    }
    assert [layer.per_pair > 0 for layer in read_layers(bamba).layers[::2]] == [False, True, False]
    lfm2 = {
        **common,
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "full_attn_idxs": [2],
        "intermediate_size": 384,
        "block_multiple_of": 256,
    }
    kinds = read_layers(lfm2).layers
    assert kinds[0] == short_conv(64, 3)
    assert kinds[1] == mlp(64, 256, gated=True)
    zamba2 = {
        **common,
        "model_type": "zamba2",
        "layers_block_type": ["mamba", "hybrid"],
        "intermediate_size": 128,
        "n_mamba_heads": 8,
        "mamba_d_state": 32,
        "mamba_ngroups": 2,
    }
    layers = read_layers(zamba2).layers
    assert sum(layer.per_pair for layer in layers) == 4 * 128
    assert sum(layer.ssm_values > 0 for layer in layers) == 2


def test_an_unknown_family_is_read_as_a_decoder_and_says_so() -> None:
    config = {
        "model_type": "brand_new",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 32,
    }
    model = CostModel.from_config(config)
    assert "'brand_new' is not known" in model.assumed
    assert model.windows == ((32, 256),)
    assert model.quadratic == 128
    assert CostModel.from_config({**config, "model_type": "llama"}).assumed == ""


def test_a_missing_field_is_named() -> None:
    config = {key: value for key, value in NEMOTRON.items() if key != "ssm_state_size"}
    with pytest.raises(ValueError, match=r"'nemotron_h' lacks mamba_d_state / ssm_state_size"):
        CostModel.from_config(config)


EVERYTHING = {
    **NEMOTRON,
    **GRANITE,
    **KIMI,
    "layer_types": None,
    "num_hidden_layers": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "attn_layer_indices": [1],
    "full_attn_idxs": [1],
    "layers_block_type": ["mamba", "attention", "hybrid", "mamba"],
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "ple_layer_ids": [1],
    "sliding_window": 64,
    "block_ffn_dim_multiplier": 1.0,
    "hybrid_override_pattern": "M-*E",
    "text_config": None,
}
CONFIGS = [EVERYTHING | {"model_type": family} for family in (*FAMILIES, "llama", "brand_new")]
odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**13), 10**13),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(0, 9), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(0, 9), max_size=2),
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(CONFIGS), st.data())
def test_whatever_a_config_holds_it_is_read_or_refused_in_one_sentence(
    config: dict[str, object], data: st.DataObject
) -> None:
    """A list as `intermediate_size`, no heads, a million layers: the server says "a guess"."""
    names = data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3))
    changed = config | {name: data.draw(odd) for name in names}
    try:
        cost = CostModel.from_config(changed)
    except ValueError as error:
        assert str(error).startswith("the config of model_type")
        assert "\n" not in str(error)
    else:
        assert cost.flops(1_000) >= 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("intermediate_size", [1, 2]), ("num_attention_heads", 0), ("num_hidden_layers", 10**12)],
)
def test_unusual_configs_are_refused(field: str, value: object) -> None:
    llama = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
    }
    assert CostModel.from_config(llama).linear > 0
    with pytest.raises(ValueError, match="the config of model_type 'llama'"):
        CostModel.from_config(llama | {field: value})


@pytest.mark.parametrize("value", ["", "wide", [2], True])
def test_a_factor_that_is_no_number_is_refused(value: object) -> None:
    lfm2 = EVERYTHING | {"model_type": "lfm2", "block_ffn_dim_multiplier": value}
    with pytest.raises(ValueError, match="block_ffn_dim_multiplier, which is no number"):
        CostModel.from_config(lfm2)
