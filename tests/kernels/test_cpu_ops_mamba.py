"""The Mamba functions that SGLang calls keep SGLang's contract: pools, slots, grids and tracks."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import FP32, Draw, assert_close, batches, bounds, few, seeds

from sglang_hybrid.extensions.cpu.ops import mamba1, mamba2, tracking
from sglang_hybrid.extensions.cpu.ops import states as pool_states
from sglang_hybrid.extensions.cpu.ops.mamba2 import PAD_SLOT_ID
from sglang_hybrid.kernels import naive

HEADS, GROUPS, WIDTH, SIZE = 4, 2, 8, 4


def slots_for(d, rows, pool, padded=None):
    """A slot of the pool for every row, none twice; the padding slot where ``padded`` is set."""
    slots = d.order(pool)[:rows].int()
    return slots if padded is None else torch.where(padded, PAD_SLOT_ID, slots)


def assert_untouched(before, after, slots):
    """Slots that no row owns are the same to the last bit."""
    others = torch.ones(len(before), dtype=torch.bool)
    others[slots[slots >= 0].long()] = False
    assert torch.equal(before[others], after[others])


@few
@given(seeds, batches(), st.booleans())
def test_conv_prefill_reads_and_leaves_windows_in_the_pool(seed, lengths, with_padding):
    d, cu, n = Draw(seed), bounds(lengths), len(lengths)
    padded = d.flags(n) if with_padding else torch.zeros(n, dtype=torch.bool)
    slots, starts = slots_for(d, n, 8, padded), d.flags(n)
    x, weight, bias = d.normal(cu[-1], 6), d.normal(6, 4), d.normal(6)
    pool = d.normal(8, 6, 3)
    before = pool.clone()
    y = mamba2.causal_conv1d_fn(
        x.T,
        weight,
        bias,
        activation="silu",
        conv_states=pool,
        has_initial_state=starts,
        cache_indices=slots,
        query_start_loc=torch.tensor(cu, dtype=torch.int32),
        seq_lens_cpu=lengths,
    )
    assert y.shape == x.T.shape
    assert_untouched(before, pool, torch.where(torch.tensor(lengths) > 0, slots, -1))
    for s in range(n):
        if padded[s]:
            continue
        window = before[slots[s]] if starts[s] else None
        expected, windows = naive.causal_conv1d(x[cu[s] : cu[s + 1]], weight, bias, window)
        assert_close(y.T[cu[s] : cu[s + 1]], expected, FP32, "y")
        if lengths[s]:
            assert_close(pool[slots[s]], windows[-1], FP32, "window")


@few
@given(seeds, st.integers(1, 5), st.sampled_from([1, 3]))
def test_conv_update_shifts_the_rows_that_own_a_slot(seed, rows, steps):
    d = Draw(seed)
    padded, x, weight = d.flags(rows), d.normal(rows, 6, steps), d.normal(6, 4)
    slots, pool = slots_for(d, rows, 8, padded), d.normal(8, 6, 3)
    before = pool.clone()
    given_x = x[:, :, 0] if steps == 1 else x
    y = mamba2.causal_conv1d_update(given_x, pool, weight, None, "silu", conv_state_indices=slots)
    assert y.shape == given_x.shape
    assert_untouched(before, pool, slots)
    y = y.view(rows, 6, steps)
    for i in range(rows):
        if padded[i]:
            assert (y[i] == 0).all()
            continue
        expected, windows = naive.causal_conv1d(x[i].T, weight, None, before[slots[i]])
        assert_close(y[i].T, expected, FP32, "y")
        assert_close(pool[slots[i]], windows[-1], FP32, "window")


def scan_case(d, lengths, started, dtype=torch.float32):
    """Arguments of mamba_chunk_scan_combined as MambaMixer2 passes them, and y and states by
    the definition."""
    cu = bounds(lengths)
    x = d.normal(1, cu[-1], HEADS, WIDTH).to(dtype)
    dt, A, D = d.normal(1, cu[-1], HEADS), d.uniform(-16, -1, HEADS), d.normal(HEADS)
    B, C = (d.normal(1, cu[-1], GROUPS, SIZE).to(dtype) for _ in range(2))
    bias = d.uniform(-6, 0, HEADS)
    start = d.normal(len(lengths), HEADS, WIDTH, SIZE) if started else None
    arguments = {
        "D": D,
        "z": None,
        "dt_bias": bias,
        "cu_seqlens": torch.tensor(cu, dtype=torch.int32),
        "initial_states": start,
        "return_varlen_states": True,
        "return_final_states": False,
        "return_track_states": True,
        "dt_softplus": True,
        "dt_limit": (0.0, float("inf")),
        "out": torch.full_like(x, torch.nan),
    }
    expected = [
        naive.ssd(
            x[0, a:b],
            dt[0, a:b],
            A,
            B[0, a:b],
            C[0, a:b],
            D,
            bias,
            True,
            None if start is None else start[s],
        )
        for s, (a, b) in enumerate(pairwise(cu))
    ]
    return (x, dt, A, B, C), arguments, expected


def flat_state(expected, lengths, at):
    """The state when the packed batch was read up to ``at``; between sequences, of the one that
    ends."""
    cu = bounds(lengths)
    if at == 0:
        return expected[0][1][0]
    owner = next(s for s in range(len(lengths)) if cu[s] < at <= cu[s + 1])
    return expected[owner][1][at - cu[owner]]


@few
@given(seeds, batches(), st.booleans(), st.sampled_from([8, 16, 64]))
def test_scan_returns_grid_final_and_tracked_states(seed, lengths, started, chunk_size):
    d, cu = Draw(seed), bounds(lengths)
    positional, arguments, expected = scan_case(d, lengths, started)
    asked = d.positions(lengths, chunk_size)
    grid, final, tracked = mamba2.mamba_chunk_scan_combined(
        *positional,
        chunk_size=chunk_size,
        state_dtype=torch.float32,
        track_seq_idx=torch.tensor([s for s, _ in asked]),
        track_end_locs=torch.tensor([cu[s] + p for s, p in asked]),
        **arguments,
    )
    assert_close(arguments["out"][0], torch.cat([y for y, _ in expected]), FP32, "y")
    assert grid.shape[:2] == (1, -(-cu[-1] // chunk_size))
    for c in range(grid.shape[1]):
        assert_close(grid[0, c], flat_state(expected, lengths, c * chunk_size), FP32, f"grid {c}")
    for s, (_, states) in enumerate(expected):
        assert_close(final[s], states[-1], FP32, "final")
    assert tracked is not None
    for i, (s, p) in enumerate(asked):
        assert_close(tracked[0, i], expected[s][1][p], FP32, f"tracked ({s}, {p})")


@few
@given(seeds, batches(), st.sampled_from([8, 16]))
def test_what_sglang_tracks_is_the_state_at_the_last_chunk_border(seed, lengths, chunk_size):
    """SGLang's own plan says where it reads; there it must find the state it means."""
    plan_of = pytest.importorskip("sglang.srt.layers.attention.mamba.prefill_track_metadata")
    d = Draw(seed)
    positional, arguments, expected = scan_case(d, lengths, started=True)
    wanted = [d.integer(min(n, chunk_size), n) for n in lengths]
    prefix = [d.integer(0, 3) for _ in lengths]
    plan = plan_of.build_prefill_track_plan(
        [n >= chunk_size for n in lengths],
        [p + w for p, w in zip(prefix, wanted, strict=True)],
        lengths,
        prefix,
        chunk_size,
        mamba2=True,
    )
    grid, _, tracked = mamba2.mamba_chunk_scan_combined(
        *positional,
        chunk_size=chunk_size,
        state_dtype=torch.float32,
        track_seq_idx=torch.tensor(plan.recompute_rows),
        track_end_locs=torch.tensor(plan.recompute_end_locs),
        **arguments,
    )

    def border(row):
        return expected[row][1][wanted[row] // chunk_size * chunk_size]

    for row, source in zip(plan.h_rows, plan.h_src, strict=True):
        assert_close(grid[0, source], border(row), FP32, f"row {row} on the grid")
    assert (tracked is None) == (not plan.recompute_rows)
    for i, row in enumerate(plan.recompute_rows):
        assert tracked is not None
        assert_close(tracked[0, i], border(row), FP32, f"row {row} off the grid")


def test_scan_returns_states_in_the_pool_dtype():
    positional, arguments, _ = scan_case(Draw(1), [20], False, torch.bfloat16)
    grid, final, tracked = mamba2.mamba_chunk_scan_combined(
        *positional, chunk_size=16, state_dtype=torch.float16, **arguments
    )
    assert grid.dtype == final.dtype == torch.float16
    assert tracked is None
    assert arguments["out"].isfinite().all()


@few
@given(seeds, st.integers(1, 6), st.sampled_from(["mamba2", "mamba1"]), st.booleans())
def test_state_update_writes_its_slots_and_no_others(seed, rows, kind, with_padding):
    d = Draw(seed)
    heads, width = (HEADS, WIDTH) if kind == "mamba2" else (12, 1)
    groups = GROUPS if kind == "mamba2" else 1
    padded = d.flags(rows) if with_padding else torch.zeros(rows, dtype=torch.bool)
    slots, pool = slots_for(d, rows, 9, padded), d.normal(9, heads, width, SIZE)
    before, out = pool.clone(), torch.full((rows, heads, width), torch.nan)
    x, z = d.normal(rows, heads, width), d.normal(rows, heads, width)
    B, C = d.normal(rows, groups, SIZE), d.normal(rows, groups, SIZE)
    if kind == "mamba2":
        dt = d.normal(rows, heads)[:, :, None].expand(-1, -1, width)
        A = d.uniform(-16, -1, heads)[:, None, None].expand(-1, width, SIZE)
        D, bias = (d.normal(heads)[:, None].expand(-1, width) for _ in range(2))
    else:
        dt, A = d.normal(rows, heads, 1), d.uniform(-16, -1, heads, 1, SIZE)
        D, bias = d.normal(heads, 1), torch.zeros(heads, 1)
    mamba2.selective_state_update(
        pool,
        x,
        dt,
        A,
        B,
        C,
        D,
        z=z,
        dt_bias=bias,
        dt_softplus=True,
        state_batch_indices=slots,
        out=out,
    )
    assert_untouched(before, pool, slots)
    for i in range(rows):
        if padded[i]:
            assert (out[i] == 0).all()
            continue
        step = naive.time_step(dt[i], bias, True)
        b, c = (t[i].double().repeat_interleave(heads // groups, dim=0) for t in (B, C))
        h = before[slots[i]].double() * torch.exp(step[..., None] * A.double())
        h = h + (step * x[i])[..., None] * b[:, None, :]
        y = (h * c[:, None, :]).sum(-1) + D.double() * x[i]
        assert_close(pool[slots[i]], h, FP32, "state")
        assert_close(out[i], y * torch.nn.functional.silu(z[i].double()), FP32, "y")


def test_state_update_is_the_same_for_large_states(monkeypatch):
    d = Draw(5)
    pool, x = d.normal(6, HEADS, WIDTH, SIZE), d.normal(5, HEADS, WIDTH)
    arguments = (x, d.normal(5, HEADS, WIDTH), d.uniform(-4, -1, HEADS, WIDTH, SIZE))
    groups = (d.normal(5, GROUPS, SIZE), d.normal(5, GROUPS, SIZE))
    results = []
    for limit in (1, 1 << 18):
        monkeypatch.setattr(pool_states, "ADVANCED_IN_PLACE", limit)
        states, out = pool.clone(), torch.empty_like(x)
        mamba2.selective_state_update(
            states,
            *arguments,
            *groups,
            dt_softplus=True,
            out=out,
            state_batch_indices=torch.tensor([5, 0, 3, 1, 2]),
        )
        results.append((states, out))
    for one, all_at_once in zip(*results, strict=True):
        assert_close(one, all_at_once, FP32)


@few
@given(seeds, st.integers(1, 6), st.booleans())
def test_tracking_copies_marked_rows_only(seed, rows, check_freed):
    d = Draw(seed)
    order = d.order(14)
    source, target, mask = order[:rows].int(), order[rows : 2 * rows], d.flags(rows)
    if check_freed:
        target = torch.where(d.flags(rows), -1, target)
    conv, ssm = d.normal(3, 14, 6, 3), d.normal(3, 14, 2, 4, 4)
    for layered in (True, False):
        pools = (
            [(conv.clone(), ssm.clone())]
            if layered
            else [(conv[i].clone(), ssm[i].clone()) for i in range(3)]
        )
        track = (
            tracking.track_mamba_states_all_layers
            if layered
            else tracking.track_mamba_states_if_needed
        )
        for pool in pools:
            track(*pool, source, mask, target, rows, check_freed_slots=check_freed)
        for before, after in (
            (conv, pools[0][0] if layered else torch.stack([p[0] for p in pools])),
            (ssm, pools[0][1] if layered else torch.stack([p[1] for p in pools])),
        ):
            expected = before.clone()
            for i in range(rows):
                if mask[i] and target[i] >= 0:
                    expected[:, target[i]] = before[:, source[i]]
            assert torch.equal(after, expected)


def test_mamba1_scan_is_the_recurrence():
    d = Draw(8)
    x, dt = d.normal(50, 6), d.uniform(0, 0.5, 50, 6)
    A, B, C, h0 = d.uniform(-16, -1, 6, 4), d.normal(50, 4), d.normal(50, 4), d.normal(6, 4)
    final, y = mamba1.selective_scan(x=x, dt=dt, A=A, B=B, C=C, h0=h0)
    expected, states = naive.selective_scan(x, dt, A, B, C, h0)
    assert_close(y, expected, FP32, "y")
    assert_close(final, states[-1], FP32, "state")


def test_a_scan_that_is_not_packed_is_refused():
    positional, arguments, _ = scan_case(Draw(1), [4], False)
    arguments["cu_seqlens"] = None
    with pytest.raises(ValueError, match="packed batches only"):
        mamba2.mamba_chunk_scan_combined(*positional, chunk_size=16, **arguments)


def test_last_slot_of_each_prefix():
    table = torch.arange(100, 140, dtype=torch.int32).view(4, 10)
    last = pool_states.last_slots(table, torch.tensor([2, 0, 3]), torch.tensor([10, 0, 1]))
    assert last.tolist() == [129, -1, 130]
    assert last.dtype == torch.int64
