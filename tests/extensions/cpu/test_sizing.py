"""Sizes of weights and pools, and the error where they do not fit."""

import json
from pathlib import Path

import pytest

from sglang_hybrid.core.costs.model_config import read_layers
from sglang_hybrid.extensions.cpu import sizing
from sglang_hybrid.extensions.cpu.models import build_tiny_model
from sglang_hybrid.extensions.cpu.sizing import (
    MAX_MAMBA_CACHE_SIZE,
    Sizes,
    check_memory,
    model_sizes,
)
from sglang_hybrid.serving.startup import StartupError


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("nemotron-h", tmp_path_factory.mktemp("models") / "nemotron-h")


def test_sizes_of_a_model(hybrid: Path) -> None:
    wide, narrow = (model_sizes(str(hybrid), dtype) for dtype in ("float32", "bfloat16"))
    assert wide is not None and narrow is not None
    stored = (hybrid / "model.safetensors").stat().st_size
    assert wide.weights == stored
    assert narrow.weights == stored // 2
    assert wide.kv_token == 2 * narrow.kv_token > 0
    assert wide.state > wide.kv_token
    config = json.loads((hybrid / "config.json").read_text())
    windows = sum(layer.conv_values for layer in read_layers(config).layers)
    assert wide.state - narrow.state == 2 * windows > 0


def test_a_plain_transformer_has_no_state(tmp_path: Path) -> None:
    sizes = model_sizes(str(build_tiny_model("transformer", tmp_path / "model")), "float32")
    assert sizes is not None
    assert sizes.state == 0
    assert sizes.default_slots == MAX_MAMBA_CACHE_SIZE


def test_elsewhere_and_unknown_models_are_not_sized(tmp_path: Path) -> None:
    assert model_sizes("owner/name", "auto") is None
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "model_type": "x"}))
    assert model_sizes(str(tmp_path), "auto") is None
    check_memory(str(tmp_path), "auto", 10**15, 10**9)


@pytest.mark.parametrize(
    ("memory", "slots"),
    [(2**40, MAX_MAMBA_CACHE_SIZE), (100 * 2**20, 15), (2**20, 1)],
    ids=["large machine", "small machine", "too small for one"],
)
def test_default_slots(monkeypatch: pytest.MonkeyPatch, memory: int, slots: int) -> None:
    monkeypatch.setattr(sizing, "memory_limit", lambda: memory)
    assert Sizes(weights=0, kv_token=0, state=2**20).default_slots == slots


def test_pools_are_weighed_against_the_memory_that_is_free(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = model_sizes(str(hybrid), "float32")
    assert sizes is not None
    packed = sizes.weights // 3
    monkeypatch.setattr(sizing, "packed_limit", lambda: packed)
    needed = sizes.weights + packed + 1000 * sizes.kv_token + 10 * sizes.state
    monkeypatch.setattr(sizing, "memory_available", lambda: needed)
    check_memory(str(hybrid), "float32", 1000, 10)
    for tokens, slots in ((1001, 10), (1000, 11)):
        with pytest.raises(StartupError, match=r"needs .* of memory .* are free; lower --max-"):
            check_memory(str(hybrid), "float32", tokens, slots)
