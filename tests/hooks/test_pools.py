"""Hooks on SGLang's pools of KV and states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt import runtime_context

from sglang_hybrid.hooks import pools


@pytest.mark.parametrize("backend", ["hybrid", None])
def test_one_memory_sets_nothing_aside_and_moves_behind_copies(
    backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own cache keeps what SGLang does."""
    memory = SimpleNamespace(radix_cache_backend=backend)
    monkeypatch.setattr(runtime_context, "get_memory", lambda: memory)
    told: list[Any] = []
    pools.reserve_no_states(lambda _, requests: told.append(requests), None, 20)
    pools.move_behind_copies(lambda _, blocked: told.append(blocked), None, "a gate")
    assert told == ([0] if backend else [20, "a gate"])
