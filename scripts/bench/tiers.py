"""Host memory below the device of a real server."""

from __future__ import annotations

from typing import Annotated

from scripts.bench.ab import PRESETS, Preset, read_slice
from scripts.bench.commands import Count, one_of
from scripts.bench.measured import Configuration, measure
from scripts.bench.report import BenchFailed, Table
from scripts.bench.servers import LAUNCHERS, flags_of, vocabulary_of
from scripts.bench.traces import find, preset_of
from scripts.bench.traffic import hit_rate
from sglang_hybrid.extensions.cpu.models import ensure_tiny_model
from sglang_hybrid.extensions.lab.simulation.traces.slices import reusable_tokens

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
    """The part of a trace that is served, and the device. No prompt is longer than seven eighths of
    the KV.
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
