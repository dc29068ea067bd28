"""Positions of a forward pass whose requests may begin behind a gap (modular mode)."""

from __future__ import annotations

from typing import Any

import torch

from sglang_hybrid.serving.device_streams import to_device


def shifted(forward: Any, batch: Any) -> torch.Tensor:
    """Positions [tokens] of a ForwardBatch, each moved by the offset of its request.

    batch: SGLang's ScheduleBatch; a request without `position_offset` has none.
    """
    positions: torch.Tensor = forward.positions
    offsets = [getattr(req, "position_offset", 0) for req in batch.reqs or ()]
    if positions is None or not any(offsets):
        return positions
    moved = to_device(torch.tensor(offsets, dtype=positions.dtype), positions.device)
    lengths = forward.extend_seq_lens
    one_each = len(positions) == len(offsets) and forward.forward_mode.is_decode()
    if lengths is None or one_each:  # drafts have equally many
        return positions + moved.repeat_interleave(len(positions) // len(offsets))
    lengths = lengths.to(torch.int64)
    # Without the size of the result the host would wait for the device to tell it.
    return positions + torch.repeat_interleave(moved, lengths, output_size=len(positions))
