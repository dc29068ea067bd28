"""One decode step of a whole model in C++ (``kernels/native/model_step.cpp``): one call for all
layers, a few rows, weights in float32 or bfloat16, sums in float32.

A model is described once, layer by layer; the kernels keep the addresses of its weights and pools.
Plain twins: SGLang's own forward functions of these layers, on the platform's torch functions.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.extensions.cpu.native.attention import MOST_IN_A_GROUP, Sequences
from sglang_hybrid.extensions.cpu.native.steps import is_whole
from sglang_hybrid.kernels.attention import Rule

MOST_ROWS = 16
"""Rows of a batch up to which a step is computed here."""


class Unserved(Exception):
    """The model has no step here; the message says why."""


class Activation(IntEnum):
    """The function between the two products of an MLP. Of a gated one the first half of the first
    product are the gates of the second half.
    """

    SQUARED_RELU = 1
    GATED_SILU = 2


@dataclass(frozen=True)
class LayerWiring:
    """The connection of a layer to the residual stream: its input is ``norm(residual) * in_scale``,
    and its result times ``out_scale`` is added to the residual. A layer ``beside`` the one before
    has the same input as that one.
    """

    norm: Any
    in_scale: float = 1.0
    out_scale: float = 1.0
    beside: bool = False


class NativeModel:
    """A model's layers, in their order, and its step. Raises `Unserved` for what it cannot take."""

    def __init__(self, kernels: ctypes.CDLL, norm: Any, dtype: torch.dtype) -> None:
        """``norm`` stands behind the last layer; ``dtype`` is that of all weights."""
        if dtype not in (torch.float32, torch.bfloat16):
            raise Unserved(f"weights in {dtype}")
        self._kernels, self._dtype = kernels, dtype
        self._kept: list[Tensor] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self._addresses: list[int] = []  # of the tensors in these places
        weight, self._eps = self._norm(norm), norm.variance_epsilon
        half = int(dtype == torch.bfloat16)
        found = kernels.hybrid_model(norm.weight.numel(), self._eps, half, weight)
        self._handle = ctypes.c_void_p(found)
        weakref.finalize(self, kernels.hybrid_model_free, self._handle)

    def mlp(
        self,
        place: LayerWiring,
        up: Any,
        down: Any,
        activation: Activation,
        gate_scale: float = 1.0,
    ) -> None:
        """``down(activation(up(x)))``; ``gate_scale`` multiplies gates before their activation."""
        self._kernels.hybrid_model_mlp(
            *self._place(place),
            *self._linear(up),
            *self._linear(down),
            down.input_size,
            int(activation),
            gate_scale,
        )

    def mamba2(
        self, place: LayerWiring, mixer: Any, cache: Any, scale: Tensor | None = None
    ) -> None:
        """SGLang's `MambaMixer2` on one layer's windows and states of all slots. ``scale``
        [projections] multiplies the projected inputs.
        """
        norm = mixer.norm
        width, size = mixer.head_dim, mixer.ssm_state_size
        _check_states(mixer, cache, (width * size, size, 1))
        self._kernels.hybrid_model_mamba2(
            *self._place(place),
            *self._linear(mixer.in_proj),
            *self._linear(mixer.out_proj),
            self._small(scale),
            self._parameter(mixer.conv1d, "weight"),
            self._parameter(mixer.conv1d, "bias"),
            self._parameter(mixer, "A"),
            self._parameter(mixer, "D"),
            self._parameter(mixer, "dt_bias"),
            self._parameter(norm, "weight") if norm.use_rms_norm else None,
            *_addresses_of(cache),
            mixer.num_heads,
            width,
            mixer.n_groups,
            size,
            mixer.conv1d.weight.shape[-1],
            norm.group_size,
            norm.variance_epsilon,
        )

    def mamba1(self, place: LayerWiring, mixer: Any, cache: Any) -> None:
        """SGLang's `MambaMixer1` on one layer's windows and states of all slots."""
        size = mixer.ssm_state_size
        _check_states(mixer, cache, (size, size, 1))
        self._found(mixer._parameters, "A_log")
        self._kernels.hybrid_model_mamba1(
            *self._place(place),
            *self._linear(mixer.in_proj),
            *self._linear(mixer.x_proj),
            *self._linear(mixer.dt_proj),
            *self._linear(mixer.out_proj),
            self._parameter(mixer.conv1d, "weight"),
            self._parameter(mixer.conv1d, "bias"),
            self._small(-mixer.A_log.float().exp()),
            self._parameter(mixer, "D"),
            *_addresses_of(cache),
            mixer.intermediate_size,
            size,
            mixer.time_step_rank,
            mixer.conv1d.weight.shape[-1],
            int(mixer.use_bc_dt_rms),
            mixer.rms_eps,
        )

    def attention(
        self,
        place: LayerWiring,
        qkv: Any,
        out: Any,
        heads: tuple[int, int],
        keys: Tensor,
        values: Tensor,
        rule: Rule,
        rotary: Any = None,
        key_scale: float = 1.0,
    ) -> None:
        """Attention of ``heads`` (of queries, of keys) over a pool [slots, heads, width], into
        which the new tokens are written. ``rotary`` turns queries and keys, the latter after they
        were multiplied by ``key_scale``.
        """
        query_heads, key_heads = heads
        width = keys.shape[2]
        for pool in (keys, values):
            if pool.dtype not in (torch.float32, torch.bfloat16) or pool.dtype != keys.dtype:
                raise Unserved(f"keys in {keys.dtype}, values in {values.dtype}")
            if pool.shape[1:] != (key_heads, width) or pool.stride()[1:] != (width, 1):
                raise Unserved("keys and values that do not lie in one piece")
        if query_heads // key_heads > MOST_IN_A_GROUP or not rule.causal or rule.sinks is not None:
            raise Unserved("attention that is not causal, has sinks or too many heads")
        self._kernels.hybrid_model_attention(
            *self._place(place),
            *self._linear(qkv),
            *self._linear(out),
            keys.data_ptr(),
            keys.stride(0),
            values.data_ptr(),
            values.stride(0),
            query_heads,
            key_heads,
            width,
            int(keys.dtype == torch.bfloat16),
            rule.scale,
            rule.cap,
            -1 if rule.window is None else rule.window,
            key_scale,
            *self._rotation(rotary, width),
        )

    def is_current(self) -> bool:
        """True if all tensors still lie where the kernels read them."""
        return [owner[name].data_ptr() for owner, name in self._places] == self._addresses

    def step(
        self,
        x: Tensor,
        state_slots: Tensor | None,
        kv_slots: Tensor | None,
        positions: Tensor,
        sequences: Sequences | None,
    ) -> Tensor:
        """One token of every row: [b, D], normalized, for embeddings x [b, D].

        ``state_slots`` [b] (-1 for padding), ``kv_slots`` [b], where new keys are written,
        ``positions`` [b], and ``sequences``, whose last tokens the rows are; None for what the
        model's layers do not have.
        """
        given = x.float().contiguous()
        indices = [None if t is None else t.long() for t in (state_slots, kv_slots, positions)]
        out = torch.empty_like(given)
        self._kernels.hybrid_model_step(
            self._handle,
            given.shape[0],
            given.data_ptr(),
            out.data_ptr(),
            *(None if t is None else t.data_ptr() for t in indices),
            None if sequences is None else sequences.addresses.ctypes.data,
            None if sequences is None else sequences.lengths.ctypes.data,
            None if sequences is None else sequences.counts.ctypes.data,
        )
        return out.to(x.dtype)

    def _place(self, place: LayerWiring) -> tuple[Any, ...]:
        norm = self._norm(place.norm)
        if place.norm.variance_epsilon != self._eps:
            raise Unserved("norms that are not alike")
        return self._handle, norm, place.in_scale, place.out_scale, int(place.beside)

    def _norm(self, norm: Any) -> int | None:
        if type(norm).__name__ != "RMSNorm":
            raise Unserved(f"a {type(norm).__name__}")
        if norm.variance_size_override is not None or norm.override_orig_dtype is not None:
            raise Unserved("a norm of a part of a row")
        return self._parameter(norm, "weight")

    def _linear(self, layer: Any) -> tuple[int | None, int | None]:
        """Addresses of a linear layer's weight and bias."""
        if not is_whole(layer, self._dtype):
            raise Unserved(f"a {type(layer).__name__} that is more than a product")
        weight = self._found(layer._parameters, "weight")
        return weight.data_ptr(), None if layer.bias is None else self._parameter(layer, "bias")

    def _parameter(self, owner: Any, name: str) -> int | None:
        if getattr(owner, name) is None:
            return None
        holder = owner._parameters if name in owner._parameters else owner._buffers
        return self._small(self._found(holder, name))

    def _found(self, owner: dict[str, Any], name: str) -> Tensor:
        tensor: Tensor = owner[name]
        self._places.append((owner, name))
        self._addresses.append(tensor.data_ptr())
        return tensor

    def _small(self, tensor: Tensor | None) -> int | None:
        """The address of a tensor as floats: its own, or a copy's."""
        if tensor is None:
            return None
        self._kept.append(tensor.detach().float().contiguous())
        return self._kept[-1].data_ptr()

    def _rotation(self, rotary: Any, width: int) -> tuple[int | None, int]:
        if rotary is None:
            return None, 0
        plain = type(rotary).__name__ in ("RotaryEmbedding", "Llama3RotaryEmbedding")
        if not plain or not rotary.is_neox_style or rotary.head_size != width:
            raise Unserved(f"positions by {type(rotary).__name__}")
        return self._parameter(rotary, "cos_sin_cache"), rotary.rotary_dim


def _check_states(mixer: Any, cache: Any, strides: tuple[int, ...]) -> None:
    """Raises `Unserved` for a Mamba layer whose states or activation the kernels do not know."""
    windows, states = cache.conv[0], cache.temporal
    if mixer.tp_size != 1 or mixer.activation not in ("silu", "swish"):
        raise Unserved("a Mamba layer of several ranks, or with another activation")
    if states.dtype != torch.float32 or windows.dtype not in (torch.float32, torch.bfloat16):
        raise Unserved(f"states in {states.dtype}, windows in {windows.dtype}")
    taps = mixer.conv1d.weight.shape[-1]
    if windows.stride()[1:] != (taps - 1, 1) or states.stride()[1:] != strides:
        raise Unserved("states that do not lie in one piece")


def _addresses_of(cache: Any) -> tuple[int, int, int, int, int]:
    """Addresses of a layer's windows (with their stride, and 1 for bfloat16) and states."""
    windows, states = cache.conv[0], cache.temporal
    of_windows = windows.data_ptr(), windows.stride(0), int(windows.dtype == torch.bfloat16)
    return *of_windows, states.data_ptr(), states.stride(0)
