"""Mamba2: the chunked form and the decode step agree with the recurrence."""

import pytest
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

from sglang_hybrid.kernels import naive, ssd

shapes = st.sampled_from([(4, 1, 8, 16), (4, 2, 16, 8), (2, 2, 4, 32), (1, 1, 32, 4)])


def inputs(d, tokens, shape, dtype=torch.float32):
    """x, dt, A, B, C, D, dt_bias at the scale of trained models."""
    heads, groups, width, size = shape
    moving = (
        d.normal(tokens, heads, width),
        d.normal(tokens, heads),
        d.normal(tokens, groups, size),
        d.normal(tokens, groups, size),
    )
    x, dt, B, C = (t.to(dtype) for t in moving)
    return x, dt, d.uniform(-16, -1, heads), B, C, d.normal(heads), d.uniform(-6, 0, heads)


@few
@given(seeds, batches(), shapes, chunks, st.booleans())
def test_prefill_is_the_recurrence(seed, lengths, shape, chunk, started):
    d, cu = Draw(seed), bounds(lengths)
    x, dt, A, B, C, D, bias = inputs(d, cu[-1], shape)
    start = d.normal(len(lengths), shape[0], shape[2], shape[3]) if started else None
    asked, out = d.positions(lengths, chunk), torch.full_like(x, torch.nan)
    done = ssd.ssd_prefill(
        x,
        dt,
        A,
        B,
        C,
        cu,
        D=D,
        dt_bias=bias,
        dt_softplus=True,
        initial_states=start,
        positions=asked,
        out=out,
        chunk=chunk,
    )
    assert done.y is out

    def define(s, at):
        h0 = None if start is None else start[s]
        return naive.ssd(x[at], dt[at], A, B[at], C[at], D, bias, True, h0)

    assert_scanned(done, cu, asked, define)


@few
@given(seeds, st.integers(2, 150), chunks)
def test_resuming_anywhere_equals_not_stopping(seed, tokens, chunk):
    d = Draw(seed)
    x, dt, A, B, C, D, bias = inputs(d, tokens, (4, 2, 8, 8))
    options = {"D": D, "dt_bias": bias, "dt_softplus": True, "chunk": chunk}
    p = d.integer(1, tokens - 1)
    whole = ssd.ssd_prefill(x, dt, A, B, C, [0, tokens], positions=[(0, p)], **options)
    rest = ssd.ssd_prefill(
        x[p:],
        dt[p:],
        A,
        B[p:],
        C[p:],
        [0, tokens - p],
        initial_states=whole.states_at,
        **options,
    )
    assert_close(rest.y, whole.y[p:], FP32, "y")
    assert_close(rest.final_states, whole.final_states, FP32, "final state")


@few
@given(seeds)
def test_a_sequence_does_not_see_its_neighbours(seed):
    d, cu = Draw(seed), [0, 70, 75, 140]
    x, dt, A, B, C, *_ = inputs(d, 140, (2, 1, 8, 8))
    dt = dt.abs()
    before = ssd.ssd_prefill(x, dt, A, B, C, cu)
    x[:70], B[:70], x[75:], B[75:] = torch.nan, torch.nan, torch.nan, torch.nan
    after = ssd.ssd_prefill(x, dt, A, B, C, cu)
    assert torch.equal(before.y[70:75], after.y[70:75])
    assert torch.equal(before.final_states[1], after.final_states[1])


@few
@given(seeds, shapes, st.integers(1, 5))
def test_steps_are_the_recurrence(seed, shape, steps):
    d, (heads, _, width, size) = Draw(seed), shape
    x, dt, A, B, C, D, bias = inputs(d, steps, shape)
    h = d.normal(1, heads, width, size)
    y, states = naive.ssd(x, dt, A, B, C, D, bias, True, h[0])
    for t in range(steps):
        now = slice(t, t + 1)
        given = ssd.step_inputs(
            x[now],
            dt[now, :, None],
            A[:, None, None],
            B[now],
            C[now],
            D=D[:, None],
            dt_bias=bias[:, None],
            dt_softplus=True,
        )
        out = ssd.selective_state_step(h, given)
        assert_close(out[0], y[t], FP32, f"y {t}")
        assert_close(h[0], states[t + 1], FP32, f"state {t}")


def test_the_output_can_be_gated_and_steps_limited():
    d = Draw(3)
    x, dt, A, B, C, D, _ = inputs(d, 70, (2, 1, 8, 8))
    z = d.normal(70, 2, 8)
    done = ssd.ssd_prefill(x, dt, A, B, C, [0, 70], D=D, z=z, dt_limit=(0.01, 0.1))
    y, states = naive.ssd(x, dt.clamp(0.01, 0.1), A, B, C, D)
    assert_close(done.y, y * torch.nn.functional.silu(z.double()), FP32, "y")
    assert_close(done.final_states[0], states[-1], FP32, "state")


def test_strong_decay_loses_no_precision():
    """Sums of dt * A far below what float32 resolves must not blur small differences."""
    d = Draw(4)
    x, _, _, B, C, *_ = inputs(d, 256, (2, 1, 8, 8))
    dt = torch.where(d.flags(256)[:, None], 10.0, 1e-3).expand(256, 2)
    A = torch.tensor([-16.0, -0.1])
    done = ssd.ssd_prefill(x, dt, A, B, C, [0, 256], chunk=256)
    y, states = naive.ssd(x, dt, A, B, C)
    assert_close(done.y, y, FP32, "y")
    assert_close(done.final_states[0], states[-1], FP32, "state")


def test_bf16_inputs():
    d = Draw(5)
    x, dt, A, B, C, D, bias = inputs(d, 200, (4, 1, 8, 16), torch.bfloat16)
    done = ssd.ssd_prefill(x, dt, A, B, C, [0, 200], D=D, dt_bias=bias, dt_softplus=True)
    y, states = naive.ssd(x, dt, A, B, C, D, bias, True)
    assert done.y.dtype == torch.bfloat16
    assert_close(done.y, y, BF16, "y")
    assert_close(done.final_states[0], states[-1], FP32, "state")


@pytest.mark.parametrize("position", [(0, 11), (0, -1), (1, 0)])
def test_a_position_outside_the_batch_is_refused(position):
    x, dt, A, B, C, *_ = inputs(Draw(6), 10, (2, 1, 8, 8))
    with pytest.raises(ValueError, match="Position"):
        ssd.ssd_prefill(x, dt, A, B, C, [0, 10], positions=[position])


def test_initial_states_of_the_wrong_shape_are_refused():
    x, dt, A, B, C, *_ = inputs(Draw(7), 10, (2, 1, 8, 8))
    with pytest.raises(ValueError, match=r"\(1, 2, 8, 8\)"):
        ssd.ssd_prefill(x, dt, A, B, C, [0, 10], initial_states=torch.zeros(2, 2, 8, 8))
