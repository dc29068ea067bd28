"""The look-up of last slots."""

import torch

from sglang_hybrid.platforms.cpu_ops import pool


def test_last_slot_of_each_prefix():
    table = torch.arange(100, 140, dtype=torch.int32).view(4, 10)
    last = pool.last_slots(table, torch.tensor([2, 0, 3]), torch.tensor([10, 0, 1]))
    assert last.tolist() == [129, -1, 130]
    assert last.dtype == torch.int64
