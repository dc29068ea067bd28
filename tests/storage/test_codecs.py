"""Codecs against plain Python, number by number, and their promised errors."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.storage.codecs.codecs import Codec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def f32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def half(x: float) -> int:
    """The upper half of a float32, rounded to nearest, halves to even."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return int(bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def plain_int8(row: list[float]) -> tuple[bytes, list[float]]:
    """A row as int8 with a bfloat16 scale, and what it decodes to; halves round to even."""
    kept = half(f32(max(abs(x) for x in row) / 127))
    scale = struct.unpack("<f", struct.pack("<I", kept << 16))[0]
    numbers = [round(f32(x / scale)) if scale else 0 for x in row]
    numbers = [max(-127, min(127, number)) for number in numbers]
    encoded = struct.pack(f"<{len(row)}bH", *numbers, kept)
    return encoded, [f32(number * scale) for number in numbers]


def plain_bf16(row: list[float]) -> tuple[bytes, list[float]]:
    """The upper half of each float32."""
    halves = [half(x) for x in row]
    decoded = [struct.unpack("<f", struct.pack("<I", each << 16))[0] for each in halves]
    return struct.pack(f"<{len(row)}H", *halves), decoded


PLAIN = {Codec.INT8: plain_int8, Codec.BF16: plain_bf16}
numbers = st.floats(-1e4, 1e4, width=32)


@settings(max_examples=200, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=40), st.sampled_from(list(PLAIN)))
def test_as_plain_python_does_it(row: list[float], codec: Codec) -> None:
    encoded, decoded = PLAIN[codec](row)
    ours = codec.encode(torch.tensor([row]))
    back = codec.decode(ours, torch.float32)[0].tolist()
    assert bytes(ours[0].numpy()) == encoded or codec is Codec.INT8
    scale = max(map(abs, row)) / 127
    # a quotient at the middle between two steps may be rounded either way
    assert back == pytest.approx(decoded, abs=scale * 1.001 if codec is Codec.INT8 else 0)
    same = sum(one == other for one, other in zip(back, decoded, strict=True))
    assert back == decoded or (codec is Codec.INT8 and same >= 0.9 * len(row))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 64, 128])
def test_errors_are_within_their_bounds(dtype: torch.dtype, width: int) -> None:
    scales = torch.logspace(-6, 3, 50)[:, None]
    rows = (torch.randn(50, width, generator=torch.Generator().manual_seed(width)) * scales).to(
        dtype
    )
    exact, bf16, int8 = (codec.decode(codec.encode(rows), dtype).double() for codec in Codec)
    wide = rows.double()
    assert torch.equal(exact, wide)
    unit = torch.finfo(dtype).eps / 2
    assert ((bf16 - wide).abs() <= 2**-8 * wide.abs() + torch.finfo(dtype).tiny).all()
    most = wide.abs().amax(-1, keepdim=True)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((int8 - wide).abs() <= most / 253 + most * unit + smallest).all()


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_encoded_twice_is_the_same(codec: Codec, dtype: torch.dtype) -> None:
    """A copy that is loaded and written again does not drift."""
    rows = torch.randn(200, 3, 64).to(dtype)
    once = codec.decode(codec.encode(rows), dtype)
    assert torch.equal(codec.decode(codec.encode(once), dtype), once)


@pytest.mark.parametrize("codec", list(Codec))
def test_zeros_stay_zeros(codec: Codec) -> None:
    assert not codec.decode(codec.encode(torch.zeros(2, 8)), torch.float32).any()


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_no_number_is_not_made_one(codec: Codec, bad: float) -> None:
    rows = torch.ones(2, 8)
    rows[0, 3] = bad
    back = codec.decode(codec.encode(rows), torch.float32)
    assert not back[0, 3].isfinite() and torch.equal(back[1].round(), torch.ones(8))


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 4, 16), (0, 7)])
def test_bytes_are_as_announced(codec: Codec, shape: tuple[int, ...]) -> None:
    rows = torch.randn(shape)
    content = codec.encode(rows)
    assert content.dtype is torch.uint8
    assert content.shape == (*shape[:-1], codec.row_bytes(shape[-1], torch.float32))
    assert codec.decode(content, torch.float32).shape == shape


def test_a_codec_that_saves_nothing_is_not_used() -> None:
    assert Codec.INT8.fit(128, torch.float32) is Codec.INT8
    assert Codec.INT8.fit(3, torch.float32) is Codec.BF16, "3 + 2 bytes instead of 6"
    assert Codec.INT8.fit(3, torch.bfloat16) is Codec.EXACT
    assert Codec.BF16.fit(128, torch.bfloat16) is Codec.EXACT
    assert Codec.INT8.fit(128, torch.bfloat16) is Codec.INT8
    assert Codec.EXACT.fit(128, torch.float32) is Codec.EXACT
    assert Codec.INT8.fit(128, torch.uint8) is Codec.EXACT, "what SGLang keeps float8 in"
