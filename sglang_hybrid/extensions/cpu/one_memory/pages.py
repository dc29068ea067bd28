"""Tensors whose memory is reserved but taken from the system page by page, and given back.

An anonymous mapping has no physical memory until something is written to it, and none after
`madvise(MADV_DONTNEED)`; addresses stay. So the system's page table is the page table of one
memory: a pool's tensors are as large as the whole budget, and only what is in use is resident.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

PAGE = mmap.PAGESIZE
_NORESERVE = 0x4000  # MAP_NORESERVE of Linux; Python names it from 3.12 on
_libc = ctypes.CDLL(None, use_errno=True)


def reserve(size: int) -> mmap.mmap:
    """`size` bytes of zeros without physical memory. Raises OSError if the system has no room for
    the addresses.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    mapping = mmap.mmap(-1, up_to_pages(size), flags=flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a page of 2 MiB would hold rows of both free and used
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return mapping


def up_to_pages(size: int) -> int:
    """`size` bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


@dataclass(frozen=True)
class Plane:
    """Rows of one tensor: row i is the `row_bytes` at address + i * row_bytes."""

    address: int
    row_bytes: int

    def give_back(self, first: int, last: int) -> None:
        """Give the memory of rows [first, last) back. Raises OSError; ValueError unless the rows
        fill whole pages.
        """
        start, size = self.address + first * self.row_bytes, (last - first) * self.row_bytes
        if start % PAGE or size % PAGE:
            raise ValueError(
                f"rows {first} to {last} of {self.row_bytes} bytes fill no whole pages"
            )
        if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


@dataclass(frozen=True)
class Planes:
    """All tensors that hold rows of one kind; `rows` of each make a granule."""

    planes: Sequence[Plane]
    rows: int

    def give_back(self, first: int, last: int) -> None:
        """Give the memory of granules [first, last) back."""
        for plane in self.planes:
            plane.give_back(first * self.rows, last * self.rows)


def rows_of_whole_pages(row_bytes: int) -> int:
    """The least number of rows that fill whole pages."""
    return PAGE // math.gcd(PAGE, row_bytes)


class Reserved(TorchFunctionMode):
    """Within it, `torch.zeros` of a page or more makes tensors on reserved memory.

    states: (layers, slots) of tensors [layers, slots, ...] that are to lie in memory slot by slot,
    each slot on pages of its own. Any other tensor is contiguous, as usual.
    """

    def __init__(self, states: tuple[int, int] | None = None) -> None:
        super().__init__()
        self._states = states
        self.mapped: list[tuple[int, int]] = []  # first address, size

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is not torch.zeros:
            return func(*args, **kwargs)
        size = args if args else kwargs["size"]
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        if not on_cpu or shape.numel() * dtype.itemsize < PAGE:
            return func(*args, **kwargs)
        return self._tensor(shape, dtype)

    def _tensor(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        if self._states is None or tuple(shape[:2]) != self._states:
            return self._map(shape.numel() * dtype.itemsize, dtype)[: shape.numel()].view(shape)
        layers, slots = shape[:2]
        row = shape[2:].numel()  # values of one layer's row
        stride = up_to_pages(layers * row * dtype.itemsize) // dtype.itemsize
        values = self._map(slots * stride * dtype.itemsize, dtype)
        inner = torch.empty(shape[2:], device="meta").stride()
        return values.as_strided(shape, (row, stride, *inner))

    def _map(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        values = torch.frombuffer(reserve(size), dtype=dtype)
        self.mapped.append((values.data_ptr(), values.nbytes))
        return values

    def plane(self, tensor: torch.Tensor, row_dim: int) -> Plane:
        """The rows of a tensor that was made here, along dimension `row_dim`. Raises ValueError for
        any other tensor.
        """
        address = tensor.data_ptr()
        if not any(start <= address < start + size for start, size in self.mapped):
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not on reserved memory")
        return Plane(address, tensor.stride(row_dim) * tensor.itemsize)
