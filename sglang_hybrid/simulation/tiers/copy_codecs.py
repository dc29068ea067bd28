"""How much smaller copies below the device are under `--hybrid-tier-codec`, without making any."""

from __future__ import annotations

from enum import Enum
from typing import Final

ROW: Final = 128
"""Numbers that share a scale: `head_dim` and the last dimension of a state in most models."""

SCALE_BYTES: Final = 4
KV_VALUE_BYTES: Final = 2


class CopyCodec(Enum):
    """As `sglang_hybrid.storage.codecs.codecs.Codec`, by the bytes of a row of ROW numbers."""

    EXACT = "exact"
    BF16 = "bf16"
    INT8 = "int8"

    def bytes_of(self, size: int, value_bytes: int) -> int:
        """Bytes of a copy of `size` bytes of numbers of `value_bytes` each; as many as before where
        the codec saves nothing.
        """
        row = {
            CopyCodec.EXACT: ROW * value_bytes,
            CopyCodec.BF16: ROW * 2,
            CopyCodec.INT8: ROW + SCALE_BYTES,
        }[self]
        return min(size, -(-size * row // (ROW * value_bytes)))

    def is_exact(self, value_bytes: int) -> bool:
        """Whether copies of numbers of `value_bytes` each are what was on the device."""
        return self is CopyCodec.EXACT or (self is CopyCodec.BF16 and value_bytes <= 2)
