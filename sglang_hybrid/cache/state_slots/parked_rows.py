"""The bytes of KV in slots without a state: copies between tokens of KV and parts of slots.

A slot is a row of bytes for each recurrent layer. A token of KV, all attention layers of it, lies
in one such row, and as many tokens in each as fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_hybrid.cache.state_slots.state_rows import words_of_rows


class ParkedRows:
    """Copies of KV into slots of states and back, token by token, to a bit.

    Args:
        kv: of all attention layers, [tokens, ...] each; what is behind the first axis lies
            together.
        states: [layers, slots, ...] of any type, which lie together.
        page: tokens that KV is given out by.

    token_bytes: of the KV of one token. tokens: of KV that fit into one slot, whole pages. Raises
    ValueError for KV whose rows do not lie together, and for states that have no room for a token.
    """

    def __init__(self, kv: Sequence[Tensor], states: Tensor, page: int) -> None:
        self._kv = [words_of_rows(tensor) for tensor in kv]
        words = sum(rows.shape[1] for rows in self._kv)
        self.token_bytes = 8 * words
        if not states.is_contiguous() or states[0, 0].nbytes % 8:
            raise ValueError(f"states of shape {tuple(states.shape)} do not lie word by word")
        of_slots = states.flatten(2).view(torch.int64)
        self._in_row = of_slots.shape[2] // words if words else 0
        self.tokens = len(states) * self._in_row // page * page
        if not self.tokens:
            raise ValueError("a slot has no room for a token of KV")
        rows = of_slots[..., : self._in_row * words]
        self._places = rows.view(*rows.shape[:2], self._in_row, words)

    def read_kv(self, tokens: Tensor) -> Tensor:
        """int64 [n, words] of these tokens of KV, int64 [n]."""
        return torch.cat([kv[tokens] for kv in self._kv], 1)

    def write_kv(self, tokens: Tensor, content: Tensor) -> None:
        """Put [n, words] into these tokens of KV [n]."""
        split = content.split_with_sizes([kv.shape[1] for kv in self._kv], 1)
        for kv, rows in zip(self._kv, split, strict=True):
            kv.index_copy_(0, tokens, rows)

    def read(self, slots: Tensor, places: Tensor) -> Tensor:
        """int64 [n, words] of these places, each in its slot, int64 [n] both."""
        content: Tensor = self._places[self._index(slots, places)]
        return content

    def write(self, slots: Tensor, places: Tensor, content: Tensor) -> None:
        """Put [n, words] into these places [n], each in its slot [n]."""
        self._places[self._index(slots, places)] = content

    def _index(self, slots: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return places // self._in_row, slots, places % self._in_row
