"""States written inside a prefill are those of the recurrence; run by test_checkpoint_states.

The kernels run on a GPU, or in Triton's interpreter with TRITON_INTERPRET=1. Triton reads that
variable when it is imported, hence tests in a process of their own. Whatever a kernel must not read
is poisoned: targets before they are written, padding, and the state of a chunk in which a sequence
starts.
"""

import math
import os
import secrets
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import BF16, FP32, INTERPRETED, Draw, batches, bounds, few, placed, seeds
from torch import Tensor

from sglang_hybrid.kernels import checkpoint_states as cs
from sglang_hybrid.kernels import naive

if INTERPRETED:
    from scripts.gpu_check import interpreter  # noqa: F401

some = settings(
    few, max_examples=int(os.environ.get("EXAMPLES", "20")), phases=[Phase.explicit, Phase.generate]
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = st.sampled_from(DTYPES)
slot_types = st.sampled_from([torch.int32, torch.int64])


def fresh() -> Draw:
    """Random tensors from a seed that pytest shows when the test fails."""
    seed = secrets.randbits(31)
    print("seed", seed)
    return Draw(seed)


class Pool:
    """Slots that lie further apart than their states are long, the targets' among them poisoned."""

    def __init__(self, d: Draw, wanted: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        numel, spare = math.prod(shape), 3
        self.memory = d.normal(wanted + spare, numel + 16).to(dtype)
        self.states = self.memory[:, :numel].view(-1, *shape)
        order = d.order(wanted + spare)
        self.slots, self.others = order[:wanted], order[wanted:]
        self.states[self.slots] = math.nan
        self.before = self.memory.clone()
        self.numel = numel

    def check(self, expected: list[Tensor], tolerance: float) -> None:
        """Every target is as expected, per leading index (a head) and relative to its largest
        element; nothing else in the memory has changed."""
        for slot, want in zip(self.slots, expected, strict=True):
            found = self.states[slot].double()
            error = (found - want).abs().flatten(1).amax(1)
            scale = want.abs().flatten(1).amax(1)
            assert (error <= tolerance * scale + 1e-30).all(), (error / scale, tolerance)
        raw, before = self.memory.view(torch.uint8), self.before.view(torch.uint8)
        assert torch.equal(raw[self.others], before[self.others])
        edge = self.numel * self.memory.element_size()
        assert torch.equal(raw[:, edge:], before[:, edge:])


def launch(save: Callable[..., None], pool: Pool, wanted: cs.Targets, **arguments: Any) -> None:
    """Call a kernel with everything where it runs; the pool has what it wrote afterwards."""
    memory = placed(pool.memory)
    save(
        memory.as_strided(pool.states.size(), pool.states.stride()),
        cs.Targets(placed(wanted.sequences), placed(wanted.ends), placed(wanted.slots)),
        **{
            name: placed(value) if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        },
    )
    pool.memory.copy_(memory)


def asked_for(d: Draw, lengths: list[int], chunk: int, start: int = 0) -> list[tuple[int, int]]:
    """Some of: both ends, one, around the borders of chunks, anywhere; in no order, some
    sequences left out. Chunks lie on the packed grid (start = 0) or on each sequence's own."""
    cu, found = bounds(lengths), []
    for s, n in enumerate(lengths):
        first = cu[s] if start == 0 else 0
        border = chunk * d.integer(first // chunk, (first + n) // chunk) - first
        wanted = {0, 1, n, border - 1, border, border + 1, d.integer(0, n)}
        if n and d.integer(0, 3):
            found += [(s, p) for p in sorted(wanted) if 0 <= p <= n]
    found = [found[i] for i in d.order(len(found)).tolist()]
    return found[:10]


def targets(cu: list[int], asked: list[tuple[int, int]], slots: Tensor) -> cs.Targets:
    return cs.Targets(
        torch.tensor([s for s, _ in asked], dtype=torch.int32),
        torch.tensor([cu[s] + p for s, p in asked], dtype=slots.dtype),
        slots,
    )


class Mamba2:
    """A batch at the scale of trained models, and all its states in float64."""

    def __init__(self, d, lengths, shape, dtype, started):
        heads, groups, width, size = shape
        self.cu = bounds(lengths)
        tokens = self.cu[-1]
        self.x = d.normal(tokens, heads, width).to(dtype)
        self.B = d.normal(tokens, groups, size).to(dtype)
        self.A = d.uniform(-16, -1, heads)
        raw, bias = d.normal(tokens, heads).to(dtype), d.uniform(-6, 0, heads)
        self.dt = naive.time_step(raw, bias, True).float()
        self.initial = d.normal(len(lengths), heads, width, size) if started else None
        self.states = []
        for s in range(len(lengths)):
            at = slice(self.cu[s], self.cu[s + 1])
            start = None if self.initial is None else self.initial[s]
            # The last output is no part of a state, so that B serves as C.
            _, states = naive.ssd(
                self.x[at], self.dt[at], self.A, self.B[at], self.B[at], initial_state=start
            )
            self.states.append(states)

    def chunked(self, chunk: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """dt [H, C, L] and chunk states [C, H, P, N] as the scan has them, poisoned around."""
        tokens, heads = self.dt.shape
        count = -(-tokens // chunk)
        dt = torch.full((heads, count * chunk), math.nan)
        dt[:, :tokens] = self.dt.T
        states = torch.full((count, *self.states[0].shape[1:]), math.nan, dtype=dtype)
        for s, (begin, end) in enumerate(zip(self.cu, self.cu[1:], strict=False)):
            for c in range(count):
                if begin < c * chunk <= end:
                    states[c] = self.states[s][c * chunk - begin].to(dtype)
        return dt.view(heads, count, chunk), states

    def save(
        self, pool: Pool, asked: list[tuple[int, int]], dt: Tensor, chunk_states: Tensor
    ) -> None:
        """The states that were asked for, by the kernel, in the pool."""
        launch(
            cs.save_ssd_states,
            pool,
            targets(self.cu, asked, pool.slots),
            x=self.x,
            dt=dt,
            A=self.A,
            B=self.B,
            chunk_states=chunk_states,
            cu_seqlens=torch.tensor(self.cu),
            initial_states=self.initial,
        )


ssd_shapes = st.sampled_from(
    [
        (2, 1, 32, 16),
        (4, 2, 32, 32),
        (2, 2, 64, 16),
        (1, 1, 48, 80),
        (2, 1, 128, 16),
        (1, 1, 32, 256),
    ]
)


@some
@given(seeds, batches(), ssd_shapes, st.sampled_from([64, 128, 256]), dtypes, dtypes, st.booleans())
def test_mamba2(seed, lengths, shape, chunk, dtype, kept, started):
    d = Draw(seed)
    batch = Mamba2(d, lengths, shape, dtype, started)
    asked = asked_for(d, lengths, chunk)
    pool = Pool(d, len(asked), batch.states[0].shape[1:], kept)
    dt, chunk_states = batch.chunked(chunk, kept)
    batch.save(pool, asked, dt, chunk_states)
    exact = dtype == kept == torch.float32
    pool.check([batch.states[s][p] for s, p in asked], FP32 if exact else BF16)


def test_mamba2_at_a_chunk_border_is_the_chunk_state_itself():
    d = fresh()
    batch = Mamba2(d, [10, 140], (2, 1, 32, 16), torch.bfloat16, False)
    dt, chunk_states = batch.chunked(64, torch.float32)
    pool = Pool(d, 2, (2, 32, 16), torch.float32)
    batch.save(pool, [(1, 118), (1, 54)], dt, chunk_states)
    assert torch.equal(pool.states[pool.slots], chunk_states[[2, 1]])


def test_mamba2_reads_slices_and_transposes_as_they_are():
    """SGLang's x and B are slices of one [T, D] tensor."""
    d = fresh()
    batch = Mamba2(d, [70, 1], (2, 1, 32, 16), torch.float32, True)
    dt, chunk_states = batch.chunked(64, torch.float32)
    both = torch.cat([batch.x.flatten(1), batch.B.flatten(1)], dim=1).T.contiguous().T
    asked = [(0, 69), (1, 1), (0, 3)]
    pool = Pool(d, 3, (2, 32, 16), torch.float32)
    batch.x = both[:, :64].unflatten(1, (2, 32))
    batch.B = both[:, 64:].unflatten(1, (1, 16))
    batch.save(pool, asked, dt, chunk_states)
    pool.check([batch.states[s][p] for s, p in asked], FP32)


@some
@given(seeds, batches(longest=150), dtypes, dtypes, st.booleans(), st.booleans())
def test_delta_rule(seed, lengths, dtype, kept, per_channel, started):
    """Gated delta net (one decay per head), KDA (one per channel of the key)."""
    d, (heads, keys, value, key) = Draw(seed), (2, 1, 32, 32)
    lengths = [n for n in lengths if n]
    cu = bounds(lengths)
    k = torch.nn.functional.normalize(d.normal(cu[-1], keys, key), dim=-1).to(dtype)
    v = d.normal(cu[-1], heads, value).to(dtype)
    g = d.uniform(-1.5, -0.001, cu[-1], heads, *([key] if per_channel else []))
    beta = d.uniform(0, 1, cu[-1], heads)
    unit = math.log(2) if per_channel else 1.0
    states, rows, offsets = [], [], []
    decays, corrections = torch.empty_like(g), torch.empty_like(v)
    for s, n in enumerate(lengths):
        at = slice(cu[s], cu[s + 1])
        start = d.normal(heads, value, key) if started else None
        _, found = naive.gated_delta_rule(k[at], k[at], v[at], g[at], beta[at], initial_state=start)
        states.append(found)
        offsets.append(len(rows))
        rows += [found[c] for c in range(0, n, cs.DELTA_CHUNK)]
        for c in range(0, n, cs.DELTA_CHUNK):
            part = slice(cu[s] + c, min(cu[s] + c + cs.DELTA_CHUNK, cu[s + 1]))
            decays[part] = (g[part].double().cumsum(0) / unit).float()
        factor = torch.exp(g[at].double())[:, :, None]
        before = found[:-1] * (factor if per_channel else factor[..., None])
        unit_key = k[at].double() / k[at].double().square().sum(-1, keepdim=True)
        corrections[at] = torch.einsum(
            "thvk,thk->thv", found[1:] - before, unit_key.repeat_interleave(heads // keys, 1)
        ).to(dtype)
    asked = asked_for(d, lengths, cs.DELTA_CHUNK, start=1)
    pool = Pool(d, len(asked), (heads, value, key), kept)
    launch(
        cs.save_delta_states,
        pool,
        targets(cu, asked, pool.slots),
        keys=k,
        corrections=corrections,
        decays=decays,
        chunk_states=torch.stack(rows).to(dtype),
        rows=torch.tensor(
            [
                offsets[s] + min(p // cs.DELTA_CHUNK, (lengths[s] - 1) // cs.DELTA_CHUNK)
                for s, p in asked
            ]
        ),
        cu_seqlens=torch.tensor(cu),
        unit=unit,
    )
    exact = dtype == kept == torch.float32
    pool.check([states[s][p] for s, p in asked], FP32 if exact else BF16)


@some
@given(seeds, batches(), st.sampled_from([(2, 32, 32), (1, 48, 16), (2, 16, 80)]), dtypes, dtypes)
def test_lightning_attention(seed, lengths, shape, dtype, kept):
    d, (heads, key, value), cu = Draw(seed), shape, bounds(lengths)
    keys, values = d.normal(cu[-1], heads, key).to(dtype), d.normal(cu[-1], heads, value).to(dtype)
    slopes = d.uniform(0, 1, heads, 1, 1)
    asked = sorted(asked_for(d, lengths, 32, start=1))
    pool = Pool(d, len(asked) + len(lengths), shape, kept)
    # The sequences' own slots are among those that must not change.
    owners, pool.slots = pool.slots[: len(lengths)], pool.slots[len(lengths) :]
    pool.states[owners] = d.normal(len(lengths), *shape).to(kept)
    pool.before, pool.others = pool.memory.clone(), torch.cat([pool.others, owners])
    resumed = d.flags(len(lengths))
    launch(
        cs.save_lightning_states,
        pool,
        targets(cu, asked, pool.slots),
        keys=keys,
        values=values,
        slopes=slopes,
        state_indices=owners,
        resumed=resumed,
        cu_seqlens=torch.tensor(cu),
    )
    expected = []
    for s, at in asked:
        of_one = slice(cu[s], cu[s + 1])
        k, v = keys[of_one], values[of_one]
        start = pool.states[owners[s]].transpose(1, 2) if resumed[s] else None
        steps = torch.ones(len(k), heads)
        _, states = naive.ssd(v, steps, -slopes.flatten(), k, k, initial_state=start)
        expected.append(states[at].transpose(1, 2))
    pool.check(expected, FP32 if kept == torch.float32 else BF16)


@some
@given(
    seeds,
    batches(longest=20),
    st.sampled_from([2, 3, 4]),
    st.sampled_from([16, 300]),
    dtypes,
    slot_types,
    st.booleans(),
)
def test_windows(seed, lengths, width, channels, dtype, slot_type, transposed):
    d, cu, past = Draw(seed), bounds(lengths), width - 1
    x = d.normal(cu[-1], channels).to(dtype)
    if transposed:
        x = x.T.contiguous().T
    asked = asked_for(d, lengths, 4)
    pool = Pool(d, len(asked), (channels, past), dtype)
    # The sequences' own slots are among those that must not change.
    pool.memory = torch.cat([pool.memory, d.normal(len(lengths), channels * past + 16).to(dtype)])
    pool.states = pool.memory[:, : pool.numel].view(-1, channels, past)
    pool.before = pool.memory.clone()
    state_indices = torch.arange(len(pool.memory) - len(lengths), len(pool.memory))
    pool.others = torch.cat([pool.others, state_indices])
    resumed = d.flags(len(lengths))
    launch(
        cs.save_windows,
        pool,
        targets(cu, asked, pool.slots.to(slot_type)),
        inputs=x,
        state_indices=state_indices.to(slot_type),
        resumed=resumed,
        cu_seqlens=torch.tensor(cu, dtype=torch.int32),
    )
    expected = []
    for s, p in asked:
        start = pool.states[state_indices[s]] if resumed[s] else None
        _, windows = naive.causal_conv1d(
            x[cu[s] : cu[s + 1]], torch.zeros(channels, width), initial_window=start
        )
        expected.append(windows[p])
    pool.check(expected, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 1, 128, 256), (8, 2, 64, 128)])
def test_mamba2_at_the_shapes_of_models(shape, dtype):
    """A head of Falcon-H1-7B, some of Nemotron-H."""
    d = fresh()
    lengths, chunk = [300, 1, 513], 256
    batch = Mamba2(d, lengths, shape, dtype, True)
    asked = asked_for(d, lengths, chunk)
    pool = Pool(d, len(asked), batch.states[0].shape[1:], torch.float32)
    dt, chunk_states = batch.chunked(chunk, torch.float32)
    batch.save(pool, asked, dt, chunk_states)
    pool.check([batch.states[s][p] for s, p in asked], FP32 if dtype == torch.float32 else BF16)
