"""Drafts of speculative decoding on the CPU: trees, what is accepted, and the states behind each
drafted token, which are those of reading its path token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import kernel_cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import FP32, assert_close, few, seeds
from torch import Tensor

pytest.importorskip("sglang")
from test_checkpoint_states import run

from sglang_hybrid.extensions.cpu.ops import (
    draft_steps,
    draft_trees,
    gated_delta,
    kimi_delta,
    mamba2,
)
from sglang_hybrid.kernels.attention import Rule, attention

ROWS, NODES = 3, 5


class Draw(kernel_cases.Draw):
    """Random integers, too."""

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """low <= each < high."""
        return torch.randint(low, high, shape, generator=self.generator)


def links(parents: Tensor) -> tuple[Tensor, Tensor]:
    """First children and next siblings [b, n] of trees with these parents."""
    children, siblings = torch.full_like(parents, -1), torch.full_like(parents, -1)
    for row, line in enumerate(parents.tolist()):
        for node in range(len(line) - 1, 0, -1):
            siblings[row, node] = children[row, line[node]]
            children[row, line[node]] = node
    return children, siblings


def drawn_parents(d: Draw, rows: int, n: int) -> Tensor:
    """Each node hangs on an earlier one; -1 for node 0."""
    return torch.tensor([[-1, *(d.integer(0, k - 1) for k in range(1, n))] for _ in range(rows)])


def drawn_links(d: Draw, rows: int, n: int) -> tuple[Tensor, Tensor]:
    return links(drawn_parents(d, rows, n))


def paths(parents: Tensor) -> Tensor:
    """The nodes of its tree that each node sees [b, n, n]: itself and its ancestors."""
    seen = torch.eye(parents.shape[1], dtype=torch.bool).repeat(len(parents), 1, 1)
    for row, line in enumerate(parents.tolist()):
        for node in range(1, len(line)):
            seen[row, node] |= seen[row, line[node]]
    return seen


def chosen_candidates(d: Draw, rows: int) -> tuple[Tensor, Tensor, int, int, int]:
    """The drafts of a model: (parents of groups, chosen candidates, topk, steps, nodes).

    Candidates come in groups of topk: one behind node 0, then in each step one behind each of topk
    candidates of the step before.
    """
    topk, steps, n = d.integer(1, 3), 4, 5
    groups: list[list[int]] = []
    chosen: list[list[int]] = []
    for _ in range(rows):
        behind, last = [-1], list(range(topk))
        for step in range(1, steps):
            of_last = [last[i] for i in d.order(len(last))[:topk].tolist()]
            first = 1 + (step - 1) * topk
            behind += of_last
            last = [(first + g) * topk + k for g in range(topk) for k in range(topk)]
        kept: set[int] = set()
        while len(kept) < n - 1:
            open_ = [c for c in range(len(behind) * topk) if c not in kept]
            open_ = [c for c in open_ if c // topk == 0 or behind[c // topk] in kept]
            kept.add(open_[d.integer(0, len(open_) - 1)])
        groups.append(behind)
        chosen.append(sorted(kept))
    return torch.tensor(groups), torch.tensor(chosen), topk, steps, n


@few
@given(seeds)
def test_links_and_masks_are_the_same_trees(seed: int) -> None:
    parents = drawn_parents(Draw(seed), ROWS, NODES)
    children, siblings = links(parents)
    assert torch.equal(draft_trees.parents(children, siblings), parents)
    seen, lengths = paths(parents), torch.tensor([4, 0, 9])
    positions = torch.empty(ROWS * NODES, dtype=torch.long)
    places, first, following = (torch.empty(ROWS, NODES, dtype=torch.long) for _ in range(3))
    draft_trees.reconstruct_indices_from_tree_mask_func(
        seen.flatten(), lengths, positions, places, first, following, ROWS, NODES
    )
    assert torch.equal(first, children)
    assert torch.equal(following, siblings)
    assert places.flatten().tolist() == list(range(ROWS * NODES))
    assert torch.equal(positions.view(ROWS, NODES), seen.sum(-1) - 1 + lengths[:, None])


def test_what_is_drawn_has_the_models_distribution() -> None:
    """Drafted or not: node 1 hangs on node 0, and both say what was drawn."""
    rows, d = 6000, Draw(3)
    probs = torch.tensor([[[0.5, 0.3, 0.2, 0.0], [0.1, 0.0, 0.2, 0.7]]]).expand(rows, 2, 4)
    predicts = torch.zeros(rows * 2, dtype=torch.int32)
    accepted, counts = torch.zeros(rows, 2, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    children = torch.tensor([[1, -1]]).expand(rows, 2)
    draft_trees.accept_sampled(
        *(predicts, accepted, counts, torch.zeros(rows, 2, dtype=torch.long)),
        *(torch.arange(rows * 2).view(rows, 2), children, torch.full((rows, 2), -1)),
        *(d.uniform(0, 1, rows, 2), d.uniform(0, 1, rows), probs, torch.zeros_like(probs)),
    )
    first, second = predicts.view(rows, 2).T
    taken = counts == 1
    assert torch.equal(taken, first == 0)  # the draft said 0
    for tokens, right in ((first, probs[0, 0]), (second[taken], probs[0, 1])):
        found = torch.bincount(tokens.long(), minlength=4) / len(tokens)
        assert (found - right).abs().max() < 4 * 0.5 / len(tokens) ** 0.5
        assert not found[right == 0].any()
    with pytest.raises(ValueError, match="accept-threshold-single"):
        draft_trees.accept_sampled(
            *(predicts, accepted, counts, probs, probs, probs, probs, probs, probs, probs, probs),
            threshold_single=0.5,
        )


def test_likely_tokens_are_kept() -> None:
    probs = torch.tensor([[0.5, 0.1, 0.3, 0.1], [0.25, 0.25, 0.4, 0.1]])
    kept = draft_trees.keep_top_k(probs, torch.tensor([2, 4]))
    assert_close(kept, torch.tensor([[0.625, 0, 0.375, 0], [0.25, 0.25, 0.4, 0.1]]), FP32)
    kept = draft_trees.keep_top_p(probs, torch.tensor([0.5, 0.6]))
    assert_close(kept.sum(-1), torch.ones(2), FP32)
    assert [(row > 0).sum().item() for row in kept] == [1, 2]


@few
@given(seeds, st.booleans(), st.sampled_from([None, 4]), st.sampled_from([0.0, 2.0]))
def test_a_token_of_a_tree_sees_its_path(
    seed: int, sink: bool, window: int | None, cap: float
) -> None:
    """Its output is that of a sequence with nothing but its path behind the older tokens."""
    d, older = Draw(seed), 6
    q, k, v = d.normal(NODES, 4, 8), d.normal(older + NODES, 2, 8), d.normal(older + NODES, 2, 8)
    path = paths(drawn_parents(d, 1, NODES))[0]
    rule = Rule(0.5, window=window, cap=cap, sinks=d.normal(4) if sink else None)
    y = attention(q, k, v, rule, path)
    for node in range(NODES):
        read = torch.cat([torch.arange(older), older + path[node].nonzero()[:, 0]])
        alone = attention(q[node : node + 1], k[read], v[read], rule)
        assert_close(y[node : node + 1], alone, FP32)


class Draft:
    """Drafts of `ROWS` sequences: chains without ``parents``, trees with them.

    ``buffer`` gets the states behind nodes, at the rows ``places``; ``slots`` are the sequences'.
    """

    def __init__(self, d: Draw, tree: bool, pool: Tensor) -> None:
        self.parents = drawn_parents(d, ROWS, NODES) if tree else None
        self.pool, self.slots = pool, torch.tensor([4, 1, 2], dtype=torch.int32)
        self.places = torch.tensor([0, 2, 1], dtype=torch.int32)
        self.buffer = torch.zeros(ROWS, NODES, *pool.shape[1:])

    @property
    def behind(self) -> Tensor:
        """States behind the nodes of each sequence."""
        return self.buffer[self.places.long()]

    def walked(self, step: Callable[[Tensor, int, int], Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs and states of each node, by reading its path alone from the sequence's state.

        ``step(states, row, node)`` reads one token with a pool of one state.
        """
        outputs, states = [], []
        for row in range(ROWS):
            line = (
                list(range(-1, NODES - 1)) if self.parents is None else self.parents[row].tolist()
            )
            for node in range(NODES):
                path, at = [], node
                while at >= 0:
                    path.insert(0, at)
                    at = line[at]
                state = self.pool[self.slots[row]][None].clone()
                for one in path:
                    y = step(state, row, one)
                outputs.append(y)
                states.append(state[0])
        shape = ROWS, NODES
        return torch.stack(outputs).unflatten(0, shape), torch.stack(states).unflatten(0, shape)


class WindowDraft(Draft):
    """Drafts through a convolution of 6 channels."""

    def __init__(self, d: Draw, tree: bool) -> None:
        super().__init__(d, tree, d.normal(6, 6, 3))
        self.x, self.weight, self.bias = d.normal(ROWS, 6, NODES), d.normal(6, 4), d.normal(6)

    def run(self, update: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        self.buffer.zero_()
        trees: dict[str, Any] = {}
        if self.parents is not None:
            children, siblings = links(self.parents)
            above = torch.zeros_like(children)
            trees = {"retrieve_next_token": children, "retrieve_next_sibling": siblings}
            trees["retrieve_parent_token"] = above
        y = update(
            *(self.x.clone(), self.pool.clone(), self.weight, self.bias, "silu"),
            conv_state_indices=self.slots,
            intermediate_conv_window=self.buffer,
            intermediate_state_indices=self.places,
            **trees,
        )
        if self.parents is not None:
            assert torch.equal(above[:, 1:], self.parents[:, 1:])
        return y, self.behind.clone()


class DeltaDraft(Draft):
    """Drafts through a delta rule with 2 key heads and 4 value heads; KDA has 4 of both."""

    def __init__(self, d: Draw, tree: bool, by_channel: bool) -> None:
        super().__init__(d, tree, d.normal(6, 4, 16, 16))
        tokens, heads = ROWS * NODES, 4 if by_channel else 2
        self.by_channel = by_channel
        self.q, self.k = d.normal(1, tokens, heads, 16), d.normal(1, tokens, heads, 16)
        self.v, self.b = d.normal(1, tokens, 4, 16), d.normal(tokens, 4)
        self.a = d.normal(tokens, 4 * 16 if by_channel else 4)
        self.A_log, self.dt_bias = d.uniform(-1, 1, 4), d.normal(4 * 16 if by_channel else 4)

    def run(self, update: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        self.buffer.zero_()
        pool = self.pool.clone()
        o = update(
            A_log=self.A_log,
            a=self.a,
            dt_bias=self.dt_bias,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            q=self.q,
            k=self.k,
            v=self.v,
            b=self.b,
            initial_state_source=pool,
            initial_state_indices=self.slots,
            cu_seqlens=torch.arange(ROWS + 1, dtype=torch.int32) * NODES,
            use_qk_l2norm_in_kernel=True,
            is_kda=self.by_channel,
            disable_state_update=True,
            intermediate_states_buffer=self.buffer,
            intermediate_state_indices=self.places,
            cache_steps=NODES,
            retrieve_parent_token=self.parents,
        )
        assert torch.equal(pool, self.pool)
        return o, self.behind.clone()

    def step(self, state: Tensor, row: int, node: int) -> Tensor:
        at = row * NODES + node
        mixed = torch.cat([t[0, at].flatten() for t in (self.q, self.k, self.v)])[None]
        decode = (
            kimi_delta.fused_recurrent_kda_packed_decode
            if self.by_channel
            else gated_delta.fused_recurrent_gated_delta_rule_packed_decode
        )
        out = torch.empty(1, 1, 4, 16)
        decode(
            *(mixed, self.a[at : at + 1], self.b[at : at + 1], self.A_log, self.dt_bias),
            *(16**-0.5, state, out, torch.zeros(1, dtype=torch.int32)),
            use_qk_l2norm_in_kernel=True,
        )
        return out[0, 0]


@few
@given(seeds, st.booleans())
def test_windows_behind_drafts_are_those_of_their_paths(seed: int, tree: bool) -> None:
    draft = WindowDraft(Draw(seed), tree)

    def step(state: Tensor, row: int, node: int) -> Tensor:
        token = draft.x[row : row + 1, :, node]
        return mamba2.causal_conv1d_update(token, state, draft.weight, draft.bias, "silu")[0]

    y, behind = draft.run(mamba2.causal_conv1d_update)
    outputs, states = draft.walked(step)
    assert_close(y.transpose(1, 2), outputs, FP32)
    assert_close(behind, states, FP32)


@few
@given(seeds, st.booleans(), st.booleans())
def test_delta_states_behind_drafts_are_those_of_their_paths(
    seed: int, tree: bool, by_channel: bool
) -> None:
    draft = DeltaDraft(Draw(seed), tree, by_channel)
    module = kimi_delta if by_channel else gated_delta
    o, behind = draft.run(module.fused_sigmoid_gating_delta_rule_update)
    outputs, states = draft.walked(draft.step)
    assert_close(o[0].unflatten(0, (ROWS, NODES)), outputs, FP32)
    assert_close(behind, states, FP32)


@few
@given(seeds, st.booleans())
def test_mamba2_states_behind_drafts_are_those_of_their_paths(seed: int, tree: bool) -> None:
    d = Draw(seed)
    draft = Draft(d, tree, d.normal(6, 4, 8, 16))
    x, dt = d.normal(ROWS, NODES, 4, 8), d.uniform(0, 0.5, ROWS, NODES, 4)
    B, C, A = d.normal(ROWS, NODES, 2, 16), d.normal(ROWS, NODES, 2, 16), d.uniform(-2, -1, 4)
    D, bias = d.normal(4), d.normal(4)

    def update(state: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, **more: Any) -> Tensor:
        out = torch.empty_like(x)
        mamba2.selective_state_update(
            *(state, x, dt[..., None].expand(*dt.shape, 8)),
            *(A[:, None, None].expand(4, 8, 16), B, C, D[:, None].expand(4, 8)),
            dt_bias=bias[:, None].expand(4, 8),
            dt_softplus=True,
            out=out,
            **more,
        )
        return out

    pool = draft.pool.clone()
    y = update(
        *(pool, x, dt, B, C),
        state_batch_indices=draft.slots,
        disable_state_update=True,
        intermediate_states_buffer=draft.buffer,
        intermediate_state_indices=draft.places,
        retrieve_parent_token=draft.parents,
    )
    assert torch.equal(pool, draft.pool)

    def step(state: Tensor, row: int, node: int) -> Tensor:
        one = (slice(row, row + 1), node)
        return update(state, x[one], dt[one], B[one], C[one])[0]

    outputs, states = draft.walked(step)
    assert_close(y, outputs, FP32)
    assert_close(draft.behind, states, FP32)


def test_the_accepted_state_becomes_the_requests() -> None:
    """The tracked state goes to its slot; -1 is none."""
    d = Draw(7)
    pool = SimpleNamespace(
        temporal=d.normal(2, 8, 4),
        conv=[d.normal(2, 8, 3)],
        intermediate_ssm=d.normal(2, 3, NODES, 4),
        intermediate_conv_window=[d.normal(2, 3, NODES, 3)],
    )
    for states, verified in (
        (pool.temporal, pool.intermediate_ssm),
        (pool.conv[0], pool.intermediate_conv_window[0]),
    ):
        before = states.clone()
        draft_steps.scatter_accepted_states(
            pool,
            torch.tensor([5, 2, 0]),
            torch.tensor([1, 4, 0]),
            torch.tensor([7, 3, 6]),
            torch.tensor([0, -1, -1]),
        )
        for slot, row, node in ((5, 0, 1), (2, 1, 4), (0, 2, 0), (7, 0, 0)):
            assert torch.equal(states[:, slot], verified[:, row, node])
        assert torch.equal(states[:, [1, 3, 4, 6]], before[:, [1, 3, 4, 6]])


@pytest.mark.slow
def test_drafts_are_those_of_sglangs_kernels() -> None:
    pytest.importorskip("triton")
    run(["launched_drafts.py"], "not slow", 6, 250)
