"""Host memory below the device on a real server: SGLang's own cache with HiCache, and ours.

    python scripts/bench.py tiers [TRACE ...] [--requests 120] [--ratio 4] [--link host=1GB/s]

The same slice of each trace, one server after another, with the same bytes on the device (`SLICES`)
and on the host, both under --hicache-write-policy write_through; answers are forced as `ab` does
it. Hits over both tiers, bytes that were copied to the host for each token that was hit (as
SGLang's own metric counts them), and times to first token.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from scripts.bench.ab import PRESETS
from scripts.bench.measured import metrics, warm_up
from scripts.bench.report import ROOT, BenchFailed, Table, positive
from scripts.bench.servers import LAUNCHERS, flags_of, vocabulary_of
from scripts.bench.traces import find, preset_of
from scripts.bench.traffic import drive, hit_rate
from sglang_hybrid.models import ensure_default_model
from sglang_hybrid.models.tokenizer import FIRST_TEXT_ID
from sglang_hybrid.serving.server_process import ServerProcess
from sglang_hybrid.simulation.traces.formats import read_trace
from sglang_hybrid.simulation.traces.requests import Request
from sglang_hybrid.simulation.traces.slices import reusable_tokens, to_vocabulary


@dataclass(frozen=True)
class TierSlice:
    """What of a trace is served, and by which device: KV tokens and state slots. No prompt may be
    longer than seven eighths of the KV. scale: as in `Slice`, 0 for the trace's preset.
    """

    kv_tokens: int
    state_slots: int = 16
    requests: int = 120
    scale: int = 0

    def cut(self, path: Path) -> list[Request]:
        cut = preset_of(PRESETS, path).slice
        longest = min(cut.max_prompt_tokens, self.kv_tokens * 7 // 8)
        scale = self.scale or cut.scale
        cut = replace(cut, requests=self.requests, scale=scale, max_prompt_tokens=longest)
        return cut.cut(read_trace(path))


SLICES = {
    "sharegpt_55": TierSlice(4_096),
    "bbh_fewshot": TierSlice(4_096),
    "taubench_airline": TierSlice(4_800),
    "claude_code_64k": TierSlice(8_192, scale=8),
    "mooncake_conversation_trace": TierSlice(8_192, state_slots=32, requests=450),
}
"""Devices on which the prompts of a slice fit, and all of it does not."""

WRITTEN = "sglang:hicache_backup_bytes_total"
CONCURRENCY = 2


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "traces",
        nargs="*",
        metavar="TRACE",
        choices=[[], *SLICES],
        help=f"default: {' '.join(SLICES)}",
    )
    parser.add_argument("--requests", type=positive, help="of each trace, instead of SLICES")
    parser.add_argument("--ratio", type=positive, default=4, help="host memory over the device's")
    parser.add_argument("--link", default="", help="what SGLANG_HYBRID_SIMULATE_BANDWIDTH says")


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
    table = Table(
        *("trace", "cache", "hit rate", "could be hit", "KB written per hit token"),
        *("TTFT P50, ms", "TTFT P95, ms"),
        text=2,
    )
    for name in options.traces or SLICES:
        chosen = SLICES[name]
        if options.requests:
            chosen = replace(chosen, requests=options.requests)
        flags = [
            *flags_of(model, chosen.kv_tokens, chosen.state_slots, CONCURRENCY + 1),
            *("--enable-metrics", "--enable-hierarchical-cache"),
            *("--hicache-ratio", str(options.ratio), "--chunked-prefill-size", "2048"),
        ]
        trace, _ = to_vocabulary(chosen.cut(find(name)), FIRST_TEXT_ID, vocabulary_of(model))
        if not trace:
            raise BenchFailed(f"nothing is left of {name}")
        prompts = sum(request.input_len for request in trace)
        best = reusable_tokens(trace) / prompts
        for cache, module in LAUNCHERS.items():
            hit, written, times = serve(module, flags, trace, options.link)
            each = written / 1e3 / max(1.0, hit * prompts)
            low, high = np.percentile(times, (50, 95)).tolist()
            cells = (f"{hit:.1%}", f"{best:.1%}", f"{each:.3f}", f"{low:.0f}", f"{high:.0f}")
            table.row(name, cache, *cells)
