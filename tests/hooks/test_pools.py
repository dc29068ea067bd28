"""SGLang's host pools as our hooks build them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_hybrid.hooks.pools import move_behind_copies, set_nothing_aside, smaller_states


class HostPool:
    """SGLang's pool of states, as far as the hook looks at it."""

    def __init__(self, windows: list[int]) -> None:
        self.conv_state_elem_sizes = windows
        self.conv_state_shapes = [(size, 1) for size in windows]
        self.conv_buffer = [f"of {size}" for size in windows]


@pytest.mark.parametrize(("windows", "kept"), [([0], 0), ([12], 1), ([12, 4], 2), ([], 0)])
def test_windows_without_values_are_left_out(windows: list[int], kept: int) -> None:
    pytest.importorskip("sglang")
    pool = smaller_states(HostPool)(windows)
    assert len(pool.conv_buffer) == len(pool.conv_state_shapes) == kept
    assert pool.conv_state_elem_sizes == windows[:kept]


@pytest.mark.parametrize(("backend", "ours"), [("hybrid", True), ("unified", False)])
def test_sglangs_pool_under_our_cache(
    monkeypatch: pytest.MonkeyPatch, backend: str, ours: bool
) -> None:
    """Nothing is set aside for requests that wait, and no gate keeps rows where they are."""
    runtime = pytest.importorskip("sglang.srt.runtime_context")
    chosen = SimpleNamespace(radix_cache_backend=backend)
    monkeypatch.setattr(runtime, "get_memory", lambda: chosen)
    aside: list[int] = []
    set_nothing_aside(lambda _, requests: aside.append(requests), object(), 7)
    assert aside == [0 if ours else 7]
    gates: list[str] = []
    move_behind_copies(lambda _, gate: gates.append(gate), object(), "closed")
    assert gates == ([] if ours else ["closed"])
