"""Mamba1: the scan agrees with the recurrence."""

import torch
from hypothesis import example, given
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
from torch.nn.functional import softplus

from sglang_hybrid.kernels import naive
from sglang_hybrid.kernels.selective_scan import selective_scan_prefill


def inputs(d, tokens, channels, size, dtype=torch.float32):
    dt = softplus(d.normal(tokens, channels) + d.uniform(-6, 0, channels))
    moving = (d.normal(tokens, channels), dt, d.normal(tokens, size), d.normal(tokens, size))
    x, dt, B, C = (t.to(dtype) for t in moving)
    return x, dt, d.uniform(-16, -1, channels, size), B, C


@few
@given(seeds, batches(), st.sampled_from([(12, 4), (3, 16), (1, 1)]), chunks, st.booleans())
@example(5376, [15, 69], (1, 1), 4, True)  # its state crosses zero
def test_prefill_is_the_recurrence(seed, lengths, shape, chunk, started):
    d, cu = Draw(seed), bounds(lengths)
    x, dt, A, B, C = inputs(d, cu[-1], *shape)
    start = d.normal(len(lengths), *shape) if started else None
    asked = d.positions(lengths, chunk)
    done = selective_scan_prefill(
        x, dt, A, B, C, cu, initial_states=start, positions=asked, chunk=chunk
    )

    def define(s, at):
        h0 = None if start is None else start[s]
        return naive.selective_scan(x[at], dt[at], A, B[at], C[at], h0)

    assert_scanned(done, cu, asked, define)


@few
@given(seeds, st.integers(2, 150), chunks)
def test_resuming_anywhere_equals_not_stopping(seed, tokens, chunk):
    d = Draw(seed)
    x, dt, A, B, C = inputs(d, tokens, 6, 4)
    p = d.integer(1, tokens - 1)
    whole = selective_scan_prefill(x, dt, A, B, C, [0, tokens], positions=[(0, p)], chunk=chunk)
    rest = selective_scan_prefill(
        x[p:],
        dt[p:],
        A,
        B[p:],
        C[p:],
        [0, tokens - p],
        initial_states=whole.states_at,
        chunk=chunk,
    )
    assert_close(rest.y, whole.y[p:], FP32, "y")
    assert_close(rest.final_states, whole.final_states, FP32, "final state")


def test_strong_decay_overflows_nothing():
    d = Draw(2)
    x, _, A, B, C = inputs(d, 100, 4, 4)
    dt = torch.full((100, 4), 50.0)
    done = selective_scan_prefill(x, dt, A, B, C, [0, 100])
    y, states = naive.selective_scan(x, dt, A, B, C)
    assert_close(done.y, y, FP32, "y")
    assert_close(done.final_states[0], states[-1], FP32, "state")


def test_bf16_inputs():
    d = Draw(3)
    x, dt, A, B, C = inputs(d, 100, 8, 4, torch.bfloat16)
    done = selective_scan_prefill(x, dt, A, B, C, [0, 100])
    y, states = naive.selective_scan(x, dt, A, B, C)
    assert done.y.dtype == torch.bfloat16
    assert_close(done.y, y, BF16, "y")
    assert_close(done.final_states[0], states[-1], FP32, "state")
