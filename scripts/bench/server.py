"""Prefill and decode tokens per second, time to first token and peak memory of a served model.

Starts the server and drives it through SGLang's own `bench_serving` for the default model and one
of about 100 M parameters.

    python scripts/bench.py server [--models DIR ...] [--requests 16] [-- server flags]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from scripts.bench.report import BenchFailed, Table, positive
from scripts.bench.servers import STEPS, large_model, percentile
from sglang_hybrid.models import ensure_default_model
from sglang_hybrid.serving.server_process import ServerProcess

PROMPT = 2048
"""Tokens of a prompt when prefill is measured."""
SAMPLE_SECONDS = 1.0
"""Between samples of memory: each costs the server some milliseconds."""


@dataclass
class Result:
    """What one model did."""

    model: str
    parameters: float
    prefill: float
    decode: float
    ttft_p50: float
    ttft_p95: float
    memory: float


class PeakMemory:
    """Samples what the server's processes hold, shared pages counted once, while it is entered;
    `peak` is the largest sum, in bytes.
    """

    def __init__(self, server: ServerProcess) -> None:
        self.peak = 0
        self._server = server
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            try:
                held = sum(p.memory_full_info().pss for p in self._server.processes())
            except psutil.Error:
                held = 0  # one of them has just ended
            self.peak = max(self.peak, held)
            if self._done.wait(SAMPLE_SECONDS):
                return


def bench_serving(
    server: ServerProcess, model: Path, prompt: int, output: int, n: int
) -> dict[str, Any]:
    """One run of SGLang's bench_serving, one request at a time; returns its result record."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        command = [
            *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"),
            *("--base-url", server.url, "--model", str(model), "--tokenizer", str(model)),
            *("--dataset-name", "random-ids", "--random-range-ratio", "1"),
            *("--random-input-len", str(prompt), "--random-output-len", str(output)),
            *("--num-prompts", str(n), "--max-concurrency", "1", "--flush-cache"),
            *("--warmup-requests", "1", "--disable-tqdm", "--output-details"),
            *("--output-file", file.name),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise BenchFailed(f"bench_serving failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        record: dict[str, Any] = json.loads(Path(file.name).read_text().splitlines()[-1])
    if record["completed"] != n:
        raise BenchFailed(f"{record['completed']} of {n} requests were answered; see {server.log}")
    return record


def measure(model: Path, n: int, flags: list[str]) -> Result:
    """Prompts of `PROMPT` tokens for prefill, answers of `STEPS` for decoding, one at a time."""
    with (
        ServerProcess(["--model-path", str(model), *flags]) as server,
        PeakMemory(server) as memory,
    ):
        prefill = bench_serving(server, model, prompt=PROMPT, output=1, n=n)
        decode = bench_serving(server, model, prompt=16, output=STEPS, n=max(2, n // 4))
    ttfts = sorted(prefill["ttfts"])
    return Result(
        model=model.name,
        parameters=parameters(model) / 1e6,
        prefill=PROMPT / percentile(ttfts, 0.5),
        decode=1000 / decode["median_tpot_ms"],
        ttft_p50=percentile(ttfts, 0.5) * 1000,
        ttft_p95=percentile(ttfts, 0.95) * 1000,
        memory=memory.peak / 2**30,
    )


def parameters(model: Path) -> int:
    """Number of weights in a model directory."""
    from safetensors import safe_open

    total = 0
    for file in model.glob("*.safetensors"):
        with safe_open(str(file), framework="numpy") as weights:
            for name in weights.keys():  # noqa: SIM118 (safe_open is no mapping)
                size = 1
                for length in weights.get_slice(name).get_shape():
                    size *= length
                total += size
    return total


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models",
        nargs="*",
        type=Path,
        help="model directories to measure (default: the embedded one and 100 M)",
    )
    parser.add_argument("--requests", type=positive, default=16, help="prompts per model")
    parser.add_argument("server_flags", nargs="*", help="flags for the server, after --")


def run(options: argparse.Namespace) -> None:
    start = time.monotonic()
    models = options.models or [ensure_default_model(), large_model()]
    table = Table(
        *("model", "parameters, M", "prefill, tokens/s", "decode, tokens/s", "TTFT P50, ms"),
        *("TTFT P95, ms", "peak memory, GiB"),
    )
    for model in models:
        r = measure(model, options.requests, options.server_flags)
        table.row(
            *(r.model, f"{r.parameters:.0f}", f"{r.prefill:,.0f}", f"{r.decode:,.0f}"),
            *(f"{r.ttft_p50:.0f}", f"{r.ttft_p95:.0f}", f"{r.memory:.2f}"),
        )
    print(
        f"\nPrompts of {PROMPT:,} tokens, one at a time. {time.monotonic() - start:.0f} s in all."
    )
