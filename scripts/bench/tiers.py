"""Host memory below the device of a real server."""

from __future__ import annotations

import asyncio
from typing import Annotated

import numpy as np

from scripts.bench.ab import PRESETS, Preset, read_slice
from scripts.bench.commands import Count, one_of
from scripts.bench.measured import Configuration, measure, warm_up
from scripts.bench.report import ROOT, BenchFailed, Table
from scripts.bench.servers import LAUNCHERS, flags_of, hybrid_cache, vocabulary_of
from scripts.bench.traces import find, preset_of
from scripts.bench.traffic import Steps, beside, drive, hit_rate, probe
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.cpu.models import ensure_tiny_model
from sglang_hybrid.extensions.lab.simulation.traces.slices import reusable_tokens
from sglang_hybrid.serving.server_process import ServerProcess

PRESETS_OF_TIERS = {
    "sharegpt_55": ("kv_tokens=4096",),
    "bbh_fewshot": ("kv_tokens=4096",),
    "taubench_airline": ("kv_tokens=4800",),
    "claude_code_64k": ("kv_tokens=8192", "scale=8"),
    "mooncake_conversation_trace": ("kv_tokens=8192", "state_slots=32", "requests=450"),
}
"""Changes of the presets of `ab`: devices on which the prompts of a slice fit, and all of it does
not. Elsewhere 120 requests, and 16 state slots."""

WRITTEN = "sglang:hicache_backup_bytes_total"
CONCURRENCY = 2


def preset_of_tiers(name: str, requests: int | None) -> Preset:
    """What of a trace is served, and by which device. No prompt is longer than seven eighths of the
    KV.
    """
    preset = preset_of(PRESETS, find(name)).changed(("requests=120", "state_slots=16"))
    preset = preset.changed(PRESETS_OF_TIERS[name])
    longest = min(preset.slice.max_prompt_tokens, preset.kv_tokens * 7 // 8)
    fewer = [f"requests={requests}"] if requests else []
    return preset.changed([f"max_prompt_tokens={longest}", *fewer])


def tiers(
    *traces: Annotated[str, {"metavar": "TRACE"}, one_of(PRESETS_OF_TIERS)],
    requests: Annotated[Count | None, "of each trace, instead of the preset's"] = None,
    ratio: Annotated[Count, "host memory over the device's"] = 4,
    link: Annotated[str, "what SGLANG_HYBRID_SIMULATE_BANDWIDTH says"] = "",
    limit: Annotated[float, "seconds for a server"] = 3600.0,
) -> None:
    """Host memory below the device on a real server: SGLang's own cache with HiCache, and ours.

    The same slice of each trace, one server after another, with the same bytes on the device
    and on the host, both under --hicache-write-policy write_through; answers are forced as `ab`
    does it. Hits over both tiers, bytes that were copied to the host for each token that was hit
    (as SGLang's own metric counts them), and times to first token.
    """
    model = ensure_tiny_model()
    table = Table(
        *("trace", "cache", "hit rate", "could be hit", "KB written per hit token"),
        *("TTFT P50, ms", "TTFT P95, ms"),
        text=2,
    )
    for name in traces or PRESETS_OF_TIERS:
        preset = preset_of_tiers(name, requests)
        flags = [
            *flags_of(model, preset.kv_tokens, preset.state_slots, CONCURRENCY + 1),
            *("--enable-metrics", "--enable-hierarchical-cache"),
            *("--hicache-ratio", str(ratio), "--chunked-prefill-size", "2048"),
        ]
        trace, _ = read_slice(find(name), preset, vocabulary_of(model))
        prompts = sum(request.input_len for request in trace)
        best = reusable_tokens(trace) / prompts
        for cache in LAUNCHERS:
            slow = {"SGLANG_HYBRID_SIMULATE_BANDWIDTH": link}
            server = Configuration(cache, (), cache == "ours", slow)
            result = measure(server, flags, trace, CONCURRENCY, limit)
            if result.error:
                raise BenchFailed(result.error)
            hit = hit_rate(result.outcomes)
            each = result.counted.get(WRITTEN, 0.0) / 1e3 / max(1.0, hit * prompts)
            _, middle, high = result.ttft
            cells = (f"{hit:.1%}", f"{best:.1%}", f"{each:.3f}", f"{middle:.0f}", f"{high:.0f}")
            table.row(name, cache, *cells)


TRACE = "sharegpt_55"
KV_TOKENS, STATE_SLOTS = 60_000, 500
RUNNING = 3
"""The streamed answer, and two requests of the trace."""

TIERS = ("--enable-hierarchical-cache", "--hicache-ratio", "2")
ALL_IS_COPIED = {"SGLANG_HYBRID_OFFLOAD_WATERMARK": "0"}  # though nothing is evicted
SERVERS = {"without tiers": (), "with copies": TIERS}


async def hits_and_steps(url: str, trace: list[Request]) -> tuple[float, np.ndarray]:
    """Hit rate of the trace, and milliseconds of all steps meanwhile [n]."""
    steps = Steps()
    async with beside(probe(url, steps)):
        outcomes = await drive(url, trace, RUNNING - 1)
    return hit_rate(outcomes), np.array([gap for gap, _ in steps.between()]) * 1e3


def tier_steps(
    requests: Annotated[Count, "of the trace"] = 150,
    rounds: Annotated[Count, "of both servers"] = 2,
) -> None:
    """What copies in the background cost a step: a real server with host memory below it, and
    without.

    A slice of sharegpt_55 on a device that holds all of it, so that hits are the same on both
    servers and nothing is loaded: first without tiers, then with --hicache-write-policy
    write_through and a watermark of 0, so that what every request leaves is copied in the
    background, and again. Meanwhile one long answer is streamed; the time between its tokens is a
    step as a client sees it.
    """
    model, path = ensure_tiny_model(), find(TRACE)
    preset = preset_of(PRESETS, path).changed([f"requests={requests}"])
    trace, _ = read_slice(path, preset, vocabulary_of(model))
    common = flags_of(model, KV_TOKENS, STATE_SLOTS, RUNNING)
    table = Table("server", "hit rate", "MB copied", "steps", "P50, ms", "P99, ms", text=1)
    highest: dict[str, list[float]] = {name: [] for name in SERVERS}
    for _ in range(rounds):
        for name, flags in SERVERS.items():
            with ServerProcess(
                [*common, *flags], directory=ROOT, environment=ALL_IS_COPIED
            ) as server:
                warm_up(server.url, RUNNING - 1)
                hits, times = asyncio.run(hits_and_steps(server.url, trace))
                tiers = hybrid_cache(server.url)["tiers"]
            copied = 0 if tiers is None else tiers["written_bytes"]
            middle, high = np.percentile(times, (50, 99)).tolist()
            highest[name].append(high)
            cells = (f"{hits:.1%}", f"{copied / 1e6:.1f}", f"{len(times):,}")
            table.row(name, *cells, f"{middle:.1f}", f"{high:.1f}")
    without, copying = (float(np.median(highest[name])) for name in SERVERS)
    print(f"\nP99 with copies over without: {copying / without:.2f}")
