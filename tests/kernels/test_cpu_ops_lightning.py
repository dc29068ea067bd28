"""The functions of lightning attention that SGLang calls keep SGLang's contract."""

from itertools import pairwise
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import FP32, Draw, assert_close, batches, bounds, few, seeds

from sglang_hybrid.extensions.cpu.ops import lightning
from sglang_hybrid.extensions.cpu.ops.gated_delta import layernorm_fn
from sglang_hybrid.kernels import naive
from sglang_hybrid.kernels.checkpoint_states import Targets

HEADS, SIZE, SLOTS = 3, 8, 12


def by_definition(q, k, v, slopes, start):
    """Outputs [T, H, D], and states [T + 1, H, Dk, Dv]."""
    steps = torch.ones(len(q), HEADS)
    start = None if start is None else start.transpose(1, 2)
    o, states = naive.ssd(v, steps, -slopes, k, q / SIZE**0.5, initial_state=start)
    return o, states.transpose(2, 3)


def call(q, k, v, pool, slopes, cu, slots, resumed, **more):
    meta = SimpleNamespace(
        batch_size=len(cu) - 1,
        q_offsets=torch.tensor(cu, dtype=torch.int32),
        s_offsets=slots.int(),
        s_scales=resumed,
    )
    return lightning.seg_la_fwd(q, k, v, pool, slopes[:, None, None], meta, **more)


@few
@given(seeds, batches(), st.booleans())
def test_prefill(seed, lengths, with_padding):
    d, cu, n = Draw(seed), bounds([it or 2 for it in lengths] + [2]), len(lengths) + 1
    q, k, v = (d.normal(cu[-1], HEADS, SIZE) for _ in range(3))
    slopes, resumed = d.uniform(0, 1, HEADS), d.flags(n)
    order = d.order(SLOTS)
    slots, kept = order[:n], order[n : 2 * n]
    if with_padding:
        slots = torch.where(d.flags(n), -1, slots)
    wanted = torch.tensor([d.integer(0, b - a) for a, b in pairwise(cu)])
    pool = d.normal(SLOTS, HEADS, SIZE, SIZE)
    before, left = pool.clone(), pool.clone()
    tracked = {"track_lens": wanted, "track_state_indices": torch.where(d.flags(n), kept, -1)}
    o = call(q, k, v, pool, slopes, cu, slots, resumed, **tracked)
    for s in range(n):
        at = slice(cu[s], cu[s + 1])
        start = before[slots[s]] if slots[s] >= 0 and resumed[s] else None
        expected, states = by_definition(q[at], k[at], v[at], slopes, start)
        assert_close(o[at], expected, FP32, "o")
        if slots[s] >= 0:
            assert_close(pool[slots[s]], states[-1], FP32, "final", among=states)
            left[slots[s]] = pool[slots[s]]
        target = tracked["track_state_indices"][s]
        if target >= 0 and wanted[s] > 0:
            assert_close(pool[target], states[wanted[s]], FP32, "tracked", among=states)
            left[target] = pool[target]
    assert torch.equal(pool, left)


@few
@given(seeds, st.integers(1, 5), st.booleans(), st.sampled_from([1, 4]))
def test_a_step_and_drafts(seed, rows, with_padding, nodes):
    """A step advances the states of its rows; drafts leave them, and theirs in a buffer."""
    d, drafted = Draw(seed), nodes > 1
    cu = list(range(0, rows * nodes + 1, nodes))
    q, k, v = (d.normal(rows * nodes, HEADS, SIZE) for _ in range(3))
    slopes, slots = d.uniform(0, 1, HEADS), d.order(SLOTS)[:rows]
    if with_padding:
        slots = torch.where(d.flags(rows), -1, slots)
    pool = d.normal(SLOTS, HEADS, SIZE, SIZE)
    before, left = pool.clone(), pool.clone()
    buffer, places = torch.full((rows, nodes, HEADS, SIZE, SIZE), torch.nan), d.order(rows)
    drafts = {"caches": buffer, "cache_indices": places.int()} if drafted else {}
    o = call(q, k, v, pool, slopes, cu, slots, torch.ones(rows), **drafts)
    for s in range(rows):
        at = slice(cu[s], cu[s + 1])
        if slots[s] < 0:
            assert not o[at].any()
            assert not drafted or buffer[places[s]].isnan().all()
            continue
        expected, states = by_definition(q[at], k[at], v[at], slopes, before[slots[s]])
        assert_close(o[at], expected, FP32, "o")
        if drafted:
            assert_close(buffer[places[s]], states[1:], FP32, "behind drafts")
        else:
            assert_close(pool[slots[s]], states[-1], FP32, "state")
            left[slots[s]] = pool[slots[s]]
    assert torch.equal(pool, left)


def test_states_inside_begin_with_a_prefix_or_with_nothing():
    """The slot of a new sequence holds another request's state."""
    d, cu = Draw(2), [0, 5, 9]
    k, v = d.normal(2, cu[-1], HEADS, SIZE)
    slopes, pool = d.uniform(0, 1, HEADS), d.normal(SLOTS, HEADS, SIZE, SIZE)
    before = pool.clone()
    sequences, ends = torch.tensor([0, 0, 1]), torch.tensor([2, 5, 8])
    lightning.save_lightning_states(
        pool,
        Targets(sequences, ends, torch.tensor([7, 8, 9])),
        keys=k,
        values=v,
        slopes=slopes[:, None, None],
        state_indices=torch.tensor([3, 4]),
        resumed=torch.tensor([True, False]),
        cu_seqlens=torch.tensor(cu),
    )
    for s, end, slot in zip(sequences.tolist(), ends.tolist(), (7, 8, 9), strict=True):
        at = slice(cu[s], end)
        start = None if s else before[3]
        _, states = by_definition(k[at], k[at], v[at], slopes, start)
        assert_close(pool[slot], states[-1], FP32, "state")
        before[slot] = pool[slot]
    assert torch.equal(pool, before)


def test_a_norm_of_groups():
    d = Draw(1)
    x, z, weight = d.normal(5, 12), d.normal(5, 12), d.normal(12)
    given = {"eps": 1e-5, "is_rms_norm": True, "group_size": 4, "activation": "sigmoid"}
    groups = x.double().view(5, 3, 4)
    normed = groups / (groups.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    plain = normed.view(5, 12) * weight
    assert_close(layernorm_fn(x, weight, None, **given), plain, FP32, "norm")
    gated = plain * z.double().sigmoid()
    assert_close(layernorm_fn(x, weight, None, z, **given), gated, FP32, "gated norm")
