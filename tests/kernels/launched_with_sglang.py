"""Mamba2 states from the chunks that SGLang's own kernels compute; run by test_checkpoint_states.

Here the layouts are SGLang's: what its scan holds when the states are written.
"""

import pytest
import torch
from einops import rearrange
from kernel_cases import DEVICE, INTERPRETED, placed
from launched_checkpoint_states import Mamba2, Pool, fresh, launch, targets
from sglang.kernels.ops.mamba.triton_ops.ssd_chunk_state import _chunk_cumsum_fwd, _chunk_state_fwd
from sglang.kernels.ops.mamba.triton_ops.ssd_state_passing import _state_passing_fwd
from sglang.srt.layers.attention.mamba.mamba2_metadata import Mamba2Metadata

from sglang_hybrid.kernels import checkpoint_states as cs
from tests.checkpoints.launched_scans import run_without_a_device

CLOSE = 1e-4 if INTERPRETED else 5e-3
"""SGLang takes decays from differences of a running sum, ours does not; on a GPU it multiplies in
tf32."""

if INTERPRETED:
    run_without_a_device()


@pytest.mark.parametrize("resumed", [False, True])
def test_mamba2(resumed):
    d, lengths, chunk = fresh(), [1, 37, 16, 5], 16
    batch = Mamba2(d, lengths, (2, 1, 32, 16), torch.float32, resumed)
    cu_seqlens = torch.tensor(batch.cu, dtype=torch.int32, device=DEVICE)
    tokens = batch.cu[-1]
    sequences = torch.arange(len(lengths), device=DEVICE).int()
    owner = torch.repeat_interleave(sequences, cu_seqlens.diff())[None]
    x, B = placed(batch.x)[None], placed(batch.B)[None]
    decays, dt = _chunk_cumsum_fwd(placed(batch.dt)[None], placed(batch.A), chunk)
    states = _chunk_state_fwd(B, x, dt, decays, seq_idx=owner)
    offsets = None
    if resumed:
        _, offsets = Mamba2Metadata._query_start_loc_to_chunk_indices_offsets(
            cu_seqlens, chunk, tokens
        )
    states, _ = _state_passing_fwd(
        rearrange(states, "... p n -> ... (p n)"),
        decays,
        initial_states=placed(batch.initial).flatten(2) if resumed else None,
        seq_idx=owner,
        chunk_size=chunk,
        is_cont_batched=True,
        chunk_offsets=offsets,
    )
    states = rearrange(states, "... (p n) -> ... p n", n=16)
    asked = [(s, p) for s, n in enumerate(lengths) for p in range(1, n + 1)]
    pool = Pool(d, len(asked), (2, 32, 16), torch.float32)
    launch(
        cs.save_ssd_states,
        pool,
        targets(batch.cu, asked, pool.slots),
        x=x[0],
        dt=dt[0],
        A=batch.A,
        B=B[0],
        chunk_states=states[0],
        cu_seqlens=cu_seqlens,
        initial_states=batch.initial,
    )
    pool.check([batch.states[s][p] for s, p in asked], CLOSE)
