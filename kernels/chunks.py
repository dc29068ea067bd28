"""Chunks of a packed batch of sequences, and the states that pass from chunk to chunk.

A packed batch holds its sequences one after the other: sequence ``s`` is
``tokens[cu_seqlens[s] : cu_seqlens[s + 1]]``. Chunks are counted from each sequence's own start, so
what a sequence computes does not depend on its neighbours in the batch. The tokens that remain
behind a sequence's last whole chunk are a shorter chunk. Such chunks are computed last, those of
several sequences together.
"""

from __future__ import annotations

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


class Asked(NamedTuple):
    """A requested position: the index of the request, and after how many tokens of which chunk."""

    request: int
    chunk: int
    tokens: int


@dataclass(frozen=True)
class Block:
    """n chunks of L tokens that are computed at once.

    ``sequences[i]`` is the sequence of chunk i, and ``counts[i]`` how many of its L tokens are its
    own; the others repeat its last token and must count for nothing. Those are the false ones in
    ``valid`` [n, L] (None: there are none). ``tokens`` [n * L] are indices of the packed batch
    (None: the tokens from ``begin`` on, in order). ``asked`` are the requested positions inside.
    """

    length: int
    sequences: list[int]
    counts: list[int]
    begin: int
    tokens: Tensor | None
    valid: Tensor | None
    asked: list[Asked]

    def rows(self, packed: Tensor) -> Tensor:
        """Rows of packed [T, ...] as float32 [n, L, ...]; a view where it can be."""
        n = len(self.sequences)
        if self.tokens is None:
            rows = packed[self.begin : self.begin + n * self.length]
        else:
            rows = packed.index_select(0, self.tokens)
        return rows.float().view(n, self.length, *packed.shape[1:])

    def without_padding(self, rows: Tensor) -> Tensor:
        """Rows [n, L, ...] with zeros in place of the rows that repeat a chunk's last token."""
        if self.valid is None:
            return rows
        return rows.masked_fill(~self.valid.view(*self.valid.shape, *[1] * (rows.dim() - 2)), 0.0)

    def view(self, packed: Tensor) -> Tensor | None:
        """A view [n, L, ...] of the chunks' rows in packed [T, ...]; None if not side by side."""
        if self.tokens is not None:
            return None
        n = len(self.sequences)
        return packed[self.begin : self.begin + n * self.length].view(
            n, self.length, *packed.shape[1:]
        )

    def store(self, rows: Tensor, packed: Tensor) -> None:
        """Write chunked rows [n, L, ...] to their tokens in packed [T, ...]."""
        place = self.view(packed)
        if place is not None:
            place.copy_(rows)
        elif self.tokens is not None:
            flat, tokens = rows.flatten(0, 1).to(packed.dtype), self.tokens
            if self.valid is not None:
                flat, tokens = flat[self.valid.flatten()], tokens[self.valid.flatten()]
            packed.index_copy_(0, tokens, flat)


class States:
    """The state of every sequence while its chunks are computed in order: float32 [S, ...]."""

    def __init__(
        self,
        initial: Tensor | None,
        positions: Positions,
        cu_seqlens: list[int],
        shape: Sequence[int],
        device: torch.device,
    ) -> None:
        """``initial`` [S, ...] are the first states (None: zeros), ``shape`` is that of one state.

        Raises ValueError for initial states of another shape and for positions outside their
        sequence.
        """
        sequences = len(cu_seqlens) - 1
        check_positions(positions, cu_seqlens)
        if initial is None:
            zero = torch.zeros(*shape, dtype=torch.float32, device=device)
            self.current = [zero] * sequences
        else:
            if tuple(initial.shape) != (sequences, *shape):
                raise ValueError(
                    f"Initial states have shape {tuple(initial.shape)}; this batch needs "
                    f"{(sequences, *shape)}."
                )
            self.current = list(initial.float())
        self.found = torch.empty(len(positions), *shape, dtype=torch.float32, device=device)
        for request, (sequence, tokens) in enumerate(positions):
            if tokens == 0:
                self.found[request] = self.current[sequence]

    def pass_through(self, block: Block, factor: Tensor, addend: Tensor) -> Tensor:
        """Advance through a block whose chunk i makes ``factor[i] * state + addend[i]`` of a state.

        Shapes: addend [n, ...], factor the same or broadcast to it. Returns the states [n, ...]
        that enter the chunks, and notes those that were asked for at the ends of chunks.
        """
        if len(block.sequences) == 1:
            sequence = block.sequences[0]
            entering = self.current[sequence][None]
            self.current[sequence] = torch.addcmul(addend[0], entering[0], factor[0])
            self.note(block, self.current)
            return entering
        entering = torch.empty_like(addend)
        into = entering.unbind(0)
        parts = zip(block.sequences, addend.unbind(0), factor.unbind(0), strict=True)
        leaving = []
        for i, (sequence, added, kept) in enumerate(parts):
            if i == 0 or sequence != block.sequences[i - 1]:
                into[i].copy_(self.current[sequence])
            goes_on = i + 1 < len(into) and block.sequences[i + 1] == sequence
            if goes_on:
                leaving.append(torch.addcmul(added, into[i], kept, out=into[i + 1]))
            else:
                leaving.append(torch.addcmul(added, into[i], kept))
                self.current[sequence] = leaving[i]
        self.note(block, leaving, by_chunk=True)
        return entering

    def note(self, block: Block, states: Sequence[Tensor], *, by_chunk: bool = False) -> None:
        """Save the states that were asked for at the ends of chunks.

        ``states`` are those of the sequences, or those that leave the block's chunks.
        """
        for request, chunk, tokens in block.asked:
            if tokens == block.counts[chunk]:
                self.found[request] = states[chunk if by_chunk else block.sequences[chunk]]

    def final(self) -> Tensor:
        """The states [S, ...] behind the last tokens."""
        return self.current[0][None] if len(self.current) == 1 else torch.stack(self.current)


def find_inside(block: Block) -> list[Asked]:
    """The requested positions that are not at the end of their chunk."""
    return [asked for asked in block.asked if asked.tokens < block.counts[asked.chunk]]


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
    """Cut every sequence into chunks of ``length`` tokens and a shorter one; ``per_block`` at a
    time. The chunks of a sequence come in order.
    """
    whole: list[tuple[int, int, int]] = []
    shorter: list[tuple[int, int, int]] = []
    for sequence, (begin, end) in enumerate(pairwise(cu_seqlens)):
        ends = range(begin + length, end + 1, length)
        whole += [(sequence, at - length, length) for at in ends]
        rest = (end - begin) % length
        if rest:
            shorter.append((sequence, end - rest, rest))
    asked: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for request, (sequence, tokens) in enumerate(positions):
        if tokens > 0:
            nth = (tokens - 1) // length
            at = cu_seqlens[sequence] + nth * length
            asked.setdefault((sequence, at), []).append((request, tokens - nth * length))
    for chunks in (whole, shorter):
        for low in range(0, len(chunks), per_block):
            yield _block(chunks[low : low + per_block], asked, device)


def _block(
    chunks: list[tuple[int, int, int]],
    asked: dict[tuple[int, int], list[tuple[int, int]]],
    device: torch.device,
) -> Block:
    """A block of chunks (sequence, first token, tokens)."""
    sequences, begins, counts = (list(values) for values in zip(*chunks, strict=True))
    length = max(counts)
    in_a_row = all(a + length == b for a, b in pairwise(begins))
    tokens = valid = None
    if not (in_a_row and min(counts) == length):
        step = torch.arange(length, device=device)
        count = torch.tensor(counts, device=device)[:, None]
        last = torch.tensor(begins, device=device)[:, None] + torch.minimum(step, count - 1)
        tokens = last.flatten()
        valid = None if min(counts) == length else step < count
    return Block(
        length=length,
        sequences=sequences,
        counts=counts,
        begin=begins[0],
        tokens=tokens,
        valid=valid,
        asked=[
            Asked(request, chunk, n)
            for chunk, key in enumerate(zip(sequences, begins, strict=True))
            for request, n in asked.get(key, ())
        ],
    )
