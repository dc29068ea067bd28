"""Small hybrids that are trained in minutes: Mamba-2, gated delta net or KDA, with attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Kind = Literal["mamba2", "gdn", "kda"]

PATTERN = "R*R"
"""Layers: R is recurrent, * is attention without positions."""
HIDDEN, HEADS, WIDTH, TAPS = 64, 2, 64, 4
"""Numbers per token, heads, numbers of a head's key and value, taps of a short convolution."""
CHUNK = 16
STRONGEST = -4.0
"""Strongest log decay of a token. A chunk's decays are products of factors that float32 holds."""
WHOLE = 1 << 30
"""Window of attention that sees every token."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model: its layers as in `PATTERN`, and numbers as beside `HIDDEN`."""

    pattern: str = PATTERN
    hidden: int = HIDDEN
    heads: int = HEADS
    width: int = WIDTH

    @property
    def inner(self) -> int:
        return self.heads * self.width


TINY = Sizes()

Cache = list[list[Tensor]]
"""The tensors that each layer keeps of a prefix: keys and values [b, t, heads, width] of attention,
a state [b, heads, width, width] of a recurrent layer, and then a window [b, channels, taps - 1].
"""


class Inputs(NamedTuple):
    """The arguments of `scan` beside a state."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None


class Hybrid(nn.Module):
    """A model of tokens below ``words``; attention sees the last ``window`` tokens."""

    def __init__(self, kind: Kind, words: int, sizes: Sizes = TINY) -> None:
        super().__init__()
        self.sizes, hidden = sizes, sizes.hidden
        self.embedding = nn.Embedding(words, hidden)
        layers = [
            Attention(sizes) if letter == "*" else Recurrent(kind, sizes)
            for letter in sizes.pattern
        ]
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in layers)
        self.head = nn.Sequential(nn.RMSNorm(hidden), nn.Linear(hidden, words, bias=False))

    def forward(
        self, tokens: Tensor, cache: Cache | None = None, window: int = WHOLE
    ) -> tuple[Tensor, Cache]:
        """Output [b, l, hidden] of ``tokens`` [b, l] behind a prefix, for ``head``; a new cache."""
        x, kept = self.embedding(tokens), []
        before = cache or self.empty(len(tokens))
        for layer, norm, content in zip(self.layers, self.norms, before, strict=True):
            mixed, content = layer(norm(x), content, window)
            x = x + mixed
            kept.append(content)
        return x, kept

    def empty(self, batch: int) -> Cache:
        """The cache of an empty prefix."""
        heads, width, found = self.sizes.heads, self.sizes.width, Cache()
        for letter in self.sizes.pattern:
            window = torch.zeros(batch, 3 * self.sizes.inner, TAPS - 1)
            if letter == "*":
                found.append([*(torch.zeros(batch, 0, heads, width) for _ in "kv"), window])
            else:
                found.append([torch.zeros(batch, heads, width, width), window])
        return found


class Mixer(nn.Module):
    """Queries, keys and values of a short convolution, which both kinds of layers begin with.

    Training starts from a look-up, so it is short: queries and keys are alike, and the keys are of
    the token before.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, inner = sizes, sizes.inner
        self.project = nn.Linear(sizes.hidden, 3 * inner, bias=False)
        self.taps = nn.Parameter(torch.randn(3 * inner, TAPS) * 0.1)
        self.out = nn.Linear(inner, sizes.hidden, bias=False)
        with torch.no_grad():
            queries, keys, _ = self.project.weight.chunk(3)
            keys.copy_(queries)
            for taps, tap in zip(self.taps.chunk(3), (-1, -2, -1), strict=True):
                taps[:, tap] += 1.0

    def read(self, h: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v [b, l, heads, width], and the window behind them."""
        packed, length = torch.cat([before, self.project(h).mT], -1), h.shape[1]
        taps = (packed[..., i : i + length] * self.taps[:, i, None] for i in range(TAPS))
        mixed = sum(taps, start=h.new_zeros(()))
        shape = (3, self.sizes.heads, self.sizes.width)
        q, k, v = F.silu(mixed).mT.unflatten(-1, shape).unbind(2)
        return q, k, v, packed[..., length:]


class Attention(Mixer):
    """Softmax attention without positions."""

    def forward(self, h: Tensor, cache: list[Tensor], window: int) -> tuple[Tensor, list[Tensor]]:
        q, k, v, before = self.read(h, cache[2])
        k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        places = torch.arange(k.shape[1])
        distance = places[-h.shape[1] :, None] - places
        seen = (distance >= 0) & (distance < window)
        q, keys, values = (each.transpose(1, 2) for each in (q, k, v))
        found = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        return self.out(found.transpose(1, 2).flatten(2)), [k, v, before]


class Recurrent(Mixer):
    """A scan, a norm and a gate.

    Mamba-2 (Dao & Gu 2024) writes values scaled by a step; a gated delta net (Yang, Kautz &
    Hatamizadeh 2024) writes corrections of what it recalls; KDA (Kimi Team 2025) does so with a
    decay for each channel of the key.
    """

    def __init__(self, kind: Kind, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.kind, hidden = kind, sizes.hidden
        decays = sizes.inner if kind == "kda" else sizes.heads
        self.gate = nn.Linear(hidden, sizes.inner, bias=False)
        self.write = nn.Linear(hidden, sizes.heads)
        self.decay = nn.Linear(hidden, decays)
        nn.init.constant_(self.decay.bias, -4.0)
        self.rate = nn.Parameter(torch.linspace(0.0, math.log(8.0), decays))
        self.norm = nn.RMSNorm(sizes.width)

    def forward(self, h: Tensor, cache: list[Tensor], _: int) -> tuple[Tensor, list[Tensor]]:
        inputs, before = self.inputs(h, cache[1])
        y, state = scan(*inputs, cache[0])
        return self.output(y, h), [state, before]

    def inputs(self, h: Tensor, before: Tensor) -> tuple[Inputs, Tensor]:
        """The inputs of the scan, and the window behind them."""
        q, k, v, window = self.read(h, before)
        step = F.softplus(self.decay(h))
        g = (-self.rate.exp() * step).clamp(STRONGEST).unflatten(-1, (self.sizes.heads, -1))
        if self.kind == "mamba2":
            return Inputs(q * self.sizes.width**-0.5, k, v * step[..., None], g, None), window
        beta = torch.sigmoid(self.write(h))[..., None]
        return Inputs(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, g, beta), window

    def output(self, y: Tensor, h: Tensor) -> Tensor:
        """The layer's output from that of the scan."""
        gated = self.norm(y).flatten(2) * F.silu(self.gate(h))
        output: Tensor = self.out(gated)
        return output


def scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [b, l, H, Dv], and the state behind them, in a form that can be differentiated.

    It is `naive.gated_delta_rule` with scale 1; without ``beta`` nothing is corrected, which is
    `naive.ssd` with steps in ``v``. Shapes: q and k [b, l, H, Dk], v [b, l, H, Dv], g [b, l, H, Dk
    or 1] not below `STRONGEST`, beta [b, l, H, 1], state [b, H, Dv, Dk].
    """
    length = q.shape[1]
    chunk = min(CHUNK, length)
    padding = (0, 0, 0, 0, 0, -length % chunk)
    q, k, v, g, write = (
        F.pad(each, padding).unflatten(1, (-1, chunk)).transpose(2, 3)  # [b, c, H, L, D]
        for each in (q, k, v, g, q if beta is None else beta)
    )
    total = g.cumsum(-2)
    middle = total[..., chunk // 2, None, :]
    later, earlier = (total - middle).exp(), k * (middle - total).exp()
    since, last = total.exp(), total[..., -1:, :]
    scores = (q * later @ earlier.mT).tril()
    alone = v
    if beta is not None:
        system = (write * k * later @ earlier.mT).tril(-1)
        right = write * torch.cat([v, k * since], -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        alone, weight = solved.split((v.shape[-1], k.shape[-1]), -1)
    added, kept = k * (last - total).exp(), last.exp()
    entering, written = [], []
    for number in range(q.shape[1]):
        entering.append(state)
        u = alone[:, number]
        if beta is not None:
            u = u - weight[:, number] @ state.mT
        written.append(u)
        state = state * kept[:, number] + u.mT @ added[:, number]
    y = scores @ torch.stack(written, 1) + q * since @ torch.stack(entering, 1).mT
    return y.transpose(2, 3).flatten(1, 2)[:, :length], state
