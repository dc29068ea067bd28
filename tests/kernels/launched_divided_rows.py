"""The kernels of `divided_rows`, in Triton's interpreter or on a GPU, beside plain torch; run by
test_divided_rows.
"""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE
from torch import Tensor

from sglang_hybrid.kernels.divided_rows import DividedRows
from sglang_hybrid.storage.codecs import in_place
from sglang_hybrid.storage.codecs.codecs import Codec
from sglang_hybrid.storage.codecs.in_place import InPlace

SLOTS = 12
POOLS = {
    "KV of two layers": (2, (2, 64), torch.bfloat16),
    "KV of short rows": (2, (3, 20), torch.float16),
    "KV of odd rows": (1, (5, 9), torch.bfloat16),
    "states": (3, (4, 16, 128), torch.float32),
    "states of many rows": (1, (40, 3, 8), torch.float32),
}


def pools(layers: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """A tensor for the first layer, and one for all others; some rows are special."""
    torch.manual_seed(layers)
    whole = torch.randn(layers, SLOTS, *shape) * 5
    whole[:, 1] = 0
    whole[:, 2, 0] = float("inf")
    whole[:, 3, 0, 0] = float("nan")
    whole[:, 4] *= 1e-30
    whole[:, 5] = whole[:, 5].round().clamp(-3, 3) + 0.5  # halves lie between two steps
    whole = whole.to(dtype).to(DEVICE)
    return [each.clone() for each in (whole[:1], whole[1:]) if len(each)]


def both(tensors: list[Tensor], codec: Codec) -> tuple[InPlace, list[Tensor], list[DividedRows]]:
    """Plain torch on tensors of its own, these tensors, and the kernels on them. Their scales are
    those of an `InPlace` that is used for nothing else.
    """
    plain = [tensor.cpu() for tensor in tensors]
    definition, other = InPlace(plain, [], codec), InPlace(tensors, [], codec)
    groups = zip(in_place._alike(tensors), other._coded, strict=True)
    kernels = [DividedRows(group, coded.beside, other.parts) for group, coded in groups]
    return definition, plain, kernels


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.BF16])
@pytest.mark.parametrize("name", POOLS)
def test_the_kernels_do_what_plain_torch_does(name: str, codec: Codec) -> None:
    """They agree to a bit, whether a place is among the slots or not."""
    layers, shape, dtype = POOLS[name]
    if codec is Codec.BF16 and dtype is not torch.float32:
        pytest.skip("it makes nothing smaller")
    tensors = pools(layers, shape, dtype)
    definition, plain, kernels = both(tensors, codec)
    slots = torch.tensor([3, 1, 2, 4, 5, 0])
    at = torch.arange(6) + 1
    places = torch.tensor([3, 1, 2, 9])[at // definition.parts]
    parts = at % definition.parts
    definition.encode(slots, places, parts)
    for each in kernels:
        each.encode(*(index.to(DEVICE) for index in (slots, places, parts)))
    assert_same_bytes(tensors, plain)
    into = torch.tensor([6, 7, 8, 10, 11, 0])
    definition.decode(places, parts, into)
    for each in kernels:
        each.decode(*(index.to(DEVICE) for index in (places, parts, into)))
    for found, wanted in zip(tensors, plain, strict=True):
        torch.testing.assert_close(
            found.cpu()[:, into], wanted[:, into], rtol=0, atol=0, equal_nan=True
        )


def assert_same_bytes(tensors: list[Tensor], plain: list[Tensor]) -> None:
    for found, wanted in zip(tensors, plain, strict=True):
        assert torch.equal(found.cpu().view(torch.uint8), wanted.view(torch.uint8))


def test_rows_with_something_between_them() -> None:
    """Latents and the part of the key beside them are views of one tensor."""
    whole = pools(1, (1, 96), torch.bfloat16)[0]
    views = [part for part in whole.split((64, 32), -1)]
    definition = whole.cpu()
    rows = InPlace(list(definition.split((64, 32), -1)), [], Codec.INT8)
    other = InPlace(views, [], Codec.INT8)
    slots, places, parts = (torch.tensor(each) for each in ([6, 7], [6, 6], [0, 1]))
    rows.encode(slots, places, parts)
    for view, coded in zip(views, other._coded, strict=True):
        kernel = DividedRows([view], coded.beside, other.parts)
        kernel.encode(*(index.to(DEVICE) for index in (slots, places, parts)))
    assert torch.equal(whole.cpu().view(torch.uint8), definition.view(torch.uint8))
