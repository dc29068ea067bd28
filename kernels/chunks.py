"""How a packed batch of sequences is cut into chunks.

A packed batch holds its sequences one after the other: sequence ``s`` is
``tokens[cu_seqlens[s] : cu_seqlens[s + 1]]``. Chunks are counted from each sequence's own start, so
what a sequence computes does not depend on its neighbours in the batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Positions = Sequence[tuple[int, int]]
"""Pairs (sequence index, tokens of that sequence consumed); (s, 0) is the initial state of s."""


class Scanned(NamedTuple):
    """A prefill's result: y [T, ...], final states [S, ...] and states at positions [n, ...]."""

    y: Tensor
    final_states: Tensor
    states_at: Tensor


@dataclass(frozen=True)
class Block:
    """A run of consecutive chunks that is computed at once.

    ``token`` [n, L] is the packed index of each token, ``valid`` [n, L] is false on the padding
    behind a sequence's last token (there ``token`` repeats that last token), ``full`` says that
    there is no padding. ``sequence[i]``, ``opens[i]`` and ``closes[i]`` say which sequence chunk i
    belongs to and whether it is its first or its last. ``begin`` and ``end`` bound the block's
    packed tokens. ``asked`` lists the requested positions that fall into it: (index of the request,
    chunk in this block, tokens of that chunk consumed, 1 to L).
    """

    token: Tensor
    valid: Tensor
    full: bool
    sequence: list[int]
    opens: list[bool]
    closes: list[bool]
    begin: int
    end: int
    asked: list[tuple[int, int, int]]

    def store(self, y: Tensor, out: Tensor) -> None:
        """Writes chunked rows y [n, L, ...] to their tokens in out [T, ...]."""
        rows = y.flatten(0, 1)
        out[self.begin : self.end] = rows if self.full else rows[self.valid.flatten()]

    def gather(self, packed: Tensor) -> Tensor:
        """Rows of packed [T, ...] as float32 [n, L, ...]; padding repeats the last token."""
        if self.full:
            shape = (*self.token.shape, *packed.shape[1:])
            return packed[self.begin : self.end].float().reshape(shape)
        return packed[self.token].float()


def check_positions(positions: Positions, cu_seqlens: list[int]) -> None:
    """Raises ValueError when a position lies outside its sequence."""
    lengths = [end - begin for begin, end in pairwise(cu_seqlens)]
    for sequence, tokens in positions:
        if not 0 <= sequence < len(lengths):
            raise ValueError(
                f"Position ({sequence}, {tokens}) names sequence {sequence}, but the batch has "
                f"{len(lengths)} sequences."
            )
        if not 0 <= tokens <= lengths[sequence]:
            raise ValueError(
                f"Position ({sequence}, {tokens}) lies outside its sequence of "
                f"{lengths[sequence]} tokens."
            )


def blocks(
    cu_seqlens: list[int], length: int, per_block: int, positions: Positions, device: torch.device
) -> Iterator[Block]:
    """Cuts every sequence into chunks of ``length`` tokens; yields them ``per_block`` at a time."""
    starts, lengths = cu_seqlens[:-1], [end - begin for begin, end in pairwise(cu_seqlens)]
    chunks = [
        (s, starts[s] + at, min(length, lengths[s] - at), at == 0, at + length >= lengths[s])
        for s in range(len(starts))
        for at in range(0, lengths[s], length)
    ]
    first_chunk = [0]
    for n in lengths:
        first_chunk.append(first_chunk[-1] - (-n // length))
    asked: dict[int, list[tuple[int, int, int]]] = {}
    for index, (s, tokens) in enumerate(positions):
        if tokens > 0:
            nth = (tokens - 1) // length
            chunk = first_chunk[s] + nth
            entry = (index, chunk % per_block, tokens - nth * length)
            asked.setdefault(chunk // per_block, []).append(entry)
    step = torch.arange(length, device=device)
    for number, low in enumerate(range(0, len(chunks), per_block)):
        part = chunks[low : low + per_block]
        begin = torch.tensor([c[1] for c in part], device=device)[:, None]
        count = torch.tensor([c[2] for c in part], device=device)[:, None]
        yield Block(
            token=begin + torch.minimum(step, count - 1),
            valid=step < count,
            full=all(c[2] == length for c in part),
            sequence=[c[0] for c in part],
            opens=[c[3] for c in part],
            closes=[c[4] for c in part],
            begin=part[0][1],
            end=part[-1][1] + part[-1][2],
            asked=asked.get(number, []),
        )


def initial_or_zero(
    states: Tensor | None, sequences: int, shape: Sequence[int], device: torch.device
) -> Tensor:
    """A fresh float32 copy of the initial states [S, ...], or zeros where there are none."""
    if states is None:
        return torch.zeros(sequences, *shape, dtype=torch.float32, device=device)
    if tuple(states.shape) != (sequences, *shape):
        raise ValueError(
            f"Initial states have shape {tuple(states.shape)}; this batch needs "
            f"{(sequences, *shape)}."
        )
    return states.to(torch.float32, copy=True)


def states_at_start(initial: Tensor, positions: Positions, cu_seqlens: list[int]) -> Tensor:
    """Room for the states at ``positions`` [n, ...], filled where the position is 0.

    Raises ValueError when a position lies outside its sequence.
    """
    check_positions(positions, cu_seqlens)
    found = initial.new_empty(len(positions), *initial.shape[1:])
    for index, (sequence, tokens) in enumerate(positions):
        if tokens == 0:
            found[index] = initial[sequence]
    return found
