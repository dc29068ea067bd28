"""SGLang's Triton scans, patched, on a GPU or in Triton's interpreter: a program for test_triton.
Its arguments are "few" or "all" checks, and the types that inputs of delta rules have.

Fails unless every state that a prefill is asked for, and every final state, is the one of the
definition. Triton reads TRITON_INTERPRET=1 when it is imported, hence a process of its own.
"""

import contextlib
import os
import random
import sys
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.hooks import patching

patching.install()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from sglang.kernels.ops.attention.fla import (  # noqa: E402
    chunk_delta_h,
    chunk_fwd,
    chunk_intra,
    chunk_intra_token_parallel,
    chunk_o,
    cumsum,
    kda,
    l2norm,
    op,
    wy_fast,
)
from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule  # noqa: E402
from sglang.kernels.ops.attention.linear.seg_la import SegLaMeta, seg_la_fwd  # noqa: E402
from sglang.kernels.ops.mamba.triton_ops import (  # noqa: E402
    mamba_chunk_scan_combined,
    ssd_bmm,
    ssd_chunk_scan,
    ssd_chunk_state,
    ssd_state_passing,
)
from sglang.srt.layers.attention.mamba.mamba2_metadata import Mamba2Metadata  # noqa: E402

from sglang_hybrid.checkpoints.tracks import PrefillTracks, StateTracks  # noqa: E402
from sglang_hybrid.kernels import naive  # noqa: E402
from sglang_hybrid.kernels.checkpoint_states import save_lightning_states  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
HEADS, WIDTH, GROUPS, SIZE = (2, 16, 1, 16) if INTERPRETED else (4, 64, 2, 128)
JET_SIZE = 96
"""Size of keys in Jet-Nemotron, whose blocks call the same scan: no power of two."""
CHUNK = 16 if INTERPRETED else 64
CLOSE = 1e-4 if INTERPRETED else 5e-3
"""Largest error of a Mamba2 state; on a GPU the scan multiplies in tf32."""
TYPES = {"float16": (torch.float16, 1e-2), "bfloat16": (torch.bfloat16, 3e-2)}
"""Types of a delta rule's inputs, and the largest error of its states."""

PREFIXES = [0, 3, 64, 0]
SLOTS = 40


MAMBA2 = (ssd_bmm, ssd_chunk_scan, ssd_chunk_state, ssd_state_passing)
KDA = (chunk_intra, chunk_intra_token_parallel, kda)
DELTA = (chunk_delta_h, chunk_fwd, chunk_o, cumsum, l2norm, wy_fast, *KDA)


def run_without_a_device() -> None:
    """One configuration per kernel, since choosing needs a clock on the device; no device guard;
    functions that a module has by a name of its own are looked up again, for the interpreter
    replaces them in Triton's module."""
    for module in (*MAMBA2, *DELTA):
        for kernel in vars(module).values():
            while hasattr(kernel, "fn") and not hasattr(kernel, "configs"):
                kernel = kernel.fn
            if hasattr(kernel, "configs"):
                sizes = kernel.configs[0].kwargs
                if module in MAMBA2:
                    sizes = dict.fromkeys(sizes, 16)
                kernel.configs = [triton.Config(sizes)]
    for module in (op, *DELTA):
        for name in {"exp", "exp2", "log", "log2"} & vars(module).keys():
            setattr(module, name, lambda x, name=name: getattr(tl, name)(x))
    kda.libdevice = SimpleNamespace(exp=kda.exp)
    torch.cpu.device = lambda index: contextlib.nullcontext()  # type: ignore[attr-defined]


class Batch:
    """A packed batch with prefixes, asked for states around borders of chunks and at all ends.

    Sequence s has slot ``owners[s]`` and target i ``slots[i]`` of a pool of 40, which is noise; a
    fresh sequence's slot is zero, as SGLang clears it.
    """

    def __init__(
        self,
        lengths: list[int],
        borders: list[int],
        state: tuple[int, ...],
        *,
        copies_ends: bool,
    ) -> None:
        self.bounds = list(accumulate(lengths, initial=0))
        self.cu_seqlens = torch.tensor(self.bounds, dtype=torch.int32)
        self.asked = [(s, at) for s, n in enumerate(lengths) for at in {*borders, n} if at <= n]
        random.Random(7).shuffle(self.asked)
        order = torch.randperm(SLOTS)
        self.owners, self.slots = order[: len(lengths)], order[len(lengths) :][: len(self.asked)]
        self.pool = torch.randn(SLOTS, *state)
        prefixes = PREFIXES[: len(lengths)]
        for s, prefix in enumerate(prefixes):
            self.pool[self.owners[s]] *= prefix > 0
        self.before = self.pool.clone()
        positions = [prefixes[s] + at for s, at in self.asked]
        with torch.device("cpu"):  # it puts on the device itself what it needs there
            self.tracks = PrefillTracks(
                StateTracks([s for s, _ in self.asked], positions, self.slots),
                prefixes,
                lengths,
                self.slots,
                self.owners,
                self.cu_seqlens,
                copies_ends=copies_ends,
            )

    def check(self, s: int, states: Tensor, tolerance: float) -> None:
        """All of sequence s against its states [tokens + 1, ...] by definition."""
        found = [
            (at, slot)
            for (owner, at), slot in zip(self.asked, self.slots.tolist(), strict=True)
            if owner == s
        ]
        for at, slot in [*found, (len(states) - 1, int(self.owners[s]))]:
            error = (self.pool[slot].double() - states[at]).abs().max()
            scale = states[at].abs().max()
            assert error <= tolerance * scale, f"{s} after {at}: {error:.1e} at {scale:.1e}"

    def check_others(self) -> None:
        """No other slot was written."""
        others = torch.ones(SLOTS, dtype=torch.bool)
        others[self.slots] = others[self.owners] = False
        assert torch.equal(self.pool[others], self.before[others])


def check_mamba2(resumed: bool) -> None:
    """Check the scan as MambaMixer2 calls it: without initial states if no sequence has any."""
    borders = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK]
    batch = Batch([1, 2 * CHUNK + 5, CHUNK, 5], borders, (HEADS, WIDTH, SIZE), copies_ends=False)
    tokens, sequences = batch.bounds[-1], len(batch.bounds) - 1
    x, dt = torch.randn(1, tokens, HEADS, WIDTH), torch.randn(1, tokens, HEADS)
    A, D, bias = -torch.rand(HEADS) - 0.1, torch.randn(HEADS), torch.randn(HEADS)
    B, C = torch.randn(2, 1, tokens, GROUPS, SIZE)
    initial = batch.pool[batch.owners] if resumed else None
    indices = offsets = None
    if resumed:
        indices, offsets = Mamba2Metadata._query_start_loc_to_chunk_indices_offsets(
            batch.cu_seqlens, CHUNK, tokens
        )
    lengths = batch.cu_seqlens.diff()
    batch.tracks.begin(batch.pool)
    _, final, _ = mamba_chunk_scan_combined(
        x,
        dt,
        A,
        B,
        C,
        chunk_size=CHUNK,
        D=D,
        dt_bias=bias,
        initial_states=initial,
        seq_idx=torch.repeat_interleave(torch.arange(sequences).int(), lengths)[None],
        chunk_indices=indices,
        chunk_offsets=offsets,
        cu_seqlens=batch.cu_seqlens,
        dt_softplus=True,
        out=torch.empty_like(x),
        state_dtype=torch.float32,
        return_varlen_states=True,
        return_track_states=True,
    )
    batch.pool[batch.owners] = final
    for s, (a, b) in enumerate(pairwise(batch.bounds)):
        start = None if initial is None else initial[s]
        _, states = naive.ssd(x[0, a:b], dt[0, a:b], A, B[0, a:b], C[0, a:b], D, bias, True, start)
        batch.check(s, states, CLOSE)
    batch.check_others()


def check_gated_delta_net(dtype: torch.dtype, close: float, key_heads: int, size: int) -> None:
    """Check the scan as SGLang's backend calls it: states in place, ends copied behind."""
    batch = Batch([3, 130, 64, 70], [1, 2, 63, 64, 65, 128], (HEADS, WIDTH, size), copies_ends=True)
    tokens = batch.bounds[-1]
    q, k = torch.randn(2, 1, tokens, key_heads, size).to(dtype)
    v = torch.randn(1, tokens, HEADS, WIDTH).to(dtype)
    g, beta = -torch.rand(1, tokens, HEADS), torch.rand(1, tokens, HEADS).to(dtype)
    batch.tracks.begin(batch.pool)
    output, _, _ = chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=batch.pool,
        initial_state_indices=batch.owners.int(),
        cu_seqlens=batch.cu_seqlens,
        use_qk_l2norm_in_kernel=True,
    )
    batch.tracks.finish(batch.pool, None, None)
    check_delta(batch, output, (q, k, v, g, beta), close)


def check_kda(dtype: torch.dtype, close: float) -> None:
    """The same of KDA, whose scan makes its gates itself."""
    batch = Batch([3, 130, 64, 70], [1, 2, 63, 64, 65, 128], (HEADS, WIDTH, SIZE), copies_ends=True)
    tokens = batch.bounds[-1]
    q, k, raw = torch.randn(3, 1, tokens, HEADS, SIZE).to(dtype)
    v, b = torch.randn(1, tokens, HEADS, WIDTH).to(dtype), torch.randn(1, tokens, HEADS).to(dtype)
    A_log, dt_bias = torch.rand(HEADS), torch.randn(HEADS, SIZE) - 2
    batch.tracks.begin(batch.pool)
    output = kda.chunk_kda(
        q,
        k,
        v.clone(),  # the scan writes its output there
        raw,
        b,
        initial_state=batch.pool,
        initial_state_indices=batch.owners.int(),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=batch.cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias.flatten(),
        beta_is_raw=True,
    )
    batch.tracks.finish(batch.pool, None, None)
    g = -A_log.exp()[:, None] * torch.nn.functional.softplus(raw.float() + dt_bias)
    check_delta(batch, output, (q, k, v, g, b.float().sigmoid()), close)


def check_lightning() -> None:
    """Check the scan as SGLang's backend runs it, with the one head size that it has on a GPU;
    states inside are written before it, ends copied behind."""
    size, heads = 128, 2
    batch = Batch([3, 130, 64, 70], [1, 2, 63, 64, 65, 128], (heads, size, size), copies_ends=True)
    q, k, v = torch.randn(3, batch.bounds[-1], heads, size)
    slopes = torch.rand(heads, 1, 1)
    resumed = torch.tensor(PREFIXES) > 0
    batch.tracks.into(batch.pool).save(
        save_lightning_states,
        keys=k,
        values=v,
        slopes=slopes,
        state_indices=batch.owners.int(),
        resumed=resumed,
        cu_seqlens=batch.cu_seqlens,
    )
    meta = SegLaMeta(
        batch_size=len(PREFIXES),
        max_q_length=0,
        q_offsets=batch.cu_seqlens,
        s_offsets=batch.owners.int(),
        q_lengths=batch.cu_seqlens.diff(),
        s_scales=resumed,
    )
    output = seg_la_fwd(q, k, v, batch.pool, slopes, meta)
    batch.tracks.finish(batch.pool, None, None)
    for s, (a, b) in enumerate(pairwise(batch.bounds)):
        start, steps = batch.before[batch.owners[s]].transpose(1, 2), torch.ones(b - a, heads)
        expected, states = naive.ssd(
            *(v[a:b], steps, -slopes.flatten(), k[a:b], q[a:b] / size**0.5), initial_state=start
        )
        error = (output[a:b].double() - expected).abs().max() / expected.abs().max()
        assert error <= CLOSE, f"output of {s}: {error:.1e}"
        batch.check(s, states.transpose(2, 3), CLOSE)
    batch.check_others()


def check_delta(batch: Batch, output: Tensor, inputs: tuple[Tensor, ...], close: float) -> None:
    """Outputs and states of a scan of q, k, v, g and beta, each [1, T, ...]."""
    for s, (a, b) in enumerate(pairwise(batch.bounds)):
        start = batch.before[batch.owners[s]]
        q, k, v, g, beta = (t[0, a:b].float() for t in inputs)
        expected, states = naive.gated_delta_rule(q, k, v, g, beta, None, True, start)
        error = (output[0, a:b].double() - expected).abs().max() / expected.abs().max()
        assert error <= close, f"output of {s}: {error:.1e}"
        batch.check(s, states, close)
    batch.check_others()


def check_that_nothing_is_rounded_on_its_way(dtype: torch.dtype) -> None:
    """A state at the border of a chunk is the one that a prefill which ends there leaves."""
    inputs = torch.randn(3, 1, 70, HEADS, SIZE).to(dtype)
    v, gate = torch.randn(1, 70, HEADS, SIZE).to(dtype), torch.randn(1, 70, HEADS)

    def delta_net(tokens: int, pool: Tensor, **more: Any) -> None:
        q, k, _ = inputs[:, :, :tokens]
        g, beta = -gate[:, :tokens].abs(), gate[:, :tokens].sigmoid().to(dtype)
        chunk_gated_delta_rule(q, k, v[:, :tokens], g, beta, initial_state=pool, **more)

    def by_channel(tokens: int, pool: Tensor, **more: Any) -> None:
        q, k, raw = inputs[:, :, :tokens]
        beta = gate[:, :tokens].sigmoid()
        g = -raw.float().abs()
        kda.chunk_kda(q, k, v[:, :tokens].clone(), g, beta, initial_state=pool, **more)

    for scan in (delta_net, by_channel):
        left = []
        for tokens in (64, 70):
            batch = Batch([tokens], [64], (HEADS, SIZE, SIZE), copies_ends=True)
            batch.pool[batch.owners] = 0
            batch.tracks.begin(batch.pool)
            scan(
                tokens,
                batch.pool,
                initial_state_indices=batch.owners.int(),
                cu_seqlens=batch.cu_seqlens,
                use_qk_l2norm_in_kernel=True,
            )
            batch.tracks.finish(batch.pool, None, None)
            left.append(batch.pool[batch.slots[batch.asked.index((0, 64))]])
        error = (left[1] - left[0]).abs().max() / left[0].abs().max()
        assert error < 1e-5, f"{scan.__name__} in {dtype}: {error:.1e}"


if __name__ == "__main__":
    if INTERPRETED:
        run_without_a_device()
        from scripts.gpu_check import interpreter  # noqa: F401
    torch.set_default_device(DEVICE)
    seed = torch.seed() % 2**31
    print("seed", seed)
    torch.manual_seed(seed)
    which, *names = sys.argv[1:]
    check_mamba2(resumed=True)
    if which == "all":
        check_mamba2(resumed=False)
        check_lightning()
    for name in names:
        dtype, close = TYPES[name]
        check_gated_delta_net(dtype, close, GROUPS, SIZE)
        check_gated_delta_net(dtype, close, HEADS, JET_SIZE)
        check_that_nothing_is_rounded_on_its_way(dtype)
        if which == "all":
            check_kda(dtype, close)
