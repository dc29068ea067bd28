"""The cost of two exact states beside the prefill of one layer, by CUDA events.

    python -m scripts.gpu_check.timings    # without a GPU: small layers, in Triton's interpreter

The prefill is the layer's projections with SGLang's convolution and scan, or, where SGLang is not
installed, the projections alone, which take less. States and prefill are timed apart, since their
difference would be less than what prefills differ by. What the scan itself does more for them is
not in that: where SGLang is installed, the whole layer is timed with and without states, by turns.
"""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

from torch import Tensor  # noqa: E402

from scripts.gpu_check.findings import tell  # noqa: E402
from scripts.gpu_check.layers import (  # noqa: E402
    LAYERS,
    SMALL,
    TAPS,
    Shape,
    spread,
    state_launches,
)
from sglang_hybrid.checkpoints.tracks import PrefillTracks, StateTracks  # noqa: E402
from sglang_hybrid.storage.codecs.codecs import Codec  # noqa: E402
from sglang_hybrid.storage.codecs.in_place import InPlace  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
STATES = 2
GOAL = 0.02
"""Most that two states may add to a layer's prefill."""


def milliseconds(run: Callable[[], object], times: int = 20) -> float:
    """The median of ``run`` on the device; without one, the time of a single run here.

    Before each run the device clears a buffer that is larger than its L2 cache, which takes longer
    than this process needs to enqueue the run: it waits for nothing then.
    """
    if not GPU:
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3
    run()
    cover = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    new = partial(torch.cuda.Event, enable_timing=True)
    events = [(new(), new()) for _ in range(times)]
    for begin, end in events:
        for _ in range(4):
            cover.zero_()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return float(median(begin.elapsed_time(end) for begin, end in events))


def normal(*shape: int) -> Tensor:
    values = torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)
    return values / math.sqrt(shape[0])


class Prefill:
    """A layer's projections, and SGLang's convolution and scan between them if asked for, which
    leave states at ``positions``: in ``states``, the layer's pool, from slot 2 on.
    """

    states: Tensor

    def __init__(
        self, layer: Shape, tokens: int, positions: Sequence[int] = (), *, with_sglang: bool
    ) -> None:
        self.layer, self.tokens, self.positions = layer, tokens, list(positions)
        self.hidden = normal(tokens, layer.hidden)
        self.into = normal(layer.hidden, layer.channels + layer.more)
        self.out_of = normal(layer.inner, layer.hidden)
        self.between = self._sglangs() if with_sglang else self._nothing

    def __call__(self) -> Tensor:
        projected = self.hidden @ self.into
        gate, inputs = torch.split(projected, [self.layer.more, self.layer.channels], dim=1)
        return self.between(inputs, gate) @ self.out_of

    def _nothing(self, inputs: Tensor, gate: Tensor) -> Tensor:
        return inputs[:, : self.layer.inner]

    def _sglangs(self) -> Callable[[Tensor, Tensor], Tensor]:
        from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn

        layer, tokens = self.layer, self.tokens
        windows, states = layer.pools(2 + len(self.positions), DEVICE)
        taps = normal(layer.channels, TAPS)
        cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
        slots = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        fresh = torch.zeros(1, dtype=torch.bool, device=DEVICE)
        self.states = states
        tracks = self._tracks(slots, cu_seqlens) if self.positions else None
        scan = self._mamba2(cu_seqlens) if layer.chunk else self._delta(states, slots, cu_seqlens)

        def run(inputs: Tensor, gate: Tensor) -> Tensor:
            lists = (windows, cu_seqlens, [tokens], slots, fresh)
            if tracks is not None:
                tracks.save_windows(windows, inputs)
            mixed = causal_conv1d_fn(inputs.T, taps, None, *lists).T
            gate = torch.nn.functional.silu(gate[:, : layer.inner])
            if tracks is not None:
                tracks.begin(states)
            return scan(mixed).view(tokens, layer.inner) * gate

        return run

    def _tracks(self, slots: Tensor, cu_seqlens: Tensor) -> PrefillTracks:
        count = len(self.positions)
        places = torch.arange(2, 2 + count, device=DEVICE)
        wanted = StateTracks([0] * count, self.positions, places)
        return PrefillTracks(wanted, [0], [self.tokens], places, slots, cu_seqlens)

    def _mamba2(self, cu_seqlens: Tensor) -> Callable[[Tensor], Tensor]:
        from sglang.kernels.ops.mamba.triton_ops import mamba_chunk_scan_combined

        layer, tokens = self.layer, self.tokens
        shared = layer.groups * layer.size
        A, D = -torch.rand(layer.heads, device=DEVICE) - 1, torch.ones(layer.heads, device=DEVICE)
        dt, sequence = normal(1, tokens, layer.heads), torch.zeros(1, tokens, device=DEVICE).int()
        out = torch.empty(1, tokens, layer.heads, layer.width, device=DEVICE, dtype=dt.dtype)

        def run(mixed: Tensor) -> Tensor:
            x, B, C = torch.split(mixed, [layer.inner, shared, shared], dim=1)
            mamba_chunk_scan_combined(
                x.view(1, tokens, layer.heads, layer.width),
                dt,
                A,
                B.view(1, tokens, layer.groups, layer.size),
                C.view(1, tokens, layer.groups, layer.size),
                chunk_size=layer.chunk,
                D=D,
                dt_bias=D,
                seq_idx=sequence,
                cu_seqlens=cu_seqlens,
                dt_softplus=True,
                out=out,
                state_dtype=torch.float32,
                return_varlen_states=True,
            )
            return out

        return run

    def _delta(
        self, states: Tensor, slots: Tensor, cu_seqlens: Tensor
    ) -> Callable[[Tensor], Tensor]:
        from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule

        layer, tokens = self.layer, self.tokens
        shared = layer.groups * layer.size
        decay = -torch.rand(1, tokens, layer.heads, device=DEVICE)
        beta = torch.rand(1, tokens, layer.heads, device=DEVICE).bfloat16()

        def run(mixed: Tensor) -> Tensor:
            q, k, v = torch.split(mixed, [shared, shared, layer.inner], dim=1)
            output: Tensor = chunk_gated_delta_rule(
                q.view(1, tokens, layer.groups, layer.size),
                k.view(1, tokens, layer.groups, layer.size),
                v.view(1, tokens, layer.heads, layer.width),
                decay,
                beta,
                initial_state=states,
                initial_state_indices=slots,
                cu_seqlens=cu_seqlens,
                use_qk_l2norm_in_kernel=True,
            )[0]
            return output

        return run


def main() -> None:
    with_sglang = GPU and importlib.util.find_spec("sglang") is not None
    if with_sglang:
        from sglang_hybrid.hooks import patching

        patching.install()
    measure_coding("1,024 tokens of KV", (20, 2_048, 2, 256), torch.bfloat16, 1_024)
    measure_coding("a state", (24, 8, 128, 64, 128), torch.float32, 1)
    for layer in LAYERS if GPU else SMALL:
        for tokens in (2048, 8192, 32_768) if GPU else (130,):
            measure(layer, tokens, with_sglang=with_sglang)


def measure_coding(what: str, shape: tuple[int, ...], dtype: torch.dtype, slots: int) -> None:
    """Report what coding so many slots of a pool [layers, slots, ...] in place takes, and decoding
    them.
    """
    if not GPU:
        shape, slots = (2, 12, *(min(size, 16) for size in shape[2:])), min(slots, 4)
    pool = torch.randn(shape, device=DEVICE).to(dtype)
    coded = InPlace([pool], [], Codec.INT8)
    at = torch.arange(slots, device=DEVICE)
    places, parts = at // coded.parts, at % coded.parts
    moved = pool[:, :slots].nbytes * (1 + 1 / coded.parts)
    for name, run in {
        "code": partial(coded.encode, at, places, parts),
        "decode": partial(coded.decode, places, parts, at + slots),
    }.items():
        took = milliseconds(run)
        tell(f"{name} {what}", f"{took:.3f} ms, {moved / took / 1e6:,.0f} GB/s")


def measure(layer: Shape, tokens: int, *, with_sglang: bool) -> None:
    """Report what the states take, and the layer."""
    states = milliseconds(state_launches(layer, tokens, spread(tokens, STATES), DEVICE))
    whole = milliseconds(Prefill(layer, tokens, with_sglang=with_sglang))
    share = states / whole
    beside = "the layer's prefill" if with_sglang else "the layer's projections alone"
    found = f"{states:.3f} ms beside {whole:.3f} ms of {beside}: {100 * share:.1f} %"
    known = GPU and (with_sglang or share < GOAL)
    what = f"{STATES} states, {layer.name}, {tokens} tokens"
    tell(what, f"{found} (goal: {100 * GOAL:.0f} %)", share < GOAL if known else None)
    if not with_sglang:
        return
    ways = [Prefill(layer, tokens, at, with_sglang=True) for at in ([], spread(tokens, STATES))]
    turns = [[milliseconds(way, times=10) for way in ways] for _ in range(5)]
    without, with_states = (median(each) for each in zip(*turns, strict=True))
    more = 100 * median(b / a - 1 for a, b in turns)
    found = f"{with_states:.3f} ms with states, {without:.3f} without: {more:+.1f} %"
    tell(f"{what}, the whole layer", found)


if __name__ == "__main__":
    main()
