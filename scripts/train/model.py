"""Nemotron-H in plain differentiable PyTorch, over batches of sequences of equal length."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_hybrid.extensions.cpu.models.architectures.nemotron_h import HybridSizes

CHUNK = 64
EPSILON = 1e-5


class NemotronH(nn.Module):
    """The model, with parameters named as in its checkpoint (dots become slashes).

    ``words`` is the number of tokens that have a row in the embedding and in the head. The others,
    ``absent`` of them, have zero rows: as inputs they are nothing, as outputs their logits are 0.
    """

    def __init__(self, sizes: HybridSizes, words: int, absent: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.absent = absent
        mamba, attention, hidden = sizes.mamba, sizes.attention, sizes.mamba.hidden
        put = self._put
        put("model.embeddings.weight", torch.randn(words + 1, hidden) * 0.1)
        deep = (2 * len(sizes.pattern)) ** -0.5
        for index, kind in enumerate(sizes.pattern):
            layer = f"model.layers.{index}"
            mixer = f"{layer}.mixer"
            put(f"{layer}.norm.weight", torch.ones(hidden))
            if kind == "M":
                rows = mamba.inner + mamba.conv_width + mamba.heads
                put(f"{mixer}.in_proj.weight", _linear(rows, hidden))
                put(
                    f"{mixer}.conv1d.weight",
                    torch.randn(mamba.conv_width, 1, mamba.conv_kernel) * 0.3,
                )
                put(f"{mixer}.conv1d.bias", torch.zeros(mamba.conv_width))
                put(f"{mixer}.A_log", torch.linspace(0.0, math.log(16.0), mamba.heads))
                put(f"{mixer}.D", torch.ones(mamba.heads))
                steps = torch.logspace(-3, -1, mamba.heads)[torch.randperm(mamba.heads)]
                put(f"{mixer}.dt_bias", steps + torch.log(-torch.expm1(-steps)))
                put(f"{mixer}.norm.weight", torch.ones(mamba.inner))
                put(f"{mixer}.out_proj.weight", _linear(hidden, mamba.inner) * deep)
            elif kind == "*":
                queries, keys = (
                    attention.heads * attention.head_dim,
                    attention.kv_heads * attention.head_dim,
                )
                put(f"{mixer}.q_proj.weight", _linear(queries, hidden))
                put(f"{mixer}.k_proj.weight", _linear(keys, hidden))
                put(f"{mixer}.v_proj.weight", _linear(keys, hidden))
                put(f"{mixer}.o_proj.weight", _linear(hidden, queries) * deep)
            else:
                put(f"{mixer}.up_proj.weight", _linear(sizes.mlp, hidden))
                put(f"{mixer}.down_proj.weight", _linear(hidden, sizes.mlp) * deep)
        put("model.norm_f.weight", torch.ones(hidden))
        put("lm_head.weight", torch.randn(words, hidden) * hidden**-0.5)

    def _put(self, name: str, value: Tensor) -> None:
        self.register_parameter(name.replace(".", "/"), nn.Parameter(value))

    def __getitem__(self, name: str) -> Tensor:
        return self.get_parameter(name.replace(".", "/"))

    def checkpoint(self) -> dict[str, Tensor]:
        """The parameters by their names in the checkpoint."""
        return {name.replace("/", "."): value.detach() for name, value in self.named_parameters()}

    def forward(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        """Logits [count, words] after those of ``tokens`` [b, l] where ``wanted`` [b, l] is true.

        A token without a row is given as the number ``words``.
        """
        table = self["model.embeddings.weight"]
        known = (tokens < len(table) - 1)[..., None]
        x = F.embedding(tokens, table) * known
        for index, kind in enumerate(self.sizes.pattern):
            layer = f"model.layers.{index}"
            h = _norm(x, self[f"{layer}.norm.weight"])
            mix = {"M": self._mamba, "*": self._attention, "-": self._mlp}[kind]
            x = x + mix(f"{layer}.mixer", h)
        return F.linear(_norm(x[wanted], self["model.norm_f.weight"]), self["lm_head.weight"])

    def loss(self, tokens: Tensor, answered: Tensor) -> Tensor:
        """Mean cross entropy, nats per answer token, over the whole vocabulary."""
        wanted = torch.zeros_like(answered)
        wanted[:, :-1] = answered[:, 1:]
        logits = self(tokens, wanted)
        others = logits.new_full((len(logits), 1), math.log(self.absent))
        return F.cross_entropy(torch.cat([logits, others], 1), tokens[:, 1:][answered[:, 1:]])

    def _mlp(self, mixer: str, h: Tensor) -> Tensor:
        up = F.relu(F.linear(h, self[f"{mixer}.up_proj.weight"])).square()
        return F.linear(up, self[f"{mixer}.down_proj.weight"])

    def _attention(self, mixer: str, h: Tensor) -> Tensor:
        shape, (b, length, _) = self.sizes.attention, h.shape
        q, k, v = (
            F.linear(h, self[f"{mixer}.{name}_proj.weight"])
            .view(b, length, heads, -1)
            .transpose(1, 2)
            for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads))
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(found.transpose(1, 2).flatten(2), self[f"{mixer}.o_proj.weight"])

    def _mamba(self, mixer: str, h: Tensor) -> Tensor:
        shape, (b, length, _) = self.sizes.mamba, h.shape
        projected = F.linear(h, self[f"{mixer}.in_proj.weight"])
        gate, packed, step = projected.split((shape.inner, shape.conv_width, shape.heads), -1)
        taps, bias = self[f"{mixer}.conv1d.weight"], self[f"{mixer}.conv1d.bias"]
        before = F.pad(packed, (0, 0, shape.conv_kernel - 1, 0))
        packed = bias + sum(
            before[:, tap : tap + length] * taps[:, 0, tap] for tap in range(shape.conv_kernel)
        )
        keys = shape.groups * shape.state
        x, B, C = F.silu(packed).split((shape.inner, keys, keys), -1)
        y = _scan(
            x.view(b, length, shape.heads, -1),
            F.softplus(step + self[f"{mixer}.dt_bias"]),
            -self[f"{mixer}.A_log"].exp(),
            B.view(b, length, shape.groups, -1),
            C.view(b, length, shape.groups, -1),
        )
        y = y + x.view_as(y) * self[f"{mixer}.D"][:, None]
        gated = y.flatten(2) * F.silu(gate)
        normed = _norm(gated.unflatten(-1, (shape.groups, -1)), gated.new_ones(())).flatten(2)
        return F.linear(normed * self[f"{mixer}.norm.weight"], self[f"{mixer}.out_proj.weight"])


def _linear(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns).div(columns**0.5)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


def _scan(x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Mamba-2's recurrence in chunks (Dao & Gu 2024, section 6): states that begin at zero.

    `sglang_hybrid.kernels.ssd` computes the same in place, which cannot be differentiated.

    Shapes: x [b, l, H, P], step [b, l, H], A [H] (negative), B and C [b, l, G, N]; y is as x.
    ``l`` is a multiple of `CHUNK`.
    """
    heads, groups = x.shape[2], B.shape[2]
    x, step, B, C = (
        t.unflatten(1, (-1, CHUNK)).transpose(2, 3) for t in (x, step[..., None], B, C)
    )
    inputs = x * step  # [b, c, H, L, P]
    total = (step[..., 0] * A[:, None]).cumsum(-1)  # [b, c, H, L]
    B, C = (t.repeat_interleave(heads // groups, 2) for t in (B, C))  # [b, c, H, L, N]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    y = (C @ B.transpose(-1, -2) * decay) @ inputs
    left = (total[..., -1:] - total).exp()[..., None]
    added = (inputs * left).transpose(-1, -2) @ B  # [b, c, H, P, N]
    state = torch.zeros_like(added[:, 0])
    entering = []
    for chunk in range(added.shape[1]):
        entering.append(state)
        state = state * total[:, chunk, :, -1, None, None].exp() + added[:, chunk]
    read = C @ torch.stack(entering, 1).transpose(-1, -2) * total.exp()[..., None]
    return (y + read).transpose(2, 3).flatten(1, 2)
