"""Trees of drafts on the CPU against SGLang's own kernels; run by test_cpu_ops_drafts.

SGLang's kernels run in Triton's interpreter.
"""

import os
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent import (
    fused_sigmoid_gating_delta_rule_update,
)
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update
from sglang.kernels.ops.speculative import cache_locs, eagle, gather_spec_extras, spec_tree
from test_cpu_ops_drafts import DeltaDraft, Draw, WindowDraft, chosen_candidates, drawn_links

from sglang_hybrid.extensions.cpu.ops import (
    draft_steps,
    draft_trees,
    gated_delta,
    kimi_delta,
    mamba2,
)

SEEDS = range(int(os.environ.get("EXAMPLES", "6")))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", [0, 1])
def test_trees_are_built_alike(seed, mode):
    d = Draw(seed)
    lengths = torch.tensor([5, 1, 9])
    parents, candidates, topk, steps, n = chosen_candidates(d, len(lengths))
    found = []
    builds: Any = (draft_trees.build_tree, spec_tree.sgl_build_tree_kernel_triton)
    for build in builds:
        size = 3 * n * n + (int(lengths.sum()) * n if mode == 0 else 0)
        mask, positions = torch.ones(size, dtype=torch.bool), torch.zeros(3 * n, dtype=torch.long)
        written = [torch.full((3, n), -1) for _ in range(3)]
        build(parents, candidates, lengths, mask, positions, *written, topk, steps, n, mode)
        found.append([mask, positions, *written])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_tokens_are_accepted(seed):
    d = Draw(seed)
    n, most = 7, 5
    children, siblings = drawn_links(d, 4, n)
    places = torch.arange(4 * n).view(4, n)
    drafted, said = (d.integers(0, 3, 4, n) for _ in range(2))
    found = []
    for accept in (draft_trees.accept_greedy, spec_tree.verify_tree_greedy_triton):
        predicts = torch.zeros(4 * n, dtype=torch.int32)
        accepted = torch.full((4, most), -1, dtype=torch.int32)
        counts = torch.zeros(4, dtype=torch.int32)
        accept(predicts, accepted, counts, drafted, places, children, siblings, said)
        found.append([accepted, counts, predicts[accepted[accepted >= 0].long()]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][1].max() > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_slots_go_to_the_same_places(seed):
    d = Draw(seed)
    table = d.order(6 * 40).view(6, 40).int()
    rows, lengths = torch.tensor([4, 1, 3]), torch.tensor([7, 0, 12])
    found = []
    for draft in (draft_steps.draft_slots, cache_locs.assign_draft_cache_locs_contiguous_func):
        slots = torch.zeros(3 * 5, dtype=torch.long)
        draft(rows, table, lengths, slots, 1, 5)
        found.append(slots)
    assert torch.equal(*found)
    accepted = torch.tensor([[0, 2, -1], [5, -1, -1], [10, 11, 14]], dtype=torch.int32)
    moved = []
    for fill in (draft_steps.fill_accept_out_cache_loc, eagle.fill_accept_out_cache_loc_func):
        slots = torch.zeros(9, dtype=torch.long)
        fill(accepted, found[0], slots, 9)
        moved.append(slots)
    assert torch.equal(*moved)
    said, last = d.integers(0, 9, 9).int(), []
    for write in (draft_steps.last_accepted, eagle.fill_bonus_tokens_func):
        tokens = torch.zeros(3, dtype=torch.int32)
        write(said, torch.tensor([2, 1, 3]), tokens, 3, 3)
        last.append(tokens)
    assert torch.equal(*last)
    buffers = [d.normal(6, 2), d.integers(0, 9, 6, 2), d.integers(0, 9, 6), d.normal(6, 8)]
    theirs = gather_spec_extras.gather_spec_extras(rows, *buffers)
    assert all(
        torch.equal(a, b)
        for a, b in zip(theirs, draft_steps.gather_rows(rows, *buffers), strict=True)
    )


@pytest.mark.parametrize("tree", [False, True])
def test_windows_behind_drafts(tree):
    draft = WindowDraft(Draw(1), tree)
    found = [draft.run(update) for update in (mamba2.causal_conv1d_update, causal_conv1d_update)]
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("by_channel", [False, True])
def test_delta_states_behind_drafts(tree, by_channel):
    draft = DeltaDraft(Draw(2), tree, by_channel)
    module = kimi_delta if by_channel else gated_delta
    mine = draft.run(module.fused_sigmoid_gating_delta_rule_update)
    other = draft.run(fused_sigmoid_gating_delta_rule_update)
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
