"""States at any positions from a scan that leaves one every 64 tokens only.

FlashInfer's gated delta net returns the states after 64, 128 ... tokens of each sequence
(linear/kernels/gdn_flashinfer.py:80, 555-590), and SGLang's Triton kernel goes on from there: to
have the state after 100 tokens, it starts with the one after 64 and scans 36 tokens. It does so for
all wanted states of a layer at once.
"""

from __future__ import annotations

from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.kernels.checkpoint_states import DELTA_CHUNK
from sglang_hybrid.kernels.chunks import Positions
from sglang_hybrid.serving.device_streams import put_integers


class Tails:
    """The states of one prefill that lie inside its sequences: n of them.

    Args:
        positions: (sequence, tokens of this prefill) of each; at least one.
        slots: where they go, and ``starts``, where their sequences start from, both int64 [n] on
            the pool's device.
        lengths: tokens of each sequence in this prefill.
    """

    def __init__(
        self, positions: Positions, slots: Tensor, starts: Tensor, lengths: list[int]
    ) -> None:
        first = list(accumulate((length // DELTA_CHUNK for length in lengths), initial=0))
        begins = list(accumulate(lengths, initial=0))
        left = [tokens % DELTA_CHUNK for _, tokens in positions]
        near = [i for i, (_, tokens) in enumerate(positions) if tokens < DELTA_CHUNK]
        far = [i for i, (_, tokens) in enumerate(positions) if tokens >= DELTA_CHUNK]
        rest = [i for i, tokens in enumerate(left) if tokens]
        ends = [begins[sequence] + tokens for sequence, tokens in positions]
        spans = [range(end - tokens, end) for end, tokens in zip(ends, left, strict=True)]
        self._count = first[-1] if far else 0
        self._has_near, self._has_tails = bool(near), bool(rest)
        moved = put_integers(
            slots.device,
            first,
            near,
            far,
            [
                first[sequence] + tokens // DELTA_CHUNK - 1
                for sequence, tokens in positions
                if tokens >= DELTA_CHUNK
            ],
            rest,
            list(chain(*spans)),
            list(accumulate(filter(None, left), initial=0)),
        )
        self._slots, self._starts = slots, starts
        self._cu_starts, self._near, self._far, self._rows = moved[:4]
        self._rest, self._tokens, self._cu_tails = moved[4:]

    @property
    def arguments(self) -> dict[str, Any]:
        """The metadata of the forward with which SGLang's scan leaves its states."""
        if not self._count:
            return {}
        return {
            "state_checkpoint_cu_starts": self._cu_starts,
            "num_state_checkpoints": self._count,
            "state_checkpoint_every_n_tokens": DELTA_CHUNK,
        }

    def begin(self, pool: Tensor) -> None:
        """Called before the scan, which overwrites what sequences start from. pool [slots, Hv, Dv,
        Dk].
        """
        if self._has_near:
            pool[self._slots[self._near]] = pool[self._starts[self._near]]

    def finish(self, pool: Tensor, left: Tensor | None, kernel: Any, **inputs: Tensor) -> None:
        """Write all states, after the scan.

        left: [1, count, Hv, Dv, Dk], what the scan left. kernel: SGLang's for the Triton scan.
        inputs: the scan's q, k, v, g and beta, each [1, T, ...].
        """
        if left is not None:
            pool[self._slots[self._far]] = left[0, self._rows].to(pool.dtype)
        if not self._has_tails:
            return
        slots = self._slots[self._rest]
        states = pool[slots]
        kernel.extend(
            **{name: values[:, self._tokens] for name, values in inputs.items()},
            ssm_states=states,
            cache_indices=torch.arange(len(slots), dtype=torch.int32, device=pool.device),
            query_start_loc=self._cu_tails.int(),
        )
        pool[slots] = states
