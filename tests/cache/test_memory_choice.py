"""Servers that keep KV and states in one memory, and the log of those that do not."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.cache import memory_choice, resolution

HYBRID, PLAIN, JET = "NemotronHForCausalLM", "LlamaForCausalLM", "JetNemotronForCausalLM"
TWO_POOLS = "KV and states have a pool each: "
DRAFTS = {"speculative_algorithm": "EAGLE"}
LACKING = {"lacking": "A function is another one."}
TINY = {"max_total_tokens": 100, "max_mamba_cache_size": 1}


@pytest.mark.parametrize(
    ("asked", "on_cpu", "architecture", "given", "expected"),
    [
        ("auto", True, HYBRID, {}, "one"),
        ("one", True, HYBRID, {}, "one"),
        ("one", False, HYBRID, {}, "one"),
        ("one", False, HYBRID, {"max_mamba_cache_size": None}, "one"),
        ("one", True, HYBRID, DRAFTS, "one"),
        ("split", True, HYBRID, {}, ""),
        ("auto", True, PLAIN, {}, ""),
        ("auto", True, HYBRID, {"disable_radix_cache": True}, ""),
        ("one", True, HYBRID, {"radix_cache_backend": None}, ""),
        ("auto", True, HYBRID, {"enable_unified_memory": True}, ""),
        ("auto", False, HYBRID, {}, f"{TWO_POOLS}one memory is checked on machines with one"),
        ("auto", False, HYBRID, {"nnodes": 2}, f"{TWO_POOLS}several machines have to divide alike"),
        ("auto", False, HYBRID, {"pp_size": 2}, f"{TWO_POOLS}with --pp-size, each stage"),
        ("auto", False, PLAIN, {}, ""),
        ("auto", True, HYBRID, DRAFTS, f"{TWO_POOLS}drafts of speculative decoding"),
        ("auto", True, HYBRID, {"pp_size": 2}, f"{TWO_POOLS}with --pp-size, each stage"),
        ("auto", True, JET, {}, f"{TWO_POOLS}with this model, SGLang's scan"),
        ("auto", True, HYBRID, {"index_topk": 4}, f"{TWO_POOLS}the model's KV has an index"),
        ("auto", True, HYBRID, TINY, f"{TWO_POOLS}the memory does not hold one request"),
        ("auto", True, HYBRID, {"policy": "sglang-lru"}, f"{TWO_POOLS}--hybrid-eviction sglang-l"),
        ("auto", True, HYBRID, LACKING, f"{TWO_POOLS}A function is another one."),
        ("one", True, HYBRID, LACKING, "one"),  # which is refused later
        ("one", True, PLAIN, {}, "!the model has no recurrent states"),
        ("one", False, PLAIN, {}, "!the model has no recurrent states"),
        ("one", True, HYBRID, TINY, "!the memory does not hold one request"),
        ("one", True, HYBRID, {"policy": "sglang-lru"}, "!--hybrid-eviction sglang-lru is SGLa"),
        ("one", True, HYBRID, {"mamba_full_memory_ratio": 0.5}, "!--mamba-full-memory-ratio, whi"),
        ("one", True, HYBRID, {"dcp_size": 2}, r"!checkpoints are not planned \(decode context"),
    ],
)
def test_who_has_one_memory(
    asked: str,
    on_cpu: bool,
    architecture: str,
    given: dict[str, Any],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """expected: "one", what the log says about two pools, or after an exclamation mark why one
    memory is refused.
    """
    defaults = {
        **dict.fromkeys(("enable_unified_memory", "disable_radix_cache", "enable_memory_saver")),
        **dict.fromkeys(("enable_linear_replayssm", "enable_linear_replayssm_spec"), False),
        **dict.fromkeys(("enable_two_batch_overlap", "enable_deterministic_inference"), False),
        **dict.fromkeys(("speculative_algorithm", "mamba_full_memory_ratio", "page_size")),
        **dict.fromkeys(("pp_size", "dcp_size"), 1),
        "radix_cache_backend": "hybrid",
        "disaggregation_mode": "null",
        "max_total_tokens": 6_000,
        "max_mamba_cache_size": 20,
        "model_path": "",
        "nnodes": 1,
        "kv_cache_dtype": "auto",
        "enable_kv_cache_sharding": False,
        "device": "cpu" if on_cpu else "cuda",
        "dtype": "float32",
    }
    view: Any = SimpleNamespace(**defaults | given)
    text = SimpleNamespace(
        architectures=[architecture], index_topk=given.get("index_topk"), kv_lora_rank=None
    )
    model = SimpleNamespace(hf_config=text, hf_text_config=text, is_hybrid_swa=False)
    sizes = SimpleNamespace(model_sizes=lambda path, dtype: SimpleNamespace(kv_token=1, state=300))
    declared: dict[str, Any] = {}
    for module in (resolution, memory_choice):
        monkeypatch.setattr(module, "resolving_view", lambda given: given)
        monkeypatch.setattr(module, "model_config_of", lambda given: model)
    monkeypatch.setattr(memory_choice, "_gpu_name", lambda: "")
    monkeypatch.setattr(memory_choice, "serves_on_cpu", lambda: on_cpu)
    monkeypatch.setattr(memory_choice, "extension", lambda name: sizes)
    monkeypatch.setattr(memory_choice, "has_states", lambda args: architecture != PLAIN)
    monkeypatch.setattr(
        memory_choice, "declare_resolution", lambda args, by, **fields: declared.update(fields)
    )
    monkeypatch.setenv("SGLANG_HYBRID_MEMORY", asked)
    monkeypatch.setenv("SGLANG_HYBRID_EVICTION", given.get("policy", "auto"))
    caplog.set_level(logging.INFO, logger=memory_choice.__name__)
    if expected.startswith("!"):
        why = f"^--hybrid-memory one cannot be: {expected[1:]}.*; use --hybrid-memory split"
        with pytest.raises(ValueError, match=why):
            memory_choice.choose_one_memory(view)
    else:
        memory_choice.choose_one_memory(view, given.get("lacking", ""))
    slots = view.max_mamba_cache_size
    more = {} if slots is None else {"max_mamba_cache_size": slots + 1}
    assert declared == ({"enable_unified_memory": True, **more} if expected == "one" else {})
    assert (TWO_POOLS in caplog.text) is expected.startswith(TWO_POOLS)
    if expected.startswith(TWO_POOLS):
        assert expected in caplog.text
