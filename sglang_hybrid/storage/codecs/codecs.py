"""Smaller copies of KV and states: rows of numbers as bytes, and back.

A row is what shares a scale: the `head_dim` numbers of one token and head in KV, the last dimension
of an SSM state. A snapshot is encoded once, when it leaves the device, and decoded as often as it
is loaded, so errors do not add up.

| codec | bytes of a row of n numbers | error of a number x in a row whose largest is m |
|---|---|---|
| exact | as on the device | none |
| bf16 | 2 n | at most 2**-8 of abs(x) |
| int8 | n + 2 | at most m / 253 |
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

_LARGEST = 127
_SCALE = torch.bfloat16
_SCALE_BYTES = 2


class Codec(Enum):
    """The form in which rows are stored; from the largest to the smallest."""

    EXACT = "exact"
    BF16 = "bf16"
    INT8 = "int8"

    def fit(self, width: int, dtype: torch.dtype) -> Codec:
        """This codec, or the next larger one if it saves less than a quarter of the bytes of rows
        of `width` numbers of `dtype`: a short row is not worth a scale.
        """
        order = list(Codec)
        fit = Codec.EXACT
        for codec in order[: order.index(self) + 1]:
            if codec.row_bytes(width, dtype) < 0.75 * fit.row_bytes(width, dtype):
                fit = codec
        return fit

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Bytes of an encoded row of `width` numbers of `dtype`."""
        return width * dtype.itemsize if self is Codec.EXACT else self._bytes(width)

    def _bytes(self, width: int) -> int:
        return 2 * width if self is Codec.BF16 else width + _SCALE_BYTES

    def encode(self, rows: Tensor) -> Tensor:
        """Bytes of rows: uint8 [..., row_bytes] of numbers [..., width]."""
        if self is Codec.EXACT:
            return _view(rows, torch.uint8)
        if self is Codec.BF16:
            return _view(rows.bfloat16(), torch.uint8)
        wide = rows.float()
        scales = (wide.abs().amax(-1, keepdim=True) / _LARGEST).to(_SCALE)
        steps = wide / torch.where(scales > 0, scales, 1.0).float()
        numbers = steps.round_().clamp_(-_LARGEST, _LARGEST).nan_to_num_().to(torch.int8)
        return torch.cat([_view(numbers, torch.uint8), _view(scales, torch.uint8)], -1)

    def decode(self, content: Tensor, dtype: torch.dtype) -> Tensor:
        """Numbers [..., width] of `dtype` of bytes [..., row_bytes]."""
        if self is Codec.EXACT:
            return _view(content, dtype)
        if self is Codec.BF16:
            return _view(content, torch.bfloat16).to(dtype)
        numbers = _view(content[..., :-_SCALE_BYTES], torch.int8)
        scales = _view(content[..., -_SCALE_BYTES:], _SCALE)
        return (numbers * scales.float()).to(dtype)


def _view(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes as another type; the last dimension changes its length."""
    width = rows.shape[-1] * rows.element_size() // dtype.itemsize
    flat = rows.reshape(-1).clone() if rows.storage_offset() else rows.reshape(-1)
    return flat.view(dtype).reshape(*rows.shape[:-1], width)
