"""Log lines of a server on a GPU about the pools of KV and states."""

from __future__ import annotations

import logging
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
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(attn_tp_rank=0))
    monkeypatch.setattr(devices, "serves_on_cpu", lambda: False)
    return SimpleNamespace(mambaish_config=object(), is_draft_worker=False)


def test_the_log_says_why_there_are_two(on_a_gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=pools.__name__)
    assert pools.plan_one_memory(lambda _: "sizes", on_a_gpu) == "sizes"
    assert "KV and states have a pool each: one memory" in caplog.text
    caplog.clear()
    on_a_gpu.mambaish_config = None
    assert pools.plan_one_memory(lambda _: "sizes", on_a_gpu) == "sizes"
    assert not caplog.text


def test_one_memory_that_cannot_be_is_refused(
    on_a_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_MEMORY", "one")
    with pytest.raises(StartupError, match=r"^--hybrid-memory one cannot be: .*; use .* split"):
        pools.plan_one_memory(lambda _: "sizes", on_a_gpu)
    monkeypatch.setenv("SGLANG_HYBRID_MEMORY", "split")
    assert pools.plan_one_memory(lambda _: "sizes", on_a_gpu) == "sizes"
