"""Recurrent layers of models that servers run, and their pools and launches on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_hybrid.checkpoints.compile_kernels import prefill
from sglang_hybrid.checkpoints.scans import Save
from sglang_hybrid.kernels import checkpoint_states as cs

TAPS = 4


@dataclass(frozen=True)
class Shape:
    """A recurrent layer: sizes as in the model's config.json on Hugging Face.

    Mamba2: heads of states [width, size], B and C in ``groups``, ``chunk`` tokens between its chunk
    states. Gated delta net (``chunk`` None): value heads of states [Dv, Dk], keys in ``groups``.
    ``more`` are the columns of its projection beside the convolution's.
    """

    name: str
    hidden: int
    heads: int
    width: int
    groups: int
    size: int
    chunk: int | None
    more: int

    @property
    def inner(self) -> int:
        return self.heads * self.width

    @property
    def save(self) -> Save:
        """The kernel that leaves its states."""
        return cs.save_delta_states if self.chunk is None else cs.save_ssd_states

    @property
    def channels(self) -> int:
        """The channels of the convolution."""
        return self.inner + 2 * self.groups * self.size

    def pools(self, slots: int, device: str) -> tuple[Tensor, Tensor]:
        """Windows in bfloat16 and states in float32, as servers keep them by default."""
        windows = torch.zeros(slots, self.channels, TAPS - 1, device=device, dtype=torch.bfloat16)
        states = torch.zeros(slots, self.heads, self.width, self.size, device=device)
        return windows, states


LAYERS = (
    Shape("Nemotron-H-8B", 4096, 128, 64, 8, 128, 128, 8192 + 128),
    Shape("Qwen3-Next-80B", 2048, 32, 128, 16, 128, None, 4096 + 64),
)
SMALL = (
    Shape("a small Mamba2", 64, 2, 32, 1, 16, 64, 64 + 2),
    Shape("a small gated delta net", 64, 2, 16, 1, 16, None, 32 + 4),
)
"""Shapes for Triton's interpreter."""


def state_launches(
    layer: Shape, tokens: int, positions: list[int], device: str
) -> Callable[[], None]:
    """The launches of a prefill of so many tokens that leaves states at these positions."""
    windows, states = layer.pools(len(positions) + 1, device)
    # A part of what the layer projects, as in SGLang.
    projected = torch.zeros(
        tokens, layer.channels + layer.more, device=device, dtype=torch.bfloat16
    )
    inputs = projected[:, layer.more :]
    launches = prefill(windows, states, inputs, positions, layer.save, layer.chunk or 0)

    def run() -> None:
        for launch in launches.values():
            launch()

    return run


def spread(tokens: int, count: int) -> list[int]:
    """Positions all over a prefill, in the middle of chunks where it is long."""
    return [max(1, (i + 1) * tokens // (count + 1) - tokens // 100) for i in range(count)]
