"""Copies between device pools and host pools in plain torch: SGLang's `sgl_kernel.kvcacheio` and
its Mamba transfer kernels, which need CUDA.

Words of SGLang's names: *lf*, layer first, a tensor [slots, ...] per layer, as on the device;
*pf*, page first, one tensor with all layers of a page together, [slots, layers, ...] or, with
pages, [pages, layers, page, ...]. `all_layer` is a backup, `per_layer` a load. A table of
addresses (uint64, one per layer) stands for tensors that SGLang passes by pointer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.platforms.cpu_ops.transfer_streams import current_stream


def no_registration(buffer: Tensor, registration_granularity_bytes: int | None = None) -> None:
    """Host memory is the device's memory here: there is nothing to register it with."""


def per_layer(
    *,
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
) -> None:
    """One layer's keys and values [slots, heads, dim], host layer first."""
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        rows_per_layer(
            src=source,
            dst=target,
            src_indices=src_indices,
            dst_indices=dst_indices,
            item_size=item_size,
        )


def all_layer(
    *,
    src_k_layers: Tensor,
    dst_k_layers: Tensor,
    src_v_layers: Tensor,
    dst_v_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
) -> None:
    """All layers between tables of addresses, host layer first."""
    for sources, targets in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        rows_all_layer(
            src_layers=sources,
            dst_layers=targets,
            src_indices=src_indices,
            dst_indices=dst_indices,
            item_size=item_size,
            num_layers=num_layers,
        )


def per_layer_pf_lf(
    *,
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    """One layer from the host's [slots, layers, heads, dim] to the device's [slots, heads, dim]."""
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        rows_pf_lf(
            src=source,
            dst=target,
            src_indices=src_indices,
            dst_indices=dst_indices,
            layer_id=layer_id,
            item_size=item_size,
            src_layout_dim=src_layout_dim,
        )


def all_layer_lf_pf(
    *,
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    """All layers from a table of addresses to the host's [slots, layers, heads, dim]."""
    for sources, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        _gather(sources, target, src_indices, dst_indices, item_size)


def rows_per_layer(
    *, src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size: int
) -> None:
    """One layer's rows [slots, ...] of a single tensor, as MLA's, host layer first."""
    dst[dst_indices] = src[src_indices]
    _carry(item_size * len(src_indices))


def rows_all_layer(
    *,
    src_layers: Tensor,
    dst_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
) -> None:
    """All layers of a single tensor each, between tables of addresses, host layer first."""
    for source, target in zip(src_layers.tolist(), dst_layers.tolist(), strict=True):
        _rows_at(target, dst_indices, item_size)[dst_indices] = _rows_at(
            source, src_indices, item_size
        )[src_indices]
    _carry(num_layers * item_size * len(src_indices))


def rows_pf_lf(
    *,
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    """One layer of a single tensor, MLA's or states', from the host's [slots, layers, ...] to the
    device's [slots, ...]; axes of length 1 may differ.
    """
    dst[dst_indices] = src[src_indices, layer_id].reshape(-1, *dst.shape[1:])
    _carry(item_size * len(src_indices))


def rows_lf_pf(
    *,
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    """All layers of a single tensor each, from a table of addresses to the host's [slots, layers,
    ...].
    """
    _gather(src_layers, dst, src_indices, dst_indices, item_size)


def mamba_lf_pf(*, src_ptrs: Tensor, **named: Any) -> None:
    """`rows_lf_pf` of states, where SGLang calls the table otherwise."""
    rows_lf_pf(src_layers=src_ptrs, **named)


def direct(
    *,
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Rows of each tensor [slots, ...] to the tensor in the same place of the other list."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]
        _carry(_row_bytes(source) * len(src_indices))


def per_layer_direct_pf_lf(
    *,
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer from the host's [pages, layers, page, ...] to the device's [slots, ...]."""
    page, offset = src_indices // page_size, src_indices % page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[page, layer_id, offset]
        _carry(_row_bytes(target) * len(src_indices))


def all_layer_direct_lf_pf(
    *,
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """All layers' [slots, ...], those of the first host tensor first, to [pages, layers, page,
    ...].
    """
    page, offset = dst_indices // page_size, dst_indices % page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        target = dst_ptrs[number // layers]
        target[page, number % layers, offset] = source[src_indices]
        _carry(_row_bytes(source) * len(src_indices))


def _gather(
    addresses: Tensor, target: Tensor, rows: Tensor, target_rows: Tensor, item_size: int
) -> None:
    """`target[target_rows, layer]` from the rows of `item_size` bytes at each layer's address."""
    flat = target.view(torch.uint8).reshape(target.shape[0], len(addresses), item_size)
    for layer, address in enumerate(addresses.tolist()):
        flat[target_rows, layer] = _rows_at(address, rows, item_size)[rows]
    _carry(len(addresses) * item_size * len(rows))


def _rows_at(address: int, rows: Tensor, item_size: int) -> Tensor:
    """Memory at `address` as bytes [slots, item_size], as far as the largest of `rows`."""
    count = int(rows.max()) + 1
    memory = (ctypes.c_uint8 * (count * item_size)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(count, item_size)


def _row_bytes(tensor: Tensor) -> int:
    return tensor[0].numel() * tensor.element_size()


def _carry(size: int) -> None:
    current_stream().carry(size)
