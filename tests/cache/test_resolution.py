"""Servers that SGLang would answer wrongly with are refused, in a sentence that says what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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
        resolution._no_drafts_that_states_do_not_follow(view)
        resolution._no_stages_that_lose_router_states(view)
        resolution._no_ranks_that_share_jet_blocks(view)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("architecture", ["JetNemotronForCausalLM", "NemotronHForCausalLM"])
def test_one_memory_is_refused_where_states_would_go_to_a_copy(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    view: Any = SimpleNamespace(enable_unified_memory=True, radix_cache_backend="hybrid")
    config = SimpleNamespace(architectures=[architecture])
    model = SimpleNamespace(hf_config=config, hf_text_config=config)
    monkeypatch.setattr(resolution, "resolving_view", lambda given: given)
    monkeypatch.setattr(resolution, "model_config_of", lambda given: model)
    monkeypatch.setattr(resolution, "why_not_unified", lambda given: ("", ""))
    if architecture == "NemotronHForCausalLM":
        resolution._one_memory_that_can_be(view)
        return
    with pytest.raises(ValueError, match="writes states to a copy of the pool; use --hybrid-memor"):
        resolution._one_memory_that_can_be(view)


@pytest.mark.parametrize(
    ("architecture", "flags", "said"),
    [
        ("Mamba2ForCausalLM", CHAINS, "leave out --speculative-algorithm"),
        ("Lfm2ForCausalLM", TREES, "use --speculative-ngram-max-bfs-breadth 1"),
        ("Lfm2ForCausalLM", EAGLE_TREES, "use --speculative-eagle-topk 1"),
        ("Lfm2ForCausalLM", CHAINS, None),
        ("BailingMoeV2_5ForCausalLM", TREES, "use --speculative-ngram-max-bfs-breadth 1"),
        ("BailingMoeV2_5ForCausalLM", CHAINS, None),
        ("BailingMoeV3ForCausalLM", TREES, None),
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
