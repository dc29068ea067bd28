"""Softmax attention of a sequence's new tokens over the keys it reads, in plain torch for a CPU.

Definition: ``naive.attention``. The plain twin of ``native/attention.cpp``, which serves wherever a
C++ compiler was found and the types allow it. A sequence's result does not depend on others.

Tensors are token-major: queries [n, Hq, D], keys [T, Hkv, D], values [T, Hkv, Dv], with Hkv
dividing Hq. Products run in torch's own flash kernel for CPUs, except where scores are capped.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

QUERY_BLOCK = 256
"""Queries that are compared at once with the keys of a window, or with capped scores."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

Partial = tuple[Tensor, Tensor]
"""Attention over some keys [n, Hq, Dv], and the logarithm of the sum of each query's exponentiated
scores [n, Hq]."""


class Rule(NamedTuple):
    """The rule by which scores are made, and the keys that a query sees.

    Args:
        scale: factor of every score.
        causal: a new token sees the tokens up to itself, otherwise all of them.
        window: keys before its own that a causal query sees; None is all.
        cap: scores s become ``cap * tanh(s / cap)``; 0 leaves them.
        sinks: [Hq], a score per head that takes its share of the softmax and has no value.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    cap: float = 0.0
    sinks: Tensor | None = None


def attention(q: Tensor, k: Tensor, v: Tensor, rule: Rule, path: Tensor | None = None) -> Tensor:
    """Attention of the last n of T tokens: [n, Hq, Dv] in q's dtype. Without any keys it is zero.

    Shapes: q [n, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv]. ``path`` [n, n]: the new tokens are a tree
    behind the others, and each sees those new ones where its row is true: itself and its ancestors.
    """
    n, total = q.shape[0], k.shape[0]
    if not n or not total:
        return q.new_zeros(*q.shape[:2], v.shape[-1])
    k, v = k.to(q.dtype), v.to(q.dtype)
    if path is not None:
        hidden = _hidden_in_tree(path, total, rule.window)
        out, lse = _masked(q, k, v, rule, hidden)
    elif rule.cap or (rule.causal and rule.window is not None):
        out, lse = _in_blocks(q, k, v, rule)
    elif rule.causal and n > 1:  # torch's kernel is twice as fast where it needs no mask
        out, lse = _flashed(q, k[-n:], v[-n:], rule.scale, causal=True)
        if n < total:
            out, lse = _merged((out, lse), _flashed(q, k[:-n], v[:-n], rule.scale))
    else:
        out, lse = _flashed(q, k, v, rule.scale)
    if rule.sinks is not None:  # a sink changes every weight by the same factor
        out = out * (lse - rule.sinks.float()).sigmoid()[..., None]
    return out.to(q.dtype)


def _merged(one: Partial, other: Partial) -> Partial:
    """Attention over the keys of both (Milakov & Gimelshein 2018, "Online normalizer calculation
    for softmax").
    """
    lse = torch.logaddexp(one[1], other[1])
    first, second = (out * (part - lse).exp()[..., None] for out, part in (one, other))
    return first + second, lse


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Partial:
    """Attention where keys are hidden from queries one by one, or scores are capped."""
    n, total = q.shape[0], k.shape[0]
    parts = []
    for begin in range(0, n, QUERY_BLOCK):
        block = q[begin : begin + QUERY_BLOCK]
        own, low, high = total - n + begin, 0, total
        if rule.causal:
            high = own + block.shape[0]
            low = 0 if rule.window is None else max(0, own - rule.window)
        hidden = _hidden(own - low, block.shape[0], high - low, rule)
        seen = k[low:high], v[low:high]
        parts.append(_masked(block, *seen, rule, hidden))
    out, lse = (torch.cat(t) for t in zip(*parts, strict=True))
    return out, lse


def _hidden(first: int, n: int, total: int, rule: Rule) -> Tensor | None:
    """Mask [n, total] of the keys that queries do not see (None: they see all); the first query's
    own key has index ``first``.
    """
    if not rule.causal:
        return None
    distance = torch.arange(first, first + n)[:, None] - torch.arange(total)
    hidden = distance < 0
    return hidden if rule.window is None else hidden | (distance > rule.window)


def _hidden_in_tree(path: Tensor, total: int, window: int | None) -> Tensor:
    """Mask [n, total] of the keys that the tokens of a tree do not see; see `attention`."""
    older = total - path.shape[0]
    depth = path.sum(-1)
    hidden = torch.cat([path.new_zeros(len(path), older), ~path], dim=1)
    if window is None:
        return hidden
    places = torch.cat([torch.arange(older) - older + 1, depth])
    return hidden | (depth[:, None] - places > window)


def _masked(q: Tensor, k: Tensor, v: Tensor, rule: Rule, hidden: Tensor | None) -> Partial:
    """Attention of queries over all keys but the `hidden` ones [n, T]; None hides none."""
    if rule.cap:
        return _capped(q, k, v, rule, hidden)
    return _flashed(q, k, v, rule.scale, hidden)


def _flashed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    hidden: Tensor | None = None,
    *,
    causal: bool = False,
) -> Partial:
    """Attention by torch's flash kernel: all keys but the `hidden` ones, or, if `causal`, keys 0 to
    i of query i. The kernel wants values as wide as keys; zeros change neither scores nor outputs.
    """
    mask = None
    if hidden is not None:
        mask = q.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)[None, None]
    width, value_width = k.shape[-1], v.shape[-1]
    if width > value_width:
        v = pad(v, (0, width - value_width))
    elif width < value_width:
        q, k = (pad(t, (0, value_width - width)) for t in (q, k))
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out, lse = _flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1)[..., :value_width], lse[0].transpose(0, 1)


def _capped(q: Tensor, k: Tensor, v: Tensor, rule: Rule, hidden: Tensor | None) -> Partial:
    """`_flashed` where scores are capped."""
    n, heads, width = q.shape
    kv_heads = k.shape[1]
    rows = q.view(n, kv_heads, -1, width).permute(1, 2, 0, 3).reshape(kv_heads, -1, width)
    scores = (rows @ k.permute(1, 2, 0)).float().mul_(rule.scale / rule.cap).tanh_().mul_(rule.cap)
    scores = scores.view(kv_heads, -1, n, k.shape[0])
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp_().to(v.dtype).view(kv_heads, -1, k.shape[0])
    out = (weights @ v.transpose(0, 1)).view(kv_heads, -1, n, v.shape[-1])
    return out.permute(2, 0, 1, 3).reshape(n, heads, -1), lse.permute(2, 0, 1).reshape(n, heads)
