"""Rows of a pool that are coded in their own memory: smaller numbers, several slots in one.

A slot of KV in bfloat16 has room for two slots in int8, one of a state in float32 for four. A coded
slot is named by its *place*, a slot of the pool, and a number `part` below `InPlace.parts`. Tensors
too small to be divided, windows of convolutions and the scales of rows, are kept beside the pool,
for every place that there can be.

Layers of one shape are coded together, so that a GPU starts few kernels: its own for what is
divided (`kernels/divided_rows.py`), those of plain torch, which is the definition, elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from sglang_hybrid.storage.codecs.codecs import Codec

WIDEST_ROW = 128
"""Numbers that share a scale at most, of a tensor without rows of its own."""

RowsOf = Callable[[Tensor], Tensor]
"""The rows of slots [n] where their tensors lie now: int64 [n]."""

BYTES_AT_ONCE = 32 << 20
"""Bytes of a tensor's slots that are coded at once; the arithmetic takes a few times as many."""


@dataclass(frozen=True)
class Names:
    """Slots that name rows, which may move. count: the slots that there are."""

    count: int
    rows: RowsOf


class InPlace:
    """The tensors of a pool's slots, coded and decoded.

    Args:
        divided: tensors [layers, slots, ...] whose slots have room for several coded ones; the
            numbers of a slot are contiguous. Their last dimension is a row.
        beside: tensors [layers, slots, ...] of which coded slots lie beside the pool.
        codec: of both.
        names: the number of slots, and the rows of slots, where rows move and slots only name them;
            None where a slot is its row.

    parts: coded slots that fit into one; 1 if the codec makes nothing smaller.
    """

    def __init__(
        self,
        divided: Sequence[Tensor],
        beside: Sequence[Tensor],
        codec: Codec,
        names: Names | None = None,
    ) -> None:
        self.parts = min((_parts(tensor, codec) for tensor in divided), default=1)
        self._coded: list[_Divided | _Beside] = []
        if self.parts > 1:
            self._coded += (_Divided(group, codec, self.parts, names) for group in _alike(divided))
            self._coded += (_Beside(group, codec, self.parts, names) for group in _alike(beside))

    @property
    def bytes_beside(self) -> int:
        """Bytes that lie beside the pool."""
        return sum(each.beside.nbytes for each in self._coded)

    def encode(self, slots: Tensor, places: Tensor, parts: Tensor) -> None:
        """Code `slots` [n] into parts [n] of `places` [n]. A place may be one of the slots that
        come no later: they are read in their order, before anything is written.
        """
        for each in self._coded:
            for some in each.portions(len(slots)):
                each.encode(slots[some], places[some], parts[some])

    def decode(self, places: Tensor, parts: Tensor, slots: Tensor) -> None:
        """Decode parts [n] of `places` [n] into `slots` [n], which are none of the places."""
        for each in self._coded:
            for some in each.portions(len(slots)):
                each.decode(places[some], parts[some], slots[some])

    def move(self, places: Tensor, parts: Tensor, to: Tensor, to_parts: Tensor) -> None:
        """Move coded slots [n] as they are."""
        for each in self._coded:
            each.move(places, parts, to, to_parts)


def _parts(tensor: Tensor, codec: Codec) -> int:
    """Coded slots of `tensor` that fit into one."""
    small = {Codec.INT8: 1, Codec.BF16: 2}.get(codec, tensor.dtype.itemsize)
    gains = codec.fit(tensor.shape[-1], tensor.dtype) is codec
    return tensor.dtype.itemsize // small if gains else 1


def _alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors, by their shapes and steps but for the number of layers."""
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        kind = tensor.shape[1:], tensor.stride()[1:], tensor.dtype
        groups.setdefault(kind, []).append(tensor)
    return list(groups.values())


class _Group:
    """Tensors [layers, slots, ...] of one shape, whose coded slots have something in `beside`,
    uint8 [layers of all, slots, parts, ...].
    """

    beside: Tensor

    def __init__(self, tensors: Sequence[Tensor], names: Names | None) -> None:
        self._tensors = tensors
        self._slots = tensors[0].shape[1] if names is None else names.count
        self._rows_of: RowsOf = (lambda slots: slots) if names is None else names.rows
        self._layers = [len(tensor) for tensor in tensors]
        self._shape, self._dtype = tensors[0].shape[2:], tensors[0].dtype

    def portions(self, count: int) -> Iterator[slice]:
        """`count` slots, some at a time."""
        slot = sum(self._layers) * prod(self._shape) * self._dtype.itemsize
        most = max(1, BYTES_AT_ONCE // slot)
        for first in range(0, count, most):
            yield slice(first, first + most)

    def _read(self, slots: Tensor) -> Tensor:
        """The content of `slots` [n]: [layers of all, n, ...]."""
        rows = self._rows_of(slots)
        return torch.cat([tensor[:, rows] for tensor in self._tensors])

    def _write(self, slots: Tensor, content: Tensor) -> None:
        content, rows = content.reshape(-1, len(slots), *self._shape), self._rows_of(slots)
        for tensor, some in zip(self._tensors, content.split_with_sizes(self._layers), strict=True):
            tensor[:, rows] = some


class _Divided(_Group):
    """Tensors whose slots are divided into parts. Scales lie beside them."""

    def __init__(
        self, tensors: Sequence[Tensor], codec: Codec, parts: int, names: Names | None
    ) -> None:
        super().__init__(tensors, names)
        self._codec = codec
        size = prod(self._shape) * self._dtype.itemsize // parts
        self._parts = []
        for tensor in tensors:
            whole = tensor.view(torch.uint8)
            shape, steps = (*tensor.shape[:2], parts, size), whole.stride()[:2]
            self._parts.append(whole.as_strided(shape, (*steps, size, 1), whole.storage_offset()))
        self._rows = prod(self._shape[:-1])
        self._width = codec.row_bytes(self._shape[-1], self._dtype)
        self._numbers = size // self._rows
        shape = (sum(self._layers), self._slots, parts, self._rows)
        scale = self._width - self._numbers
        self.beside = tensors[0].new_empty((*shape, scale), dtype=torch.uint8)
        self._launched = None
        if self.beside.is_cuda:
            from sglang_hybrid.kernels.divided_rows import DividedRows

            self._launched = DividedRows(tensors, self.beside, parts)
            self._launched.warm_up()

    def encode(self, slots: Tensor, places: Tensor, parts: Tensor) -> None:
        if self._launched is not None:
            self._launched.encode(slots, places, parts)
            return
        coded = self._codec.encode(self._read(slots))
        coded = coded.view(-1, len(slots), self._rows, self._width)
        numbers = coded[..., : self._numbers].flatten(2).split_with_sizes(self._layers)
        for target, some in zip(self._parts, numbers, strict=True):
            target[:, self._rows_of(places), parts] = some
        self.beside[:, places, parts] = coded[..., self._numbers :]

    def decode(self, places: Tensor, parts: Tensor, slots: Tensor) -> None:
        if self._launched is not None:
            self._launched.decode(places, parts, slots)
            return
        rows = self._rows_of(places)
        numbers = torch.cat([source[:, rows, parts] for source in self._parts])
        numbers = numbers.view(-1, len(slots), self._rows, self._numbers)
        coded = torch.cat([numbers, self.beside[:, places, parts]], -1)
        self._write(slots, self._codec.decode(coded, self._dtype))

    def move(self, places: Tensor, parts: Tensor, to: Tensor, to_parts: Tensor) -> None:
        rows, to_rows = self._rows_of(places), self._rows_of(to)
        for each in self._parts:
            each[:, to_rows, to_parts] = each[:, rows, parts]
        self.beside[:, to, to_parts] = self.beside[:, places, parts]


class _Beside(_Group):
    """Tensors whose coded slots lie beside them. Their numbers share scales as they come."""

    def __init__(
        self, tensors: Sequence[Tensor], codec: Codec, parts: int, names: Names | None
    ) -> None:
        super().__init__(tensors, names)
        count = prod(self._shape)
        width = next(width for width in range(min(WIDEST_ROW, count), 0, -1) if not count % width)
        self._codec = codec.fit(width, self._dtype)
        self._as_rows = (count // width, width)
        shape = (sum(self._layers), self._slots, parts, count // width)
        size = self._codec.row_bytes(width, self._dtype)
        self.beside = tensors[0].new_empty((*shape, size), dtype=torch.uint8)

    def encode(self, slots: Tensor, places: Tensor, parts: Tensor) -> None:
        rows = self._read(slots).reshape(-1, len(slots), *self._as_rows)
        self.beside[:, places, parts] = self._codec.encode(rows)

    def decode(self, places: Tensor, parts: Tensor, slots: Tensor) -> None:
        self._write(slots, self._codec.decode(self.beside[:, places, parts], self._dtype))

    def move(self, places: Tensor, parts: Tensor, to: Tensor, to_parts: Tensor) -> None:
        self.beside[:, to, to_parts] = self.beside[:, places, parts]
