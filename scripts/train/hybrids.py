"""Small hybrids that are trained in minutes: Mamba-2, gated delta net or KDA, with attention."""

from __future__ import annotations

import math
from typing import Literal

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

Cache = list[list[Tensor]]
"""What each layer keeps of a prefix: keys and values [b, t, heads, width] of an attention layer, a
state [b, heads, width, width] of a recurrent one, and then a window [b, channels, taps - 1].
"""


class Hybrid(nn.Module):
    """A model of tokens below ``words``; attention sees the last ``window`` tokens."""

    def __init__(self, kind: Kind, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, HIDDEN)
        layers = [Attention() if letter == "*" else Recurrent(kind) for letter in PATTERN]
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in layers)
        self.head = nn.Sequential(nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, words, bias=False))

    def forward(
        self, tokens: Tensor, cache: Cache | None = None, window: int = WHOLE
    ) -> tuple[Tensor, Cache]:
        """Output [b, l, HIDDEN] of ``tokens`` [b, l] behind a prefix, for ``head``; a new cache."""
        x, kept = self.embedding(tokens), []
        before = cache or [_empty(letter, len(tokens)) for letter in PATTERN]
        for layer, norm, content in zip(self.layers, self.norms, before, strict=True):
            mixed, content = layer(norm(x), content, window)
            x = x + mixed
            kept.append(content)
        return x, kept


def _empty(letter: str, batch: int) -> list[Tensor]:
    """What a layer keeps of no prefix."""
    window = torch.zeros(batch, 3 * HEADS * WIDTH, TAPS - 1)
    if letter == "*":
        return [*(torch.zeros(batch, 0, HEADS, WIDTH) for _ in "kv"), window]
    return [torch.zeros(batch, HEADS, WIDTH, WIDTH), window]


class Mixer(nn.Module):
    """Queries, keys and values of a short convolution, which both kinds of layers begin with.

    Training starts from a look-up, so it is short: queries and keys are alike, and the keys are of
    the token before.
    """

    def __init__(self) -> None:
        super().__init__()
        inner = HEADS * WIDTH
        self.project = nn.Linear(HIDDEN, 3 * inner, bias=False)
        self.taps = nn.Parameter(torch.randn(3 * inner, TAPS) * 0.1)
        self.out = nn.Linear(inner, HIDDEN, bias=False)
        with torch.no_grad():
            queries, keys, _ = self.project.weight.chunk(3)
            keys.copy_(queries)
            for taps, tap in zip(self.taps.chunk(3), (-1, -2, -1), strict=True):
                taps[:, tap] += 1.0

    def read(self, h: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v [b, l, HEADS, WIDTH], and the window behind them."""
        packed, length = torch.cat([before, self.project(h).mT], -1), h.shape[1]
        taps = (packed[..., i : i + length] * self.taps[:, i, None] for i in range(TAPS))
        mixed = sum(taps, start=h.new_zeros(()))
        q, k, v = F.silu(mixed).mT.unflatten(-1, (3, HEADS, WIDTH)).unbind(2)
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

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        inner, decays = HEADS * WIDTH, HEADS * (WIDTH if kind == "kda" else 1)
        self.gate = nn.Linear(HIDDEN, inner, bias=False)
        self.write = nn.Linear(HIDDEN, HEADS)
        self.decay = nn.Linear(HIDDEN, decays)
        nn.init.constant_(self.decay.bias, -4.0)
        self.rate = nn.Parameter(torch.linspace(0.0, math.log(8.0), decays))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, h: Tensor, cache: list[Tensor], _: int) -> tuple[Tensor, list[Tensor]]:
        q, k, v, before = self.read(h, cache[1])
        step = F.softplus(self.decay(h))
        g = (-self.rate.exp() * step).clamp(STRONGEST).unflatten(-1, (HEADS, -1))
        beta = None
        if self.kind == "mamba2":
            q, v = q * WIDTH**-0.5, v * step[..., None]
        else:
            beta = torch.sigmoid(self.write(h))[..., None]
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        y, state = scan(q, k, v, g, beta, cache[0])
        gated = self.norm(y).flatten(2) * F.silu(self.gate(h))
        return self.out(gated), [state, before]


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
