"""What exact states inside a prefill cost on a GPU."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from itertools import accumulate
from typing import Annotated, Any

import torch
from torch import Tensor

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

from scripts.bench.report import BenchFailed, Table  # noqa: E402
from scripts.gpu_check.kernels import TOLERANCE, check_mamba2  # noqa: E402
from scripts.gpu_check.layers import LAYERS, TAPS, Shape  # noqa: E402
from sglang_hybrid.kernels import checkpoint_states as cs  # noqa: E402

SHAPES = [LAYERS[0], Shape("Falcon-H1-7B", 3072, 24, 128, 1, 256, 256, 3072 + 24)]
BATCHES = {"1 x 8K": [8192], "8 x 1K": [1024] * 8, "1 x 64K": [65536]}
COUNTS = [1, 2, 8]


def spread(lengths: list[int], count: int) -> list[tuple[int, int]]:
    """``count`` positions (sequence, tokens), shared out over the sequences, inside of chunks."""
    rows = [i % len(lengths) for i in range(count)]
    asked = []
    for row in range(len(lengths)):
        share = rows.count(row)
        asked += [(row, (i + 1) * lengths[row] // (share + 1) - 45) for i in range(share)]
    return asked


class Batch:
    """Sequences of one forward: their new inputs, and the slots they start from and end in."""

    def __init__(self, shape: Shape, hidden: Tensor, lengths: list[int], slots: list[int]) -> None:
        from sglang.srt.layers.attention.mamba.mamba2_metadata import Mamba2Metadata

        self.hidden, self.lengths = hidden, lengths
        device = hidden.device
        self.cu = list(accumulate(lengths, initial=0))
        self.cu_seqlens = torch.tensor(self.cu, dtype=torch.int32, device=device)
        self.slots = torch.tensor(slots, dtype=torch.int32, device=device)
        rows = torch.arange(len(lengths), dtype=torch.int32, device=device)
        self.sequence = torch.repeat_interleave(rows, self.cu_seqlens.diff())[None]
        self.chunks, self.offsets = Mamba2Metadata._query_start_loc_to_chunk_indices_offsets(
            self.cu_seqlens, shape.chunk, self.cu[-1]
        )


Leave = Callable[..., None]
"""Called with stage "inputs" before the convolution and "scanned" after the scan."""


class Layer:
    """One Mamba2 layer, and pools with room for the batch's slots and the states it leaves."""

    def __init__(self, shape: Shape, slots: int, device: str, dtype: torch.dtype) -> None:
        def normal(*size: int) -> Tensor:
            return torch.randn(*size, device=device, dtype=dtype) / math.sqrt(size[0])

        self.shape = shape
        self.project_in = normal(shape.hidden, shape.channels + shape.more)
        self.project_out = normal(shape.inner, shape.hidden)
        self.taps = torch.randn(shape.channels, TAPS, device=device, dtype=dtype)
        self.A = -torch.rand(shape.heads, device=device) * 15 - 1
        self.D = torch.ones(shape.heads, device=device)
        self.bias = torch.rand(shape.heads, device=device) * 6 - 6
        self.windows, self.states = shape.pools(slots, device)

    def prefill(self, batch: Batch, *, resumed: bool = False, leave: Leave | None = None) -> Tensor:
        """hidden [T, hidden] to the layer's output; every sequence's slot takes its end."""
        from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn
        from sglang.kernels.ops.mamba.triton_ops.ssd_combined import _mamba_chunk_scan_combined_fwd

        shape = self.shape
        parts = [shape.inner, shape.channels, shape.heads]
        gate, inputs, dt = torch.split(batch.hidden @ self.project_in, parts, dim=1)
        has_prefix = torch.full_like(batch.slots, resumed, dtype=torch.bool)
        if leave:
            leave("inputs", batch, inputs=inputs, has_prefix=has_prefix)
        mixed = causal_conv1d_fn(
            inputs.T,
            self.taps,
            None,
            self.windows,
            batch.cu_seqlens,
            batch.lengths,
            batch.slots,
            has_prefix,
        ).T
        groups = shape.groups * shape.size
        x, B, C = mixed.split([shape.inner, groups, groups], dim=1)
        x = x.unflatten(1, (shape.heads, shape.width))[None]
        B, C = (t.unflatten(1, (shape.groups, shape.size))[None] for t in (B, C))
        initial = self.states[batch.slots] if resumed else None
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        _, steps, decays, states, _, final, _ = _mamba_chunk_scan_combined_fwd(
            x,
            dt[None],
            self.A,
            B,
            C,
            shape.chunk,
            D=self.D,
            dt_bias=self.bias,
            initial_states=initial,
            seq_idx=batch.sequence,
            chunk_indices=batch.chunks if resumed else None,
            chunk_offsets=batch.offsets if resumed else None,
            cu_seqlens=batch.cu_seqlens,
            dt_softplus=True,
            state_dtype=self.states.dtype,
            out=y,
        )
        self.states[batch.slots] = final
        if leave:
            leave("scanned", batch, x=x, dt=steps, decays=decays, B=B, states=states, start=initial)
        return (y[0].flatten(1) * torch.nn.functional.silu(gate)) @ self.project_out


def ours(layer: Layer, targets: cs.Targets) -> Leave:
    """States by this project's kernels."""

    def leave(stage: str, batch: Batch, **t: Any) -> None:
        if stage == "inputs":
            cs.save_windows(
                layer.windows,
                targets,
                inputs=t["inputs"],
                state_indices=batch.slots,
                resumed=t["has_prefix"],
                cu_seqlens=batch.cu_seqlens,
            )
        else:
            cs.save_ssd_states(
                layer.states,
                targets,
                x=t["x"][0],
                dt=t["dt"][0],
                A=layer.A,
                B=t["B"][0],
                chunk_states=t["states"][0],
                cu_seqlens=batch.cu_seqlens,
                initial_states=t["start"],
            )

    return leave


def sglangs(layer: Layer, targets: cs.Targets) -> Leave:
    """States by SGLang's second pass; windows by indices that are made once per forward.

    Targets come in the order of their sequences.
    """
    from sglang.kernels.ops.mamba.triton_ops.ssd_combined import _track_states_at

    window = targets.ends[:, None] + torch.arange(1 - TAPS, 0, device=targets.ends.device)
    rows, passes = targets.sequences.tolist(), dict[int, list[int]]()
    for i, row in enumerate(rows):
        passes.setdefault(i - rows.index(row), []).append(i)
    parts = [
        cs.Targets(targets.sequences[part], targets.ends[part], targets.slots[part])
        for part in passes.values()
    ]

    def leave(stage: str, batch: Batch, **t: Any) -> None:
        if stage == "inputs":
            layer.windows[targets.slots] = t["inputs"][window].transpose(1, 2)
        else:
            for part in parts:
                found = _track_states_at(
                    t["B"],
                    t["x"],
                    t["dt"],
                    t["decays"],
                    t["states"],
                    batch.cu_seqlens,
                    t["start"],
                    part.sequences,
                    part.ends,
                )
                layer.states[part.slots] = found[0].to(layer.states.dtype)

    return leave


def split(
    layer: Layer, hidden: Tensor, lengths: list[int], asked: list[tuple[int, int]], first: int
) -> Callable[[], None]:
    """The prefill in as many forwards as the most divided sequence needs."""
    starts = list(accumulate(lengths, initial=0))
    cuts = [[0, *(p for s, p in asked if s == row), n] for row, n in enumerate(lengths)]
    rounds: list[tuple[Batch, Tensor, Tensor]] = []
    for i in range(max(len(c) for c in cuts) - 1):
        rows = [row for row, c in enumerate(cuts) if i + 1 < len(c)]
        parts = [hidden[starts[r] + cuts[r][i] : starts[r] + cuts[r][i + 1]] for r in rows]
        batch = Batch(layer.shape, torch.cat(parts), [len(p) for p in parts], rows)
        kept = [(r, first + asked.index((r, cuts[r][i + 1]))) for r in rows if i + 2 < len(cuts[r])]
        kept_slots = torch.tensor(kept, dtype=torch.long, device=hidden.device)
        source, target = kept_slots.view(-1, 2).unbind(1)
        rounds.append((batch, source, target))

    def run() -> None:
        for i, (batch, source, target) in enumerate(rounds):
            layer.prefill(batch, resumed=i > 0)
            layer.windows[target] = layer.windows[source]
            layer.states[target] = layer.states[source]

    return run


def bytes_moved(shape: Shape, batch: Batch, asked: list[tuple[int, int]]) -> tuple[int, int]:
    """What ours asks of memory and caches for these states, and the least there is to move."""
    assert shape.chunk is not None, "a Mamba2 layer has chunks"
    tiles = cs.ssd_tiles(shape.width, shape.size, torch.bfloat16)
    across = -(-shape.size // tiles["TILE_SIZE"])
    down = -(-shape.width // tiles["TILE_WIDTH"])
    window = 2 * 2 * shape.channels * (TAPS - 1)
    state = 2 * 4 * shape.heads * shape.width * shape.size  # the chunk's state in, the state out
    moved = least = 0
    for sequence, position in asked:
        start, end = batch.cu[sequence], batch.cu[sequence] + position
        read = end - max(start, end // shape.chunk * shape.chunk)
        x, B, dt = 2 * shape.inner, 2 * shape.groups * shape.size, 4 * shape.heads
        least += state + window + read * (x + B + dt)
        each_head = B // shape.groups * shape.heads
        moved += state + window + read * (x * across + each_head * down + 2 * dt * across * down)
    return moved, least


def scans(layer: Layer, batch: Batch) -> Callable[[], Any] | None:
    """mamba_ssm's own scan of this batch, where it is installed."""
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError:
        return None
    shape, like = layer.shape, batch.hidden
    tokens = len(like)
    x = torch.randn(1, tokens, shape.heads, shape.width, device=like.device, dtype=like.dtype)
    dt = torch.randn(1, tokens, shape.heads, device=like.device, dtype=like.dtype)
    B, C = (
        torch.randn(1, tokens, shape.groups, shape.size, device=like.device, dtype=like.dtype)
        for _ in range(2)
    )
    return lambda: mamba_chunk_scan_combined(
        x,
        dt,
        layer.A,
        B,
        C,
        shape.chunk,
        D=layer.D,
        dt_bias=layer.bias,
        dt_softplus=True,
        seq_idx=batch.sequence,
    )


def agree(layer: Layer, batch: Batch, count: int, asked: list[tuple[int, int]]) -> None:
    """All three ways leave the same states, to bfloat16's rounding. Raises AssertionError."""
    first = len(batch.lengths)
    kept = slice(first, first + count)
    targets = target_list(batch.cu, asked, first, batch.hidden.device)
    found = []
    for run in (
        lambda: layer.prefill(batch, leave=ours(layer, targets)),
        lambda: layer.prefill(batch, leave=sglangs(layer, targets)),
        split(layer, batch.hidden, batch.lengths, asked, first),
    ):
        layer.states.fill_(torch.nan)
        layer.windows.fill_(torch.nan)
        run()
        found.append((layer.states[kept].clone(), layer.windows[kept].clone()))
    for states, windows in found[1:]:
        error = (states - found[0][0]).abs().amax() / found[0][0].abs().amax()
        assert error < 1e-2, f"the states differ by {error:.1e}"
        torch.testing.assert_close(windows, found[0][1], rtol=2e-2, atol=2e-2)


def target_list(
    cu: list[int], asked: list[tuple[int, int]], first: int, device: torch.device
) -> cs.Targets:
    """The positions in sequences that begin at ``cu``, to slots from ``first`` on."""
    return cs.Targets(
        torch.tensor([s for s, _ in asked], device=device),
        torch.tensor([cu[s] + p for s, p in asked], device=device),
        torch.arange(first, first + len(asked), device=device),
    )


def bench(shapes: list[Shape], batches: dict[str, list[int]]) -> None:
    """Prints the table; times are medians, with the L2 cache flushed before each run."""
    from triton.testing import do_bench

    def milliseconds(run: Callable[[], Any]) -> float:
        return float(do_bench(run, warmup=100, rep=400, return_mode="median"))

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("milliseconds for one layer; in brackets what the states add to it\n")
    head = ("model", "tokens", "none", "states", "ours", "SGLang", "split", "mamba_ssm scan")
    table = Table(*head, text=2)
    notes = []
    for shape in shapes:
        for name, lengths in batches.items():
            layer = Layer(shape, len(lengths) + max(COUNTS), "cuda", torch.bfloat16)
            hidden = torch.randn(sum(lengths), shape.hidden, device="cuda", dtype=torch.bfloat16)
            batch = Batch(shape, hidden, lengths, list(range(len(lengths))))
            alone = milliseconds(lambda: layer.prefill(batch))  # noqa: B023
            scan = scans(layer, batch)
            library = f"{milliseconds(scan):.3f}" if scan else "not installed"
            for count in COUNTS:
                asked = spread(lengths, count)
                agree(layer, batch, count, asked)
                targets = target_list(batch.cu, asked, len(lengths), hidden.device)
                cells = [shape.name, name, f"{alone:.3f}", str(count)]
                for leave in (ours(layer, targets), sglangs(layer, targets)):
                    took = milliseconds(lambda: layer.prefill(batch, leave=leave))  # noqa: B023
                    cells.append(f"{took:.3f} (+{(took / alone - 1) * 100:.1f} %)")
                took = milliseconds(split(layer, hidden, lengths, asked, len(lengths)))
                cells += [f"{took:.3f} (+{(took / alone - 1) * 100:.1f} %)", library]
                table.row(*cells)
                moved, least = bytes_moved(shape, batch, asked)
                notes.append(
                    f"{shape.name}, {name}, {count}: {moved / 1e6:.1f} MB asked for by the "
                    f"programs, {least / 1e6:.1f} MB at least"
                )
    print("\nBytes of our states per layer, counted from the shapes and not measured:")
    print("\n".join(notes))


def check(dtype: torch.dtype) -> None:
    """Our states of a small batch against the recurrence in float64. Raises BenchFailed."""
    for width, size in ((64, 128), (128, 256)):
        worst = check_mamba2(width, size, dtype, resumed=True)
        print(f"{dtype}, states [{width}, {size}]: largest relative error {worst:.1e}")
        if worst > TOLERANCE[dtype]:
            raise BenchFailed(f"the error is above {TOLERANCE[dtype]}")


def kernels(
    quick: Annotated[bool, "one model, without 64K tokens"] = False,
) -> None:
    """What exact states inside a prefill cost: one Mamba2 layer, with and without them, on a GPU.

    The layer is the projections, SGLang's convolution and SGLang's scan, in bfloat16, with a
    float32 state pool. States are left at positions spread over the batch, none on a chunk's
    border:
    * ours: `kernels/checkpoint_states.py`, one launch for the windows and one for the states;
    * SGLang: its second varlen pass (`_track_states_at`), once for as many states as a sequence
      has, since one pass takes one per sequence, and the copies into the pool;
    * split: the prefill stops at every position and copies the slot.

    Without a GPU only the kernels' results are checked, in Triton's interpreter.
    """
    check(torch.float32)
    if not GPU:
        print("No GPU: the kernels ran in Triton's interpreter, and there are no timings.")
        return
    check(torch.bfloat16)
    from sglang_hybrid.hooks import patching

    patching.install()
    batches = {k: v for k, v in BATCHES.items() if not quick or sum(v) <= 8192}
    bench(SHAPES[:1] if quick else SHAPES, batches)
