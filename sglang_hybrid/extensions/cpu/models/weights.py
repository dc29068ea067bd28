"""Seeded weights of the tiny models.

Every tensor has its own random stream, named after the tensor, so that its values depend neither on
the order in which tensors are made nor on what else the model contains.

The scales are those of a trained network rather than of a fresh one: activations keep unit size
through the layers, and the recurrent layers speak loudly enough that a wrong state shows in the
next token.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_hybrid.extensions.cpu.models.tokenizer import FIRST_TEXT_ID, VOCAB_SIZE

Array = npt.NDArray[np.float32]

LOGIT_STD = 4.0
"""Standard deviation of the logits over the vocabulary: about the entropy of a trained model."""


@dataclass(frozen=True)
class Mamba2Shape:
    """Sizes of a Mamba-2 mixer. ``heads * head_dim`` is its inner width."""

    hidden: int
    heads: int
    head_dim: int
    groups: int
    state: int
    conv_kernel: int = 4

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_width(self) -> int:
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of a grouped-query attention layer."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class DeltaNetShape:
    """Sizes of a gated delta net. ``taps`` are those of its convolution."""

    key_heads: int
    value_heads: int
    head_dim: int
    taps: int


@dataclass
class Weights:
    """The tensors of one model, filled by name."""

    seed: int
    tensors: dict[str, Array] = field(default_factory=dict)

    def random(self, name: str) -> np.random.Generator:
        """The random stream of the tensor ``name``."""
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        return np.random.Generator(np.random.Philox(int.from_bytes(digest[:16], "little")))

    def put(self, name: str, values: npt.ArrayLike) -> Array:
        """Set the tensor ``name``, as float32; returns it."""
        tensor: Array = np.ascontiguousarray(values, dtype=np.float32)
        self.tensors[name] = tensor
        return tensor

    def ones(self, name: str, *shape: int) -> None:
        """A tensor of ones, as norms begin with."""
        self.put(name, np.ones(shape))

    def zeros(self, name: str, *shape: int) -> None:
        """A tensor of zeros, as norms begin with that store a weight's difference from one."""
        self.put(name, np.zeros(shape))

    def normal(self, name: str, *shape: int, std: float) -> Array:
        values = self.random(name).standard_normal(shape, dtype=np.float32)
        return self.put(name, values * np.float32(std))

    def linear(self, name: str, rows: int, columns: int, gain: float = 1.0) -> Array:
        """A ``[rows, columns]`` projection that maps inputs of unit size to size ``gain``."""
        return self.normal(name, rows, columns, std=gain / columns**0.5)

    def embedding(self, name: str, hidden: int, std: float = 0.5) -> None:
        """The input embedding of a model with a separate output projection."""
        self.normal(name, VOCAB_SIZE, hidden, std=std)

    def head(self, name: str, hidden: int, scale: float = 1.0) -> None:
        """The output projection (or tied embedding) whose products, times ``scale``, are logits.

        Special tokens and single bytes stay far below the best logit: greedy output neither ends
        early nor breaks a UTF-8 sequence.
        """
        values = self.linear(name, VOCAB_SIZE, hidden, gain=LOGIT_STD / scale)
        values[:FIRST_TEXT_ID] *= 0.1

    def attention(
        self, prefix: str, hidden: int, shape: AttentionShape, gain: float, output: str = "o_proj"
    ) -> None:
        """Query, key, value and output projections without biases."""
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.linear(f"{prefix}.q_proj.weight", queries, hidden, gain=1.5)
        self.linear(f"{prefix}.k_proj.weight", keys, hidden, gain=1.5)
        self.linear(f"{prefix}.v_proj.weight", keys, hidden)
        self.linear(f"{prefix}.{output}.weight", hidden, queries, gain=gain)

    def gated_attention(self, prefix: str, hidden: int, shape: AttentionShape, gain: float) -> None:
        """Attention of Qwen3-Next and Qwen3.5: `q_proj` yields, head by head, a query and an output
        gate; queries and keys are normed.
        """
        self.attention(prefix, hidden, shape, gain)
        self.linear(f"{prefix}.q_proj.weight", 2 * shape.heads * shape.head_dim, hidden)
        self.zeros(f"{prefix}.q_norm.weight", shape.head_dim)
        self.zeros(f"{prefix}.k_norm.weight", shape.head_dim)

    def gated_mlp(self, prefix: str, hidden: int, inner: int, gain: float) -> None:
        """Gate, up and down projections of a SwiGLU layer."""
        self.linear(f"{prefix}.gate_proj.weight", inner, hidden)
        self.linear(f"{prefix}.up_proj.weight", inner, hidden)
        self.linear(f"{prefix}.down_proj.weight", hidden, inner, gain=gain)

    def experts(self, prefix: str, hidden: int, inner: int, count: int, bias: str) -> None:
        """A router whose choice has a ``bias`` of that name, ``count`` SwiGLU experts, and one that
        all tokens share, as DeepSeek-V3 has them.
        """
        self.linear(f"{prefix}.gate.weight", count, hidden, gain=1.5)
        self.normal(f"{prefix}.gate.{bias}", count, std=0.05)
        for expert in range(count):
            self.gated_mlp(f"{prefix}.experts.{expert}", hidden, inner, gain=1.0)
        self.gated_mlp(f"{prefix}.shared_experts", hidden, inner, gain=1.0)

    def delta_net(self, prefix: str, hidden: int, shape: DeltaNetShape) -> None:
        """A gated delta net as Qwen3-Next has it."""
        keys, values = shape.key_heads * shape.head_dim, shape.value_heads * shape.head_dim
        self.linear(f"{prefix}.in_proj_qkvz.weight", 2 * keys + 2 * values, hidden)
        self.linear(f"{prefix}.in_proj_ba.weight", 2 * shape.value_heads, hidden, gain=0.7)
        self.conv(f"{prefix}.conv1d.weight", 2 * keys + values, shape.taps)
        self.decay_rates(f"{prefix}.A_log", shape.value_heads)
        self.time_steps(f"{prefix}.dt_bias", shape.value_heads)
        self.ones(f"{prefix}.norm.weight", shape.head_dim)
        self.linear(f"{prefix}.out_proj.weight", hidden, values, gain=1.2)

    def decay_rates(self, name: str, *shape: int) -> None:
        """Logarithms of rates between 1 and 16 (Mamba-2 initialises in the same range)."""
        self.put(name, self.random(name).uniform(0.0, np.log(16.0), shape))

    def time_steps(self, name: str, count: int) -> None:
        """Biases whose softplus is log-uniform between 1e-3 and 1e-1 (Mamba, section 3.6)."""
        steps = np.exp(self.random(name).uniform(np.log(1e-3), np.log(1e-1), count))
        self.put(name, steps + np.log(-np.expm1(-steps)))

    def conv(self, name: str, channels: int, taps: int) -> Array:
        """A depthwise convolution that keeps the size of its input."""
        return self.normal(name, channels, 1, taps, std=1.0 / taps**0.5)

    def mamba2(self, prefix: str, shape: Mamba2Shape, gain: float, norm: bool = True) -> None:
        """The tensors of a Mamba-2 mixer, named as transformers names them.

        The rows of ``in_proj`` are gate, x, B, C, dt; the channels of ``conv1d`` are x, B, C.
        B and C are larger than x, so that what the state recalls outweighs the skip path ``D``.
        """
        rows = shape.inner + shape.conv_width + shape.heads
        in_proj = self.linear(f"{prefix}.in_proj.weight", rows, shape.hidden)
        in_proj[-shape.heads :] *= 0.5
        conv = self.conv(f"{prefix}.conv1d.weight", shape.conv_width, shape.conv_kernel)
        conv[shape.inner :] *= 3.0
        self.normal(f"{prefix}.conv1d.bias", shape.conv_width, std=0.1)
        self.decay_rates(f"{prefix}.A_log", shape.heads)
        self.ones(f"{prefix}.D", shape.heads)
        self.time_steps(f"{prefix}.dt_bias", shape.heads)
        if norm:
            self.ones(f"{prefix}.norm.weight", shape.inner)
        self.linear(f"{prefix}.out_proj.weight", shape.hidden, shape.inner, gain=gain)
