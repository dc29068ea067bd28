"""Attention in C++ (``kernels/native/attention.cpp``), where the pools allow it.

Definition: ``naive.attention``; plain twin: ``kernels/attention.py``. Keys and values are read
once, through the table of slots, for all sequences of a batch in one call. A sequence's result
depends neither on the rest of the batch nor on the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_hybrid.kernels.attention import Rule

MOST_IN_A_GROUP = 64
"""Query heads that may share a key head: rows of a block in the kernel."""

HALF_PRECISION_ROWS = 64
"""Query rows of a key head up to which half precision is computed here, in float32; for more torch
has products in half precision."""


@dataclass(frozen=True)
class Sequences:
    """The slots of a batch's keys and values.

    ``addresses`` [b]: of each sequence's slots (int32, in the order of its tokens). ``lengths``
    [b]: how many slots these are. ``counts`` [b]: new tokens of each sequence. ``most``: the
    largest of the counts. ``kept``: the slots of each sequence, or those and more behind them.
    """

    addresses: NDArray[np.int64]
    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]
    most: int
    kept: Sequence[Tensor]

    @staticmethod
    def of(slots: Sequence[Tensor], counts: Sequence[int]) -> Sequences:
        """The sequences with these slots [T] each, and so many new tokens."""
        kept = [t.to(torch.int32).contiguous() for t in slots]
        addresses = np.array([t.data_ptr() for t in kept], np.int64)
        lengths = np.array([len(t) for t in kept], np.int64)
        most = max(counts, default=0)
        return Sequences(addresses, lengths, np.array(counts, np.int64), most, kept)

    @staticmethod
    def of_rows(table: Tensor, rows: Sequence[int], lengths: Sequence[int]) -> Sequences:
        """Sequences that have one new token each, and whose slots are the first ``lengths`` of
        these ``rows`` of a table (int32, contiguous).
        """
        size = table.stride(0) * table.element_size()
        addresses = table.data_ptr() + np.array(rows, np.int64) * size
        found = np.array(lengths, np.int64)
        return Sequences(addresses, found, np.ones_like(found), 1, [table[row] for row in rows])

    def slots(self) -> list[Tensor]:
        """Slots [T] of each sequence."""
        pairs = zip(self.kept, self.lengths.tolist(), strict=True)
        return [kept[:length] for kept, length in pairs]


def can_compute(q: Tensor, keys: Tensor, values: Tensor, most: int) -> bool:
    """True if the kernel computes this; ``most`` new tokens of a sequence."""
    group = q.shape[1] // keys.shape[1]
    if keys.dtype not in (torch.float32, torch.bfloat16) or values.dtype != keys.dtype:
        return False
    if q.dtype != torch.float32 and (
        q.dtype != torch.bfloat16 or most * group > HALF_PRECISION_ROWS
    ):
        return False
    rows = keys.stride(2) == values.stride(2) == 1 and keys.stride(1) == keys.shape[2]
    return rows and group <= MOST_IN_A_GROUP


def attention(
    library: ctypes.CDLL,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sequences: Sequences,
    rule: Rule,
    value_width: int,
) -> Tensor:
    """New tokens of every sequence over its keys, their own included: [n, Hq, Dv] in q's type.

    Shapes: q [n, Hq, D], packed; keys [slots, Hkv, D] and values [slots, Hkv, at least Dv] of a
    pool. Of a sequence's keys the last are those of its new tokens, except where ``rule`` is not
    causal.
    """
    queries = q.float().contiguous()
    heads, width = queries.shape[1:]
    sinks = None if rule.sinks is None else rule.sinks.float().contiguous()
    out = queries.new_empty(queries.shape[0], heads, value_width)
    library.hybrid_attention(
        queries.data_ptr(),
        queries.stride(0),
        keys.data_ptr(),
        keys.stride(0),
        values.data_ptr(),
        values.stride(0),
        values.stride(1),
        out.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        sequences.addresses.ctypes.data,
        sequences.lengths.ctypes.data,
        sequences.counts.ctypes.data,
        len(sequences.lengths),
        heads,
        keys.shape[1],
        width,
        value_width,
        rule.scale,
        rule.cap,
        -1 if rule.window is None else rule.window,
        int(rule.causal),
        int(keys.dtype == torch.bfloat16),
    )
    return out.to(q.dtype)
