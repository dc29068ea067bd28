"""The state behind several segments of tokens that were each computed alone, from zero.

A recurrent layer is linear in its state: a segment multiplies the state that it is entered with by
its transition, and adds the state that it leaves when it is entered with zero. So these two are
all of a segment, and two segments together are a segment again. The transition of a layer that
only decays is a number for each head (Mamba2, lightning attention), for each channel of the key
(gated linear attention) or for each element (Mamba1). That of a delta rule is a matrix [Dk, Dk] for
each head.

Definition: the state behind all tokens, of the functions in ``naive.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import torch
import triton
from torch import Tensor

from sglang_hybrid.kernels import composition_triton as kernels
from sglang_hybrid.kernels.gated_delta_rule import L2_EPS, gated_delta_rule_prefill

TILE_ROWS = 16
"""Rows of a transition that one program takes through a segment."""


@dataclass(frozen=True)
class Segment:
    """A map of states S [..., V, K]. A segment leaves ``S * transition + added`` of S, or, if its
    transition is a matrix [..., K, K], ``S @ transition + added``.
    """

    added: Tensor
    transition: Tensor
    is_matrix: bool = False

    def after(self, state: Tensor) -> Tensor:
        """The state behind the segment, which is entered with ``state``."""
        return self._multiply(state) + self.added

    def then(self, later: Segment) -> Segment:
        """Both as one segment. Raises ValueError if only one transition is a matrix."""
        if self.is_matrix != later.is_matrix:
            raise ValueError("A transition by a matrix and one by numbers cannot be composed.")
        return Segment(later.after(self.added), later._multiply(self.transition), self.is_matrix)

    def _multiply(self, by: Tensor) -> Tensor:
        return by @ self.transition if self.is_matrix else by * self.transition


def compose(segments: Sequence[Segment]) -> Segment:
    """Several segments in their order as one. Raises ValueError for none."""
    if not segments:
        raise ValueError("At least one segment must be given; there is none to compose.")
    return reduce(Segment.then, segments)


def decaying_segments(
    final_states: Tensor, log_decay: Tensor, cu_seqlens: Sequence[int]
) -> list[Segment]:
    """The segments of a packed batch of a layer that only decays, from the states that its scan
    leaves when it starts with zeros.

    Shapes: final_states [S, ...], log_decay [T, ...], the logarithm of each token's decay, which
    broadcasts to a state: for Mamba2 ``dt * A`` as [T, H, 1, 1], for Mamba1 as [T, D, N], with a
    decay for each channel of the key [T, H, 1, K]. Sums are in float64.
    """
    sums = log_decay.double().cumsum(0)
    sums = torch.cat([torch.zeros_like(sums[:1]), sums])
    return [
        Segment(added, (sums[end] - sums[begin]).exp().to(added.dtype))
        for added, (begin, end) in zip(final_states, pairwise(cu_seqlens), strict=True)
    ]


def delta_rule_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: list[int],
    *,
    scale: float | None = None,
    l2norm: bool = False,
) -> tuple[Tensor, list[Segment]]:
    """Gated delta net, or KDA, over a packed batch of segments: (o [T, Hv, Dv], the segments).

    The scan has Dk more rows of values, which are zero, and its state begins with the identity in
    these rows. Nothing is added to them, so they end as the transition. With Dk = Dv = 128 this
    makes the scan 1.4 times as long; a product of the chunks' matrices [Dk, Dk], in a pass of its
    own, makes it 1.5 times as long, of KDA 2.6 times. Arguments as in ``gated_delta_rule_prefill``.
    """
    keys, values = k.shape[-1], v.shape[-1]
    heads, count = v.shape[1], len(cu_seqlens) - 1
    wider = torch.cat([v, v.new_zeros(*v.shape[:2], keys)], -1)
    start = torch.zeros(count, heads, values + keys, keys, device=v.device)
    start[..., values:, :] = torch.eye(keys, device=v.device)
    scanned = gated_delta_rule_prefill(
        q, k, wider, g, beta, cu_seqlens, scale=scale, l2norm=l2norm, initial_states=start
    )
    segments = [
        Segment(state[..., :values, :], state[..., values:, :], is_matrix=True)
        for state in scanned.final_states
    ]
    return scanned.y[..., :values], segments


def delta_rule_transitions(
    k: Tensor, g: Tensor, beta: Tensor, cu_seqlens: list[int], *, l2norm: bool = False
) -> Tensor:
    """The transitions of `delta_rule_segments` alone, float32 [S, Hv, Dk, Dk]: a scan of values of
    zero, from the identity. That is what a prefill needs beside its own scan. On a GPU it is one
    launch for each segment, and nothing waits for the device.
    """
    if k.is_cuda:
        return launched_transitions(k, g, beta, cu_seqlens, l2norm=l2norm)
    heads, keys, count = beta.shape[1], k.shape[-1], len(cu_seqlens) - 1
    identity = torch.eye(keys, device=k.device).expand(count, heads, keys, keys)
    zeros = k.new_zeros(len(k), heads, keys)
    return gated_delta_rule_prefill(
        k, k, zeros, g, beta, cu_seqlens, l2norm=l2norm, initial_states=identity
    ).final_states


def launched_transitions(
    k: Tensor, g: Tensor, beta: Tensor, cu_seqlens: list[int], *, l2norm: bool = False
) -> Tensor:
    """`delta_rule_transitions` by the Triton kernel. In memory, the numbers of a key, and of its
    decays where each channel has one, stand side by side.
    """
    tokens, heads, keys = len(k), beta.shape[1], k.shape[-1]
    if k.stride(-1) != 1 or (g.dim() == 3 and g.stride(-1) != 1) or tokens < cu_seqlens[-1]:
        raise ValueError(
            f"k has strides {k.stride()}, g {g.stride()}, and segments end at token "
            f"{cu_seqlens[-1]} of {tokens}; rows must be dense, and no segment longer."
        )
    shape = (len(cu_seqlens) - 1, heads, keys, keys)
    found = torch.eye(keys, device=k.device).expand(shape).contiguous()  # of no tokens
    for one, (begin, end) in zip(found, pairwise(cu_seqlens), strict=True):
        if begin == end:
            continue
        of_segment = [each[begin:end] for each in (k, g, beta)]
        strides = [stride for each in of_segment for stride in each.stride()[:2]]
        kernels.delta_transition[(heads, triton.cdiv(keys, TILE_ROWS))](
            *(one, *of_segment, end - begin, *strides, L2_EPS),
            KEY=keys,
            HEADS_PER_KEY=heads // k.shape[1],
            PER_CHANNEL=g.dim() == 3,
            NORMALISE=l2norm,
            TILE_ROWS=TILE_ROWS,
            TILE_KEY=triton.next_power_of_2(keys),
        )
    return found


def decay_transition(log_decay: Tensor) -> Tensor:
    """The transition of one segment of a layer that only decays, float32. log_decay: of each token,
    [T, ...], as for `decaying_segments`. Sums are in float64.
    """
    return log_decay.double().sum(0).exp().float()
