"""Segments of a prompt that a small hybrid computes apart, and caches that are composed of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from scripts.train.hybrids import WHOLE, Attention, Cache, Hybrid, Inputs, Recurrent, scan
from sglang_hybrid.kernels.composition import Segment


class Bytes(NamedTuple):
    """Bytes of a segment's keys and values, states, and transitions; windows are left out."""

    kv: int
    states: int
    transitions: int


@dataclass(frozen=True)
class Apart:
    """A segment's part of each layer's cache, behind its seam, computed with no prefix.

    seam: the segment's first tokens, which are computed anew with everything in front of them.
    layers: keys and values [b, t, heads, width], or what the tokens do to a recurrent state, and
    the window behind the segment.
    """

    seam: Tensor
    layers: list[tuple[list[Tensor] | Segment, Tensor]]

    def __getitem__(self, rows: slice) -> Apart:
        """The parts of some of the batch's rows."""
        chosen: list[tuple[list[Tensor] | Segment, Tensor]] = []
        for kept, window in self.layers:
            if isinstance(kept, Segment):
                part: list[Tensor] | Segment = Segment(
                    kept.added[rows], kept.transition[rows], kept.is_matrix
                )
            else:
                part = [each[rows] for each in kept]
            chosen.append((part, window[rows]))
        return Apart(self.seam[rows], chosen)

    @property
    def bytes(self) -> Bytes:
        """The bytes of one row of the batch."""
        kept = [part for part, _ in self.layers]
        segments = [part for part in kept if isinstance(part, Segment)]
        content = [each for part in kept if isinstance(part, list) for each in part]
        return Bytes(
            sum(each[0].nbytes for each in content),
            sum(segment.added[0].nbytes for segment in segments),
            sum(segment.transition[0].nbytes for segment in segments),
        )


def encode(model: Hybrid, tokens: Tensor, seam: int, window: int = WHOLE) -> Apart:
    """Compute segments [b, l] with no prefix."""
    x, layers = model.embedding(tokens), []
    for layer, norm, empty in zip(model.layers, model.norms, model.empty(len(tokens)), strict=True):
        h = norm(x)
        kept: list[Tensor] | Segment
        if isinstance(layer, Recurrent):
            inputs, last = layer.inputs(h, empty[-1])
            y, kept = _scan(inputs, seam, empty[0])
            mixed = layer.output(y, h)
        else:
            assert isinstance(layer, Attention)
            mixed, (*content, last) = layer(h, empty, window)
            kept = [each[:, seam:] for each in content]
        x = x + mixed
        layers.append((kept, last))
    return Apart(tokens[:, :seam], layers)


def _scan(inputs: Inputs, seam: int, zero: Tensor) -> tuple[Tensor, Segment]:
    """Outputs of all tokens, and what those behind the seam do to a state."""

    def of(part: slice) -> Inputs:
        return Inputs(*(None if each is None else each[:, part] for each in inputs))  # type: ignore[arg-type]

    y, entered = inputs.v[:, :0], zero
    if seam:
        y, entered = scan(*of(slice(seam)), zero)
    q, k, v, g, beta = of(slice(seam, None))
    if beta is None:
        later, state = scan(q, k, v, g, beta, entered)
        transition = g.sum(1)[:, :, None].exp()
    else:  # the identity, of which nothing but the transition is left
        size = k.shape[-1]
        one = torch.eye(size).expand(*zero.shape[:2], size, size)
        wider = torch.cat([v, v.new_zeros(*v.shape[:-1], size)], -1)
        later, both = scan(q, k, wider, g, beta, torch.cat([entered, one], 2))
        later, (state, transition) = later[..., : v.shape[-1]], both.split([v.shape[-1], size], 2)
    added = state - Segment(zero, transition, beta is not None).after(entered)
    return torch.cat([y, later], 1), Segment(added, transition, beta is not None)


def append(model: Hybrid, cache: Cache, apart: Apart, window: int = WHOLE) -> Cache:
    """The cache behind a segment, from the cache in front of it. The seam is computed."""
    if apart.seam.shape[1]:
        cache = model(apart.seam, cache, window)[1]
    found: Cache = []
    for before, (kept, last) in zip(cache, apart.layers, strict=True):
        if isinstance(kept, Segment):
            found.append([kept.after(before[0]), last])
        else:
            pairs = zip(before[:-1], kept, strict=True)
            found.append([*(torch.cat(pair, 1) for pair in pairs), last])
    return found


def composed(model: Hybrid, documents: Tensor, seam: int, window: int = WHOLE) -> Cache:
    """The cache behind documents [b, n, l], each of which is computed apart."""
    batch, count, _ = documents.shape
    apart = encode(model, documents.transpose(0, 1).flatten(0, 1), seam, window)
    cache = model.empty(batch)
    for number in range(count):
        cache = append(model, cache, apart[number * batch : (number + 1) * batch], window)
    return cache
