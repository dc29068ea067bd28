"""Attention over a pool agrees with its definition, however the slots lie and are read."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import BF16, FP32, Draw, assert_close, few, seeds

from sglang_hybrid.kernels import attention, naive
from sglang_hybrid.kernels.attention import Rule
from sglang_hybrid.kernels.kv_slots import batch_reads, prefix_slots

POOL = 900

heads = st.sampled_from([(1, 1), (4, 2), (6, 2), (4, 4), (8, 1)])
widths = st.sampled_from([(8, 8), (16, 16), (24, 16), (8, 16), (20, 20)])


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """Every combination of mask, window and cap; sinks are added where heads are known."""
    causal = draw(st.booleans())
    window = draw(st.sampled_from([None, 0, 5, 40, 1000])) if causal else None
    return Rule(draw(st.sampled_from([0.1, 1.0])), causal, window, draw(st.sampled_from([0, 3.0])))


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(tokens before, new tokens) of every sequence."""
    before = st.one_of(st.sampled_from([0, 1, 15, 16, 17, 64]), st.integers(0, 150))
    new = st.one_of(st.sampled_from([1, 2, 16, 33]), st.integers(1, 60))
    return draw(st.lists(st.tuples(before, new), min_size=1, max_size=4))


def scattered(d: Draw, lengths: list[int], *, shared: int = 0) -> list[np.ndarray]:
    """Slots of sequences: runs and single slots in turn; the first ``shared`` are common to all."""
    order, at = d.order(POOL).numpy(), 0
    result = []
    common = np.arange(shared) + 700 if shared else np.zeros(0, np.int64)
    for length in lengths:
        slots = [common[:length]]
        missing = length - len(slots[0])
        while missing > 0:
            n = min(missing, d.integer(1, 40))
            if d.integer(0, 1):
                slots.append(order[at : at + n])
            else:
                first = d.integer(0, POOL - n)
                slots.append(np.arange(first, first + n))
            at, missing = (at + n) % (POOL - 200), missing - n
        result.append(np.concatenate(slots).astype(np.int32))
    return result


def with_sinks(d: Draw, rule: Rule, n: int) -> Rule:
    return rule._replace(sinks=d.normal(n)) if d.integer(0, 1) else rule


@few
@given(seeds, layouts(), heads, widths, rules(), st.sampled_from([4, 16, 64]))
def test_new_tokens_of_a_sequence(seed, layout, head_numbers, head_widths, rule, shortest):
    d = Draw(seed)
    (q_heads, kv_heads), (width, value_width) = head_numbers, head_widths
    pool = d.normal(POOL, kv_heads, width), d.normal(POOL, kv_heads, value_width)
    rule = with_sinks(d, rule, q_heads)
    in_order = bool(rule.cap) or rule.window is not None
    prefixes = scattered(d, [before for before, _ in layout])
    for new, slots in zip([new for _, new in layout], prefixes, strict=True):
        q = d.normal(new, q_heads, width)
        own = d.normal(new, kv_heads, width), d.normal(new, kv_heads, value_width)
        prefix = prefix_slots(slots, shortest, in_order=in_order)
        k, v = (torch.cat([p[slots.astype(np.int64)], o]) for p, o in zip(pool, own, strict=True))
        expected = naive.attention(
            q, k, v, rule.scale, causal=rule.causal, window=rule.window, cap=rule.cap,
            sinks=rule.sinks,
        )  # fmt: skip
        assert_close(attention.extend(q, own, pool, prefix, rule), expected, FP32)


@few
@given(seeds, layouts(), heads, widths, st.sampled_from([0, 3.0]), st.integers(0, 100))
def test_one_new_token_of_each_sequence(seed, layout, head_numbers, head_widths, cap, shared):
    d = Draw(seed)
    (q_heads, kv_heads), (width, value_width) = head_numbers, head_widths
    pool = d.normal(POOL, kv_heads, width), d.normal(POOL, kv_heads, value_width)
    rule = with_sinks(d, Rule(0.3, cap=cap), q_heads)
    lengths = [1 + before for before, _ in layout]
    sequences = scattered(d, lengths, shared=shared)
    q = d.normal(len(layout), q_heads, width)
    reads = batch_reads(sequences, shortest=16, whole=bool(cap))
    got = attention.decode(q, pool, reads, rule)
    for i, slots in enumerate(sequences):
        k, v = (p[slots.astype(np.int64)] for p in pool)
        expected = naive.attention(q[i : i + 1], k, v, rule.scale, cap=cap, sinks=rule.sinks)
        assert_close(got[i : i + 1], expected, FP32, f"sequence {i} of {lengths}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_its_type(dtype):
    d = Draw(7)
    pool = tuple(d.normal(POOL, 2, 16).to(dtype) for _ in range(2))
    sequences = scattered(d, [300, 40, 80], shared=32)
    q = d.normal(3, 4, 16).to(dtype)
    got = attention.decode(q, pool, batch_reads(sequences, shortest=16), Rule(0.25))
    assert got.dtype == dtype
    for i, slots in enumerate(sequences):
        k, v = (p[slots.astype(np.int64)] for p in pool)
        assert_close(got[i : i + 1], naive.attention(q[i : i + 1], k, v, 0.25), BF16)


def test_idle_threads_get_pieces_of_the_keys():
    d = Draw(8)
    q, k, v = d.normal(1, 4, 16), d.normal(2100, 1, 16), d.normal(2100, 1, 16)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        got = attention.over_all(q, k, v, 0.25)
    finally:
        torch.set_num_threads(threads)
    assert_close(got.out, naive.attention(q, k, v, 0.25), FP32)


def test_keys_of_another_type_are_converted():
    d = Draw(9)
    pool = tuple(d.normal(POOL, 2, 16).bfloat16() for _ in range(2))
    slots = np.arange(50)
    q, own = d.normal(3, 4, 16), (d.normal(3, 2, 16), d.normal(3, 2, 16))
    k, v = (torch.cat([p[:50].float(), o]) for p, o in zip(pool, own, strict=True))
    got = attention.extend(q, own, pool, prefix_slots(slots, 16), Rule(0.25))
    assert_close(got, naive.attention(q, k, v, 0.25), FP32)


def test_a_query_that_sees_nothing_gets_zeros():
    pool = torch.ones(4, 2, 16), torch.ones(4, 2, 8)
    got = attention.extend(torch.ones(3, 4, 16), None, pool, [], Rule(1.0, causal=False))
    assert got.shape == (3, 4, 8)
    assert not got.any()
