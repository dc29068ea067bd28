"""The KDA functions that SGLang calls keep SGLang's contract."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import FP32, Draw, assert_close, batches, bounds, few, seeds
from torch.nn.functional import softplus

from sglang_hybrid.extensions.cpu.ops import kimi_delta
from sglang_hybrid.kernels import naive

HEADS, K_DIM, V_DIM = 3, 8, 6
bound = st.sampled_from([None, -5.0])


def gate(raw, A_log, dt_bias, lower_bound):
    """Kimi Team 2025, "Kimi Linear", section 4, and the bounded form of Kimi K3."""
    step = raw.double() + dt_bias.double().view(HEADS, K_DIM)
    rate = A_log.double().exp().view(HEADS, 1)
    if lower_bound is None:
        return -rate * softplus(step)
    return lower_bound * (rate * step).sigmoid()


@few
@given(seeds, batches(), st.booleans(), bound)
def test_prefill_updates_the_pool_and_returns_states_at_chunk_starts(
    seed, lengths, with_padding, lower_bound
):
    d, cu, n = Draw(seed), bounds(lengths), len(lengths)
    q, k, raw = (d.normal(1, cu[-1], HEADS, K_DIM) for _ in range(3))
    v, b = d.normal(1, cu[-1], HEADS, V_DIM), d.normal(1, cu[-1], HEADS)
    A_log, dt_bias = d.normal(1, 1, HEADS, 1), d.normal(HEADS * K_DIM)
    slots = d.order(9)[:n]
    if with_padding:
        slots = torch.where(d.flags(n), -1, slots)
    pool = d.normal(9, HEADS, V_DIM, K_DIM)
    before = pool.clone()
    wanted = torch.tensor([d.integer(-1, max(0, (n - 1) // 64)) for n in lengths])
    wanted = wanted.where(torch.tensor(lengths) > 0, -1)
    tracked = torch.full((n, HEADS, V_DIM, K_DIM), torch.nan)
    given = {"initial_state": pool, "initial_state_indices": slots.int()}
    o, h = kimi_delta.chunk_kda(
        **{"q": q, "k": k, "v": v, "g": raw, "beta": b, **given},
        cu_seqlens=torch.tensor(cu, dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        beta_is_raw=True,
        output_intermediate_states=True,
        track_state=tracked,
        track_chunk_idx=wanted,
    )
    row, left = 0, before.clone()
    g = gate(raw, A_log, dt_bias, lower_bound)
    for s in range(n):
        at = slice(cu[s], cu[s + 1])
        start = before[slots[s]] if slots[s] >= 0 else None
        expected, states = naive.gated_delta_rule(
            q[0, at], k[0, at], v[0, at], g[0, at], b[0, at].double().sigmoid(), None, True, start
        )
        assert_close(o[0, at], expected, FP32, "o")
        for p in range(0, lengths[s], 64):
            assert_close(h[0, row], states[p], FP32, f"state of {s} at {p}", among=states)
            row += 1
        if wanted[s] >= 0:
            assert_close(tracked[s], states[64 * wanted[s]], FP32, "tracked", among=states)
        else:
            assert tracked[s].isnan().all()
        if slots[s] >= 0:
            assert_close(pool[slots[s]], states[-1], FP32, "final", among=states)
            left[slots[s]] = pool[slots[s]]
    assert h.shape == (1, row, HEADS, V_DIM, K_DIM)
    assert torch.equal(pool, left)


def test_a_gate_that_is_given_is_taken():
    """SGLang also calls the scan without A_log and with betas behind their sigmoid."""
    d = Draw(1)
    q, k = d.normal(1, 70, HEADS, K_DIM), d.normal(1, 70, HEADS, K_DIM)
    v, beta = d.normal(1, 70, HEADS, V_DIM), d.uniform(0, 1, 1, 70, HEADS)
    g = -d.uniform(0, 2, 1, 70, HEADS, K_DIM)
    pool = torch.zeros(1, HEADS, V_DIM, K_DIM)
    o = kimi_delta.chunk_kda(
        *(q, k, v, g, beta, 0.3, pool, torch.tensor([0])), cu_seqlens=torch.tensor([0, 70])
    )
    expected, states = naive.gated_delta_rule(q[0], k[0], v[0], g[0], beta[0], 0.3)
    assert_close(o[0], expected, FP32, "o")
    assert_close(pool[0], states[-1], FP32, "final")
    with pytest.raises(ValueError, match="packed batches only"):
        kimi_delta.chunk_kda(q, k, v, g, beta)


@few
@given(seeds, st.integers(1, 6), st.booleans(), bound)
def test_decode_updates_its_slots_and_no_others(seed, rows, with_padding, lower_bound):
    d = Draw(seed)
    q, k, a = (d.normal(rows, HEADS, K_DIM) for _ in range(3))
    v, b = d.normal(rows, HEADS, V_DIM), d.normal(rows, HEADS)
    A_log, dt_bias = d.normal(HEADS), d.normal(HEADS * K_DIM)
    slots = d.order(9)[:rows]
    if with_padding:
        slots = torch.where(d.flags(rows), -1, slots)
    pool, out = d.normal(9, HEADS, V_DIM, K_DIM), torch.full((rows, 1, HEADS, V_DIM), torch.nan)
    before = pool.clone()
    returned, _ = kimi_delta.fused_recurrent_kda_packed_decode(
        mixed_qkv=torch.cat([t.flatten(1) for t in (q, k, v)], dim=1),
        a=a.flatten(1),
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=0.5,
        initial_state=pool,
        out=out,
        ssm_state_indices=slots.int(),
        use_qk_l2norm_in_kernel=True,
        lower_bound=lower_bound,
    )
    assert returned is out
    left, g = before.clone(), gate(a, A_log, dt_bias, lower_bound)
    for i in range(rows):
        now = slice(i, i + 1)
        if slots[i] < 0:
            assert (out[i] == 0).all()
            continue
        o, states = naive.gated_delta_rule(
            q[now], k[now], v[now], g[now], b[now].double().sigmoid(), 0.5, True, before[slots[i]]
        )
        assert_close(out[i], o, FP32, "o")
        assert_close(pool[slots[i]], states[-1], FP32, "state")
        left[slots[i]] = pool[slots[i]]
    assert torch.equal(pool, left)
    unpacked = kimi_delta.fused_sigmoid_gating_delta_rule_update(
        **{"A_log": A_log, "a": a.flatten(1), "dt_bias": dt_bias, "b": b},
        **{"q": q[None], "k": k[None], "v": v[None], "scale": 0.5},
        initial_state_source=before,
        initial_state_indices=slots.int(),
        use_qk_l2norm_in_kernel=True,
        lower_bound=lower_bound,
    )
    assert torch.equal(unpacked[0], out[:, 0])
    assert torch.equal(before, pool)
