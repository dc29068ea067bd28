"""Servers that SGLang would answer wrongly with are refused, in a sentence that says what to do."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.arg_groups import mamba_hook
from sglang.srt.configs.minicpm import MiniCPMHybridConfig

from sglang_hybrid.cache import resolution

NGRAMS = {"speculative_algorithm": "NGRAM"}
TREES = {**NGRAMS, "speculative_ngram_max_bfs_breadth": 8}
CHAINS = {**NGRAMS, "speculative_ngram_max_bfs_breadth": 1}
EAGLE_TREES = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4}
ON_TWO = {"pp_size": 2}
SESSIONS = {"enable_streaming_session": True}


def refused(monkeypatch: pytest.MonkeyPatch, architecture: str, **flags: Any) -> str | None:
    """Why a server of this architecture with these flags does not start; None if it may."""
    defaults = {
        "speculative_algorithm": None,
        "speculative_ngram_max_bfs_breadth": None,
        "speculative_eagle_topk": None,
        "pp_size": 1,
        "tp_size": 1,
        "enable_streaming_session": False,
        "uses_mamba_radix_cache": True,
    }
    view: Any = SimpleNamespace(**defaults | flags)
    config = SimpleNamespace(architectures=[architecture], zaya_use_eda=True)
    model = SimpleNamespace(hf_config=config)
    monkeypatch.setattr(resolution, "resolving_view", lambda given: given)
    monkeypatch.setattr(resolution, "model_config_of", lambda given: model)
    try:
        resolution.reject_unsupported_speculation(view)
        resolution._reject_pipeline_of_zaya(view)
        resolution._reject_unsupported_tensor_parallelism(view)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("architecture", ["JetNemotronForCausalLM", "NemotronHForCausalLM"])
def test_one_memory_is_refused_where_states_would_go_to_a_copy(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    view: Any = SimpleNamespace(enable_unified_memory=True, radix_cache_backend="hybrid")
    config = SimpleNamespace(architectures=[architecture])
    model = SimpleNamespace(hf_config=config, hf_text_config=config, is_hybrid_swa=False)
    monkeypatch.setattr(resolution, "resolving_view", lambda given: given)
    monkeypatch.setattr(resolution, "model_config_of", lambda given: model)
    monkeypatch.setattr(resolution, "why_not_unified", lambda given: ("", ""))
    if architecture == "NemotronHForCausalLM":
        resolution.check_unified_memory(view)
        return
    with pytest.raises(ValueError, match="writes states to a copy of the pool; use --hybrid-memor"):
        resolution.check_unified_memory(view)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, None),
        ({"uses_mamba_radix_cache": False}, "a model without recurrent states"),
        ({"windows": True}, "a model with sliding windows"),
        ({"enable_unified_memory": True}, "one memory on a GPU; use --hybrid-memory split"),
        ({"enable_unified_memory": True, "on_cpu": True}, None),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"dcp_size": 2}, "--dcp-size 2"),
        ({"radix_cache_backend": None, "enable_unified_memory": True}, None),
    ],
)
def test_where_entries_cannot_be_coded_on_the_device(
    given: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = {
        "radix_cache_backend": "hybrid",
        "uses_mamba_radix_cache": True,
        "enable_unified_memory": False,
        "disaggregation_mode": "null",
        "pp_size": 1,
        "dcp_size": 1,
    }
    view: Any = SimpleNamespace(**defaults | given)
    monkeypatch.setattr(resolution, "resolving_view", lambda given: given)
    monkeypatch.setattr(
        resolution, "_has_windows_beside_states", lambda args: "windows" in vars(args)
    )
    monkeypatch.setattr(resolution, "serves_on_cpu", lambda: "on_cpu" in given)
    resolution.check_device_codec(view)  # nothing is coded by default
    monkeypatch.setenv("SGLANG_HYBRID_DEVICE_CODEC", "int8")
    if said is None:
        resolution.check_device_codec(view)
        return
    with pytest.raises(ValueError, match=f"device-codec int8 cannot be combined with {said}"):
        resolution.check_device_codec(view)


@pytest.mark.parametrize(
    ("architecture", "flags", "said"),
    [
        ("Mamba2ForCausalLM", CHAINS, "leave out --speculative-algorithm"),
        ("Lfm2ForCausalLM", TREES, "use --speculative-ngram-max-bfs-breadth 1"),
        ("Lfm2ForCausalLM", EAGLE_TREES, "use --speculative-eagle-topk 1"),
        ("Lfm2ForCausalLM", CHAINS, None),
        ("BailingMoeV2_5ForCausalLM", TREES, "use --speculative-ngram-max-bfs-breadth 1"),
        ("BailingMoeV2_5ForCausalLM", CHAINS, None),
        ("MiniCPMSALAForCausalLM", TREES, "use --speculative-ngram-max-bfs-breadth 1"),
        ("BailingMoeV3ForCausalLM", TREES, None),
        ("Qwen4ExpForConditionalGeneration", CHAINS, "use another --speculative-algorithm"),
        ("Qwen4ExpForConditionalGeneration", EAGLE_TREES, "use --speculative-eagle-topk 1"),
        ("NemotronHForCausalLM", EAGLE_TREES, None),
        ("NemotronHForCausalLM", {**CHAINS, **SESSIONS}, "leave out --enable-streaming-session"),
        ("NemotronHForCausalLM", SESSIONS, None),
        ("ZayaForCausalLM", ON_TWO, "leave out --pp-size"),
        ("JetNemotronForCausalLM", CHAINS, "leave out --speculative-algorithm"),
        ("JetNemotronForCausalLM", {"tp_size": 2}, "leave out --tp-size"),
        ("JetNemotronForCausalLM", {}, None),
        ("NemotronHForCausalLM", {"tp_size": 2}, None),
        ("NemotronHForCausalLM", ON_TWO, None),
    ],
)
def test_what_sglang_answers_wrongly_is_refused(
    architecture: str, flags: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = refused(monkeypatch, architecture, **flags)
    assert found is None if said is None else said in str(found)


DENSE, SPARSE = "triton", "minicpm_flashattn"
TURNED_ON = {"disable_radix_cache": False, "uses_mamba_radix_cache": True}


def of_minicpm(
    monkeypatch: pytest.MonkeyPatch, config: MiniCPMHybridConfig, **flags: Any
) -> dict[str, Any]:
    """The result of SGLang's decision that MiniCPM has no prefix cache: fields by their names."""
    given = {
        "radix_cache_backend": "hybrid",
        "disable_radix_cache": False,
        "uses_mamba_radix_cache": False,
        "mamba_radix_cache_strategy": "auto",
        "attention_backend": DENSE,
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "disable_overlap_schedule": False,
        "page_size": None,
        **flags,
    }
    args: Any = SimpleNamespace(**given)
    args._resolved_overrides = [(resolution.OF_MINICPM, {"disable_radix_cache": True})]
    model = SimpleNamespace(hf_config=config)
    monkeypatch.setattr(resolution, "model_config_of", lambda _: model)
    monkeypatch.setattr(resolution, "declare_resolution", declare)
    resolution._prefixes_of_minicpm(args)
    return {name: value for _, fields in args._resolved_overrides for name, value in fields.items()}


def declare(args: Any, source: str, **fields: Any) -> None:
    args._resolved_overrides.append((source, fields))


def sala(*kinds: str) -> MiniCPMHybridConfig:
    return MiniCPMHybridConfig(
        architectures=["MiniCPMSALAForCausalLM"],
        num_hidden_layers=len(kinds),
        num_key_value_heads=32,
        mixer_types=list(kinds),
    )


@pytest.mark.parametrize(
    ("ranks", "kinds", "norms", "is_refused"),
    [
        (2, ("minicpm4", "lightning"), True, True),
        (2, ("minicpm4", "lightning"), False, False),
        (2, ("minicpm4", "minicpm4"), True, False),
        (1, ("minicpm4", "lightning"), True, False),
    ],
)
def test_ranks_that_would_norm_their_own_heads_are_refused(
    ranks: int,
    kinds: tuple[str, ...],
    norms: bool,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = sala(*kinds)
    config.use_output_norm = norms
    monkeypatch.setattr(resolution, "model_config_of", lambda _: SimpleNamespace(hf_config=config))
    args: Any = SimpleNamespace(tp_size=ranks)
    wrong = pytest.raises(ValueError, match="leave out --tp-size")
    with wrong if is_refused else nullcontext():
        resolution._reject_unsupported_tensor_parallelism(args)


def test_minicpm_has_a_prefix_cache_where_its_attention_is_dense(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hybrid = sala("minicpm4", "lightning")
    found = of_minicpm(monkeypatch, hybrid)
    assert found == TURNED_ON | {"mamba_radix_cache_strategy": "extra_buffer"}
    asked = of_minicpm(monkeypatch, hybrid, mamba_radix_cache_strategy="extra_buffer_lazy")
    assert asked == TURNED_ON
    checked: list[str] = []
    check = "validate_mamba_no_buffer"
    monkeypatch.setattr(mamba_hook, check, lambda _, architecture: checked.append(architecture))
    asked = of_minicpm(monkeypatch, hybrid, mamba_radix_cache_strategy="no_buffer")
    assert asked == TURNED_ON and checked == hybrid.architectures


@pytest.mark.parametrize(
    ("kinds", "flags"),
    [
        (("minicpm4", "lightning"), {"attention_backend": SPARSE}),
        (("minicpm4", "lightning"), {"decode_attention_backend": SPARSE}),
        (("minicpm4", "lightning"), {"disable_radix_cache": True}),
        (("minicpm4", "lightning"), {"radix_cache_backend": None}),
        (("minicpm4", "minicpm4"), {}),
    ],
    ids=["sparse", "sparse decoding", "asked for", "SGLang's cache", "without states"],
)
def test_elsewhere_minicpm_has_none(
    kinds: tuple[str, ...],
    flags: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert of_minicpm(monkeypatch, sala(*kinds), **flags) == {"disable_radix_cache": True}
    told = [record.getMessage() for record in caplog.records]
    assert ["SGLANG_MINICPM_FORCE_DENSE=1" in line for line in told] == [True] * (
        SPARSE in flags.values()
    )
