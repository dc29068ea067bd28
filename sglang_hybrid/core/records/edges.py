"""Sequences that begin alike, and edges of a radix tree as bytes, compared in place.

A sequence becomes one run of bytes, once; whether it goes on along an edge is then one call that
copies nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def common_bytes(edge: bytes, sequence: bytes, start: int) -> int:
    """The number of bytes that `edge` and `sequence` from `start` on begin with alike."""
    if sequence.startswith(edge, start):
        return len(edge)
    count = min(len(edge), len(sequence) - start)
    mine: npt.NDArray[np.uint8] = np.frombuffer(edge, np.uint8, count)
    other: npt.NDArray[np.uint8] = np.frombuffer(sequence, np.uint8, count, start)
    differs = mine != other
    return int(differs.argmax()) if differs.any() else count


def common_prefix(one: npt.NDArray[np.integer[Any]], other: npt.NDArray[np.integer[Any]]) -> int:
    """The number of tokens that two sequences share from the start."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
