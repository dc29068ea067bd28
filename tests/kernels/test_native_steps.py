"""Native decode steps agree with what plain torch computes for the same layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sglang.srt.platforms  # noqa: F401 (finds our platform; that cannot be imported before it)
import torch
from torch import Tensor

from sglang_hybrid.extensions.cpu.native import steps
from sglang_hybrid.extensions.cpu.native.library import library
from tests.kernels.naive_layers import Cache, Layer, Mixer, mixer_by_torch

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")


def close(got: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16])
def test_products(rows: int) -> None:
    torch.manual_seed(rows)
    for inputs, outputs in ((1, 1), (16, 4), (33, 47), (96, 300), (512, 257)):
        x, layer = torch.randn(rows, inputs), Layer(inputs, outputs, biased=outputs % 2 == 1)
        got = steps.product(library(), x, layer.weight, layer.bias)
        close(got, layer.by_torch(x))
        # Of up to four rows, and of more, each is summed up alike.
        least = 1 if rows < 5 else 5
        assert steps.product(library(), x[:least], layer.weight, layer.bias).equal(got[:least])


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_products_in_bfloat16(rows: int) -> None:
    torch.manual_seed(rows)
    x, layer = torch.randn(rows, 300).bfloat16(), Layer(300, 130, True, torch.bfloat16)
    got = steps.product(library(), x, layer.weight, layer.bias)
    assert got.dtype == torch.bfloat16
    close(got.float(), layer.by_torch(x.float()), 1e-2)


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("biased", [False, True])
def test_mlp(rows: int, biased: bool) -> None:
    torch.manual_seed(0)
    block = SimpleNamespace(up_proj=Layer(40, 130, biased), down_proj=Layer(130, 40, biased))
    x = torch.randn(rows, 40)
    got = steps.mlp(library(), block, x)
    assert got is not None
    close(got, block.down_proj.by_torch(block.up_proj.by_torch(x).relu().square()))
    assert steps.mlp(library(), block, torch.randn(17, 40)) is None
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


@pytest.mark.parametrize("slots", [[5], [3, 0], [2, -1], [4, 1, 6, 0, 3], [-1, 2, 5]])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    "shape", [(4, 16, 2, 16, 32), (6, 8, 1, 128, 48), (2, 20, 2, 10, 24)], ids=str
)
def test_mamba2(shape: tuple[int, ...], normed: bool, slots: list[int]) -> None:
    torch.manual_seed(0)
    of = Mixer(*shape, normed=normed)
    scale = None if normed else torch.rand(of.in_proj.output_size) + 0.5
    where = torch.tensor(slots, dtype=torch.int32)
    ours = Cache(7, of)
    theirs = ours.clone()
    for _ in range(3):
        x = torch.randn(len(slots), of.in_proj.input_size)
        got = steps.mamba2(library(), of, x, ours, where, scale)
        assert got is not None
        close(got, mixer_by_torch(of, x, theirs, where, scale), 1e-4)
        close(ours.conv[0], theirs.conv[0])
        close(ours.temporal, theirs.temporal, 1e-4)


def test_what_mamba2_does_not_serve() -> None:
    of = Mixer(4, 16, 2, 16, 32)
    cache = Cache(4, of)
    x, slots = torch.randn(1, 32), torch.tensor([1])
    assert steps.mamba2(library(), of, x, cache, slots, None) is not None
    assert steps.mamba2(library(), of, x.bfloat16(), cache, slots, None) is None
    assert steps.mamba2(library(), of, torch.randn(17, 32), cache, slots, None) is None
    of.tp_size = 2
    assert steps.mamba2(library(), of, x, cache, slots, None) is None
    of.tp_size, cache.temporal = 1, cache.temporal.bfloat16()
    assert steps.mamba2(library(), of, x, cache, slots, None) is None
