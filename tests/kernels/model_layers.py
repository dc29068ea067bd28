"""Recurrent layers of real models, and a prefill of one as far as our Triton kernels see it.

Its tensors have the shapes, types and strides that they have in SGLang's layers on a GPU.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from sglang_hybrid.checkpoints.scans import Save
from sglang_hybrid.checkpoints.tracks import PrefillTracks, StateTracks
from sglang_hybrid.kernels import checkpoint_states as cs

TAPS, SLOTS = 4, 20


@dataclass(frozen=True)
class Layer:
    """A recurrent layer on one rank: heads and groups (key heads) are that rank's.

    ``chunk`` None: the gated delta net, with states [Dv, Dk] of width Dv and size Dk. Without
    ``groups`` no kernel takes states from the scan: Mamba1, with one value per head, and a short
    convolution, whose states have no size.
    """

    heads: int
    width: int
    groups: int
    size: int
    chunk: int | None
    more: int
    """Columns of the projection beside the convolution's."""
    dtype: torch.dtype = torch.bfloat16
    states: torch.dtype = torch.float32
    taps: int = TAPS
    per_channel: bool = False
    """True if each channel of a key has a decay of its own (KDA)."""
    unconvolved: int = 0
    """Channels of a kept window in front of those that are convolved (Jet-Nemotron)."""
    constant: bool = False
    """True if a head has one decay for all tokens (lightning attention), and no convolution."""

    @property
    def inner(self) -> int:
        return self.heads * self.width

    @property
    def save(self) -> Save | None:
        """The kernel that leaves its states."""
        if not self.groups:
            return None
        if self.constant:
            return cs.save_lightning_states
        if self.per_channel:
            return cs.save_kda_states
        return cs.save_delta_states if self.chunk is None else cs.save_ssd_states

    @property
    def kernel(self) -> str | None:
        """The name of the kernel that ``save`` launches."""
        if self.save is None or self.constant:
            return "lightning_state" if self.constant else None
        return "delta_state" if self.chunk is None else "ssd_state"

    @property
    def channels(self) -> int:
        if self.constant:
            return 0
        return self.inner + 2 * self.groups * self.size - self.unconvolved

    def pools(self) -> tuple[Tensor, Tensor]:
        """The second layer's slices of pools of three layers."""
        channels = self.unconvolved + self.channels
        windows = torch.empty(3, SLOTS, channels, self.taps - 1, dtype=self.dtype)
        if self.per_channel:  # SGLang keeps KDA's the other way round
            windows = windows.view(3, SLOTS, TAPS - 1, self.channels).transpose(2, 3)
        states = torch.empty(3, SLOTS, self.heads, self.width, self.size, dtype=self.states)
        return windows[1], states[1]


LAYERS = {
    "Nemotron-H-8B": Layer(128, 64, 8, 128, 128, 8192 + 128),
    "Nemotron-H-8B, one of 8 ranks": Layer(16, 64, 1, 128, 128, 1024 + 16),
    "Falcon-H1-7B": Layer(24, 128, 1, 256, 256, 3072 + 24),
    "Granite-4.0-H-Small": Layer(128, 64, 1, 128, 256, 8192 + 128),
    "Granite-4.0-H-Small, bfloat16 states": Layer(
        128, 64, 1, 128, 256, 8192 + 128, states=torch.bfloat16
    ),
    "Qwen3-Next-80B": Layer(32, 128, 16, 128, None, 0),
    "Qwen3-Next-80B, one of 8 ranks": Layer(4, 128, 2, 128, None, 0),
    "Qwen3.5-9B, one of 16 ranks": Layer(2, 128, 1, 128, None, 0),
    "Kimi-Linear-48B": Layer(32, 128, 32, 128, None, 0, per_channel=True),
    "Ling-2.5": Layer(16, 128, 16, 128, None, 0, torch.float32, constant=True),
    "MiniCPM-SALA": Layer(32, 128, 32, 128, None, 0, constant=True),
    "Falcon-Mamba-7B": Layer(8192, 1, 0, 16, None, 8192),
    "LFM2-2.6B": Layer(1, 2048, 0, 0, None, 0, taps=3),
    "ZAYA1-base": Layer(1, 1280, 0, 0, None, 0, taps=3),
    "ZAYA1-base, the last hidden state": Layer(1, 2048, 0, 0, None, 0, taps=2),
    "Jet-Nemotron-2B": Layer(12, 256, 12, 96, None, 8472 - 3072, unconvolved=2304),
    "Qwen4-Exp, beside its delta nets": Layer(1, 8192, 0, 0, None, 0, taps=10),
}


def prefill(
    layer: Layer, lengths: list[int], prefixes: list[int], asked: list[tuple[int, int]]
) -> None:
    """One forward of a layer, as far as our kernels see it."""
    windows, states = layer.pools()
    bounds = list(accumulate(lengths, initial=0))
    tokens, n = bounds[-1], len(lengths)
    # Where SGLang's list of bounds lies depends on what else the forward's metadata holds.
    cu_seqlens = torch.tensor([0, *bounds], dtype=torch.int32)[1:]
    owners = torch.arange(n + 1, dtype=torch.int32)[1:]
    slots = torch.arange(n + 1, n + 1 + len(asked))
    positions = [prefixes[s] + at for s, at in asked]
    tracks = PrefillTracks(
        StateTracks([s for s, _ in asked], positions, slots),
        prefixes,
        lengths,
        slots,
        owners,
        cu_seqlens,
        copies_ends=layer.chunk is None,
    )
    inputs = torch.empty(tokens, layer.channels + layer.more, dtype=layer.dtype)
    inputs = inputs[:, layer.more // 2 :][:, : layer.channels]
    if windows.numel():
        tracks.save_windows(windows[:, layer.unconvolved :], inputs)
    if layer.save is None:
        return
    writer = tracks.into(states)
    if layer.constant:
        projected = torch.empty(tokens, 3 * layer.inner, dtype=layer.dtype)
        writer.save(
            layer.save,
            keys=torch.empty(tokens, layer.heads, layer.size, dtype=layer.dtype),
            values=projected[:, 2 * layer.inner :].view(tokens, layer.heads, layer.width),
            slopes=torch.empty(layer.heads, 1, 1),
            state_indices=owners,
            resumed=torch.tensor(prefixes) > 0,
            cu_seqlens=cu_seqlens,
        )
        return
    if layer.chunk is None:
        chosen = writer.choose_chunks()
        if chosen is None:  # the scan has nothing to write
            return
        writer.save(
            layer.save,
            keys=torch.empty(1, tokens, layer.groups, layer.size, dtype=layer.dtype)[0],
            corrections=torch.empty(1, tokens, layer.heads, layer.width, dtype=layer.dtype)[0],
            decays=torch.empty(tokens, layer.heads, *[layer.size] * layer.per_channel),
            chunk_states=chosen.states,
            rows=chosen.rows,
            cu_seqlens=cu_seqlens,
        )
        return
    # SGLang's convolution returns what has the strides of its input, transposed.
    mixed = torch.empty_like(inputs.T).T[:tokens]
    shared = layer.groups * layer.size
    x, B, _ = mixed.split([layer.inner, shared, shared], dim=1)
    chunks = -(-tokens // layer.chunk)
    state = (layer.heads, layer.width, layer.size)
    writer.save(
        layer.save,
        x=x.view(1, tokens, layer.heads, layer.width)[0],
        dt=torch.empty(1, layer.heads, chunks, layer.chunk)[0],
        A=torch.empty(layer.heads),
        B=B.view(1, tokens, layer.groups, -1)[0],
        chunk_states=torch.empty(1, chunks, *state, dtype=layer.states)[0],
        cu_seqlens=cu_seqlens,
        initial_states=torch.empty(n, *state, dtype=layer.states) if any(prefixes) else None,
    )
