"""The convolution agrees with its definition, for any packing and any place to stop."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import BF16, FP32, Draw, assert_close, batches, bounds, few, seeds

from sglang_hybrid.kernels import naive
from sglang_hybrid.kernels.causal_conv1d import causal_conv1d_prefill, causal_conv1d_step


@few
@given(seeds, batches(), st.sampled_from([2, 4]), st.booleans(), st.booleans())
def test_prefill_is_the_definition(seed, lengths, width, started, biased):
    d, cu = Draw(seed), bounds(lengths)
    x, weight = d.normal(cu[-1] + 3, 6), d.normal(6, width)
    bias = d.normal(6) if biased else None
    windows = d.normal(len(lengths), 6, width - 1) if started else None
    activation = "silu" if biased else None
    asked = d.positions(lengths, 4)
    done = causal_conv1d_prefill(
        x, weight, bias, cu, activation=activation, initial_windows=windows, positions=asked
    )
    for s in range(len(lengths)):
        part = slice(cu[s], cu[s + 1])
        start = None if windows is None else windows[s]
        y, states = naive.causal_conv1d(x[part], weight, bias, start, activation)
        assert_close(done.y[part], y, FP32, "y")
        assert_close(done.final_states[s], states[-1], FP32, "final window")
        for i, (owner, p) in enumerate(asked):
            if owner == s:
                assert_close(done.states_at[i], states[p], FP32, f"window at {p}")
    assert (done.y[cu[-1] :] == 0).all()


@few
@given(seeds, st.integers(1, 5))
def test_steps_continue_a_prefill(seed, steps):
    d = Draw(seed)
    x, weight, bias, window = d.normal(20, 3), d.normal(3, 4), d.normal(3), d.normal(1, 3, 3)
    y, states = naive.causal_conv1d(x, weight, bias, window[0])
    done = causal_conv1d_prefill(
        x[: 20 - steps], weight, bias, [0, 20 - steps], initial_windows=window
    )
    tail, windows = causal_conv1d_step(
        x[None, 20 - steps :].transpose(1, 2), done.final_states, weight, bias, "silu"
    )
    assert_close(tail[0].T, y[20 - steps :], FP32, "y")
    assert_close(windows[0], states[-1], FP32, "window")


def test_bf16_inputs():
    d = Draw(1)
    x, weight = d.normal(70, 6).bfloat16(), d.normal(6, 4).bfloat16()
    done = causal_conv1d_prefill(x, weight, None, [0, 70])
    assert done.y.dtype == torch.bfloat16
    assert_close(done.y, naive.causal_conv1d(x, weight)[0], BF16)


def test_an_unknown_activation_is_named():
    with pytest.raises(ValueError, match="'relu'"):
        causal_conv1d_prefill(torch.ones(2, 1), torch.ones(1, 4), None, [0, 2], activation="relu")
