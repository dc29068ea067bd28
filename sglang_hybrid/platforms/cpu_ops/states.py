"""Batch rows, the slots they own in a pool of states, and decode steps of these states."""

from collections.abc import Callable

import torch
from torch import Tensor

ADVANCED_IN_PLACE = 1 << 15
"""Values of a state from which on a decode step advances it in the pool."""


def owned(
    indices: Tensor | None, rows: int, pad_slot_id: int, device: torch.device
) -> tuple[Tensor | None, Tensor]:
    """Batch rows that own a slot (None: all of them), and the slots of these rows, as int64.

    Rows marked with the padding slot own none.
    """
    if indices is None:
        return None, torch.arange(rows, device=device)
    slots = indices[:rows].long()
    live = slots != pad_slot_id
    if bool(live.all()):
        return None, slots
    kept = live.nonzero(as_tuple=True)[0]
    return kept, slots[kept]


def advance(pool: Tensor, slots: Tensor, step: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """Advance the states pool[slots] [b, ...] by one token each; returns the outputs [b, ...].

    ``step(states, rows)`` changes float32 states in place for the inputs of some rows of the batch
    and returns their outputs. Small states are gathered and advanced together. Large ones are
    advanced one by one where they lie, so that each passes through a core's cache once.
    """
    count, values = len(slots), pool[0].numel()
    if pool.dtype == torch.float32 and (count == 1 or values >= ADVANCED_IN_PLACE):
        outputs = [
            step(pool.narrow(0, slot, 1), slice(i, i + 1)) for i, slot in enumerate(slots.tolist())
        ]
        return outputs[0] if count == 1 else torch.cat(outputs)
    states = pool.index_select(0, slots).float()
    outputs_of_all = step(states, slice(None))
    pool.index_copy_(0, slots, states.to(pool.dtype))
    return outputs_of_all
