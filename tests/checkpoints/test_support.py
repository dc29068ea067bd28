"""Settings in which checkpoints are planned, and in which a running request needs one slot."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.checkpoints import decode
from sglang_hybrid.checkpoints.support import (
    keeps_kv_only,
    one_slot_per_request,
    plans_checkpoints,
)
from sglang_hybrid.core.costs.cost import ENDLESS


def flags(**changed: Any) -> SimpleNamespace:
    asked: dict[str, Any] = {
        "radix_cache_backend": "hybrid",
        "disable_radix_cache": False,
        "page_size": None,
        "attention_backend": "hybrid_cpu",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "speculative_algorithm": None,
        "enable_linear_replayssm": False,
        "enable_linear_replayssm_spec": False,
        "dcp_size": 1,
        "disaggregation_mode": "null",
        "enable_two_batch_overlap": False,
        "enable_deterministic_inference": False,
    }
    return SimpleNamespace(**{**asked, **changed})


def test_planned_checkpoints_need_one_slot_per_request() -> None:
    assert plans_checkpoints(flags())
    assert one_slot_per_request(flags())
    assert one_slot_per_request(flags(page_size=1, attention_backend="triton"))


def test_prefill_servers_plan_and_decode_servers_keep_no_states() -> None:
    """Both need one slot for a running request."""
    assert plans_checkpoints(flags(disaggregation_mode="prefill"))
    assert one_slot_per_request(flags(disaggregation_mode="prefill"))
    decodes = flags(disaggregation_mode="decode")
    assert keeps_kv_only(decodes) and not plans_checkpoints(decodes)
    assert one_slot_per_request(decodes)
    for changed in ({"disable_radix_cache": True}, {"radix_cache_backend": None}):
        other = flags(disaggregation_mode="decode", **changed)
        assert not keeps_kv_only(other) and not one_slot_per_request(other)


@pytest.mark.parametrize(
    "changed",
    [
        {"radix_cache_backend": None},
        {"disable_radix_cache": True},
        {"speculative_algorithm": "DFLASH"},
        {"enable_linear_replayssm": True},
        {"enable_linear_replayssm_spec": True},
        {"dcp_size": 2},
        {"enable_two_batch_overlap": True},
        {"enable_deterministic_inference": True},
    ],
)
def test_sglang_tracks_by_itself(changed: dict[str, Any]) -> None:
    assert not plans_checkpoints(flags(**changed))
    assert not one_slot_per_request(flags(**changed))


def test_admission_all_leaves_the_tracking_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_ADMISSION", "all")
    assert not plans_checkpoints(flags())


@pytest.mark.parametrize(
    "changed",
    [
        {"page_size": 16},
        {"attention_backend": None},
        {"attention_backend": "trtllm_mha"},
        {"decode_attention_backend": "trtllm_mha"},
        {"prefill_attention_backend": "fa4"},
    ],
)
def test_pages_need_tracked_states(changed: dict[str, Any]) -> None:
    assert plans_checkpoints(flags(**changed))
    assert not one_slot_per_request(flags(**changed))


@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE", "NEXTN", "nextn", "STANDALONE"])
def test_drafts_may_take_a_request_past_its_end(algorithm: str) -> None:
    """The live state cannot be the one that it leaves then."""
    assert plans_checkpoints(flags(speculative_algorithm=algorithm))
    assert not one_slot_per_request(flags(speculative_algorithm=algorithm))


@pytest.mark.parametrize(
    ("page", "drafted", "lazily", "grid"),
    [
        (1, None, False, ENDLESS),
        (16, None, False, 16),
        (1, 4, False, 8),
        (16, 4, False, 16),
        (16, 12, False, 32),
        (1, 4, True, None),
    ],
)
def test_what_a_decode_leaves(page: int, drafted: int | None, lazily: bool, grid: int) -> None:
    decode.plan_for(page, drafted, lazily=lazily)
    assert decode.track_grid() == grid
    decode.use_sglang_grid()
    assert decode.track_grid() is None
