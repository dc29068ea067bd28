"""Tensors on reserved memory: resident is what was written and not given back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from sglang_hybrid.extensions.cpu.one_memory.pages import (
    PAGE,
    Planes,
    Reserved,
    rows_of_whole_pages,
    up_to_pages,
)

MB = 1 << 20


def resident() -> int:
    """Bytes of physical memory of this process."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def test_reserved_tensors_are_zeros_without_memory() -> None:
    before = resident()
    with Reserved() as reserved:
        big = torch.zeros((64, 1024, 1024), dtype=torch.float32)
        named = torch.zeros(size=(4, MB), dtype=torch.bfloat16, device="cpu")
        small = torch.zeros(10)
    assert len(reserved.mapped) == 2
    assert resident() - before < 8 * MB
    assert not big[5, 7].any()
    assert named.shape == (4, MB)
    assert named.dtype == torch.bfloat16
    assert small.shape == (10,)


def test_rows_go_back_and_come_again_as_zeros() -> None:
    row = 96  # values; 384 bytes
    with Reserved() as reserved:
        pool = torch.zeros((2, 32 * 1024, row))
    rows = rows_of_whole_pages(row * 4)
    assert rows * row * 4 % PAGE == 0
    planes = Planes([reserved.plane(half, 0) for half in pool], rows)
    before = resident()
    pool.fill_(1.0)
    full = resident()
    assert full - before > 20 * MB
    planes.give_back(1, 32 * 1024 // rows)
    assert full - resident() > 20 * MB
    for half in pool:
        assert (half[:rows] == 1).all()
        assert (half[rows:] == 0).all()


def test_states_lie_slot_by_slot() -> None:
    """Each slot has pages of its own; all else is as in a contiguous tensor."""
    with Reserved(states=(3, 200)) as reserved:
        states = torch.zeros((3, 200, 4, 70), dtype=torch.float32)
        other = torch.zeros((3, 201, 4, 70), dtype=torch.float32)
    assert other.is_contiguous()
    plane = reserved.plane(states, 1)
    assert plane.row_bytes == up_to_pages(3 * 280 * 4)
    expected = torch.randn(states.shape)
    states.copy_(expected)
    assert torch.equal(states, expected)
    states[:, torch.tensor([7, 9])] = states[:, torch.tensor([1, 2])]
    assert torch.equal(states[:, 7], expected[:, 1])
    Planes([plane], 1).give_back(7, 8)
    assert not states[:, 7].any()
    assert torch.equal(states[:, 8], expected[:, 8])
    assert torch.equal(states[:, 6], expected[:, 6])


def test_what_cannot_be_given_back_is_refused() -> None:
    with Reserved() as reserved:
        pool = torch.zeros((4096, 96))
    plane = reserved.plane(pool, 0)
    with pytest.raises(ValueError, match="no whole pages"):
        plane.give_back(0, 1)
    with pytest.raises(ValueError, match="not on reserved memory"):
        reserved.plane(torch.zeros(4096, 96), 0)
    with pytest.raises(OSError, match="memory"):
        type(plane)(1 << 60, PAGE).give_back(0, 1)
