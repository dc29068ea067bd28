"""States at any positions from a scan that leaves one at the end of each sequence only.

Jet-Nemotron's layers call such a scan. It runs several times: each sequence is cut at the positions
of its states, every run goes on where the one before it ended, and between two runs the states are
copied. Every token is scanned once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from sglang_hybrid.checkpoints.tails import put
from sglang_hybrid.kernels.chunks import Positions


@dataclass(frozen=True)
class _Run:
    """A piece of each of m sequences, in int64 on the pool's device: their tokens [t] in the packed
    batch, bounds [m + 1] of the pieces and sequences [m]; then the states [n] that are at their
    ends, by index, and the sequences that own these [n].
    """

    tokens: Tensor
    bounds: Tensor
    sequences: Tensor
    states: Tensor
    owners: Tensor


class Pieces:
    """The runs of one prefill.

    Args:
        positions: (sequence, tokens of this prefill) of each state.
        slots: where they go, int64 [n] on the pool's device.
        lengths: tokens of each sequence in this prefill.
    """

    def __init__(self, positions: Positions, slots: Tensor, lengths: list[int]) -> None:
        self._slots = slots
        starts = list(accumulate(lengths, initial=0))
        cuts = [
            sorted({0, length, *(taken for owner, taken in positions if owner == s)})
            for s, length in enumerate(lengths)
        ]
        flat: list[Tensor] = []
        for run in range(1, max(map(len, cuts))):
            pieces = [
                (s, *ends[run - 1 : run + 1]) for s, ends in enumerate(cuts) if run < len(ends)
            ]
            reached = {(s, end) for s, _, end in pieces}
            states = [i for i, state in enumerate(positions) if state in reached]
            flat += [
                torch.cat([torch.arange(starts[s] + a, starts[s] + b) for s, a, b in pieces]),
                torch.tensor(list(accumulate((b - a for _, a, b in pieces), initial=0))),
                torch.tensor([s for s, _, _ in pieces]),
                torch.tensor(states, dtype=torch.int64),
                torch.tensor([positions[i][0] for i in states], dtype=torch.int64),
            ]
        moved = iter(put(slots.device, *flat))
        self._runs = [_Run(tokens, *more) for tokens, *more in zip(*[moved] * 5, strict=True)]

    def scan(
        self,
        kernel: Callable[..., Tensor],
        *,
        initial_state_source: Tensor,
        initial_state_indices: Tensor,
        cu_seqlens: Tensor,
        use_qk_l2norm_in_kernel: bool,
        **inputs: Tensor,
    ) -> Tensor:
        """What `kernel` (SGLang's ``fused_recurrent_gated_delta_rule_update``) returns of the whole
        prefill, o [1, T, H, Dv]. States are left in the pool ``initial_state_source`` [slots, ...].

        inputs: q, k, v, g and beta, each [1, T, H, ...]; ``initial_state_indices`` [S] are slots of
        the sequences. Between two runs states are float32, whatever the pool has, as they are
        inside a scan.
        """
        pool, live = initial_state_source, initial_state_indices.long()
        states = pool[live].float()
        out = torch.empty_like(inputs["v"])
        for run in self._runs:
            out[:, run.tokens] = kernel(
                **{name: values[:, run.tokens] for name, values in inputs.items()},
                initial_state_source=states,
                initial_state_indices=run.sequences.to(initial_state_indices.dtype),
                cu_seqlens=run.bounds.to(cu_seqlens.dtype),
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )
            pool[self._slots[run.states]] = states[run.owners].to(pool.dtype)
        pool[live] = states.to(pool.dtype)
        return out
