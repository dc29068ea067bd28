"""Speed of the served model: prefill and decode throughput, time to first token, peak memory.

Starts the server and drives it through SGLang's own `bench_serving` for the default model and one
of about 100 M parameters, then prints a Markdown table for docs/benchmarks.md.

    python scripts/bench_server.py [--models DIR ...] [--requests 16] [-- server flags]
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import psutil
import requests

from sglang_hybrid.models import build_tiny_model, ensure_default_model
from sglang_hybrid.server_process import ServerProcess


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


class PeakMemory(threading.Thread):
    """Samples the memory of the server's processes; `peak` is the largest sum, in bytes."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._server = server
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.2):
            total = 0
            for process in self._server.processes():
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.peak = max(self.peak, total)

    def stop(self) -> None:
        self._done.set()
        self.join()


def bench_serving(server: ServerProcess, model: Path, prompt: int, output: int, n: int) -> dict:
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
            raise RuntimeError(f"bench_serving failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return json.loads(Path(file.name).read_text().splitlines()[-1])


def measure(model: Path, n: int, flags: list[str]) -> Result:
    with ServerProcess(["--model-path", str(model), *flags]) as server:
        memory = PeakMemory(server)
        memory.start()
        prefill = bench_serving(server, model, prompt=2048, output=1, n=n)
        decode = bench_serving(server, model, prompt=16, output=128, n=max(2, n // 4))
        memory.stop()
        requests.post(server.url + "/flush_cache", timeout=30)
    ttfts = sorted(prefill["ttfts"])
    return Result(
        model=model.name,
        parameters=parameters(model) / 1e6,
        prefill=2048 / percentile(ttfts, 0.5),
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


def percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def machine() -> str:
    cores, memory = psutil.cpu_count(), psutil.virtual_memory().total / 2**30
    name = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return f"{name}, {cores} cores, {memory:.0f} GiB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", type=Path, help="model directories to measure")
    parser.add_argument("--requests", type=int, default=16, help="prefill requests per model")
    parser.add_argument("server_flags", nargs="*", help="flags for the server, after --")
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        models = options.models or [
            ensure_default_model(),
            build_tiny_model("nemotron-h", Path(scratch) / "nemotron-h-100m", scale="100m"),
        ]
        results = [measure(model, options.requests, options.server_flags) for model in models]
    print(f"Machine: {machine()}. Date: {date.today()}. ", end="")
    print(f"Command: `python scripts/bench_server.py --requests {options.requests}`.\n")
    print(
        "| model | parameters, M | prefill, tokens/s | decode, tokens/s | TTFT P50, ms "
        "| TTFT P95, ms | peak memory, GiB |"
    )
    print("|---|---|---|---|---|---|---|")
    for r in results:
        print(
            f"| {r.model} | {r.parameters:.0f} | {r.prefill:,.0f} | {r.decode:,.0f} "
            f"| {r.ttft_p50:.0f} | {r.ttft_p95:.0f} | {r.memory:.2f} |"
        )
    print(f"\nPrompts of 2,048 tokens, one at a time; {time.monotonic() - start:.0f} s in all.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
