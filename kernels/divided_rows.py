"""Slots of a pool that are coded into parts of slots, and back: two Triton launches, and one.

`storage/codecs/in_place.py` has the same in plain torch, which is the definition. The layers of a
pool are told by their addresses, so that a launch is for all of them.
"""

# Triton's decorator and its kernels' arguments have no types that mypy reads.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2_048
"""Numbers that one program codes, or fewer."""

WORDS = 1_024
"""Words that one program copies."""

WORD_TYPES = {4: tl.int32, 2: tl.int16, 1: tl.int8}
"""Triton's integer types, by their bytes."""

ALIGNED = 16
"""Bytes that a thread reads at once where addresses are multiples of that."""

VARYING = ("pool_slots",)
ANYWHERE = ("slots", "places", "parts")
"""Lists that begin anywhere in a tensor, so that Triton compiles one variant of each kernel."""

_NUMBER_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_SMALL_TYPES = {1: tl.int8, 2: tl.bfloat16}


class DividedRows:
    """Tensors [layers, slots, ...] of one shape, type and distance of slots; the numbers of a slot
    are contiguous, and their last dimension, `width`, is a row.

    Args:
        tensors: these.
        scales: uint8 [layers of all, slots, parts, rows, 2], contiguous, of bfloat16 numbers; the
            last dimension is 0 where the codec has no scales (bf16 of float32).
        parts: coded slots that fit into one.
    """

    def __init__(self, tensors: Sequence[Tensor], scales: Tensor, parts: int) -> None:
        first = tensors[0]
        layers = [layer for tensor in tensors for layer in tensor]
        self._addresses = torch.tensor(
            [layer.data_ptr() for layer in layers], dtype=torch.int64, device=first.device
        )
        self._layers, self._scales, self._parts = len(layers), scales, parts
        self._stride, itemsize = first.stride(1), first.dtype.itemsize
        self._rows, width = scales.shape[3], first.shape[-1]
        self._size = self._rows * width * itemsize // parts
        distances = [*(layer.data_ptr() for layer in layers), self._stride * itemsize]
        aligned = not any(at % ALIGNED for at in (*distances, width, self._size))
        small = itemsize // parts
        word = next(size for size in WORD_TYPES if not any(at % size for at in distances))
        self._word = next(size for size in WORD_TYPES if not (self._size % size or word % size))
        width_tile = triton.next_power_of_2(width)
        self._tile = max(1, min(triton.next_power_of_2(self._rows), TILE // width_tile))
        self._constants = {
            **{"NUMBER": _NUMBER_TYPES[first.dtype], "SMALL": _SMALL_TYPES[small]},
            **{"WIDTH": width, "TILE_WIDTH": width_tile, "TILE_ROWS": self._tile},
            **{"SCALED": scales.shape[-1] > 0, "ALIGNED": ALIGNED if aligned else itemsize},
        }

    def warm_up(self) -> None:
        """Compile the kernels: code slot 0, which must hold zeros, and decode it."""
        zero = self._addresses.new_zeros(1)
        self.encode(zero, zero, zero)
        self.decode(zero, zero, zero)

    def encode(self, slots: Tensor, places: Tensor, parts: Tensor) -> None:
        """Code `slots` [n] into parts [n] of `places` [n], all int64. All are read before any is
        written.
        """
        staged = self._scales.new_empty(self._layers, len(slots), self._size)
        encode_rows[self._grid(len(slots))](
            *(self._addresses, slots, places, parts, staged, self._scales),
            *(self._stride, self._scales.shape[1], self._parts, self._rows),
            **self._constants,
        )
        words = self._size // self._word
        write_parts[(len(slots), self._layers, triton.cdiv(words, WORDS))](
            *(self._addresses, places, parts, staged),
            *(self._stride * self._constants["NUMBER"].primitive_bitwidth // 8, self._size),
            WORD=WORD_TYPES[self._word],
            WORDS=WORDS,
        )

    def decode(self, places: Tensor, parts: Tensor, slots: Tensor) -> None:
        """Decode parts [n] of `places` [n] into `slots` [n], which are none of the places."""
        decode_rows[self._grid(len(slots))](
            *(self._addresses, places, parts, slots, self._scales),
            *(self._stride, self._scales.shape[1], self._parts, self._rows, self._size),
            **self._constants,
        )

    def _grid(self, count: int) -> tuple[int, int, int]:
        return count, self._layers, triton.cdiv(self._rows, self._tile)


@triton.jit
def tile_of_rows(rows, WIDTH: tl.constexpr, TILE_WIDTH: tl.constexpr, TILE_ROWS: tl.constexpr):
    """The rows of this program's tile, the places of their numbers in a slot, and a mask of those
    that there are.
    """
    row = tl.program_id(2) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.arange(0, TILE_WIDTH)
    inside = (row[:, None] < rows) & (column[None, :] < WIDTH)
    return row, row[:, None] * WIDTH + column[None, :], inside


@triton.jit
def scales_of_part(scales, part, rows):
    """The scales of a part; `part` counts those of all slots of all layers."""
    return scales.to(tl.pointer_type(tl.bfloat16)) + part * rows


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=ANYWHERE)
def encode_rows(
    addresses,
    slots,
    places,
    parts,
    staged,
    scales,
    stride,
    pool_slots,
    parts_of_slot,
    rows,
    NUMBER: tl.constexpr,
    SMALL: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The numbers of slots into `staged` [layers, n, bytes of a part], their scales to where they
    belong. Grid: slots, layers, tiles of rows.
    """
    i, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, at, inside = tile_of_rows(rows, WIDTH, TILE_WIDTH, TILE_ROWS)
    source = tl.load(addresses + layer).to(tl.pointer_type(NUMBER))
    source = tl.multiple_of(source, ALIGNED) + tl.load(slots + i) * stride
    target = staged.to(tl.pointer_type(SMALL)) + (layer * tl.num_programs(0) + i) * rows * WIDTH
    numbers = tl.load(source + at, mask=inside, other=0).to(tl.float32)
    if SCALED:
        largest = tl.max(tl.abs(numbers), axis=1)
        broken = tl.max((numbers != numbers).to(tl.int32), axis=1) > 0
        scale = tl.where(broken, float("nan"), tl.math.div_rn(largest, 127.0)).to(tl.bfloat16)
        divisor = tl.where(scale > 0, scale.to(tl.float32), 1.0)
        steps = tl.math.div_rn(numbers, tl.broadcast_to(divisor[:, None], numbers.shape))
        steps = tl.minimum(tl.maximum(steps, -127.0), 127.0)
        steps = tl.where(steps == steps, steps, 0.0)
        # Adding and subtracting 1.5 * 2**23 rounds to the nearest whole number, ties to even.
        whole = (steps + 12582912.0) - 12582912.0
        tl.store(target + at, whole.to(SMALL), mask=inside)
        place, part = tl.load(places + i), tl.load(parts + i)
        kept = scales_of_part(scales, (layer * pool_slots + place) * parts_of_slot + part, rows)
        tl.store(kept + row, scale, mask=row < rows)
    else:
        tl.store(target + at, numbers.to(SMALL), mask=inside)


@triton.jit(do_not_specialize_on_alignment=ANYWHERE)
def write_parts(
    addresses,
    places,
    parts,
    staged,
    stride,
    size,
    WORD: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copies what `encode_rows` staged into the parts. stride, size: bytes from slot to slot, and
    of a part. Grid: slots, layers, tiles of words.
    """
    i, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    inside = at < size // (WORD.primitive_bitwidth // 8)
    offset = tl.load(places + i) * stride + tl.load(parts + i) * size
    target = (tl.load(addresses + layer) + offset).to(tl.pointer_type(WORD))
    source = (staged + (layer * tl.num_programs(0) + i) * size).to(tl.pointer_type(WORD))
    tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=ANYWHERE)
def decode_rows(
    addresses,
    places,
    parts,
    slots,
    scales,
    stride,
    pool_slots,
    parts_of_slot,
    rows,
    size,
    NUMBER: tl.constexpr,
    SMALL: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Parts into slots. Grid: slots, layers, tiles of rows."""
    i, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, at, inside = tile_of_rows(rows, WIDTH, TILE_WIDTH, TILE_ROWS)
    place, part = tl.load(places + i), tl.load(parts + i)
    pool = tl.multiple_of(tl.load(addresses + layer).to(tl.pointer_type(NUMBER)), ALIGNED)
    source = (pool + place * stride).to(tl.pointer_type(tl.int8)) + part * size
    numbers = tl.load(source.to(tl.pointer_type(SMALL)) + at, mask=inside, other=0)
    numbers = numbers.to(tl.float32)
    if SCALED:
        kept = scales_of_part(scales, (layer * pool_slots + place) * parts_of_slot + part, rows)
        scale = tl.load(kept + row, mask=row < rows, other=0)
        numbers *= scale.to(tl.float32)[:, None]
    tl.store(pool + tl.load(slots + i) * stride + at, numbers.to(NUMBER), mask=inside)
