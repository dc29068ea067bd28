"""Layers of SGLang's models with as much as the native kernels read of them, and what they compute
in plain torch, in float32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from sglang_hybrid.extensions.cpu.ops import mamba2


def parameter(*shape: int, dtype: torch.dtype = torch.float32, over: float = 1.0) -> nn.Parameter:
    return nn.Parameter((torch.randn(*shape) / over).to(dtype), requires_grad=False)


class UnquantizedLinearMethod:
    """A class with the name by which a plain product is known."""


class Layer(nn.Module):
    """A linear layer."""

    def __init__(
        self, inputs: int, outputs: int, biased: bool, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.input_size, self.output_size = inputs, outputs
        self.weight = parameter(outputs, inputs, dtype=dtype, over=inputs**0.5)
        self.bias = parameter(outputs, dtype=dtype) if biased else None
        self.quant_method, self.skip_bias_add = UnquantizedLinearMethod(), False

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return linear(x, self.weight, self.bias), None

    def by_torch(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.float(), None if self.bias is None else self.bias.float())


class RMSNorm(nn.Module):
    """A norm, which is known by this name."""

    def __init__(self, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = parameter(width, dtype=dtype)
        self.variance_epsilon = 1e-5
        self.variance_size_override, self.override_orig_dtype = None, None

    def by_torch(self, x: Tensor) -> Tensor:
        factor = (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return x * factor * self.weight.float()


class RotaryEmbedding(nn.Module):
    """Turns the first ``rotary_dim`` values of a head, in halves; known by this name."""

    def __init__(self, head_size: int, rotary_dim: int) -> None:
        super().__init__()
        self.head_size, self.rotary_dim, self.is_neox_style = head_size, rotary_dim, True
        angles = torch.arange(1000)[:, None] / 10 ** torch.linspace(0, 3, rotary_dim // 2)
        self.register_buffer("cos_sin_cache", torch.cat([angles.cos(), angles.sin()], -1))

    def by_torch(self, x: Tensor, position: int) -> Tensor:
        cos, sin = self.cos_sin_cache[position].chunk(2)  # type: ignore[index]
        a, b, rest = x.split([len(cos), len(cos), self.head_size - self.rotary_dim], dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class Mixer(nn.Module):
    """`MambaMixer2`."""

    def __init__(
        self,
        heads: int,
        width: int,
        groups: int,
        size: int,
        hidden: int,
        dtype: torch.dtype = torch.float32,
        normed: bool = True,
    ) -> None:
        super().__init__()
        inner = heads * width
        self.channels = inner + 2 * groups * size
        self.num_heads, self.head_dim, self.n_groups = heads, width, groups
        self.ssm_state_size, self.intermediate_size = size, inner
        self.tp_size, self.activation = 1, "silu"
        self.state_shape = heads, width, size
        self.in_proj = Layer(hidden, inner + self.channels + heads, normed, dtype)
        self.out_proj = Layer(inner, hidden, normed, dtype)
        self.conv1d: Any = nn.Module()
        self.conv1d.weight = parameter(self.channels, 1, 4, dtype=dtype)
        self.conv1d.bias = parameter(self.channels, dtype=dtype) if normed else None
        self.A = nn.Parameter(-torch.rand(heads) - 0.1, requires_grad=False)
        self.D, self.dt_bias = parameter(heads), parameter(heads)
        self.norm: Any = RMSNorm(inner, dtype)
        self.norm.use_rms_norm, self.norm.group_size = normed, inner // groups


class Mixer1(nn.Module):
    """`MambaMixer1`."""

    def __init__(
        self,
        inner: int,
        size: int,
        rank: int,
        hidden: int,
        dtype: torch.dtype = torch.float32,
        normed: bool = True,
    ) -> None:
        super().__init__()
        self.intermediate_size, self.ssm_state_size, self.time_step_rank = inner, size, rank
        self.channels, self.state_shape = inner, (inner, 1, size)
        self.tp_size, self.activation = 1, "silu"
        self.use_bc_dt_rms, self.rms_eps = normed, 1e-5
        self.in_proj = Layer(hidden, 2 * inner, normed, dtype)
        self.x_proj = Layer(inner, rank + 2 * size, False, dtype)
        self.dt_proj = Layer(rank, inner, True, dtype)
        self.out_proj = Layer(inner, hidden, normed, dtype)
        self.conv1d: Any = nn.Module()
        self.conv1d.weight = parameter(inner, 1, 4, dtype=dtype)
        self.conv1d.bias = parameter(inner, dtype=dtype) if normed else None
        self.A_log = nn.Parameter(torch.rand(inner, size), requires_grad=False)
        self.D = parameter(inner)


class Cache(SimpleNamespace):
    """Windows and states of one layer; slots of the states do not lie side by side."""

    def __init__(
        self, slots: int, mixer: Mixer | Mixer1, dtype: torch.dtype = torch.float32
    ) -> None:
        windows = torch.randn(slots, mixer.channels, 3).to(dtype)
        states = torch.randn(slots, 2, *mixer.state_shape)[:, 1]
        super().__init__(conv=[windows], temporal=states)

    def clone(self) -> SimpleNamespace:
        return SimpleNamespace(conv=[self.conv[0].clone()], temporal=self.temporal.clone())


def convolved(of: Mixer | Mixer1, x: Tensor, cache: SimpleNamespace, slots: Tensor) -> Tensor:
    bias = of.conv1d.bias
    return mamba2.causal_conv1d_update(
        x,
        cache.conv[0],
        of.conv1d.weight[:, 0].float(),
        None if bias is None else bias.float(),
        "silu",
        conv_state_indices=slots,
    )


def mixer1_by_torch(of: Mixer1, x: Tensor, cache: SimpleNamespace, slots: Tensor) -> Tensor:
    """`MambaMixer1.forward`, in float32."""
    inner, size = of.intermediate_size, of.ssm_state_size
    values, gate = of.in_proj.by_torch(x).split([inner, inner], dim=-1)
    values = convolved(of, values, cache, slots)
    selected = of.x_proj.by_torch(values).split([of.time_step_rank, size, size], dim=-1)
    if of.use_bc_dt_rms:
        selected = [t * (t.square().mean(-1, keepdim=True) + of.rms_eps).rsqrt() for t in selected]
    step, b, c = selected
    out = torch.empty(x.shape[0], inner, 1)
    mamba2.selective_state_update(
        cache.temporal,
        values[..., None],
        of.dt_proj.by_torch(step)[..., None],
        -of.A_log.exp()[:, None],
        b[:, None],
        c[:, None],
        of.D[:, None],
        z=gate[..., None],
        dt_bias=torch.zeros(inner, 1),
        dt_softplus=True,
        state_batch_indices=slots,
        out=out,
    )
    return of.out_proj.by_torch(out.flatten(1))


def mixer_by_torch(
    of: Mixer, x: Tensor, cache: SimpleNamespace, slots: Tensor, scale: Tensor | None
) -> Tensor:
    """`MambaMixer2.forward` with the platform's torch functions, in float32."""
    projected = of.in_proj.by_torch(x)
    projected = projected if scale is None else projected * scale
    inner, groups, size, heads = of.intermediate_size, of.n_groups, of.ssm_state_size, of.num_heads
    gate, mixed, step = projected.split([inner, of.channels, heads], dim=-1)
    mixed = convolved(of, mixed, cache, slots)
    state_in, b, c = mixed.split([inner, groups * size, groups * size], dim=-1)
    wide = (heads, of.head_dim)
    out = torch.empty(x.shape[0], *wide)
    mamba2.selective_state_update(
        cache.temporal,
        state_in.reshape(-1, *wide),
        step[..., None].expand(-1, *wide),
        of.A[:, None, None].expand(*wide, size),
        b.reshape(-1, groups, size),
        c.reshape(-1, groups, size),
        of.D[:, None].expand(wide),
        dt_bias=of.dt_bias[:, None].expand(wide),
        dt_softplus=True,
        state_batch_indices=slots,
        out=out,
    )
    y = out.flatten(1) * silu(gate)
    if of.norm.use_rms_norm:
        parts = y.view(x.shape[0], -1, of.norm.group_size)
        parts = parts * (parts.square().mean(-1, keepdim=True) + of.norm.variance_epsilon).rsqrt()
        y = of.norm.weight.float() * parts.flatten(1)
    return of.out_proj.by_torch(y)
