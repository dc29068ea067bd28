"""Native decode steps agree with what plain torch computes for the same layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.platforms  # noqa: F401 (finds our platform; that cannot be imported before it)
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from sglang_hybrid.platforms.cpu_ops import mamba2
from sglang_hybrid.platforms.native import steps
from sglang_hybrid.platforms.native.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")


def close(got: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


class UnquantizedLinearMethod:
    """Of the name by which a plain product is known."""


class Layer:
    """A linear layer as SGLang's are."""

    def __init__(self, inputs: int, outputs: int, biased: bool) -> None:
        self.input_size, self.output_size = inputs, outputs
        self.weight = torch.randn(outputs, inputs) / inputs**0.5
        self.bias = torch.randn(outputs) if biased else None
        self.quant_method, self.skip_bias_add = UnquantizedLinearMethod(), False

    def __call__(self, x: Tensor) -> tuple[Tensor, None]:
        return linear(x, self.weight, self.bias), None


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16])
def test_products(rows: int) -> None:
    torch.manual_seed(rows)
    for inputs, outputs in ((1, 1), (16, 4), (33, 47), (96, 300), (512, 257)):
        x, layer = torch.randn(rows, inputs), Layer(inputs, outputs, biased=outputs % 2 == 1)
        got = steps.product(library(), x, layer.weight, layer.bias)
        close(got, layer(x)[0])
        alone = steps.product(library(), x[:1], layer.weight, layer.bias)
        assert alone.equal(got[:1])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("biased", [False, True])
def test_mlp(rows: int, biased: bool) -> None:
    torch.manual_seed(0)
    block = SimpleNamespace(up_proj=Layer(40, 130, biased), down_proj=Layer(130, 40, biased))
    x = torch.randn(rows, 40)
    got = steps.mlp(library(), block, x)
    assert got is not None
    close(got, block.down_proj(block.up_proj(x)[0].relu().square())[0])
    assert steps.mlp(library(), block, torch.randn(3, 40)) is None
    assert steps.mlp(library(), block, x.bfloat16()) is None
    block.up_proj.input_size = 80  # a rank of two
    assert steps.mlp(library(), block, x) is None


@pytest.mark.parametrize("width", [1, 16, 50, 512])
def test_rms_norm(width: int) -> None:
    torch.manual_seed(width)
    x, residual, weight = torch.randn(3, width), torch.randn(3, width), torch.randn(width)
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    got = steps.rms_norm(library(), x, None, weight, 1e-5)
    assert isinstance(got, Tensor)
    close(got, expected)
    both = steps.rms_norm(library(), x, residual, weight, 1e-5)
    total = x + residual
    assert isinstance(both, tuple)
    assert both[1].equal(total)
    close(both[0], total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight)
    assert steps.rms_norm(library(), x.bfloat16(), None, weight, 1e-5) is None


def mixer(heads: int, width: int, groups: int, size: int, hidden: int, normed: bool) -> Any:
    """The parameters of SGLang's `MambaMixer2`."""
    inner = heads * width
    conv_width = inner + 2 * groups * size
    norm = SimpleNamespace(
        weight=torch.randn(inner) if normed else None,
        use_rms_norm=normed,
        group_size=inner // groups,
        variance_epsilon=1e-5,
    )
    return SimpleNamespace(
        num_heads=heads,
        head_dim=width,
        n_groups=groups,
        ssm_state_size=size,
        intermediate_size=inner,
        tp_size=1,
        activation="silu",
        in_proj=Layer(hidden, inner + conv_width + heads, biased=normed),
        out_proj=Layer(inner, hidden, biased=normed),
        conv1d=SimpleNamespace(
            weight=torch.randn(conv_width, 1, 4), bias=torch.randn(conv_width) if normed else None
        ),
        A=-torch.rand(heads) - 0.1,
        D=torch.randn(heads),
        dt_bias=torch.randn(heads),
        norm=norm,
    )


def by_torch(of: Any, x: Tensor, cache: Any, slots: Tensor, scale: Tensor | None) -> Tensor:
    """What `MambaMixer2.forward` does with the platform's torch functions."""
    projected = of.in_proj(x)[0]
    projected = projected if scale is None else projected * scale
    inner, groups, size, heads = of.intermediate_size, of.n_groups, of.ssm_state_size, of.num_heads
    gate, mixed, step = projected.split([inner, inner + 2 * groups * size, heads], dim=-1)
    mixed = mamba2.causal_conv1d_update(
        mixed,
        cache.conv[0],
        of.conv1d.weight[:, 0],
        of.conv1d.bias,
        "silu",
        conv_state_indices=slots,
    )
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
        y = of.norm.weight * parts.flatten(1)
    return of.out_proj(y)[0]


@pytest.mark.parametrize("slots", [[5], [3, 0], [2, -1], [4, 1, 6, 0, 3], [-1, 2, 5]])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    "shape", [(4, 16, 2, 16, 32), (6, 8, 1, 128, 48), (2, 20, 2, 10, 24)], ids=str
)
def test_mamba2(shape: tuple[int, ...], normed: bool, slots: list[int]) -> None:
    torch.manual_seed(0)
    of = mixer(*shape, normed=normed)
    heads, width, groups, size, hidden = shape
    channels = heads * width + 2 * groups * size
    pool = torch.randn(7, 2, heads, width, size)[:, 1]  # slots need not be side by side
    pools = torch.randn(7, channels, 3), pool
    scale = None if normed else torch.rand(of.in_proj.output_size) + 0.5
    where = torch.tensor(slots, dtype=torch.int32)
    caches = [
        SimpleNamespace(conv=[windows.clone()], temporal=states.clone())
        for windows, states in (pools, pools)
    ]
    for _ in range(3):
        x = torch.randn(len(slots), hidden)
        got = steps.mamba2(library(), of, x, caches[0], where, scale)
        assert got is not None
        close(got, by_torch(of, x, caches[1], where, scale), 1e-4)
        close(caches[0].conv[0], caches[1].conv[0])
        close(caches[0].temporal, caches[1].temporal, 1e-4)


def test_what_mamba2_does_not_serve() -> None:
    of = mixer(4, 16, 2, 16, 32, normed=True)
    cache = SimpleNamespace(conv=[torch.randn(4, 128, 3)], temporal=torch.randn(4, 4, 16, 16))
    x, slots = torch.randn(1, 32), torch.tensor([1])
    assert steps.mamba2(library(), of, x, cache, slots, None) is not None
    assert steps.mamba2(library(), of, x.bfloat16(), cache, slots, None) is None
    assert steps.mamba2(library(), of, torch.randn(17, 32), cache, slots, None) is None
    of.tp_size = 2
    assert steps.mamba2(library(), of, x, cache, slots, None) is None
    of.tp_size, cache.temporal = 1, cache.temporal.bfloat16()
    assert steps.mamba2(library(), of, x, cache, slots, None) is None
