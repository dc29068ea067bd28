"""Softmax attention of new tokens over a pool of keys and values, in plain torch for a CPU.

Definition: ``naive.attention``. Only new tokens have queries. The keys of a sequence are read in
parts: views of the pool where its slots are consecutive, gathered rows elsewhere, and the new
tokens' own keys. Each part yields an output and the logarithm of its softmax denominator, from
which ``merge`` makes the output over all keys (Milakov & Gimelshein 2018, "Online normalizer
calculation for softmax"; Dao et al. 2023, "Flash-Decoding").

Tensors are token-major: queries [n, Hq, D], keys [T, Hkv, D], values [T, Hkv, Dv], with Hkv
dividing Hq. Products run in torch's own flash kernel for CPUs, except where scores are capped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sglang_hybrid.kernels.kv_slots import BatchReads, Slots

QUERY_BLOCK = 256
"""Queries that are compared at once with the keys of a window, or with capped scores."""

SHORTEST_PIECE = 512
"""Keys for which a thread of its own pays, when few queries meet many keys."""

ROWS_OF_A_BLOCK = 32
"""Query rows up to which the flash kernel gives a head to one thread."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Partial(NamedTuple):
    """Attention over some keys: ``out`` [n, Hq, Dv], and ``lse`` [n, Hq], the logarithm of the sum
    of the exponentiated scores.
    """

    out: Tensor
    lse: Tensor


class Rule(NamedTuple):
    """How scores are made and what a query sees.

    Args:
        scale: factor of every score.
        causal: a new token sees the new tokens up to itself, otherwise all of them.
        window: keys before its own that a causal query sees; None is all.
        cap: scores s become ``cap * tanh(s / cap)``; 0 leaves them.
        sinks: [Hq], a score per head that takes its share of the softmax and has no value.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    cap: float = 0.0
    sinks: Tensor | None = None


def extend(
    q: Tensor,
    own: tuple[Tensor, Tensor] | None,
    pool: tuple[Tensor, Tensor],
    prefix: Sequence[Slots],
    rule: Rule,
) -> Tensor:
    """The new tokens of one sequence: [n, Hq, Dv] for queries q [n, Hq, D].

    ``own`` are the new tokens' keys and values (None where they have none, as in cross attention);
    those before them are in the slots ``prefix`` of ``pool``: with a window or a cap in the order
    of their tokens, otherwise in any.
    """
    own = None if own is None else (own[0].to(q.dtype), own[1].to(q.dtype))
    if rule.cap or (rule.causal and rule.window is not None):
        before = [(_rows(pool[0], slots, q), _rows(pool[1], slots, q)) for slots in prefix]
        parts = [*before, *([own] if own else [])]
        k, v = (torch.cat(t) if len(t) > 1 else t[0] for t in zip(*parts, strict=True))
        return _finished(in_blocks(q, k, v, rule), rule)
    seen = [
        over_all(q, _rows(pool[0], slots, q), _rows(pool[1], slots, q), rule.scale)
        for slots in prefix
    ]
    if own:
        seen.append(over_own(q, *own, rule.scale) if rule.causal else over_all(q, *own, rule.scale))
    return _finished(merge(seen), rule) if seen else q.new_zeros(*q.shape[:2], pool[1].shape[-1])


def decode(q: Tensor, pool: tuple[Tensor, Tensor], reads: BatchReads, rule: Rule) -> Tensor:
    """The newest token of every sequence: [b, Hq, Dv] for queries q [b, Hq, D].

    ``reads`` are the slots of each sequence's tokens, its newest included; where there is a window,
    those inside it only.
    """
    keys, values = pool
    if rule.cap:
        everything = rule._replace(causal=False, window=None)
        return torch.cat(
            [
                extend(q[i : i + 1], None, pool, [slots], everything)
                for i, slots in enumerate(reads.whole)
            ]
        )
    loose = reads.loose
    if not reads.spans and loose is not None and loose.rows is None:
        k, v = (_padded(t, loose.slots, q) for t in pool)
        return _finished(over_padded(q, k, v, rule.scale, loose.mask), rule)
    if len(reads.spans) == 1 and loose is None and reads.spans[0].rows is None:
        slots = reads.spans[0].slots
        part = over_all(q, _rows(keys, slots, q), _rows(values, slots, q), rule.scale)
        return _finished(part, rule)

    shape = (reads.places, *q.shape[:2])
    out = q.new_zeros(*shape, values.shape[-1], dtype=torch.float32)
    lse = q.new_full(shape, -math.inf, dtype=torch.float32)
    for slots, rows, place in reads.spans:
        chosen = q if rows is None else q[rows]
        part = over_all(chosen, _rows(keys, slots, q), _rows(values, slots, q), rule.scale)
        at = place if rows is None else (place, rows)
        out[at], lse[at] = part
    if loose is not None:
        chosen = q if loose.rows is None else q[loose.rows]
        k, v = (_padded(t, loose.slots, q) for t in pool)
        part = over_padded(chosen, k, v, rule.scale, loose.mask)
        at = -1 if loose.rows is None else (-1, loose.rows)
        out[at], lse[at] = part
    return _finished(merge_stacked(out, lse), rule).to(q.dtype)


def over_all(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
    """Every query sees every key. The queries of the heads that share a key head are rows of one
    product, so keys are neither repeated nor read twice.

    The flash kernel gives few rows of a head to one thread. Where that leaves threads idle, long
    keys are cut into pieces.
    """
    n, heads, width = q.shape
    length, kv_heads = k.shape[:2]
    pieces = 1
    if n * heads <= ROWS_OF_A_BLOCK * kv_heads:
        pieces = max(1, min(torch.get_num_threads() // kv_heads, length // SHORTEST_PIECE))
    cut = length // pieces * pieces
    rows = q.view(n, kv_heads, -1, width).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, width)
    k_cut, v_cut = (t[:cut].view(pieces, -1, *t.shape[1:]).transpose(1, 2) for t in (k, v))
    out, lse = _attend(rows.expand(pieces, -1, -1, -1), k_cut, v_cut, scale)
    out = out.view(pieces, kv_heads, -1, n, out.shape[-1]).permute(0, 3, 1, 2, 4).flatten(2, 3)
    lse = lse.view(pieces, kv_heads, -1, n).permute(0, 3, 1, 2).flatten(2, 3)
    if pieces == 1:
        return Partial(out[0], lse[0])
    parts = [Partial(*pair) for pair in zip(out, lse, strict=True)]
    if cut < length:
        parts.append(over_all(q, k[cut:], v[cut:], scale))
    return merge(parts)


def over_own(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
    """Query i sees keys 0 to i."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out, lse = _attend(q, k, v, scale, causal=True)
    return Partial(out[0].transpose(0, 1), lse[0].transpose(0, 1))


def over_padded(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Partial:
    """Query i sees the keys k[i] of its own: k [b, T, Hkv, D], v [b, T, Hkv, Dv].

    ``mask`` [b, T] is added to the scores: 0, and -inf on padding. Every query must see a key.
    """
    kv_heads = k.shape[2]
    rows = q.view(q.shape[0], kv_heads, -1, q.shape[-1])
    mask = None if mask is None else mask[:, None, None].to(q.dtype)
    out, lse = _attend(rows, k.transpose(1, 2), v.transpose(1, 2), scale, mask=mask)
    return Partial(out.reshape(*q.shape[:2], -1), lse.reshape(q.shape[:2]))


def in_blocks(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Partial:
    """The last n of the keys are the queries' own; windows and caps as ``rule`` has them."""
    n, total = q.shape[0], k.shape[0]
    before = total - n
    parts = []
    for begin in range(0, n, QUERY_BLOCK):
        block = q[begin : begin + QUERY_BLOCK]
        low, high = 0, total
        if rule.causal:
            high = before + begin + block.shape[0]
            low = 0 if rule.window is None else max(0, before + begin - rule.window)
        hidden = _hidden(before + begin - low, block.shape[0], high - low, rule)
        score = _capped if rule.cap else _masked
        parts.append(score(block, k[low:high], v[low:high], rule, hidden))
    if len(parts) == 1:
        return parts[0]
    return Partial(*(torch.cat(t) for t in zip(*parts, strict=True)))


def merge(parts: Sequence[Partial]) -> Partial:
    """Attention over the keys of all parts together."""
    if len(parts) == 1:
        return parts[0]
    merged = merge_stacked(*(torch.stack(t) for t in zip(*parts, strict=True)))
    return Partial(merged.out.to(parts[0].out.dtype), merged.lse)


def merge_stacked(out: Tensor, lse: Tensor) -> Partial:
    """``merge`` of parts [p, n, Hq, Dv] and [p, n, Hq]; a part without keys has the lse -inf."""
    share = lse.softmax(0).nan_to_num()  # of a query that sees no key in any part
    return Partial((out * share[..., None]).sum(0), lse.logsumexp(0))


def _rows(pool: Tensor, slots: Slots, like: Tensor) -> Tensor:
    return slots.rows(pool).to(like.dtype)


def _padded(pool: Tensor, slots: Tensor, like: Tensor) -> Tensor:
    rows = pool.index_select(0, slots.flatten()).to(like.dtype)
    return rows.view(*slots.shape, *pool.shape[1:])


def _finished(part: Partial, rule: Rule) -> Tensor:
    """The sink takes its share of the softmax, which changes every weight by the same factor."""
    if rule.sinks is None:
        return part.out
    kept = (part.lse - rule.sinks.float()).sigmoid()
    return (part.out * kept[..., None]).to(part.out.dtype)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [b, Hq, n, Dv], lse [b, Hq, n]) of q [b, Hq, n, D], k [b, Hkv, T, D], v [b, Hkv, T, Dv].

    The flash kernel wants values as wide as keys; zeros change neither scores nor outputs.
    """
    width, value_width = k.shape[-1], v.shape[-1]
    if width > value_width:
        v = pad(v, (0, width - value_width))
    elif width < value_width:
        q, k = (pad(t, (0, value_width - width)) for t in (q, k))
    out, lse = _flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out[..., :value_width], lse


def _hidden(first: int, n: int, total: int, rule: Rule) -> Tensor | None:
    """Which keys [n, total] queries do not see; the first query's own key has index ``first``."""
    if not rule.causal:
        return None
    distance = torch.arange(first, first + n)[:, None] - torch.arange(total)
    hidden = distance < 0
    return hidden if rule.window is None else hidden | (distance > rule.window)


def _masked(q: Tensor, k: Tensor, v: Tensor, rule: Rule, hidden: Tensor | None) -> Partial:
    mask = None
    if hidden is not None:
        mask = q.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)[None, None]
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out, lse = _attend(q, k, v, rule.scale, mask=mask)
    return Partial(out[0].transpose(0, 1), lse[0].transpose(0, 1))


def _capped(q: Tensor, k: Tensor, v: Tensor, rule: Rule, hidden: Tensor | None) -> Partial:
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
    return Partial(
        out.permute(2, 0, 1, 3).reshape(n, heads, -1), lse.permute(2, 0, 1).reshape(n, heads)
    )
