"""Products with weights, through oneDNN instead of the BLAS that torch calls for float32.

On a CPU for which that BLAS (MKL) does not use all vector instructions oneDNN is two to three times
as fast, and on every CPU it can keep a weight in its own blocked layout: a decode step then reads
weights at the speed of the memory (docs/benchmarks.md). The packed copy is kept beside the weight,
since models and weight updates read the latter, and only while copies take little of the memory.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from sglang_hybrid.extensions.cpu.native import steps
from sglang_hybrid.extensions.cpu.native.library import library
from sglang_hybrid.extensions.cpu.sizing import packed_limit

logger = logging.getLogger(__name__)

SMALLEST = 1 << 19
"""Multiplications of a product below which torch's own shorter call is faster."""

SMALLEST_PACKED = 1 << 17
"""Values of a weight below which packing gains nothing: it stays in a core's cache as it is."""

_ATTRIBUTE = "_onednn_weight"
_onednn = torch.ops.mkldnn._linear_pointwise.default
_packed_bytes = 0
_changes = 0


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None
) -> Tensor:
    """``x @ weight.T + bias``: x [..., K], weight [N, K] (and its packed copy), bias [N]."""
    rows = x.numel() // max(1, x.shape[-1])
    kernels = library()
    if kernels is not None and _is_native_faster(x, weight, rows):
        return steps.product(kernels, x, weight, bias)
    if rows * weight.numel() < SMALLEST or not _served(x, weight):
        return linear(x, weight, bias)
    result: Tensor = _onednn(x, weight if packed is None else packed, bias, "none", [], "")
    return result


def apply(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product with a layer's weight, for SGLang's `UnquantizedLinearMethod.apply`."""
    return product(x, layer.weight, bias, _packed(layer))


def lm_head_product(lm_head: Any, hidden_states: Tensor) -> Tensor:
    """Logits [n, V] of hidden states [n, D] (hooks/models.py)."""
    return product(hidden_states, lm_head.weight, None, _packed(lm_head))


def pack(layer: Any) -> None:
    """Keep a packed copy of a layer's weight, if it is a matrix that gains by it and there is room.

    For SGLang's `process_weights_after_loading`, which runs after a model was loaded and after its
    weights were updated.
    """
    global _packed_bytes
    unpack(layer)
    weight = layer.weight
    size = weight.numel() * weight.element_size()
    gains = weight.dim() == 2 and weight.numel() >= SMALLEST_PACKED and _served(weight, weight)
    if gains and _packed_bytes + size <= packed_limit():
        _packed_bytes += size
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        layer.__dict__[_ATTRIBUTE] = packed
    else:
        layer.__dict__[_ATTRIBUTE] = None


def pack_lm_head(layer: Any) -> None:
    """`pack` for layers that SGLang makes with its embedding method: heads, but no embeddings."""
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    if isinstance(layer, ParallelLMHead):
        pack(layer)
    else:
        unpack(layer)


def unpack(layer: Any) -> None:
    """Drop the packed copy, which is made again when it is needed next; for SGLang's
    `restore_weights_before_loading`, and for updates without it (hooks/models.py).
    """
    global _packed_bytes, _changes
    _changes += 1
    packed = layer.__dict__.pop(_ATTRIBUTE, None)
    if packed is not None:
        _packed_bytes -= layer.weight.numel() * layer.weight.element_size()


def changes() -> int:
    """A number that grows whenever weights were loaded or updated."""
    return _changes


def _packed(layer: Any) -> Tensor | None:
    """The packed copy, or None. A tied embedding gets one when it first serves as a head."""
    if _ATTRIBUTE not in layer.__dict__:
        pack(layer)
    packed: Tensor | None = layer.__dict__[_ATTRIBUTE]
    return packed


def _is_native_faster(x: Tensor, weight: Tensor, rows: int) -> bool:
    """True if a native product with the weight as it is stored is the fastest."""
    known = x.dtype == weight.dtype and weight.dtype in (torch.float32, torch.bfloat16)
    plain = known and x.is_contiguous() and weight.is_contiguous()
    return 0 < rows <= steps.MOST_ROWS and plain and weight.numel() >= steps.SMALLEST


def _served(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == weight.dtype and _supports(x.dtype) and weight.is_contiguous()


@cache
def _supports(dtype: torch.dtype) -> bool:
    """True if oneDNN has kernels of its own for a type on this CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
