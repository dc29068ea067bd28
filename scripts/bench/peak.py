"""What these cores can compute and read at most, and how much of it attention over a long context
does: of many new tokens, and in decode steps.

    python scripts/bench.py peak [--new 1000] [--before 16000] [--heads 4 2 --width 32] [--layers 2]

Compiles a loop of multiplications and additions in registers (peak.cpp), and measures the native
attention kernel on keys and values of that size, without a server.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scripts.bench.report import BenchFailed, Table, positive

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


def kernel(options: argparse.Namespace) -> Callable[..., torch.Tensor]:
    """The native attention of one layer: of queries, keys, values and sequences."""
    import sglang.srt.platforms  # noqa: F401 (finds our platform)

    from sglang_hybrid.kernels.attention import Rule
    from sglang_hybrid.platforms.native import attention as native
    from sglang_hybrid.platforms.native.library import library

    kernels = library()
    if kernels is None:
        raise BenchFailed("there are no native kernels; the log says why")
    rule = Rule(scale=options.width**-0.5, causal=True, window=None, cap=0.0, sinks=None)

    def attend(q: Any, keys: Any, values: Any, sequences: Any) -> torch.Tensor:
        return native.attention(kernels, q, keys, values, sequences, rule, options.width)

    return attend


def seconds_of(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def prefill(options: argparse.Namespace) -> float:
    """Seconds of the new tokens' attention over all tokens, in all layers: the shortest of some."""
    from sglang_hybrid.platforms.native.attention import Sequences

    attend = kernel(options)
    (heads, key_heads), width = options.heads, options.width
    length = options.before + options.new
    q = torch.randn(options.new, heads, width)
    keys, values = torch.randn(2, length, key_heads, width)
    sequences = Sequences.of([torch.arange(length)], [options.new])

    def layers() -> None:
        for _ in range(options.layers):
            attend(q, keys, values, sequences)

    return min(seconds_of(layers) for _ in range(REPEATS))


def step(options: argparse.Namespace) -> tuple[int, float, float]:
    """A decode step's bytes of keys and values, and seconds of their attention, and of reading them
    only: medians, each after other memory was read, as in a step.
    """
    from sglang_hybrid.platforms.native.attention import Sequences

    attend = kernel(options)
    (heads, key_heads), width = options.heads, options.width
    rows, length = options.sequences, options.context
    q = torch.randn(rows, heads, width)
    pools = torch.randn(options.layers, 2, rows * length, key_heads, width)
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


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--new", type=positive, default=1000, help="tokens with queries")
    parser.add_argument("--before", type=positive, default=16000, help="tokens before them")
    parser.add_argument("--heads", type=positive, nargs=2, default=[4, 2], help="queries', keys'")
    parser.add_argument("--width", type=positive, default=32, help="values of a head")
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--sequences", type=positive, default=16, help="of a decode step")
    parser.add_argument("--context", type=positive, default=6000, help="tokens of each of them")


def run(options: argparse.Namespace) -> None:
    most = fused_multiply_adds()
    seconds = prefill(options)
    pairs = options.new * (options.before + options.new / 2) * options.heads[0] * options.layers
    operations = 4 * pairs * options.width
    table = Table("float32", "ms", "GFLOP/s", "of the peak")
    table.row("multiplications and additions in registers", "", f"{most:,.0f}", "100 %")
    what = f"attention of {options.new:,} behind {options.before:,}"
    speed = operations / seconds / 1e9
    table.row(what, f"{1e3 * seconds:,.0f}", f"{speed:,.0f}", f"{100 * speed / most:.0f} %")
    least = 1e3 * operations / most / 1e9
    print(
        f"\nThe attention's {operations / 1e9:.1f} GFLOP take at least {least:.0f} ms, without its "
        f"{pairs / 1e6:,.0f} M exponentials."
    )
    size, attended, read = step(options)
    print(
        f"\nA decode step of {options.sequences} sequences at {options.context:,} reads "
        f"{size / 1e6:.0f} MB of keys and values: {1e3 * read:.1f} ms to read them, "
        f"{1e3 * attended:.1f} ms with attention."
    )
