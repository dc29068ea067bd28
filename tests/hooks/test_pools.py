"""SGLang's host pools as our hooks build them."""

from __future__ import annotations

import pytest

from sglang_hybrid.hooks.pools import smaller_states


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
