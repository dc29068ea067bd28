"""Positions of a forward pass whose requests may begin behind a gap (patch 0043, modular mode)."""

from __future__ import annotations

from typing import Any

import torch


def shifted(forward: Any, batch: Any) -> torch.Tensor:
    """Positions [tokens] of a ForwardBatch, each moved by the offset of its request.

    batch: SGLang's ScheduleBatch; a request without `position_offset` has none.
    """
    positions: torch.Tensor = forward.positions
    offsets = [getattr(req, "position_offset", 0) for req in batch.reqs or ()]
    if positions is None or not any(offsets):
        return positions
    moved = torch.tensor(offsets, dtype=positions.dtype, device=positions.device)
    if len(positions) == len(offsets) and forward.forward_mode.is_decode():
        return positions + moved
    return positions + torch.repeat_interleave(moved, forward.extend_seq_lens.to(torch.int64))
