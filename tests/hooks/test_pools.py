"""What a server on a GPU says of the pools of KV and states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt import runtime_context

from sglang_hybrid.hooks import pools
from sglang_hybrid.serving import devices
from sglang_hybrid.serving.startup import StartupError


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A configurator of a model with states there."""
    memory = SimpleNamespace(radix_cache_backend="hybrid", enable_unified_memory=False)
    monkeypatch.setattr(runtime_context, "get_memory", lambda: memory)
    monkeypatch.setattr(devices, "serves_on_cpu", lambda: False)
    return SimpleNamespace(mambaish_config=object(), is_draft_worker=False)


def test_one_memory_that_cannot_be_is_refused(
    on_a_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_MEMORY", "one")
    for config, why in (
        (None, "the model has no recurrent states"),
        (1, "there is no prefix cache"),
    ):
        on_a_gpu.mambaish_config = config
        with pytest.raises(
            StartupError, match=f"^--hybrid-memory one cannot be: {why}; use .* spl"
        ):
            pools.plan_one_memory(lambda _: "sizes", on_a_gpu)
    monkeypatch.setenv("SGLANG_HYBRID_MEMORY", "split")
    assert pools.plan_one_memory(lambda _: "sizes", on_a_gpu) == "sizes"
