"""Copies between device pools and host pools in plain torch: SGLang's `sgl_kernel.kvcacheio` and
its Mamba transfer kernels, which need CUDA.

Words of SGLang's names: *lf*, layer first, a tensor [slots, ...] per layer, as on the device;
*pf*, page first, one tensor with all layers of a page together, [slots, layers, ...] or, with
pages, [pages, layers, page, ...]. `all_layer` is a backup, `per_layer` a load. A table of
addresses (uint64, one per layer) stands for tensors that SGLang passes by pointer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.extensions.cpu.ops.transfer_streams import current_stream


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


def with_strides(original: Callable[..., None]) -> Callable[..., None]:
    """`__init__` of a host pool of KV: rows that lie apart on the device, as in SGLang's unified
    pool, are copied by the functions below that are told strides, SGLang's JIT kernels elsewhere.
    """

    @wraps(original)
    def init(self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        self.can_use_jit = not self.device_rows_packed

    return init


def strided_one_layer(
    *,
    k_cache_dst: Tensor,
    v_cache_dst: Tensor,
    k_cache_src: Tensor,
    v_cache_src: Tensor,
    indices_dst: Tensor,
    indices_src: Tensor,
    page_size: int,
    element_dim: int,
) -> None:
    """One layer's keys and values [slots, heads, dim]."""
    for target, source in ((k_cache_dst, k_cache_src), (v_cache_dst, v_cache_src)):
        strided_one_layer_mla(
            cache_dst=target,
            cache_src=source,
            indices_dst=indices_dst,
            indices_src=indices_src,
            page_size=page_size,
            element_dim=element_dim,
        )


def strided_one_layer_mla(
    *,
    cache_dst: Tensor,
    cache_src: Tensor,
    indices_dst: Tensor,
    indices_src: Tensor,
    page_size: int,
    element_dim: int,
) -> None:
    """One layer's rows [slots, ...] of a single tensor."""
    cache_dst[indices_dst] = cache_src[indices_src].reshape(-1, *cache_dst.shape[1:])
    _carry(element_dim * cache_dst.element_size() * len(indices_src))


def strided_all_layers(
    *,
    k_ptr_dst: Tensor,
    v_ptr_dst: Tensor,
    k_ptr_src: Tensor,
    v_ptr_src: Tensor,
    kv_cache_dst_stride_bytes: int,
    kv_cache_src_stride_bytes: int,
    **rest: Any,
) -> None:
    """All layers between tables of addresses, with the bytes from a row to the next."""
    for targets, sources in ((k_ptr_dst, k_ptr_src), (v_ptr_dst, v_ptr_src)):
        strided_all_layers_mla(
            ptr_dst=targets,
            ptr_src=sources,
            cache_dst_stride_bytes=kv_cache_dst_stride_bytes,
            cache_src_stride_bytes=kv_cache_src_stride_bytes,
            **rest,
        )


def strided_all_layers_mla(
    *,
    ptr_dst: Tensor,
    ptr_src: Tensor,
    indices_dst: Tensor,
    indices_src: Tensor,
    cache_dst_stride_bytes: int,
    cache_src_stride_bytes: int,
    element_size: int,
    page_size: int,
) -> None:
    """The same for rows of `element_size` bytes of a single tensor in each layer."""
    for source, target in zip(ptr_src.tolist(), ptr_dst.tolist(), strict=True):
        rows = _rows_at(source, indices_src, element_size, cache_src_stride_bytes)[indices_src]
        _rows_at(target, indices_dst, element_size, cache_dst_stride_bytes)[indices_dst] = rows
    _carry(len(ptr_src) * element_size * len(indices_src))


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


def _rows_at(address: int, rows: Tensor, item_size: int, stride: int = 0) -> Tensor:
    """Memory at `address` as bytes [slots, item_size], as far as the largest of `rows`; the next
    slot is `stride` bytes on, or follows at once.
    """
    count, stride = int(rows.max()) + 1, stride or item_size
    memory = (ctypes.c_uint8 * ((count - 1) * stride + item_size)).from_address(address)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    return flat.as_strided((count, item_size), (stride, 1))


def _row_bytes(tensor: Tensor) -> int:
    return tensor[0].numel() * tensor.element_size()


def _carry(size: int) -> None:
    current_stream().carry(size)
