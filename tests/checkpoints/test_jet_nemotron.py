"""Needs of Jet-Nemotron's layers beside states inside a prefill."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

from tests.checkpoints.layers import (
    HEADS,
    JET_CHANNELS,
    JET_PARTS,
    K_DIM,
    V_DIM,
    Case,
    call_jet,
    copied,
    jet_block,
)


def test_rows_that_pad_a_decode_graph_write_to_no_slot_but_that_for_padding() -> None:
    case = Case([1, 1], [9, 7], [])
    pools = case.pools(JET_CHANNELS, HEADS, V_DIM, K_DIM)
    layer, given = jet_block(case), case.normal(3, sum(JET_PARTS))
    backend = case.backend(GDNAttnBackend, pools)
    live = case.slots.int()
    batch = SimpleNamespace(extend_seq_lens=None, batch_size=3)

    def step(indices: torch.Tensor, rows: int) -> torch.Tensor:
        backend.forward_metadata = SimpleNamespace(
            mamba_cache_indices=indices,
            query_start_loc=torch.arange(rows + 1, dtype=torch.int32),
            state_tracks=None,
        )
        batch.batch_size = rows
        return call_jet(layer, given[:rows], backend, batch)

    before = copied(pools)
    padded = step(torch.cat([live, torch.tensor([-1], dtype=torch.int32)]), 3)
    written = copied(pools)
    others = torch.ones(case.pool_size, dtype=torch.bool)
    others[[0, *live.tolist()]] = False
    assert others[-1]
    assert torch.equal(written.conv[0][others], before.conv[0][others])
    assert torch.equal(written.temporal[others], before.temporal[others])

    pools.conv[0].copy_(before.conv[0])
    pools.temporal.copy_(before.temporal)
    torch.testing.assert_close(padded[:2], step(live, 2))
    for slot in live.tolist():
        assert torch.equal(written.conv[0][slot], pools.conv[0][slot])
        assert written.temporal[slot] == pytest.approx(pools.temporal[slot], abs=1e-6)
