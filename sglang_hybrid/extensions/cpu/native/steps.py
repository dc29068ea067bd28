"""Decode steps in C++ (``kernels/native/steps.cpp``): a few rows, one call per layer, float32; and
products with weights in float32 or bfloat16.

Plain twins: ``torch.nn.functional.linear``, SGLang's own forward functions, and with them the
functions of ``ops/mamba2.py``. None where a function does not serve what it was given.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

MOST_ROWS = 16
"""Rows of a batch up to which products and a layer's small operations are computed here. With more,
oneDNN's packed copies of weights are faster."""

SMALLEST = 1 << 13
"""Values of a weight below which torch's own call is shorter."""


def product(kernels: ctypes.CDLL, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``: x [..., K] and weight [N, K] contiguous, in float32 or bfloat16,
    bias [N]. Sums are in float32, the result is of x's type.
    """
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    given, offset = x.float(), None if bias is None else bias.float()
    y = given.new_empty(*x.shape[:-1], outputs)
    kernels.hybrid_product(
        given.data_ptr(),
        rows,
        weight.data_ptr(),
        _address(offset),
        outputs,
        inputs,
        int(weight.dtype == torch.bfloat16),
        y.data_ptr(),
    )
    return y.to(x.dtype)


def mlp(kernels: ctypes.CDLL, block: Any, x: Tensor) -> Tensor | None:
    """``down(relu(up(x)) ** 2)``, for SGLang's `NemotronHMLP`: [b, D] for x [b, D]."""
    up, down = block.up_proj, block.down_proj
    if not _few(x, MOST_ROWS) or not (is_whole(up) and is_whole(down)):
        return None
    inner, width = up.weight.shape
    hidden, y = x.new_empty(x.shape[0], inner), torch.empty_like(x)
    kernels.hybrid_mlp(
        x.data_ptr(),
        x.shape[0],
        up.weight.data_ptr(),
        _address(up.bias),
        down.weight.data_ptr(),
        _address(down.bias),
        width,
        inner,
        hidden.data_ptr(),
        y.data_ptr(),
    )
    return y


def rms_norm(
    kernels: ctypes.CDLL, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> Tensor | tuple[Tensor, Tensor] | None:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension; with a residual, of
    ``x + residual``, which is returned, too.
    """
    width = x.shape[-1]
    rows = x.numel() // max(1, width)
    if rows > MOST_ROWS or not _plain(x) or not _plain(weight) or weight.numel() != width:
        return None
    if residual is not None and not (_plain(residual) and residual.shape == x.shape):
        return None
    y, total = torch.empty_like(x), None if residual is None else torch.empty_like(x)
    addresses = (_address(t) for t in (x, residual, weight, total, y))
    kernels.hybrid_rms_norm(*addresses, rows, width, eps)
    return y if total is None else (y, total)


def mamba2(
    kernels: ctypes.CDLL, mixer: Any, x: Tensor, cache: Any, slots: Tensor, scale: Tensor | None
) -> Tensor | None:
    """One token of every row through SGLang's `MambaMixer2`: [b, D] for x [b, D].

    Advances the windows and the states of ``cache`` at ``slots`` [b], -1 for padding. ``scale``
    [projections] multiplies the projected inputs.
    """
    windows, states, norm = cache.conv[0], cache.temporal, mixer.norm
    if not _few(x, MOST_ROWS) or not _serves(mixer, windows, states, scale):
        return None
    rows, inner, size = x.shape[0], mixer.intermediate_size, mixer.ssm_state_size
    into, out = mixer.in_proj, mixer.out_proj
    conv_width = inner + 2 * mixer.n_groups * size
    projected, y = x.new_empty(rows, inner + conv_width + mixer.num_heads), torch.empty_like(x)
    convolved, mixed = x.new_empty(rows, conv_width), x.new_empty(rows, inner)
    slots = slots.long()
    kernels.hybrid_mamba2(
        x.data_ptr(),
        rows,
        x.shape[1],
        into.weight.data_ptr(),
        _address(into.bias),
        out.weight.data_ptr(),
        _address(out.bias),
        _address(scale),
        mixer.conv1d.weight.data_ptr(),
        _address(mixer.conv1d.bias),
        mixer.A.data_ptr(),
        mixer.D.data_ptr(),
        mixer.dt_bias.data_ptr(),
        _address(norm.weight) if norm.use_rms_norm else None,
        slots.data_ptr(),
        windows.data_ptr(),
        windows.stride(0),
        states.data_ptr(),
        states.stride(0),
        mixer.num_heads,
        mixer.head_dim,
        mixer.n_groups,
        size,
        windows.shape[2] + 1,
        norm.group_size,
        norm.variance_epsilon,
        *(t.data_ptr() for t in (projected, convolved, mixed, y)),
    )
    return y


def _serves(mixer: Any, windows: Tensor, states: Tensor, scale: Tensor | None) -> bool:
    parameters = (mixer.conv1d.weight, mixer.A, mixer.D, mixer.dt_bias)
    return (
        mixer.tp_size == 1
        and is_whole(mixer.in_proj)
        and is_whole(mixer.out_proj)
        and mixer.activation in ("silu", "swish")
        and windows.dtype == states.dtype == torch.float32
        and windows.stride()[1:] == (mixer.conv1d.weight.shape[-1] - 1, 1)
        and states.stride()[1:] == (mixer.head_dim * mixer.ssm_state_size, mixer.ssm_state_size, 1)
        and all(_plain(parameter) for parameter in parameters)
        and (not mixer.norm.use_rms_norm or _plain(mixer.norm.weight))
        and (scale is None or _plain(scale))
    )


def is_whole(layer: Any, dtype: torch.dtype = torch.float32) -> bool:
    """True if a layer's product is that of its own weight of this type and nothing else."""
    method = type(getattr(layer, "quant_method", None)).__name__
    return (
        method == "UnquantizedLinearMethod"
        and layer.weight.shape == (layer.output_size, layer.input_size)  # no rank has the rest
        and not layer.skip_bias_add
        and layer.weight.dtype == dtype
        and layer.weight.is_contiguous()
    )


def _few(x: Tensor, most: int) -> bool:
    return x.dim() == 2 and 0 < x.shape[0] <= most and _plain(x)


def _plain(t: Tensor) -> bool:
    return t.dtype == torch.float32 and t.is_contiguous()


def _address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()
