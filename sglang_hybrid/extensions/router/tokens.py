"""Token ids as bytes of int32, which are compared as memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = Sequence[int] | NDArray[Any] | bytes
"""Token ids. `bytes` are int32 in the machine's order; they and int32 arrays are the fastest."""

TOKEN_BYTES: Final = 4


def as_bytes(tokens: Tokens) -> bytes:
    """Token ids as int32 in the machine's order; of larger ones, which stand for images, the low 32
    bits. Raises OverflowError or TypeError for what is no 64-bit number.
    """
    if isinstance(tokens, bytes):
        return tokens
    if not isinstance(tokens, np.ndarray):
        try:
            return array("i", tokens).tobytes()
        except OverflowError:
            tokens = np.frombuffer(array("q", tokens), np.int64)
    return tokens.astype(np.int32, copy=False).tobytes()
