#!/usr/bin/env python3
"""What splitting a prefill costs: prompts of 2,048 tokens in 1, 2, 3 and 9 forwards.

    python scripts/bench_split.py [--architecture falcon-mamba] [--scale tiny] [--requests 16]

Where kernels leave no states inside a prefill (Mamba1), it is split at every checkpoint. Here the
server splits it evenly (--chunked-prefill-size) and keeps nothing. Prints Markdown.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench_server import PROMPT, bench_serving, machine, percentile
from sglang_hybrid.models import build_tiny_model
from sglang_hybrid.server_process import ServerProcess

FORWARDS = (1, 2, 3, 9)  # none, one, two and eight states inside


def ttft(model: Path, forwards: int, n: int) -> float:
    """Median seconds to the first token, one request at a time."""
    size = -(-PROMPT // forwards)
    flags = ["--model-path", str(model), "--disable-radix-cache"]
    with ServerProcess([*flags, "--chunked-prefill-size", str(size)]) as server:
        record = bench_serving(server, model, prompt=PROMPT, output=1, n=n)
    return percentile(sorted(record["ttfts"]), 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", default="falcon-mamba")
    parser.add_argument("--scale", default="tiny", choices=("tiny", "100m"))
    parser.add_argument("--requests", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / options.architecture
        model = build_tiny_model(options.architecture, directory, scale=options.scale)
        found = {k: ttft(model, k, options.requests) for k in FORWARDS}
    print(f"Machine: {machine()}. Date: {date.today()}. ", end="")
    print(f"Command: `{shlex.join(['python', *sys.argv])}`.\n")
    print("| model | states inside | forwards | TTFT P50, ms | against one forward |")
    print("|---|---:|---:|---:|---:|")
    for k, seconds in found.items():
        ratio = seconds / found[1]
        print(f"| {options.architecture} | {k - 1} | {k} | {1e3 * seconds:.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
