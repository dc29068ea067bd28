"""Block pointers in the interpreter of Triton 3.9, which no longer has them.

SGLang's kernels of the gated delta net use them. On a GPU they run with Triton 3.8, which SGLang's
torch brings and which has block pointers; elsewhere a newer Triton may be installed. Importing this
module changes `triton.language` in the process, where that lacks them.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.language.core import builtin

_load, _store = tl.load, tl.store


@dataclass(frozen=True)
class BlockPointer:
    """A tile at ``offsets`` of the tensor at ``base``: see Triton's tl.make_block_ptr."""

    base: Any
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    offsets: tuple[Any, ...]
    tile: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        return self.base.dtype

    def elements(self, checked: tuple[int, ...], semantic: Any) -> tuple[Any, Any]:
        """Pointers to the tile's elements, and which of them are inside the tensor in the checked
        dimensions (None: all)."""
        pointers, inside = self.base, None
        for dim, extent in enumerate(self.tile):
            at = tl.arange(0, extent, _semantic=semantic).to(tl.int64, _semantic=semantic)
            at = semantic.add(at, semantic.to_tensor(self.offsets[dim]), True)
            for other in range(len(self.tile)):
                if other != dim:
                    at = semantic.expand_dims(at, other)
            step = semantic.mul(at, semantic.to_tensor(self.strides[dim]), True)
            pointers = semantic.add(pointers, step, True)
            if dim in checked:
                ends = semantic.less_than(at, semantic.to_tensor(self.shape[dim]))
                inside = ends if inside is None else semantic.and_(inside, ends)
        if inside is not None:
            inside = semantic.broadcast_impl_shape(inside, list(self.tile))
        return semantic.broadcast_impl_shape(pointers, list(self.tile)), inside


def _numbers(values: Any) -> tuple[Any, ...]:
    return tuple(getattr(value, "value", value) for value in values)


@builtin
def make_block_ptr(base, shape, strides, offsets, block_shape, order, _semantic=None):
    del order  # how a device lays the tile out
    tile = tuple(int(extent) for extent in _numbers(block_shape))
    return BlockPointer(base, _numbers(shape), _numbers(strides), _numbers(offsets), tile)


@builtin
def load(pointer, *arguments, boundary_check=(), padding_option="", _semantic=None, **more):
    if not isinstance(pointer, BlockPointer):
        return _load(pointer, *arguments, _semantic=_semantic, **more)
    pointers, inside = pointer.elements(_numbers(boundary_check), _semantic)
    return _load(pointers, mask=inside, _semantic=_semantic, **more)


@builtin
def store(pointer, value, *arguments, boundary_check=(), _semantic=None, **more):
    if not isinstance(pointer, BlockPointer):
        return _store(pointer, value, *arguments, _semantic=_semantic, **more)
    pointers, inside = pointer.elements(_numbers(boundary_check), _semantic)
    return _store(pointers, value, mask=inside, _semantic=_semantic, **more)


if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
    for language in (tl, tl.core):
        for replaced in (make_block_ptr, load, store):
            setattr(language, replaced.__name__, replaced)
