"""The bytes of a state in the place of KV: copies between a slot of states and tokens of KV.

A state is one row of bytes: its tensors, one after another. It lies in as many tokens of KV as it
takes, anywhere in the pool; each KV tensor has the next bytes of it in its rows of these tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNED = 16
"""Bytes: where a tensor's part of a state begins, and where a KV tensor's does."""


class StateRows:
    """Copies of states into KV and back, to a bit.

    Args:
        kv: of all attention layers, [tokens, ...] each; what is behind the first axis lies
            together.
        states: [layers, slots, ...] each, of any types.
        page: tokens that KV is given out by.

    tokens: of KV in whose place one state lies, whole pages. Raises ValueError for KV whose rows
    do not lie together, or have other than 16 bytes times a whole number.
    """

    def __init__(self, kv: Sequence[Tensor], states: Sequence[Tensor], page: int) -> None:
        if not kv:
            raise ValueError("the model has no KV")
        self._kv = [words_of_rows(tensor) for tensor in kv]
        sizes = [rows.shape[1] * rows.itemsize for rows in self._kv]
        self._states = [tensor for tensor in states if tensor.numel()]
        parts = [tensor[:, :1].nbytes for tensor in self._states]
        begins, size = [], 0
        for part in parts:
            begins.append(size)
            size += -(-part // ALIGNED) * ALIGNED
        self.tokens = -(-size // (sum(sizes) * page)) * page
        self._staged = kv[0].new_empty(self.tokens * sum(sizes), dtype=torch.uint8)
        self._parts = [
            self._staged[at : at + part].view(tensor.dtype).view(tensor[:, :1].shape)
            for at, part, tensor in zip(begins, parts, self._states, strict=True)
        ]
        split = self._staged.split_with_sizes([self.tokens * width for width in sizes])
        self._rows = [
            rows.view(torch.int64).view(self.tokens, width // 8)
            for rows, width in zip(split, sizes, strict=True)
        ]

    @property
    def bytes_beside(self) -> int:
        """Bytes of the row through which each state goes."""
        return self._staged.nbytes

    def spill(self, slot: Tensor, tokens: Tensor) -> None:
        """Copy the state of `slot` [1] to `tokens` of KV [self.tokens], both int64."""
        for part, states in zip(self._parts, self._states, strict=True):
            torch.index_select(states, 1, slot, out=part)
        for rows, kv in zip(self._rows, self._kv, strict=True):
            kv.index_copy_(0, tokens, rows)

    def fetch(self, tokens: Tensor, slot: Tensor) -> None:
        """Copy the state in `tokens` of KV [self.tokens] to `slot` [1], both int64."""
        for rows, kv in zip(self._rows, self._kv, strict=True):
            torch.index_select(kv, 0, tokens, out=rows)
        for part, states in zip(self._parts, self._states, strict=True):
            states.index_copy_(1, slot, part)


def words_of_rows(tensor: Tensor) -> Tensor:
    """int64 [tokens, words] of the same memory: a copy moves eight bytes at once."""
    rows = tensor.flatten(1) if tensor.is_contiguous() else None
    if rows is None or rows.shape[1] * rows.element_size() % ALIGNED:
        raise ValueError(f"KV of shape {tuple(tensor.shape)} does not lie token by token")
    return rows.view(torch.int64)
