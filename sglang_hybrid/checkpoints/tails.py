"""States at any positions from a scan that leaves one every 64 tokens only.

FlashInfer's gated delta net returns the states after 64, 128 ... tokens of each sequence
(linear/kernels/gdn_flashinfer.py:80, 555-590), and SGLang's Triton kernel goes on from there: to
have the state after 100 tokens, it starts with the one after 64 and scans 36 tokens. It does so for
all wanted states of a layer at once.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.kernels.checkpoint_states import DELTA_CHUNK
from sglang_hybrid.kernels.chunks import Positions
from sglang_hybrid.serving.device_streams import to_device


def put(device: torch.device, *values: Tensor) -> list[Tensor]:
    """Flat lists of integers as int64 on the device, all in one copy."""
    moved = to_device(torch.cat([value.long() for value in values]), device)
    return list(torch.split(moved, [len(value) for value in values]))


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
        taken = torch.tensor([tokens for _, tokens in positions])
        sequences = torch.tensor([sequence for sequence, _ in positions])
        counts = torch.tensor(lengths) // DELTA_CHUNK
        first = counts.cumsum(0) - counts
        begins = torch.tensor(list(accumulate(lengths, initial=0)))[sequences]
        left = taken % DELTA_CHUNK
        far, near = taken >= DELTA_CHUNK, taken < DELTA_CHUNK
        rows = first[sequences] + taken // DELTA_CHUNK - 1
        spans = [
            torch.arange(int(end - rest), int(end))
            for end, rest in zip(begins + taken, left, strict=True)
        ]
        self._count = int(counts.sum()) if bool(far.any()) else 0
        self._has_near, self._has_tails = bool(near.any()), bool(left.any())
        moved = put(
            slots.device,
            torch.cat([first, counts.sum()[None]]),
            near.nonzero()[:, 0],
            far.nonzero()[:, 0],
            rows[far],
            left.nonzero()[:, 0],
            torch.cat(spans),
            torch.tensor(list(accumulate(left[left > 0].tolist(), initial=0))),
        )
        self._slots, self._starts = slots, starts
        self._cu_starts, self._near, self._far, self._rows = moved[:4]
        self._rest, self._tokens, self._cu_tails = moved[4:]

    @property
    def arguments(self) -> dict[str, Any]:
        """What SGLang's metadata of the forward must say so that the scan leaves its states."""
        if not self._count:
            return {}
        return {
            "state_checkpoint_cu_starts": self._cu_starts,
            "num_state_checkpoints": self._count,
            "state_checkpoint_every_n_tokens": DELTA_CHUNK,
        }

    def begin(self, pool: Tensor) -> None:
        """Before the scan, which overwrites what sequences start from. pool [slots, Hv, Dv, Dk]."""
        if self._has_near:
            pool[self._slots[self._near]] = pool[self._starts[self._near]]

    def finish(self, pool: Tensor, left: Tensor | None, kernel: Any, **inputs: Tensor) -> None:
        """Behind the scan: write all states.

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
