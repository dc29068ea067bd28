"""What splitting a prefill costs: prompts of 2,048 tokens in 1, 2, 3 and 9 forwards.

    python scripts/bench.py split [--architecture falcon-mamba] [--scale tiny] [--requests 16]

Where kernels leave no states inside a prefill (Mamba1), it is split at every checkpoint. Here the
server splits it evenly (--chunked-prefill-size) and keeps nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from scripts.bench.report import Table, positive
from scripts.bench.server import PROMPT, bench_serving
from scripts.bench.servers import percentile
from sglang_hybrid.models import build_tiny_model
from sglang_hybrid.serving.server_process import ServerProcess

FORWARDS = (1, 2, 3, 9)  # none, one, two and eight states inside


def ttft(model: Path, forwards: int, n: int) -> float:
    """Median seconds to the first token, one request at a time."""
    size = -(-PROMPT // forwards)
    flags = ["--model-path", str(model), "--disable-radix-cache"]
    with ServerProcess([*flags, "--chunked-prefill-size", str(size)]) as server:
        record = bench_serving(server, model, prompt=PROMPT, output=1, n=n)
    return percentile(sorted(record["ttfts"]), 0.5)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--architecture", default="falcon-mamba")
    parser.add_argument("--scale", default="tiny", choices=("tiny", "100m"))
    parser.add_argument("--requests", type=positive, default=16)


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / options.architecture
        model = build_tiny_model(options.architecture, directory, scale=options.scale)
        found = {k: ttft(model, k, options.requests) for k in FORWARDS}
    table = Table("model", "states inside", "forwards", "TTFT P50, ms", "against one forward")
    for k, seconds in found.items():
        ratio = f"{seconds / found[1]:.2f}"
        table.row(options.architecture, k - 1, k, f"{1e3 * seconds:.0f}", ratio)
