"""The gated-delta-net functions that SGLang calls keep SGLang's contract."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import FP32, Draw, assert_close, batches, bounds, few, seeds
from torch.nn.functional import softplus

from sglang_hybrid.extensions.cpu.ops import gated_delta
from sglang_hybrid.kernels import naive

K_HEADS, HEADS, K_DIM, V_DIM = 2, 4, 8, 6


def gates(a, b, A_log, dt_bias):
    g = -A_log.double().exp() * softplus(a.double() + dt_bias.double())
    return g, b.double().sigmoid()


def prefill(seed, lengths, key_heads, with_padding):
    """Inputs (q, k, v, g, beta) [1, T, ...] of sequences, their slots, and a pool of nine. Slots of
    padding are -1.
    """
    d, tokens, n = Draw(seed), bounds(lengths)[-1], len(lengths)
    q, k = d.normal(1, tokens, key_heads, K_DIM), d.normal(1, tokens, key_heads, K_DIM)
    v = d.normal(1, tokens, HEADS, V_DIM)
    g, beta = -d.uniform(0, 2, 1, tokens, HEADS), d.uniform(0, 1, 1, tokens, HEADS)
    slots = d.order(9)[:n]
    if with_padding:
        slots = torch.where(d.flags(n), -1, slots)
    return (q, k, v, g, beta), slots, d.normal(9, HEADS, V_DIM, K_DIM)


@few
@given(seeds, batches(), st.booleans(), st.booleans())
def test_prefill_updates_the_pool_and_returns_states_at_chunk_starts(
    seed, lengths, in_place, with_padding
):
    cu, n = bounds(lengths), len(lengths)
    (q, k, v, g, beta), slots, pool = prefill(seed, lengths, K_HEADS, with_padding)
    before = pool.clone()
    o, final, h = gated_delta.chunk_gated_delta_rule(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=pool,
        cu_seqlens=torch.tensor(cu, dtype=torch.int32),
        head_first=False,
        use_qk_l2norm_in_kernel=True,
        initial_state_indices=slots.int(),
        inplace_update=in_place,
    )
    assert final is None
    row, left = 0, before.clone()
    for s in range(n):
        at = slice(cu[s], cu[s + 1])
        start = before[slots[s]] if slots[s] >= 0 else None
        expected, states = naive.gated_delta_rule(
            q[0, at], k[0, at], v[0, at], g[0, at], beta[0, at], None, True, start
        )
        assert_close(o[0, at], expected, FP32, "o")
        for p in range(0, lengths[s], 64):
            assert_close(h[0, row], states[p], FP32, f"state of {s} at {p}")
            row += 1
        if in_place and slots[s] >= 0:
            assert_close(pool[slots[s]], states[-1], FP32, "final")
            left[slots[s]] = pool[slots[s]]
    assert h.shape == (1, row, HEADS, V_DIM, K_DIM)
    assert torch.equal(pool, left)


@few
@given(seeds, st.lists(st.integers(64, 200), min_size=1, max_size=3))
def test_what_sglang_tracks_is_the_state_at_the_last_chunk_border(seed, lengths):
    """SGLang's own plan says where it reads; there it must find the state it means."""
    plan_of = pytest.importorskip("sglang.srt.layers.attention.mamba.prefill_track_metadata")
    d, cu = Draw(seed), bounds(lengths)
    q, k = d.normal(1, cu[-1], K_HEADS, K_DIM), d.normal(1, cu[-1], K_HEADS, K_DIM)
    v = d.normal(1, cu[-1], HEADS, V_DIM)
    g, beta = -d.uniform(0, 2, 1, cu[-1], HEADS), d.uniform(0, 1, 1, cu[-1], HEADS)
    n = len(lengths)
    *_, h = gated_delta.chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=torch.zeros(n, HEADS, V_DIM, K_DIM),
        initial_state_indices=torch.arange(n),
        cu_seqlens=torch.tensor(cu),
        use_qk_l2norm_in_kernel=True,
    )
    wanted = [d.integer(64, n) for n in lengths]
    plan = plan_of.build_prefill_track_plan(
        [True] * n, wanted, lengths, [0] * n, gated_delta.CHUNK, mamba2=False
    )
    for row, source in zip(plan.h_rows, plan.h_src, strict=True):
        at = slice(cu[row], cu[row + 1])
        _, states = naive.gated_delta_rule(
            q[0, at], k[0, at], v[0, at], g[0, at], beta[0, at], None, True
        )
        assert_close(h[0, source], states[wanted[row] // 64 * 64], FP32, f"row {row}")


@few
@given(seeds, st.integers(1, 6), st.booleans())
def test_decode_updates_its_slots_and_no_others(seed, rows, with_padding):
    d = Draw(seed)
    q, k = d.normal(rows, K_HEADS, K_DIM), d.normal(rows, K_HEADS, K_DIM)
    v, a, b = d.normal(rows, HEADS, V_DIM), d.normal(rows, HEADS), d.normal(rows, HEADS)
    A_log, dt_bias = d.normal(HEADS), d.normal(HEADS)
    slots = d.order(9)[:rows]
    if with_padding:
        slots = torch.where(d.flags(rows), -1, slots)
    pool, out = d.normal(9, HEADS, V_DIM, K_DIM), torch.full((rows, 1, HEADS, V_DIM), torch.nan)
    before = pool.clone()
    returned, _ = gated_delta.fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=torch.cat([t.flatten(1) for t in (q, k, v)], dim=1),
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=0.5,
        initial_state=pool,
        out=out,
        ssm_state_indices=slots.int(),
        use_qk_l2norm_in_kernel=True,
    )
    assert returned is out
    left, (g, beta) = before.clone(), gates(a, b, A_log, dt_bias)
    for i in range(rows):
        now = slice(i, i + 1)
        if slots[i] < 0:
            assert (out[i] == 0).all()
            continue
        o, states = naive.gated_delta_rule(
            q[now], k[now], v[now], g[now], beta[now], 0.5, True, before[slots[i]]
        )
        assert_close(out[i], o, FP32, "o")
        assert_close(pool[slots[i]], states[-1], FP32, "state")
        left[slots[i]] = pool[slots[i]]
    assert torch.equal(pool, left)


@few
@given(seeds, st.one_of(batches(), st.just([1, 1, 1])), st.booleans())
def test_what_jet_nemotron_calls_ends_in_its_slots(seed, lengths, with_padding):
    """It is called for some tokens, or for one of each sequence: a decode step."""
    cu, n = bounds(lengths), len(lengths)
    (q, k, v, g, beta), slots, pool = prefill(seed, lengths, HEADS, with_padding)
    before, left = pool.clone(), pool.clone()
    o = gated_delta.fused_recurrent_gated_delta_rule_update(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state_source=pool,
        initial_state_indices=slots.int(),
        cu_seqlens=torch.tensor(cu, dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
    )
    assert o.shape == v.shape
    for s in range(n):
        if slots[s] < 0:
            continue
        at = slice(cu[s], cu[s + 1])
        expected, states = naive.gated_delta_rule(
            q[0, at], k[0, at], v[0, at], g[0, at], beta[0, at], None, True, before[slots[s]]
        )
        assert_close(o[0, at], expected, FP32, "o")
        assert_close(pool[slots[s]], states[-1], FP32, "final")
        left[slots[s]] = pool[slots[s]]
    assert torch.equal(pool, left)


def test_gates_are_the_definition():
    d = Draw(1)
    a, b, A_log, dt_bias = d.normal(7, 4) * 20, d.normal(7, 4), d.normal(4), d.normal(4)
    g, beta = gated_delta.fused_gdn_gating(A_log, a, b, dt_bias)
    expected = gates(a, b, A_log, dt_bias)
    assert g.dtype == beta.dtype == torch.float32
    assert_close(g[0], expected[0], FP32, "g")
    assert_close(beta[0], expected[1], FP32, "beta")


@pytest.mark.parametrize("share", [1, 2, 4])
def test_interleaved_projections_are_sorted(share):
    d, heads = Draw(2), share * K_HEADS
    q, k = d.normal(5, K_HEADS, K_DIM), d.normal(5, K_HEADS, K_DIM)
    v, z = d.normal(5, heads, V_DIM), d.normal(5, heads, V_DIM)
    b, a = d.normal(5, heads), d.normal(5, heads)

    def by_key_head(*parts):
        return torch.cat([t.reshape(5, K_HEADS, -1) for t in parts], dim=2).flatten(1)

    mixed_qkv, z_out, b_out, a_out = gated_delta.fused_qkvzba_split_reshape_cat(
        by_key_head(q, k, v, z), by_key_head(b, a), K_HEADS, heads, K_DIM, V_DIM
    )
    assert torch.equal(mixed_qkv, torch.cat([t.flatten(1) for t in (q, k, v)], dim=1))
    assert torch.equal(z_out, z)
    assert torch.equal(b_out, b)
    assert torch.equal(a_out, a)


def test_projections_that_come_part_by_part_are_split():
    d = Draw(2)
    parts = [d.normal(5, K_HEADS * K_DIM), d.normal(5, K_HEADS * K_DIM)]
    parts += [d.normal(5, HEADS * V_DIM), d.normal(5, HEADS * V_DIM)]
    b, a = d.normal(5, HEADS), d.normal(5, HEADS)
    mixed_qkv, z, b_out, a_out = gated_delta.fused_qkvzba_split_reshape_cat_contiguous(
        torch.cat(parts, dim=1), torch.cat([b, a], dim=1), K_HEADS, HEADS, K_DIM, V_DIM
    )
    assert torch.equal(mixed_qkv, torch.cat(parts[:3], dim=1))
    assert torch.equal(z, parts[3].view(5, HEADS, V_DIM))
    assert torch.equal(b_out, b)
    assert torch.equal(a_out, a)


@pytest.mark.parametrize("in_place", [False, True])
def test_output_gate_is_the_definition(in_place):
    """Its gate is a slice of what attention projects, [T, H, D] and not dense."""
    d = Draw(4)
    x, gate = d.normal(5, 24), d.normal(5, 3, 16)[..., 8:]
    expected = x.double() * gate.reshape(5, 24).double().sigmoid()
    y = gated_delta.fused_sigmoid_mul(x, gate, inplace=in_place)
    assert_close(y, expected, FP32)
    assert (y is x) == in_place
    with pytest.raises(ValueError, match="quantizes nothing"):
        gated_delta.fused_sigmoid_mul(x, gate, quant=True)


@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
def test_gated_norm_is_the_definition(activation):
    d = Draw(3)
    x, gate, weight = d.normal(5, 16), d.normal(5, 16), d.normal(16)
    y = gated_delta.rms_norm_gated(x, gate, weight, None, activation, eps=1e-5)
    wide, open_ = x.double(), gate.double().sigmoid()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    expected = expected * (open_ if activation == "sigmoid" else gate * open_)
    assert_close(y, expected, FP32)
    given = {"z": gate, "eps": 1e-5, "is_rms_norm": True, "activation": activation}
    assert torch.equal(gated_delta.layernorm_fn(x, weight, None, **given), y)
    with pytest.raises(ValueError, match="is an RMS norm, gated behind it"):
        gated_delta.layernorm_fn(x, weight, None, **{**given, "norm_before_gate": False})


@pytest.mark.parametrize(
    "refusal",
    [
        gated_delta.fused_recurrent_gdn_replayssm_decode,
    ],
)
def test_what_the_platform_cannot_do_is_refused_in_a_sentence(refusal):
    with pytest.raises(RuntimeError, match="not available on the CPU platform"):
        refusal(scale=1.0)
