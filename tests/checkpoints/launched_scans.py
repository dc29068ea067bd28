"""SGLang's Triton scans, patched, on a GPU or in Triton's interpreter: a program for test_triton.

Fails unless every state that a prefill is asked for, and every final state, is the one of the
definition. Triton reads TRITON_INTERPRET=1 when it is imported, hence a process of its own.
"""

import contextlib
import os
import random
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from sglang_hybrid import patching

patching.install()

import triton  # noqa: E402
from sglang.kernels.ops.attention.fla import chunk as fla_chunk  # noqa: E402
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
from sglang_hybrid.kernels.gated_delta_rule import l2_normalised  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
HEADS, WIDTH, GROUPS, SIZE = (2, 16, 1, 16) if INTERPRETED else (4, 64, 2, 128)
CHUNK = 16 if INTERPRETED else 64
CLOSE = 1e-4 if INTERPRETED else 5e-3
"""Largest error of a Mamba2 state; on a GPU the scan multiplies in tf32."""
PREFIXES = [0, 3, 64, 0]
SLOTS = 40


def run_without_a_device() -> None:
    """One configuration per kernel, since choosing needs a clock on the device; no device guard."""
    for module in (ssd_bmm, ssd_chunk_scan, ssd_chunk_state, ssd_state_passing):
        for kernel in vars(module).values():
            if hasattr(kernel, "configs"):
                sizes = dict.fromkeys(kernel.configs[0].kwargs, 16)
                kernel.configs = [triton.Config(sizes)]
    torch.cpu.device = lambda index: contextlib.nullcontext()


class Batch:
    """A packed batch with prefixes, asked for states around borders of chunks and at all ends.

    Sequence s has slot ``owners[s]`` and target i ``slots[i]`` of a pool of 40, which is noise; a
    fresh sequence's slot is zero, as SGLang clears it.
    """

    def __init__(self, lengths: list[int], borders: list[int], state: tuple[int, ...]) -> None:
        self.bounds = list(accumulate(lengths, initial=0))
        self.cu_seqlens = torch.tensor(self.bounds, dtype=torch.int32)
        self.asked = [(s, at) for s, n in enumerate(lengths) for at in {*borders, n} if at <= n]
        random.Random(7).shuffle(self.asked)
        order = torch.randperm(SLOTS)
        self.owners, self.slots = order[: len(lengths)], order[len(lengths) :][: len(self.asked)]
        self.pool = torch.randn(SLOTS, *state)
        for s, prefix in enumerate(PREFIXES):
            self.pool[self.owners[s]] *= prefix > 0
        self.before = self.pool.clone()
        positions = [PREFIXES[s] + at for s, at in self.asked]
        with torch.device("cpu"):  # it puts on the device itself what it needs there
            self.tracks = PrefillTracks(
                StateTracks([s for s, _ in self.asked], positions, self.slots),
                PREFIXES,
                lengths,
                self.slots,
                self.owners,
                self.cu_seqlens,
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
    """As MambaMixer2 calls its scan, which reads no initial states if no sequence has any."""
    borders = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK]
    batch = Batch([1, 2 * CHUNK + 5, CHUNK, 5], borders, (HEADS, WIDTH, SIZE))
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
        state_writer=batch.tracks.into(batch.pool),
    )
    batch.pool[batch.owners] = final
    for s, (a, b) in enumerate(pairwise(batch.bounds)):
        start = None if initial is None else initial[s]
        _, states = naive.ssd(x[0, a:b], dt[0, a:b], A, B[0, a:b], C[0, a:b], D, bias, True, start)
        batch.check(s, states, CLOSE)
    batch.check_others()


class PlainDelta:
    """What SGLang's gated delta net does around our kernel, token by token in plain torch: its own
    kernels use block pointers, which the interpreter of a newer Triton no longer has."""

    CHUNK = 64

    def __init__(self) -> None:
        for name in ("l2norm_fwd", "chunk_local_cumsum", "chunk_fwd_o"):
            setattr(fla_chunk, name, getattr(self, name))
        fla_chunk.chunk_gated_delta_rule_fwd_intra = self.intra
        fla_chunk.chunk_gated_delta_rule_fwd_h = self.chunk_states

    def l2norm_fwd(self, x: Tensor) -> Tensor:
        return l2_normalised(x.float()).to(x.dtype)

    def chunk_local_cumsum(self, g: Tensor, cu_seqlens: Tensor, **_: Any) -> Tensor:
        self.g, parts = g, []
        for a, b in pairwise(cu_seqlens.tolist()):
            parts += [part.cumsum(0) for part in g[0, a:b].split(self.CHUNK)]
        return torch.cat(parts)[None]

    def intra(self, v: Tensor, beta: Tensor, **_: Any) -> tuple[None, tuple[Tensor, Tensor], None]:
        return None, (v, beta), None

    def chunk_states(
        self,
        k: Tensor,
        u: tuple[Tensor, Tensor],
        initial_state: Tensor,
        initial_state_indices: Tensor,
        cu_seqlens: Tensor,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """h [1, chunks, H, V, K] in k's dtype, and v_new [1, T, H, V]; final states in place."""
        v, beta = u
        rows, added = [], []
        for s, (a, b) in enumerate(pairwise(cu_seqlens.tolist())):
            at = initial_state_indices[s]
            inputs = (t[0, a:b].float() for t in (k, k, v, self.g, beta))
            states = naive.gated_delta_rule(*inputs, None, False, initial_state[at])[1]
            kept = states[:-1] * self.g[0, a:b].exp()[:, :, None, None]
            keys = k[0, a:b].double().repeat_interleave(v.shape[2] // k.shape[2], 1)
            unit = keys / (keys * keys).sum(-1, keepdim=True)
            added.append(torch.einsum("thvk,thk->thv", states[1:] - kept, unit))
            rows.append(states[: b - a : self.CHUNK])
            initial_state[at] = states[-1].to(initial_state.dtype)
        return torch.cat(rows)[None].to(k.dtype), torch.cat(added)[None].to(v.dtype)

    def chunk_fwd_o(self, v: Tensor, **_: Any) -> Tensor:
        return torch.zeros_like(v)


def check_gated_delta_net() -> None:
    """As SGLang's backend calls the scan: half precision, states in place, ends copied behind."""
    batch = Batch([3, 130, 64, 70], [1, 2, 63, 64, 65, 128], (HEADS, WIDTH, SIZE))
    tokens = batch.bounds[-1]
    q, k = torch.randn(2, 1, tokens, GROUPS, SIZE).half()
    v = torch.randn(1, tokens, HEADS, WIDTH).half()
    g, beta = -torch.rand(1, tokens, HEADS), torch.rand(1, tokens, HEADS).half()
    if INTERPRETED:
        PlainDelta()
    fla_chunk.chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=batch.pool,
        initial_state_indices=batch.owners.int(),
        cu_seqlens=batch.cu_seqlens,
        use_qk_l2norm_in_kernel=True,
        state_writer=batch.tracks.into(batch.pool),
    )
    batch.tracks.copy_ends(batch.pool)
    for s, (a, b) in enumerate(pairwise(batch.bounds)):
        start = batch.before[batch.owners[s]]
        sequence = (t[0, a:b].float() for t in (q, k, v, g, beta))
        states = naive.gated_delta_rule(*sequence, None, True, start)[1]
        batch.check(s, states, 1e-2)
    batch.check_others()


if __name__ == "__main__":
    if INTERPRETED:
        run_without_a_device()
    torch.set_default_device(DEVICE)
    seed = torch.seed() % 2**31
    print("seed", seed)
    torch.manual_seed(seed)
    check_mamba2(resumed=False)
    check_mamba2(resumed=True)
    check_gated_delta_net()
