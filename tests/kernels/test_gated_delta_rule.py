"""Gated delta net: the chunked form and the decode step agree with the recurrence."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    BF16,
    FP32,
    Draw,
    assert_close,
    assert_scanned,
    batches,
    bounds,
    chunks,
    few,
    seeds,
)
from torch.nn.functional import normalize, softplus

from sglang_hybrid.kernels import naive
from sglang_hybrid.kernels.gated_delta_rule import gated_delta_rule_prefill, gated_delta_rule_step

shapes = st.sampled_from([(1, 2, 8, 16), (2, 2, 16, 8), (2, 8, 4, 4)])


def inputs(d, tokens, shape, dtype=torch.float32):
    """q, k, v, g, beta for (key heads, value heads, key size, value size)."""
    k_heads, heads, k_dim, v_dim = shape
    moving = (
        d.normal(tokens, k_heads, k_dim),
        d.normal(tokens, k_heads, k_dim),
        d.normal(tokens, heads, v_dim),
    )
    q, k, v = (t.to(dtype) for t in moving)
    g = -d.uniform(0, 16, heads) * softplus(d.normal(tokens, heads) - 3)
    return q, k, v, g, d.normal(tokens, heads).sigmoid()


@few
@given(seeds, batches(), shapes, chunks, st.booleans(), st.booleans())
def test_prefill_is_the_recurrence(seed, lengths, shape, chunk, started, l2norm):
    d, cu = Draw(seed), bounds(lengths)
    q, k, v, g, beta = inputs(d, cu[-1], shape)
    if not l2norm:
        k = normalize(k, dim=-1)
    scale = None if l2norm else 0.7
    start = d.normal(len(lengths), shape[1], shape[3], shape[2]) if started else None
    asked = d.positions(lengths, chunk)
    done = gated_delta_rule_prefill(
        q,
        k,
        v,
        g,
        beta,
        cu,
        scale=scale,
        l2norm=l2norm,
        initial_states=start,
        positions=asked,
        chunk=chunk,
    )

    def define(s, at):
        s0 = None if start is None else start[s]
        return naive.gated_delta_rule(q[at], k[at], v[at], g[at], beta[at], scale, l2norm, s0)

    assert_scanned(done, cu, asked, define)


@few
@given(seeds, st.integers(2, 150), chunks)
def test_resuming_anywhere_equals_not_stopping(seed, tokens, chunk):
    d = Draw(seed)
    moving = inputs(d, tokens, (1, 2, 8, 8))
    p = d.integer(1, tokens - 1)
    whole = gated_delta_rule_prefill(
        *moving, [0, tokens], l2norm=True, positions=[(0, p)], chunk=chunk
    )
    rest = gated_delta_rule_prefill(
        *(t[p:] for t in moving),
        [0, tokens - p],
        l2norm=True,
        initial_states=whole.states_at,
        chunk=chunk,
    )
    assert_close(rest.y, whole.y[p:], FP32, "o")
    assert_close(rest.final_states, whole.final_states, FP32, "final state")


@few
@given(seeds, shapes, st.integers(1, 5))
def test_steps_are_the_recurrence(seed, shape, steps):
    d = Draw(seed)
    moving = inputs(d, steps, shape)
    s = d.normal(1, shape[1], shape[3], shape[2])
    o, states = naive.gated_delta_rule(*moving, None, True, s[0])
    for t in range(steps):
        out = gated_delta_rule_step(s, *(m[t : t + 1] for m in moving), l2norm=True)
        assert_close(out[0], o[t], FP32, f"o {t}")
        assert_close(s[0], states[t + 1], FP32, f"state {t}")


def test_bf16_inputs():
    d = Draw(3)
    moving = inputs(d, 150, (1, 2, 16, 16), torch.bfloat16)
    done = gated_delta_rule_prefill(*moving, [0, 150], l2norm=True)
    o, states = naive.gated_delta_rule(*moving, None, True)
    assert done.y.dtype == torch.bfloat16
    assert_close(done.y, o, BF16, "o")
    assert_close(done.final_states[0], states[-1], FP32, "state")
