"""The native attention kernel agrees with its definition for every shape, and with itself."""

from typing import Any

import pytest
import sglang.srt.platforms  # noqa: F401 (finds our platform; that cannot be imported before it)
import torch
from torch import Tensor

from sglang_hybrid.extensions.cpu.native import attention as native
from sglang_hybrid.extensions.cpu.native.library import library
from sglang_hybrid.kernels import naive
from sglang_hybrid.kernels.attention import Rule

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")

POOL = 6_000
SHAPES = [(4, 2, 16, 16), (8, 2, 32, 32), (3, 3, 20, 20), (16, 1, 72, 40), (5, 1, 33, 47)]
SHAPES += [(8, 4, 64, 64), (8, 1, 128, 128), (64, 1, 8, 8), (40, 1, 24, 16)]
"""Query heads, key heads, widths of keys and of values."""

BATCHES = {
    "one token": ([1], [1]),
    "decode": ([100, 3, 900], [1, 1, 1]),
    "pieces": ([1025, 1024, 2500, 1], [1, 1, 3, 1]),
    "extend": ([700, 5, 130], [10, 5, 130]),
    "long prefix": ([1200], [70]),
    "32 sequences": ([1 + 3 * i for i in range(32)], [1] * 32),
}
"""Tokens of each sequence, and how many of them are new."""

RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cap": {"cap": 5.0},
    "window 0": {"window": 0},
    "window 37": {"window": 37},
    "all": {"causal": False},
    "window and cap": {"window": 100, "cap": 3.0},
}


def placed(random: torch.Generator, lengths: list[int], page: int) -> list[Tensor]:
    """Slots of sequences: their pages lie anywhere."""
    pages = torch.randperm(POOL // page, generator=random)
    found, at = [], 0
    for length in lengths:
        count = -(-length // page)
        slots = (pages[at : at + count, None] * page + torch.arange(page)).flatten()
        found.append(slots[:length].int())
        at += count
    return found


IN_EVERY_RUN = ("one token", "decode", "extend")
"""The others take seconds each for the definition."""


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.slow)
        for name in BATCHES
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_like_the_definition(batch: str, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(1)
    lengths, counts = BATCHES[batch]
    for page in (1, 16):
        for heads, kv_heads, width, value_width in SHAPES[page == 16 :: 2]:
            keys = torch.randn(POOL, kv_heads, width, generator=random).to(dtype)
            values = torch.randn(POOL, kv_heads, value_width, generator=random).to(dtype)
            slots = placed(random, lengths, page)
            sequences = native.Sequences.of(slots, counts)
            q = torch.randn(sum(counts), heads, width, generator=random)
            sinks = torch.randn(heads, generator=random)
            for name, changes in RULES.items():
                for sink in (sinks,) if changes else (None, sinks):
                    rule = Rule(width**-0.5, sinks=sink)._replace(**changes)
                    got = native.attention(library(), q, keys, values, sequences, rule, value_width)
                    for some, at, y in zip(q.split(counts), slots, got.split(counts), strict=True):
                        expected = naive.attention(
                            some, keys[at.long()], values[at.long()], **rule._asdict()
                        )
                        what = f"{name}, {heads} heads of {width}, page {page}"
                        torch.testing.assert_close(
                            y.double(), expected, atol=2e-5, rtol=2e-5, msg=lambda m, w=what: w + m
                        )


def test_an_empty_sequence_gets_zeros() -> None:
    pool = torch.ones(4, 2, 16)
    sequences = native.Sequences.of([torch.zeros(0), torch.ones(2)], [2, 1])
    rule = Rule(1.0, causal=False)
    got = native.attention(library(), torch.ones(3, 4, 16), pool, pool, sequences, rule, 16)
    assert got[:2].eq(0).all() and got[2].eq(1).all()


@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 9, 70]])
def test_the_rest_of_the_batch_and_the_threads_change_no_bit(counts: list[int]) -> None:
    random = torch.Generator().manual_seed(2)
    pool = torch.randn(POOL, 2, 32, generator=random)
    slots = placed(random, [700, 1500, 90], 1)
    q = torch.randn(sum(counts), 8, 32, generator=random)

    def run(q: Tensor, slots: list[Tensor], counts: list[int]) -> Tensor:
        sequences = native.Sequences.of(slots, counts)
        return native.attention(library(), q, pool, pool, sequences, Rule(0.2), 32)

    together = run(q, slots, counts).split(counts)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for some, at, count, y in zip(q.split(counts), slots, counts, together, strict=True):
            assert run(some, [at], [count]).equal(y)
    finally:
        torch.set_num_threads(threads)


def test_what_the_kernel_does_not_serve() -> None:
    q, pool = torch.ones(1, 4, 16), torch.ones(8, 2, 16)
    assert native.can_compute(q, pool, pool, 1)
    assert native.can_compute(q.bfloat16(), pool.bfloat16(), pool.bfloat16(), 1)
    assert not native.can_compute(q.bfloat16(), pool.bfloat16(), pool.bfloat16(), 1000)
    assert not native.can_compute(q.half(), pool.half(), pool.half(), 1)
    assert not native.can_compute(torch.ones(1, 130, 16), pool, pool, 1)
    turned = pool.transpose(0, 1).contiguous().transpose(0, 1)
    assert not native.can_compute(q, turned, turned, 1)
