"""What these cores can compute and read at most."""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from scripts.bench.commands import Count
from scripts.bench.report import BenchFailed, Table, seconds_of

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-Wno-psabi")
REPEATS = 9
STEPS = 31
OTHER_FLOATS = 9_000_000
"""What a step reads beside keys and values: the weights of the default model."""


def fused_multiply_adds() -> float:
    """GFLOP/s of all cores in registers."""
    with tempfile.TemporaryDirectory() as scratch:
        program = str(Path(scratch) / "peak")
        for command in (["g++", *FLAGS, str(SOURCE), "-o", program], [program]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise BenchFailed(f"{command[0]} failed: {done.stderr[-500:]}")
    return float(done.stdout.split()[0])


@dataclass(frozen=True)
class Attention:
    """The native attention of some layers. heads: of queries, and of keys and values."""

    heads: tuple[int, int]
    width: int
    layers: int

    def kernel(self) -> Callable[..., torch.Tensor]:
        """Of one layer: from queries, keys, values and sequences."""
        import sglang.srt.platforms  # noqa: F401 (finds our platform)

        from sglang_hybrid.kernels.attention import Rule
        from sglang_hybrid.platforms.native import attention as native
        from sglang_hybrid.platforms.native.library import library

        kernels = library()
        if kernels is None:
            raise BenchFailed("there are no native kernels; the log says why")
        rule = Rule(scale=self.width**-0.5, causal=True, window=None, cap=0.0, sinks=None)
        return lambda q, keys, values, sequences: native.attention(
            kernels, q, keys, values, sequences, rule, self.width
        )

    def prefill(self, before: int, new: int) -> float:
        """Seconds of new tokens' attention over all tokens: the shortest of some."""
        from sglang_hybrid.platforms.native.attention import Sequences

        attend, (heads, key_heads) = self.kernel(), self.heads
        length = before + new
        q = torch.randn(new, heads, self.width)
        keys, values = torch.randn(2, length, key_heads, self.width)
        sequences = Sequences.of([torch.arange(length)], [new])

        def layers() -> None:
            for _ in range(self.layers):
                attend(q, keys, values, sequences)

        return min(seconds_of(layers) for _ in range(REPEATS))

    def step(self, rows: int, length: int) -> tuple[int, float, float]:
        """A decode step's bytes of keys and values, and seconds of their attention, and of reading
        them only: medians, each after other memory was read, as in a step.
        """
        from sglang_hybrid.platforms.native.attention import Sequences

        attend, (heads, key_heads) = self.kernel(), self.heads
        q = torch.randn(rows, heads, self.width)
        pools = torch.randn(self.layers, 2, rows * length, key_heads, self.width)
        table = torch.arange(rows * length, dtype=torch.int32).view(rows, length)
        sequences = Sequences.of_rows(table, range(rows), [length] * rows)
        other = torch.randn(OTHER_FLOATS)

        def layers() -> None:
            for keys, values in pools:
                attend(q, keys, values, sequences)

        def after_other_memory(work: Callable[[], object]) -> float:
            found = []
            for _ in range(STEPS):
                other.sum()
                found.append(seconds_of(work))
            return statistics.median(found)

        return pools.nbytes, after_other_memory(layers), after_other_memory(pools.sum)


def peak(
    new: Annotated[Count, "tokens with queries"] = 1000,
    before: Annotated[Count, "tokens before them"] = 16000,
    heads: Annotated[tuple[Count, Count], "queries', keys'"] = (4, 2),
    width: Annotated[Count, "values of a head"] = 32,
    layers: Count = 2,
    sequences: Annotated[Count, "of a decode step"] = 16,
    context: Annotated[Count, "tokens of each of them"] = 6000,
) -> None:
    """What these cores can compute and read at most, and how much of it attention over a long
    context does: of many new tokens, and in decode steps.

    Compiles a loop of multiplications and additions in registers (peak.cpp), and measures the
    native attention kernel on keys and values of that size, without a server.
    """
    most = fused_multiply_adds()
    attention = Attention(heads, width, layers)
    seconds = attention.prefill(before, new)
    pairs = new * (before + new / 2) * heads[0] * layers
    operations = 4 * pairs * width
    table = Table("float32", "ms", "GFLOP/s", "of the peak")
    table.row("multiplications and additions in registers", "", f"{most:,.0f}", "100 %")
    what = f"attention of {new:,} behind {before:,}"
    speed = operations / seconds / 1e9
    table.row(what, f"{1e3 * seconds:,.0f}", f"{speed:,.0f}", f"{100 * speed / most:.0f} %")
    least = 1e3 * operations / most / 1e9
    print(
        f"\nThe attention's {operations / 1e9:.1f} GFLOP take at least {least:.0f} ms, without its "
        f"{pairs / 1e6:,.0f} M exponentials."
    )
    size, attended, read = attention.step(sequences, context)
    print(
        f"\nA decode step of {sequences} sequences at {context:,} reads "
        f"{size / 1e6:.0f} MB of keys and values: {1e3 * read:.1f} ms to read them, "
        f"{1e3 * attended:.1f} ms with attention."
    )
