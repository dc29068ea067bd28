"""Trees of drafted tokens, and which of them a model keeps, as SGLang's speculation calls it.

A request's draft is a tree of n tokens. Node 0 is the newest token of its answer; a path from there
is what may follow. The model reads all nodes in one forward, and `accept_greedy` or
`accept_sampled` walk the path that it would have taken itself. A tree is written in links [b, n]:
of each node its first child (``next_token``) and the next child of its parent (``next_sibling``);
-1 is none.

Functions that stand for one of SGLang's keep its parameters and in-place effects. This module also
stands for ``sglang.kernels.ops.speculative.reconstruct_tree``, whose import needs ``sgl_kernel``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def parents(next_token: Tensor, next_sibling: Tensor) -> Tensor:
    """The parent of each node [b, n], -1 for node 0 and for nodes that hang nowhere."""
    found = torch.full_like(next_token, -1)
    for row, (children, siblings) in enumerate(
        zip(next_token.tolist(), next_sibling.tolist(), strict=True)
    ):
        for node, child in enumerate(children):
            while child >= 0:
                found[row, child] = node
                child = siblings[child]
    return found


def reconstruct_indices_from_tree_mask_func(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """The links of trees that are given as masks: ``tree_mask`` [b * n * n], true where the column
    is an ancestor of the row, or the row itself.

    Writes ``positions`` [b * n] (a node's ancestors behind ``verified_seq_len`` [b] tokens),
    ``retrieve_index`` [b, n] (the place of each node in the packed batch) and both links.
    """
    n = draft_token_num
    above = tree_mask.view(batch_size, n, n).tril(-1)
    nodes = torch.arange(n)
    depth = above.sum(-1)
    parent = torch.where(above, nodes, -1).amax(-1)
    positions.copy_((depth + verified_seq_len[:, None]).flatten())
    retrieve_index.copy_(torch.arange(batch_size * n).view(batch_size, n))
    below = parent[:, None, :] == nodes[:, None]  # [b, node, child]
    children = torch.where(below, nodes, n).amin(-1)
    retrieve_next_token.copy_(children.masked_fill(children == n, -1))
    same = (parent[:, None, :] == parent[..., None]) & (nodes > nodes[:, None])
    same &= parent[..., None] >= 0
    siblings = torch.where(same, nodes, n).amin(-1)
    retrieve_next_sibling.copy_(siblings.masked_fill(siblings == n, -1))


def build_tree(
    parent_list: Tensor,
    top_scores_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """The links and masks of trees that a draft model made, ``topk`` tokens behind each node.

    Node i + 1 of row b is candidate ``top_scores_index[b, i]``; candidate c was made behind
    candidate ``parent_list[b, c // topk]``, and behind node 0 where that quotient is 0. Writes what
    `reconstruct_indices_from_tree_mask_func` writes, and ``tree_mask``: for each node what it sees,
    of all tokens (``tree_mask_mode`` 0) or of the nodes only (1).
    """
    n, taken = num_verify_tokens, 0
    lengths = seq_lens.tolist()
    made_behind, candidates = parent_list.tolist(), top_scores_index.tolist()
    retrieve_index.copy_(torch.arange(len(lengths) * n).view(-1, n))
    retrieve_next_token.fill_(-1)
    retrieve_next_sibling.fill_(-1)
    for row, length in enumerate(lengths):
        chosen = candidates[row]
        path = torch.eye(n, dtype=torch.bool)
        path[:, 0] = True
        parent = [-1] * n
        for node in range(1, n):
            group = chosen[node - 1] // topk
            behind = 0 if group == 0 else chosen.index(made_behind[row][group]) + 1
            parent[node] = behind
            path[node] |= path[behind]
        for node in range(n - 1, 0, -1):
            retrieve_next_sibling[row, node] = retrieve_next_token[row, parent[node]]
            retrieve_next_token[row, parent[node]] = node
        positions[row * n : (row + 1) * n] = path.sum(-1) - 1 + length
        seen = path if tree_mask_mode else torch.cat([path.new_ones(n, length), path], dim=1)
        tree_mask[taken : taken + seen.numel()] = seen.flatten()
        taken += seen.numel()


def accept_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Follow each tree as long as a child is what the model says behind its parent.

    Shapes: ``candidates`` and ``target_predict`` [b, n] are the drafted tokens and the model's next
    token behind each. Writes ``accept_index`` [b, depth] (places of the accepted nodes in the
    packed batch, then -1), ``accept_token_num`` [b] (accepted nodes besides node 0), and
    ``predicts`` [b * n]: behind each accepted node the next token. Returns these three.
    """
    most = accept_index.shape[1]
    drafted, said = candidates.tolist(), target_predict.tolist()
    children, siblings = retrieve_next_token.tolist(), retrieve_next_sibling.tolist()
    accept_index.fill_(-1)
    for row, places in enumerate(retrieve_index.tolist()):
        node, accepted = 0, [0]
        while len(accepted) < most:
            child = children[row][node]
            while child >= 0 and drafted[row][child] != said[row][node]:
                child = siblings[row][child]
            if child < 0:
                break
            accepted.append(child)
            node = child
        for at, one in enumerate(accepted):
            accept_index[row, at] = places[one]
            predicts[places[one]] = said[row][one]
        accept_token_num[row] = len(accepted) - 1
    return predicts, accept_index, accept_token_num


def accept_sampled(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """`accept_greedy` where the model's next token is drawn from ``target_probs`` [b, n, V], with
    ``uniform_samples`` [b, n] in [0, 1).

    What is drawn behind a node is its next token, drafted or not: answers have the distribution
    that they have without drafts. Raises ValueError for thresholds other than 1, which accept more.
    """
    if threshold_single != 1.0 or threshold_acc != 1.0:
        raise ValueError(
            "--speculative-accept-threshold-single and --speculative-accept-threshold-acc are not "
            "available on the CPU platform: there answers have the model's distribution."
        )
    sums = target_probs.double().cumsum(-1)
    drawn = torch.searchsorted(
        sums, uniform_samples.double()[..., None] * sums[..., -1:], right=True
    )
    accept_greedy(
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        drawn[..., 0].clamp(max=target_probs.shape[-1] - 1),
    )


def keep_top_k(probs: Tensor, top_ks: Tensor) -> Tensor:
    """``probs`` [m, V] with all but the ``top_ks`` [m] likeliest tokens at zero, summing to 1."""
    ordered = probs.sort(dim=-1, descending=True).values
    least = ordered.gather(1, (top_ks.long().clamp(1, probs.shape[1]) - 1)[:, None])
    kept = torch.where(probs >= least, probs, 0)
    return kept / kept.sum(-1, keepdim=True)


def keep_top_p(probs: Tensor, top_ps: Tensor) -> Tensor:
    """``probs`` [m, V] with all but the likeliest tokens that together have ``top_ps`` [m] at zero,
    summing to 1.
    """
    ordered, tokens = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    kept = torch.zeros_like(probs).scatter_(
        1, tokens, torch.where(before < top_ps[:, None], ordered, 0)
    )
    return kept / kept.sum(-1, keepdim=True)
