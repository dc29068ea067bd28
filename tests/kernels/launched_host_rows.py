"""The kernel of `host_rows`, in Triton's interpreter or on a GPU; run by test_host_rows."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, INTERPRETED

from sglang_hybrid.kernels import host_rows


@pytest.mark.parametrize(
    ("row_bytes", "span", "word"),
    [
        (64, slice(0, 64), torch.int64),
        (8_240, slice(16, 8_216), torch.int64),
        (132, slice(0, 132), torch.int32),
        (72, slice(4, 8), torch.int32),
        (54, slice(6, 54), torch.int16),
        (40, slice(3, 10), torch.uint8),
    ],
)
def test_rows_go_to_the_host_and_come_back(row_bytes: int, span: slice, word: torch.dtype) -> None:
    torch.manual_seed(row_bytes)
    host = torch.randint(0, 256, (40, row_bytes), dtype=torch.uint8)
    if not INTERPRETED:
        host = host.pin_memory()
    before, rows = host.clone(), torch.randperm(40)[:9]
    content = torch.randint(0, 256, (9, span.stop - span.start), dtype=torch.uint8, device=DEVICE)
    assert host_rows.word_of(host[:, span], content) is word
    host_rows._launch(host[:, span], content, rows.to(DEVICE), to_host=True)
    if not INTERPRETED:
        torch.cuda.synchronize()
    before[rows, span] = content.cpu()
    assert torch.equal(host, before), "other bytes than those were written"
    back = torch.zeros_like(content)
    host_rows._launch(host[:, span], back, rows.flip(0).to(DEVICE), to_host=False)
    assert torch.equal(back, content.flip(0))


def test_no_rows_launch_nothing() -> None:
    host = torch.zeros(4, 16, dtype=torch.uint8)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    content = torch.empty(0, 16, dtype=torch.uint8, device=DEVICE)
    host_rows._launch(host[:, 0:16], content, none, to_host=True)
