"""Attention in plain torch agrees with its definition, for every mask and shape."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import BF16, FP32, Draw, assert_close, few, seeds

from sglang_hybrid.kernels import attention as module
from sglang_hybrid.kernels import naive
from sglang_hybrid.kernels.attention import Rule, attention

heads = st.sampled_from([(1, 1), (4, 2), (6, 2), (4, 4), (8, 1)])
widths = st.sampled_from([(8, 8), (16, 16), (24, 16), (8, 16), (20, 20)])
before = st.one_of(st.sampled_from([0, 1, 15, 16, 17, 64]), st.integers(0, 150))
new = st.one_of(st.sampled_from([1, 2, 16, 33]), st.integers(1, 60))


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """Every combination of mask, window and cap; sinks are added where heads are known."""
    causal = draw(st.booleans())
    window = draw(st.sampled_from([None, 0, 5, 40, 1000])) if causal else None
    return Rule(draw(st.sampled_from([0.1, 1.0])), causal, window, draw(st.sampled_from([0, 3.0])))


@pytest.mark.parametrize("block", [16, 256])
@few
@given(seeds, before, new, heads, widths, rules(), st.booleans())
def test_it_is_the_definition(block, seed, before, new, head_numbers, head_widths, rule, sinks):
    d = Draw(seed)
    (q_heads, kv_heads), (width, value_width) = head_numbers, head_widths
    q, tokens = d.normal(new, q_heads, width), before + new
    k, v = d.normal(tokens, kv_heads, width), d.normal(tokens, kv_heads, value_width)
    rule = rule._replace(sinks=d.normal(q_heads)) if sinks else rule
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "QUERY_BLOCK", block)
        got = attention(q, k, v, rule)
    assert_close(got, naive.attention(q, k, v, **rule._asdict()), FP32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("new", [1, 70])
def test_half_precision_is_as_exact_as_its_type(dtype, new):
    d = Draw(7)
    q, k, v = (d.normal(n, h, 16).to(dtype) for n, h in ((new, 4), (300, 2), (300, 2)))
    got = attention(q, k, v, Rule(0.25))
    assert got.dtype == dtype
    assert_close(got, naive.attention(q, k, v, 0.25), BF16)


def test_keys_of_another_type_are_converted():
    d = Draw(9)
    q, k, v = d.normal(3, 4, 16), d.normal(50, 2, 16).bfloat16(), d.normal(50, 2, 16).bfloat16()
    assert_close(attention(q, k, v, Rule(0.25)), naive.attention(q, k, v, 0.25), FP32)


def test_a_query_that_sees_nothing_gets_zeros():
    got = attention(
        torch.ones(3, 4, 16), torch.ones(0, 2, 16), torch.ones(0, 2, 8), Rule(1.0, causal=False)
    )
    assert got.shape == (3, 4, 8)
    assert not got.any()
