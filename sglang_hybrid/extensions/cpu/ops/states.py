"""Batch rows, the slots that they own in a pool, and decode steps of states in these slots."""

from collections.abc import Callable

import torch
from torch import Tensor

ADVANCED_IN_PLACE = 1 << 15
"""Values of a state from which on a decode step advances it in the pool."""


def find_owned(
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


def last_slots(req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor) -> Tensor:
    """The slot of the last of ``prefix_lens`` [b] tokens of every request, -1 for an empty prefix.

    Shapes: req_to_token [requests, context], req_pool_indices [b]; the result has the type of
    ``prefix_lens``. SGLang has a torch form of its own, which it takes for `torch_native` only
    (mem_cache/allocation.py, get_last_loc).
    """
    last = req_to_token[req_pool_indices, (prefix_lens - 1).clamp_min(0)].to(prefix_lens.dtype)
    return last.masked_fill(prefix_lens == 0, -1)


def advance(pool: Tensor, slots: Tensor, step: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """Advance the states `pool[slots]` [b, ...] by one token each; returns the outputs [b, ...].

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


def advance_drafts(
    states: Tensor,
    parents: Tensor | None,
    nodes: int,
    step: Callable[[Tensor, int], Tensor],
) -> tuple[Tensor, Tensor]:
    """Read trees of drafted tokens from states [b, ...] (float32), which stay as they are.

    ``parents`` [b, nodes] is the node whose state each node goes on from, -1 for the given states;
    None is a chain. ``step(states, node)`` changes states in place for this node of every tree and
    returns the outputs [b, ...]. Returns the outputs [b, nodes, ...] and the state behind each node
    [b, nodes, ...].
    """
    rows = torch.arange(len(states))
    behind = states.new_empty(len(states), nodes, *states.shape[1:])
    outputs = []
    for node in range(nodes):
        start = states if node == 0 else behind[:, node - 1]
        if parents is not None and node:
            parent = parents[:, node].long()
            root = (parent < 0).view(-1, *[1] * (states.dim() - 1))
            start = torch.where(root, states, behind[rows, parent.clamp(min=0)])
        reached = start.clone(memory_format=torch.contiguous_format)
        outputs.append(step(reached, node))
        behind[:, node] = reached
    return torch.stack(outputs, 1), behind


def keep_behind_drafts(
    buffer: Tensor, indices: Tensor, rows: Tensor | None, behind: Tensor
) -> None:
    """Write states behind drafted tokens, ``behind`` [b, T, ...], to rows of ``buffer`` [m, T,
    ...].

    ``indices`` are the buffer's rows for all rows of the batch, ``rows`` those of the batch that
    are written (None: all). The buffer's T parts may overlap, as windows of a convolution do.
    """
    places = (indices[: len(behind)] if rows is None else indices[rows]).long()
    for node in range(behind.shape[1]):
        buffer[:, node][places] = behind[:, node].to(buffer.dtype)
