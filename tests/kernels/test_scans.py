"""Prefills in chunks, and decode steps, of every recurrent layer agree with their recurrence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
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
from torch import Tensor
from torch.nn.functional import normalize, silu, softplus

from sglang_hybrid.kernels import naive, ssd
from sglang_hybrid.kernels.chunks import Scanned
from sglang_hybrid.kernels.gated_delta_rule import gated_delta_rule_prefill, gated_delta_rule_step
from sglang_hybrid.kernels.selective_scan import selective_scan_prefill

Tensors = dict[str, Tensor]


def mamba2(d: Draw, tokens: int, shape: tuple[int, ...]) -> tuple[Tensors, Tensors]:
    """Inputs of Mamba2 at the scale of trained models."""
    heads, groups, width, size = shape
    moving = {"x": d.normal(tokens, heads, width), "dt": d.normal(tokens, heads)}
    moving |= {name: d.normal(tokens, groups, size) for name in "BC"}
    fixed = {"A": d.uniform(-16, -1, heads), "D": d.normal(heads)}
    return moving, fixed | {"dt_bias": d.uniform(-6, 0, heads)}


def mamba1(d: Draw, tokens: int, shape: tuple[int, ...]) -> tuple[Tensors, Tensors]:
    channels, size = shape
    dt = softplus(d.normal(tokens, channels) + d.uniform(-6, 0, channels))
    moving = {"x": d.normal(tokens, channels), "dt": dt}
    moving |= {name: d.normal(tokens, size) for name in "BC"}
    return moving, {"A": d.uniform(-16, -1, channels, size)}


def delta(d: Draw, tokens: int, shape: tuple[int, ...]) -> tuple[Tensors, Tensors]:
    k_heads, heads, k_dim, v_dim = shape
    moving = {name: d.normal(tokens, k_heads, k_dim) for name in "qk"}
    moving["v"] = d.normal(tokens, heads, v_dim)
    moving["g"] = -d.uniform(0, 16, heads) * softplus(d.normal(tokens, heads) - 3)
    return moving | {"beta": d.normal(tokens, heads).sigmoid()}, {}


def delta_with_unit_keys(d: Draw, tokens: int, shape: tuple[int, ...]) -> tuple[Tensors, Tensors]:
    moving, fixed = delta(d, tokens, shape)
    return moving | {"k": normalize(moving["k"], dim=-1)}, fixed


def delta_by_channel(d: Draw, tokens: int, shape: tuple[int, ...]) -> tuple[Tensors, Tensors]:
    """KDA: some of its decays leave nothing of a state within a few tokens."""
    moving, fixed = delta(d, tokens, shape)
    _, heads, k_dim, _ = shape
    rates = d.uniform(0, 16, heads, 1)
    return moving | {"g": -rates * softplus(d.normal(tokens, heads, k_dim) * 2 - 1)}, fixed


@dataclass(frozen=True)
class Scan:
    """A layer: its prefill, its definition, what both are told, inputs by token (`moving`) and for
    all tokens (`fixed`) for each of some shapes, and which numbers of a shape are a state's.
    """

    prefill: Callable[..., Scanned]
    definition: Callable[..., tuple[Tensor, Tensor]]
    draw: Callable[[Draw, int, tuple[int, ...]], tuple[Tensors, Tensors]]
    shapes: list[tuple[int, ...]]
    state: tuple[int, ...]
    options: dict[str, Any]
    halved: tuple[str, ...]
    """Inputs that come in half precision."""

    def state_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(shape[i] for i in self.state)

    def defined(self, inputs: Tensors, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.definition(**inputs, **self.options, initial_state=start)


DELTA_SHAPES = [(1, 2, 8, 16), (2, 2, 16, 8), (2, 8, 4, 4)]
SCANS = {
    "Mamba2": Scan(
        *(ssd.ssd_prefill, naive.ssd, mamba2),
        [(4, 1, 8, 16), (4, 2, 16, 8), (2, 2, 4, 32), (1, 1, 32, 4)],
        *((0, 2, 3), {"dt_softplus": True}, ("x", "dt", "B", "C")),
    ),
    "Mamba1": Scan(
        *(selective_scan_prefill, naive.selective_scan, mamba1),
        *([(12, 4), (3, 16), (1, 1)], (0, 1), {}, ("x", "dt", "B", "C")),
    ),
    "gated delta net": Scan(
        *(gated_delta_rule_prefill, naive.gated_delta_rule, delta),
        *(DELTA_SHAPES, (1, 3, 2), {"l2norm": True}, ("q", "k", "v")),
    ),
    "gated delta net, unit keys": Scan(
        *(gated_delta_rule_prefill, naive.gated_delta_rule, delta_with_unit_keys),
        *(DELTA_SHAPES, (1, 3, 2), {"scale": 0.7}, ("q", "k", "v")),
    ),
    "KDA": Scan(
        *(gated_delta_rule_prefill, naive.gated_delta_rule, delta_by_channel),
        *(DELTA_SHAPES, (1, 3, 2), {"l2norm": True}, ("q", "k", "v")),
    ),
}
every = pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)


def cut(moving: Tensors, at: slice) -> Tensors:
    return {name: tensor[at] for name, tensor in moving.items()}


@every
@few
@given(seeds, batches(), st.integers(0, 3), chunks, st.booleans())
@example(5376, [15, 69], 2, 4, True)  # of Mamba1: its state crosses zero
def test_prefill_is_the_recurrence(scan, seed, lengths, nth, chunk, started):
    d, cu = Draw(seed), bounds(lengths)
    shape = scan.shapes[nth % len(scan.shapes)]
    moving, fixed = scan.draw(d, cu[-1], shape)
    start = d.normal(len(lengths), *scan.state_shape(shape)) if started else None
    asked = d.positions(lengths, chunk)
    given = {"initial_states": start, "positions": asked, "chunk": chunk, **scan.options}
    done = scan.prefill(**moving, **fixed, cu_seqlens=cu, **given)

    def define(s, at):
        return scan.defined(cut(moving, at) | fixed, None if start is None else start[s])

    assert_scanned(done, cu, asked, define)


@every
@few
@given(seeds, st.integers(2, 150), chunks)
def test_resuming_anywhere_equals_not_stopping(scan, seed, tokens, chunk):
    d = Draw(seed)
    moving, fixed = scan.draw(d, tokens, scan.shapes[0])
    p, given = d.integer(1, tokens - 1), {**fixed, **scan.options, "chunk": chunk}
    whole = scan.prefill(**moving, **given, cu_seqlens=[0, tokens], positions=[(0, p)])
    rest = scan.prefill(
        **cut(moving, slice(p, None)),
        **given,
        cu_seqlens=[0, tokens - p],
        initial_states=whole.states_at,
    )
    assert_close(rest.y, whole.y[p:], FP32, "output")
    assert_close(rest.final_states, whole.final_states, FP32, "final state")


@every
def test_bf16_inputs(scan):
    moving, fixed = scan.draw(Draw(5), 150, scan.shapes[1])
    moving |= {name: moving[name].bfloat16() for name in scan.halved}
    done = scan.prefill(**moving, **fixed, **scan.options, cu_seqlens=[0, 150])
    y, states = scan.defined(moving | fixed)
    assert done.y.dtype == torch.bfloat16
    assert_close(done.y, y, BF16, "output")
    assert_close(done.final_states[0], states[-1], FP32, "final state")


@every
@few
@given(seeds)
def test_a_sequence_does_not_see_its_neighbours(scan, seed):
    moving, fixed = scan.draw(Draw(seed), 140, scan.shapes[0])
    given = {"cu_seqlens": [0, 70, 75, 140], **fixed, **scan.options}
    before = scan.prefill(**moving, **given)
    for name in scan.halved:
        moving[name][:70], moving[name][75:] = torch.nan, torch.nan
    after = scan.prefill(**moving, **given)
    assert torch.equal(before.y[70:75], after.y[70:75])
    assert torch.equal(before.final_states[1], after.final_states[1])


@every
@pytest.mark.parametrize("position", [(0, 11), (0, -1), (1, 0)])
def test_a_position_outside_the_batch_is_refused(scan, position):
    moving, fixed = scan.draw(Draw(6), 10, scan.shapes[0])
    with pytest.raises(ValueError, match="Position"):
        scan.prefill(**moving, **fixed, cu_seqlens=[0, 10], positions=[position])


@every
def test_initial_states_of_the_wrong_shape_are_refused(scan):
    moving, fixed = scan.draw(Draw(7), 10, scan.shapes[0])
    wanted = (1, *scan.state_shape(scan.shapes[0]))
    with pytest.raises(ValueError, match=str(wanted)[1:-1]):
        scan.prefill(
            **moving, **fixed, cu_seqlens=[0, 10], initial_states=torch.zeros(2, *wanted[1:])
        )


def step_of_mamba2(h: Tensor, moving: Tensors, fixed: Tensors) -> Tensor:
    wide = {name: fixed[name][:, None] for name in ("D", "dt_bias")}
    given = moving | wide | {"dt": moving["dt"][..., None], "A": fixed["A"][:, None, None]}
    return ssd.selective_state_step(h, ssd.step_inputs(**given, dt_softplus=True))


def step_of_delta(s: Tensor, moving: Tensors, fixed: Tensors) -> Tensor:
    return gated_delta_rule_step(s, **moving, l2norm=True)


@pytest.mark.parametrize(
    ("name", "step"),
    [("Mamba2", step_of_mamba2), ("gated delta net", step_of_delta), ("KDA", step_of_delta)],
)
@few
@given(seeds, st.integers(0, 3), st.integers(1, 5))
def test_steps_are_the_recurrence(name, step, seed, nth, steps):
    d, scan = Draw(seed), SCANS[name]
    shape = scan.shapes[nth % len(scan.shapes)]
    moving, fixed = scan.draw(d, steps, shape)
    state = d.normal(1, *scan.state_shape(shape))
    y, states = scan.defined(moving | fixed, state[0])
    for t in range(steps):
        out = step(state, cut(moving, slice(t, t + 1)), fixed)
        assert_close(out[0], y[t], FP32, f"output {t}")
        assert_close(state[0], states[t + 1], FP32, f"state {t}")


def test_the_output_of_mamba2_can_be_gated_elsewhere_and_steps_limited():
    d = Draw(3)
    moving, fixed = mamba2(d, 70, (2, 1, 8, 8))
    del fixed["dt_bias"]
    z, out = d.normal(70, 2, 8), torch.full((70, 2, 8), torch.nan)
    given = {"z": z, "dt_limit": (0.01, 0.1), "out": out}
    done = ssd.ssd_prefill(**moving, **fixed, cu_seqlens=[0, 70], **given)
    assert done.y is out
    y, states = naive.ssd(**moving | fixed | {"dt": moving["dt"].clamp(0.01, 0.1)})
    assert_close(done.y, y * silu(z.double()), FP32, "output")
    assert_close(done.final_states[0], states[-1], FP32, "state")


def test_strong_decay_loses_no_precision():
    """Sums of dt * A of Mamba2 far below what float32 resolves must not blur small differences; in
    Mamba1 nothing overflows.
    """
    d = Draw(4)
    two, one = mamba2(d, 256, (2, 1, 8, 8))[0], mamba1(d, 100, (4, 4))
    two["dt"] = torch.where(d.flags(256)[:, None], 10.0, 1e-3).expand(256, 2)
    two["A"] = torch.tensor([-16.0, -0.1])
    for name, inputs, chunk in (
        ("Mamba2", two, 256),
        ("Mamba1", one[0] | one[1] | {"dt": torch.full((100, 4), 50.0)}, 16),
    ):
        scan = SCANS[name]
        done = scan.prefill(**inputs, cu_seqlens=[0, len(inputs["x"])], chunk=chunk)
        y, states = scan.definition(**inputs)
        assert_close(done.y, y, FP32, name)
        assert_close(done.final_states[0], states[-1], FP32, name)
