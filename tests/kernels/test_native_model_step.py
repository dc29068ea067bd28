"""A native decode step of a whole model agrees with its layers in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import sglang.srt.platforms  # noqa: F401 (finds our platform; that cannot be imported before it)
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from sglang_hybrid.extensions.cpu.native.attention import Sequences
from sglang_hybrid.extensions.cpu.native.library import library
from sglang_hybrid.extensions.cpu.native.model_step import (
    Activation,
    LayerWiring,
    NativeModel,
    Unserved,
)
from sglang_hybrid.kernels.attention import Rule
from tests.kernels.naive_layers import (
    Cache,
    Layer,
    Mixer,
    Mixer1,
    RMSNorm,
    RotaryEmbedding,
    mixer1_by_torch,
    mixer_by_torch,
)

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")

WIDTH, SLOTS = 48, 9
ROWS = (1, 2, 4, 5, 16, 17, 21)
DTYPES = (torch.float32, torch.bfloat16)


def close(got: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


def model(dtype: torch.dtype = torch.float32) -> tuple[NativeModel, RMSNorm]:
    norm = RMSNorm(WIDTH, dtype)
    return NativeModel(library(), norm, dtype), norm


def step(native: NativeModel, x: Tensor, **given: Any) -> Tensor:
    """One step without what the test does not give."""
    asked = {"state_slots": None, "kv_slots": None, "sequences": None} | given
    positions = asked.pop("positions", torch.zeros(len(x), dtype=torch.long))
    return native.step(x, positions=positions, **asked)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("rows", ROWS)
def test_mlps(rows: int, activation: Activation, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    native, last = model(dtype)
    inner = 70  # of no whole tiles
    norm = RMSNorm(WIDTH, dtype)
    gated = activation is Activation.GATED_SILU
    up = Layer(WIDTH, 2 * inner if gated else inner, True, dtype)
    down = Layer(inner, WIDTH, False, dtype)
    native.mlp(LayerWiring(norm, 0.5, 2.0), up, down, activation, 1.5)
    x = torch.randn(rows, WIDTH).to(dtype)
    hidden = up.by_torch(norm.by_torch(x.float()) * 0.5)
    if gated:
        gates, values = hidden.chunk(2, dim=-1)
        hidden = silu(gates * 1.5) * values
    else:
        hidden = hidden.relu().square()
    got = step(native, x)
    assert got.dtype == dtype
    close(got, last.by_torch(x.float() + 2 * down.by_torch(hidden)), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [[5], [2, -1], [4, 1, 6, 0, 3, -1]], ids=str)
def test_mamba2_beside_another(slots: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    native, last = model(dtype)
    norms = [RMSNorm(WIDTH, dtype) for _ in range(2)]
    mixers = [Mixer(4, 16, 2, 20, WIDTH, dtype, normed=nth == 0) for nth in range(2)]
    caches = [Cache(SLOTS, mixer, dtype) for mixer in mixers]
    twins = [cache.clone() for cache in caches]
    scale = torch.rand(mixers[1].in_proj.output_size) + 0.5
    native.mamba2(LayerWiring(norms[0]), mixers[0], caches[0])
    native.mamba2(LayerWiring(norms[1], out_scale=0.5, beside=True), mixers[1], caches[1], scale)
    where = torch.tensor(slots, dtype=torch.int32)
    for _ in range(3):
        x = torch.randn(len(slots), WIDTH).to(dtype)
        first = mixer_by_torch(mixers[0], norms[0].by_torch(x.float()), twins[0], where, None)
        other = mixer_by_torch(mixers[1], norms[1].by_torch(x.float()), twins[1], where, scale)
        got = step(native, x, state_slots=where)
        close(got, last.by_torch(x.float() + first + 0.5 * other), dtype)
        for cache, twin in zip(caches, twins, strict=True):
            close(cache.temporal, twin.temporal.float(), dtype)
            close(cache.conv[0], twin.conv[0].float(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [[5], [2, -1], [4, 1, 6, 0, 3, -1]], ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_mamba1(normed: bool, slots: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    native, last = model(dtype)
    norm, mixer = RMSNorm(WIDTH, dtype), Mixer1(72, 20, 7, WIDTH, dtype, normed)
    cache = Cache(SLOTS, mixer, dtype)
    twin = cache.clone()
    native.mamba1(LayerWiring(norm), mixer, cache)
    where = torch.tensor(slots, dtype=torch.int32)
    for _ in range(3):
        x = torch.randn(len(slots), WIDTH).to(dtype)
        expected = mixer1_by_torch(mixer, norm.by_torch(x.float()), twin, where)
        close(step(native, x, state_slots=where), last.by_torch(x.float() + expected), dtype)
        close(cache.temporal, twin.temporal, dtype)
        close(cache.conv[0], twin.conv[0].float(), dtype)


@pytest.mark.parametrize("pool_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("turned", [False, True])
def test_attention(turned: bool, window: int | None, pool_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    native, last = model()
    norm, rotary = RMSNorm(WIDTH), RotaryEmbedding(24, 16) if turned else None
    heads, key_heads, width = 6, 2, 24
    qkv = Layer(WIDTH, (heads + 2 * key_heads) * width, True)
    out = Layer(heads * width, WIDTH, False)
    pools = torch.randn(2, 900, key_heads, width).to(pool_dtype)
    rule = Rule(scale=0.3, causal=True, window=window, cap=20.0, sinks=None)
    native.attention(
        LayerWiring(norm), qkv, out, (heads, key_heads), pools[0], pools[1], rule, rotary, 0.7
    )
    lengths = [1, 9, 600]
    slots = list(torch.randperm(900)[: sum(lengths)].split(lengths))
    positions = torch.tensor(lengths) - 1
    newest = torch.stack([of[-1] for of in slots])
    x = torch.randn(3, WIDTH)
    expected = []
    for row, own in enumerate(slots):
        q, k, v = qkv.by_torch(norm.by_torch(x[row])).split(
            [heads * width, key_heads * width, key_heads * width]
        )
        q, k, v = q.view(heads, width), 0.7 * k.view(key_heads, width), v.view(key_heads, width)
        if rotary is not None:
            q, k = rotary.by_torch(q, int(positions[row])), rotary.by_torch(k, int(positions[row]))
        keys, values = pools[0, own].float(), pools[1, own].float()
        keys[-1], values[-1] = k.to(pool_dtype), v.to(pool_dtype)
        seen = slice(None) if window is None else slice(max(0, len(own) - 1 - window), None)
        keys, values = (t[seen].repeat_interleave(heads // key_heads, 1) for t in (keys, values))
        scores = torch.einsum("hd,thd->ht", q, keys) * rule.scale
        shares = (20 * (scores / 20).tanh()).softmax(-1)
        expected.append(out.by_torch(torch.einsum("ht,thd->hd", shares, values).flatten()))
    got = step(
        native,
        x,
        kv_slots=newest,
        positions=positions,
        sequences=Sequences.of(slots, [1, 1, 1]),
    )
    close(got, last.by_torch(x + torch.stack(expected)), pool_dtype)


def test_weights_are_read_where_they_lie() -> None:
    native, last = model()
    norm, up, down = RMSNorm(WIDTH), Layer(WIDTH, 64, False), Layer(64, WIDTH, False)
    native.mlp(LayerWiring(norm), up, down, Activation.SQUARED_RELU)
    x = torch.randn(2, WIDTH)
    up.weight.data.mul_(2)
    norm.weight.data.mul_(3)
    expected = last.by_torch(x + down.by_torch(up.by_torch(norm.by_torch(x)).relu().square()))
    close(step(native, x), expected)
    assert native.is_current()
    first = up.weight
    up.weight = nn.Parameter(first.data.clone())
    assert not native.is_current()
    up.weight = first
    assert native.is_current()
    first.data = first.data.clone()
    assert not native.is_current()


def test_what_is_not_served() -> None:
    norm, up, down = RMSNorm(WIDTH), Layer(WIDTH, 64, False), Layer(64, WIDTH, False)
    with pytest.raises(Unserved, match="float16"):
        NativeModel(library(), RMSNorm(WIDTH, torch.float16), torch.float16)
    with pytest.raises(Unserved, match="LayerNorm"):
        NativeModel(library(), nn.LayerNorm(WIDTH), torch.float32)
    native, _ = model()
    up.input_size *= 2  # a rank of two
    with pytest.raises(Unserved, match="more than a product"):
        native.mlp(LayerWiring(norm), up, down, Activation.SQUARED_RELU)
    with pytest.raises(Unserved, match="more than a product"):
        native.mlp(LayerWiring(norm), nn.Identity(), down, Activation.SQUARED_RELU)
    norm.variance_epsilon = 1e-3
    with pytest.raises(Unserved, match="alike"):
        native.mlp(LayerWiring(norm), up, down, Activation.SQUARED_RELU)
    mixer = Mixer(4, 16, 2, 20, WIDTH)
    cache = Cache(SLOTS, mixer)
    mixer.tp_size = 2
    with pytest.raises(Unserved, match="ranks"):
        native.mamba2(LayerWiring(RMSNorm(WIDTH)), mixer, cache)
