"""Where the keys and values of sequences lie in a pool, and how a batch reads them.

A pool keeps a token's keys and values in a slot. Slots of one sequence are often consecutive, since
a prompt gets them all at once: such a span is read through a view of the pool, by all sequences
that share it together. Slots that stand alone, as those of decoded tokens do when several sequences
decode together, are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALONE = 2
"""A sequence's remaining slots are gathered by themselves if they are more than so many times the
shortest span; below that, padding a batch of them costs less than another call of the kernel."""

SlotArray = NDArray[np.integer]
"""Slots [T] of a sequence's tokens, in the order of the tokens."""


class Slots(NamedTuple):
    """Slots of some tokens: ``length`` consecutive ones from ``start``, or those in ``indices``."""

    start: int
    length: int
    indices: Tensor | None

    @staticmethod
    def of(slots: SlotArray) -> Slots:
        """Any slots, in their order."""
        length = len(slots)
        if length and slots[-1] - slots[0] == length - 1 and bool((np.diff(slots) == 1).all()):
            return Slots(int(slots[0]), length, None)
        return Slots(0, length, torch.from_numpy(slots.astype(np.int64)))

    def rows(self, pool: Tensor) -> Tensor:
        """Their rows of pool [slots, ...]: a view where the slots are consecutive."""
        if self.indices is None:
            return pool.narrow(0, self.start, self.length)
        return pool.index_select(0, self.indices)


Rows = slice | Tensor | None
"""Some sequences of a batch; None is all of them."""


class Span(NamedTuple):
    """Slots that the sequences ``rows`` of a batch read together.

    ``place`` is where their partial results go: no two spans of one sequence have the same place.
    """

    slots: Slots
    rows: Rows
    place: int


class Loose(NamedTuple):
    """Slots in no span: ``slots`` [r, T] of the sequences ``rows``, padded with any slot, and
    ``mask`` [r, T], 0 and -inf on padding (None: no padding).
    """

    slots: Tensor
    rows: Rows
    mask: Tensor | None


@dataclass(frozen=True)
class BatchReads:
    """What one new token of each of ``whole``'s sequences reads.

    ``places`` is the number of partial results of a sequence; the last is that of loose slots, if
    there are any. ``whole`` are each sequence's slots in order, empty unless they were asked for.
    """

    spans: Sequence[Span]
    loose: Loose | None
    places: int
    whole: Sequence[Slots] = ()


def prefix_slots(slots: SlotArray, shortest: int, *, in_order: bool = False) -> list[Slots]:
    """The slots of one sequence: spans of at least ``shortest``, then all others; or all in the
    order of their tokens.
    """
    if not len(slots):
        return []
    if in_order:
        return [Slots.of(slots)]
    starts, lengths = _runs(slots)
    long = lengths >= shortest
    if not long.any():
        return [Slots.of(slots)]
    spans = [
        Slots(int(slots[at]), int(n), None)
        for at, n in zip(starts[long].tolist(), lengths[long].tolist(), strict=True)
    ]
    if long.all():
        return spans
    rest = slots[~np.repeat(long, lengths)].astype(np.int64)
    return [*spans, Slots(0, len(rest), torch.from_numpy(rest))]


def batch_reads(
    sequences: Sequence[SlotArray], shortest: int, *, whole: bool = False
) -> BatchReads:
    """How the next token of every sequence reads its slots; at least one of them has some.

    Spans of at least ``shortest`` slots are read through views; sequences that begin the same span
    share it as far as it is common to them. What remains of a sequence is gathered, with the other
    sequences' remains where there is little of it. ``whole`` lists each sequence's slots instead.
    """
    if whole:
        return BatchReads((), None, 0, [Slots.of(slots) for slots in sequences])
    spans: dict[int, list[tuple[int, int]]] = {}
    loose: list[list[SlotArray]] = []
    for row, slots in enumerate(sequences):
        starts, lengths = _runs(slots)
        long = lengths >= shortest
        loose.append([slots[~np.repeat(long, lengths)] if long.any() else slots])
        for at, n in zip(starts[long].tolist(), lengths[long].tolist(), strict=True):
            spans.setdefault(int(slots[at]), []).append((n, row))
    pieces = []
    for start, length, rows in _common(spans):
        if length >= shortest:
            pieces.append((Slots(start, length, None), rows))
        else:
            for row in rows:
                loose[row].append(np.arange(start, start + length))
    rests = [np.concatenate(parts) for parts in loose]
    for row, rest in enumerate(rests):
        if len(rest) > ALONE * shortest:
            pieces.append((Slots.of(rest), [row]))
            rests[row] = rest[:0]
    placed = _placed(pieces, len(sequences))
    together = _padded(rests)
    places = 1 + max((span.place for span in placed), default=-1) + (together is not None)
    return BatchReads(placed, together, places)


def _runs(slots: SlotArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where runs of consecutive slots begin, and how long they are."""
    edges = np.flatnonzero(np.diff(slots) != 1) + 1
    starts = np.concatenate([np.zeros(1, np.int64), edges])
    return starts, np.diff(starts, append=len(slots))


def _common(spans: dict[int, list[tuple[int, int]]]) -> Iterator[tuple[int, int, list[int]]]:
    """Pieces (first slot, length, rows) of spans, each of which the same rows read throughout.

    ``spans`` lists (length, row) of the spans that begin at a slot.
    """
    for start, readers in spans.items():
        done = 0
        for length in sorted({n for n, _ in readers}):
            yield start + done, length - done, [row for n, row in readers if n >= length]
            done = length


def _placed(pieces: list[tuple[Slots, list[int]]], sequences: int) -> list[Span]:
    taken = [0] * sequences
    found = []
    for slots, rows in pieces:
        place = max(taken[row] for row in rows)
        for row in rows:
            taken[row] = place + 1
        found.append(Span(slots, _as_rows(rows, sequences), place))
    return found


def _as_rows(rows: list[int], sequences: int) -> Rows:
    if len(rows) == sequences:
        return None
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows)


def _padded(rests: list[SlotArray]) -> Loose | None:
    lengths = np.array([len(slots) for slots in rests])
    rows = np.flatnonzero(lengths)
    if not len(rows):
        return None
    inside = np.arange(int(lengths.max())) < lengths[rows, None]
    slots = np.zeros(inside.shape, np.int64)
    slots[inside] = np.concatenate(rests)
    mask = None
    if not inside.all():
        mask = torch.from_numpy(np.where(inside, 0.0, -math.inf).astype(np.float32))
    return Loose(torch.from_numpy(slots), _as_rows(rows.tolist(), len(rests)), mask)
