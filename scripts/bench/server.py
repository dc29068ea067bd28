"""The benchmarks `server` and `split`: the speed of a server on the CPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil

from scripts.bench.commands import Count
from scripts.bench.first_token import first_tokens
from scripts.bench.report import BenchFailed, Table
from scripts.bench.servers import (
    STEPS,
    Client,
    flush,
    greedy,
    large_model,
    percentile,
    post,
    sampled,
)
from sglang_hybrid.core.returns.hints import PromptHints
from sglang_hybrid.extensions.cpu.models import build_tiny_model, ensure_tiny_model
from sglang_hybrid.serving.requests import kv_hints
from sglang_hybrid.serving.server_process import ServerProcess

PROMPT = 2048
"""Tokens of a prompt when prefill is measured."""
SAMPLE_SECONDS = 1.0
"""Between samples of memory: each costs the server some milliseconds."""


def memory_of(server: ServerProcess) -> int:
    """Bytes that the server's processes hold, shared pages counted once."""
    try:
        return sum(process.memory_full_info().pss for process in server.processes())
    except psutil.Error:
        return 0  # one of them has just ended


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


def parameters(model: Path) -> int:
    """Number of weights in a model directory."""
    from safetensors import safe_open

    total = 0
    for file in model.glob("*.safetensors"):
        with safe_open(str(file), framework="numpy") as weights:
            names = weights.keys()
            total += sum(math.prod(weights.get_slice(name).get_shape()) for name in names)
    return total


def server(
    *server_flags: Annotated[str, "flags for the server, after --"],
    models: Annotated[
        tuple[Path, ...], "model directories to measure (default: the embedded one and 100 M)"
    ] = (),
    requests: Annotated[Count, "prompts per model"] = 16,
    hits: Annotated[
        tuple[int, ...], "instead: chats behind so many cached tokens (default model: mamba2)"
    ] = (),
) -> None:
    """Prefill and decode tokens per second, time to first token and peak memory of a served model.

    Starts the server and drives it through SGLang's own `bench_serving` for the default model and
    one of about 100 M parameters. With --hits it is the time to the first token of chats of text
    that the cache knows but for about 800 tokens, over HTTP: a chat of each length, by turns.
    """
    if hits:
        first_tokens(models, hits, requests)
        return
    start = time.monotonic()
    table = Table(
        *("model", "parameters, M", "prefill, tokens/s", "decode, tokens/s", "TTFT P50, ms"),
        *("TTFT P95, ms", "peak memory, GiB"),
    )
    for model in models or (ensure_tiny_model(), large_model()):
        flags = ["--model-path", str(model), *server_flags]
        with (
            ServerProcess(flags) as running,
            sampled(lambda: memory_of(running), SAMPLE_SECONDS) as memory,
        ):
            prefill = bench_serving(running, model, prompt=PROMPT, output=1, n=requests)
            few = max(2, requests // 4)
            decode = bench_serving(running, model, prompt=16, output=STEPS, n=few)
        p50, p95 = (percentile(sorted(prefill["ttfts"]), share) for share in (0.5, 0.95))
        table.row(
            *(model.name, f"{parameters(model) / 1e6:.0f}", f"{PROMPT / p50:,.0f}"),
            f"{1000 / decode['median_tpot_ms']:,.0f}",
            *(f"{1000 * p50:.0f}", f"{1000 * p95:.0f}", f"{max(memory) / 2**30:.2f}"),
        )
    print(
        f"\nPrompts of {PROMPT:,} tokens, one at a time. {time.monotonic() - start:.0f} s in all."
    )


STATES = (1, 8)
LONG = 4096
"""Tokens of a prompt that leaves states inside."""


def split(
    *architectures: Annotated[str, "embedded models (default: falcon-mamba)"],
    requests: Annotated[Count, "prompts of each kind"] = 12,
) -> None:
    """The cost of states inside a prefill: prompts of 4,096 tokens that leave 1 and 8.

    One server leaves them in the pass, at declared positions. Others split the prefill evenly
    (--chunked-prefill-size), as it is where layers leave no states inside, and keep nothing. They
    are asked in turn, one request at a time. Ratios are medians of pairs: each is a request and the
    one without states before it.
    """
    table = Table(
        *("model", "states inside", "none, ms", "in the pass, ms", "against none"),
        *("split, ms", "against none"),
    )
    with tempfile.TemporaryDirectory() as scratch:
        for architecture in architectures or ("falcon-mamba",):
            model = build_tiny_model(architecture, Path(scratch) / architecture)
            whole = ["--model-path", str(model), "--chunked-prefill-size", str(2 * LONG)]
            with ServerProcess(whole) as server:
                for count in STATES:
                    parts = ["--chunked-prefill-size", str(-(-LONG // (count + 1)))]
                    with ServerProcess([*whole, *parts, "--disable-radix-cache"]) as splitting:
                        times = _states_inside(server.url, splitting.url, count, requests)
                    none, inside, split_up = zip(*times[1:], strict=True)
                    cells = []
                    for found in (inside, split_up):
                        pairs = zip(found, none, strict=True)
                        cells += [
                            f"{1e3 * median(found):.0f}",
                            f"{median(a / b for a, b in pairs):.2f}",
                        ]
                    table.row(architecture, count, f"{1e3 * median(none):.0f}", *cells)


def _states_inside(
    url: str, splitting: str, count: int, requests: int
) -> list[tuple[float, float, float]]:
    """Seconds to the first token of prompts: without states inside, with ``count`` in the pass, and
    on the server that splits. The first is of a server that has not served yet.
    """
    source = Client(url, seed=count)
    positions = tuple((i + 1) * LONG // (count + 1) - 45 for i in range(count))
    hints = {"kv_hints": kv_hints.write(PromptHints(positions))}

    def seconds(at: str, more: dict[str, Any]) -> float:
        flush(at)
        body = {**greedy(source.tokens(LONG), 1), **more}
        begin = time.perf_counter()
        report = post(at, "/generate", body)["meta_info"].get("hybrid_cache", {})
        taken = time.perf_counter() - begin
        left = [each for each in report.get("checkpoints", []) if each["kind"] == "declared"]
        if len(left) != (count if more else 0):
            raise BenchFailed(f"{len(left)} states were left inside a prefill, not {count}")
        return taken

    return [
        (seconds(url, {}), seconds(url, hints), seconds(splitting, {})) for _ in range(requests + 1)
    ]
