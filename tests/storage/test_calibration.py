"""The smallest codec within the bound, for each layer alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.cache.tiers.codec_choice import choose_device_codecs
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.storage.codecs import probe
from sglang_hybrid.storage.codecs.calibration import calibrate
from sglang_hybrid.storage.codecs.codecs import Codec
from sglang_hybrid.storage.codecs.coded_rows import CodecPlan

INT8, BF16, EXACT = Codec.INT8, Codec.BF16, Codec.EXACT
KV_ERRORS = [{INT8: 0.005, BF16: 0.001}, {INT8: 0.02, BF16: 0.002}]
STATE_ERRORS = [{INT8: 0.5, BF16: 0.05}, {INT8: 0.01, BF16: 0.01}, {INT8: 0.3, BF16: 0.004}]


def error_of(plan: CodecPlan) -> float:
    """Errors of layers add up."""
    assert len(plan.kv) == len(KV_ERRORS) and len(plan.states) == len(STATE_ERRORS)
    pairs = [*zip(plan.kv, KV_ERRORS, strict=True), *zip(plan.states, STATE_ERRORS, strict=True)]
    return sum(errors[codec] for codec, errors in pairs if codec is not EXACT)


def test_each_layer_gets_the_smallest_codec_within_the_bound() -> None:
    found = calibrate(2, 3, error_of, 0.01)
    assert found.plan == CodecPlan((INT8, BF16), (EXACT, INT8, BF16))
    assert found.layer_error == 0.01
    assert found.error == pytest.approx(0.005 + 0.002 + 0.01 + 0.004)


def test_a_bound_that_nothing_meets_leaves_all_exact() -> None:
    assert calibrate(2, 3, error_of, 1e-6).plan.exact
    assert calibrate(2, 3, error_of, 1).plan == CodecPlan((INT8,) * 2, (INT8,) * 3)


def test_models_without_one_kind_of_layer() -> None:
    assert calibrate(0, 2, lambda plan: 0.0, 0.1).plan == CodecPlan((EXACT,), (INT8,) * 2)
    assert calibrate(2, 0, lambda plan: 0.0, 0.1).plan == CodecPlan((INT8,) * 2, (EXACT,))


def test_of_a_kind_all_layers_get_the_same_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of coded entries share slots."""

    class Probed:
        layers = (2, 3)

        def __init__(self, *given: Any) -> None:
            pass

        def error(self, plan: CodecPlan) -> float:
            return error_of(CodecPlan(plan.kv * 2, plan.states * 3))

    monkeypatch.setattr(probe, "Probe", Probed)
    context: Any = SimpleNamespace(params=SimpleNamespace(pp_size=1), tp_size=1, tp_worker=None)

    def chosen(text: str) -> CodecPlan:
        options = HybridConfig.from_environment({"SGLANG_HYBRID_DEVICE_CODEC": text})
        return choose_device_codecs(options, context)

    assert chosen("auto:0.1") == CodecPlan((INT8,), (BF16,))
    assert chosen("auto:0.01") == CodecPlan((BF16,), (EXACT,))
    assert chosen("off").exact
    assert chosen("int8") == CodecPlan.uniform(INT8)
