"""Host memory below the device on a real server: SGLang's own cache with HiCache, and ours.

    python scripts/bench.py tiers [TRACE ...] [--requests 150] [--ratio 4] [--link host=1GB/s]

The same slice of each trace, one server after another, with the same bytes on the device and on the
host, both under --hicache-write-policy write_through; answers are forced as `ab` does it. Hits over
both tiers, bytes that were copied to the host for each token that was hit (as SGLang's own metric
counts them), and times to first token.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scripts.bench.ab import PRESETS, metrics, warm_up
from scripts.bench.report import ROOT, BenchFailed, Table, positive
from scripts.bench.servers import flags_of, vocabulary_of
from scripts.bench.traces import find, preset_of
from scripts.bench.traffic import drive, hit_rate
from sglang_hybrid.models import ensure_default_model
from sglang_hybrid.models.tokenizer import FIRST_TEXT_ID
from sglang_hybrid.replay.slices import read_trace, reusable_tokens, to_vocabulary
from sglang_hybrid.replay.traces import Request
from sglang_hybrid.server_process import ServerProcess

TRACES = ("sharegpt_55", "bbh_fewshot")
SERVERS = {"SGLang": "sglang.launch_server", "ours": "sglang_hybrid.launch_server"}
WRITTEN = "sglang:hicache_backup_bytes_total"
CONCURRENCY = 2


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", nargs="*", metavar="TRACE", help=f"default: {' '.join(TRACES)}")
    parser.add_argument("--requests", type=positive, default=150, help="of each trace")
    parser.add_argument(
        "--kv-tokens", type=positive, default=4_096, help="on the device; no prompt may be longer"
    )
    parser.add_argument("--state-slots", type=positive, default=16, help="on the device")
    parser.add_argument("--ratio", type=positive, default=4, help="host memory over the device's")
    parser.add_argument("--link", default="", help="what --hybrid-simulate-bandwidth says")


def serve(
    module: str, flags: Sequence[str], trace: Sequence[Request], link: str
) -> tuple[float, float, np.ndarray]:
    """Share of prompt tokens hit, bytes copied to the host, and times to first token, ms."""
    variables = {"SGLANG_HYBRID_SIMULATE_BANDWIDTH": link}
    with ServerProcess(flags, module=module, directory=ROOT, environment=variables) as server:
        warm_up(server.url, CONCURRENCY)
        before = metrics(server.url).get(WRITTEN, 0.0)
        outcomes = asyncio.run(drive(server.url, trace, CONCURRENCY, None))
        written = metrics(server.url).get(WRITTEN, 0.0) - before
    times = np.array([outcome.ttft * 1e3 for outcome in outcomes])
    return hit_rate(outcomes), written, times


def run(options: argparse.Namespace) -> None:
    model = ensure_default_model()
    flags = [
        *flags_of(model, options.kv_tokens, options.state_slots, CONCURRENCY + 1),
        *("--enable-metrics", "--enable-hierarchical-cache"),
        *("--hicache-ratio", str(options.ratio), "--chunked-prefill-size", "2048"),
    ]
    table = Table(
        *("trace", "cache", "hit rate", "could be hit", "KB written per hit token"),
        *("TTFT P50, ms", "TTFT P95, ms"),
        text=2,
    )
    for name in options.traces or TRACES:
        path = find(name)
        cut = replace(preset_of(PRESETS, path).slice, requests=options.requests)
        trace, _ = to_vocabulary(cut.cut(read_trace(path)), FIRST_TEXT_ID, vocabulary_of(model))
        if not trace:
            raise BenchFailed(f"nothing is left of {path.name}")
        prompts = sum(request.input_len for request in trace)
        best = reusable_tokens(trace) / prompts
        for cache, module in SERVERS.items():
            hit, written, times = serve(module, flags, trace, options.link)
            each = written / 1e3 / max(1.0, hit * prompts)
            low, high = np.percentile(times, (50, 95)).tolist()
            cells = (f"{hit:.1%}", f"{best:.1%}", f"{each:.2f}", f"{low:.0f}", f"{high:.0f}")
            table.row(name, cache, *cells)
