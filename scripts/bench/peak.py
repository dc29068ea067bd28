"""What these cores can compute at most, and how much of it attention over a long context does.

    python scripts/bench.py peak [--new 1000] [--before 16000] [--heads 4 2 --width 32] [--layers 2]

Compiles a loop of multiplications and additions in registers (peak.cpp), and measures the native
attention kernel on keys and values of that size, without a server.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from scripts.bench.report import BenchFailed, Table, positive

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-Wno-psabi")
REPEATS = 9


def fused_multiply_adds() -> float:
    """GFLOP/s of all cores in registers."""
    with tempfile.TemporaryDirectory() as scratch:
        program = str(Path(scratch) / "peak")
        for command in (["g++", *FLAGS, str(SOURCE), "-o", program], [program]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise BenchFailed(f"{command[0]} failed: {done.stderr[-500:]}")
    return float(done.stdout.split()[0])


def attention(options: argparse.Namespace) -> float:
    """Seconds of the new tokens' attention over all tokens, in all layers."""
    import sglang.srt.platforms  # noqa: F401 (finds our platform)

    from sglang_hybrid.kernels.attention import Rule
    from sglang_hybrid.platforms.native import attention as native
    from sglang_hybrid.platforms.native.library import library

    kernels = library()
    if kernels is None:
        raise BenchFailed("there are no native kernels; the log says why")
    (heads, key_heads), width = options.heads, options.width
    length = options.before + options.new
    q = torch.randn(options.new, heads, width)
    keys, values = torch.randn(2, length, key_heads, width)
    sequences = native.Sequences.of([torch.arange(length)], [options.new])
    rule = Rule(scale=width**-0.5, causal=True, window=None, cap=0.0, sinks=None)
    shortest = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(options.layers):
            native.attention(kernels, q, keys, values, sequences, rule, width)
        shortest = min(shortest, time.perf_counter() - begin)
    return shortest


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--new", type=positive, default=1000, help="tokens with queries")
    parser.add_argument("--before", type=positive, default=16000, help="tokens before them")
    parser.add_argument("--heads", type=positive, nargs=2, default=[4, 2], help="queries', keys'")
    parser.add_argument("--width", type=positive, default=32, help="values of a head")
    parser.add_argument("--layers", type=positive, default=2)


def run(options: argparse.Namespace) -> None:
    most = fused_multiply_adds()
    seconds = attention(options)
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
