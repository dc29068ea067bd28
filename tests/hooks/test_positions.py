"""New text behind modules that were computed apart stands behind the schema's end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_hybrid.hooks.states import shift_positions


def forward(**more: Any) -> Any:
    positions = torch.tensor([3, 4, 5, 0, 1])
    lengths = torch.tensor([3, 2])
    return SimpleNamespace(positions=positions, extend_seq_lens=lengths, forward_mode=None, **more)


def batch(*offsets: int) -> Any:
    return SimpleNamespace(reqs=[SimpleNamespace(position_offset=each) for each in offsets])


def test_positions_of_three_parts_are_moved_as_those_of_one() -> None:
    moved, parts = [13, 14, 15, 0, 1], torch.tensor([[3, 4, 5, 0, 1]]).repeat(3, 1)
    found = forward(mrope_positions=parts)
    shift_positions(found, object, batch(10, 0))
    assert found.positions.tolist() == moved
    assert found.mrope_positions.tolist() == [moved] * 3


def test_positions_stay_where_no_request_has_a_gap() -> None:
    parts = torch.zeros(3, 5)
    found = forward(mrope_positions=parts)
    before = found.positions
    shift_positions(found, object, batch(0, 0))
    assert found.positions is before and found.mrope_positions is parts
    plain = forward()
    shift_positions(plain, object, batch(0, 2))
    assert plain.positions.tolist() == [3, 4, 5, 2, 3]
