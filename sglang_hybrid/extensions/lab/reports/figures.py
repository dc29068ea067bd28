"""Each plot of a report: what a study found, drawn, with the sentence below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.server_settings import Budget, Split
from sglang_hybrid.extensions.lab.reports import plots
from sglang_hybrid.extensions.lab.reports.study import (
    BLOCKS,
    NEVER,
    Study,
    hits_by_tier,
    lost_tokens,
    order,
    paper_model,
)

HIT_RATE = "token hit rate (%)"


@dataclass(frozen=True)
class Plot:
    """A figure, its file's name, and the sentence below it. source: figures of the paper."""

    name: str
    title: str
    caption: str
    figure: Figure
    source: str


def draw(study: Study) -> list[Plot]:
    """Every plot that the study has numbers for."""
    return [plot for make in ALL if (plot := make(study)) is not None]


def hit_rate(study: Study) -> Plot:
    """Hit rate by cache size, or by policy where there is one size."""
    sizes, series = study.sizes()
    found = study.at_compared()
    if len(sizes) < 2 or not series:
        values = {name: {"": 100 * result.hit_rate} for name, result in found.items()}
        figure = plots.bars(values, HIT_RATE)
    else:
        figure = plots.lines([_by_size(sizes, series)], HIT_RATE)
    ranked = sorted(
        (r.hit_rate, n) for n, r in found.items() if n.split(" ")[0] not in plots.BOUNDS
    )
    caption = f"Prompt tokens that were not computed again. At {study.where}: "
    caption += ", ".join(f"{name} {100 * rate:.1f} %" for rate, name in ranked[::-1][:4])
    return Plot("hit_rate", "Token hit rate", f"{caption}.", figure, "7, 8")


def ttft(study: Study) -> Plot:
    """The distribution of the time to first token."""
    series = {
        name: 1000 * (result.ttft if len(result.ttft) else result.paper_ttft)
        for name, result in study.at_compared().items()
    }
    figure = plots.distribution(series, "time to first token (ms)")
    return Plot("ttft", "Time to first token", clock(study), figure, "10b")


def p95(study: Study) -> Plot | None:
    """The 95th percentile of times to first token, next to no cache."""
    found = study.at_compared()
    if "none" not in found or len(found) < 2:
        return None
    without = found["none"].ttft_percentile(95)
    values = {
        name: {"": 100 * result.ttft_percentile(95) / without}
        for name, result in found.items()
        if name != "none"
    }
    figure = plots.bars(values, "P95 of time to first token, no cache = 100")
    text = f"Without a cache the 95th percentile is {1000 * without:,.0f} ms. {clock(study)}"
    return Plot("ttft_p95", "The slow end", text, figure, "9")


def by_length(study: Study) -> Plot | None:
    """The gain over the reference, by the prompts' length."""
    reference = study.reference()
    found = study.at_compared()
    if reference is None:
        return None
    base = found[reference]
    lengths = base.input_len
    edges = sorted({int(np.percentile(lengths, p)) for p in (0, 20, 40, 60, 80, 100)})
    if len(edges) < 3:
        return None
    edges[-1] += 1
    bins = np.digitize(lengths, edges) - 1
    counts = [int((bins == b).sum()) for b in range(len(edges) - 1)]
    series = {}
    for name, result in found.items():
        if name == reference or name.split(" ")[0] in (*plots.BOUNDS, "vllm+", "sglang"):
            continue
        gain = 100 * (result.hit_len / result.input_len - base.hit_len / base.input_len)
        series[name] = [float(gain[bins == b].mean()) for b in range(len(counts))]
    if not series:
        return None
    figure = plots.by_bin(
        edges,
        series,
        counts,
        "prompt (tokens; requests)",
        f"hit rate over {reference} (points)",
    )
    text = f"Mean hit rate of a request over {reference}'s, by the length of its prompt."
    return Plot("by_length", "Who gains", text, figure, "10a")


def contention(study: Study) -> Plot | None:
    """The gain of a policy over the reference, by cache size."""
    sizes, series = study.sizes()
    reference = study.reference()
    if reference is None or reference not in series or len(sizes) < 2:
        return None
    base = series[reference]
    gains = {
        name: [v - b for v, b in zip(values, base, strict=True)]
        for name, values in series.items()
        if name != reference and name.split(" ")[0] not in ("none", "unbounded", "vllm+")
    }
    label = f"hit rate over {reference} (points)"
    figure = plots.lines([_by_size(sizes, gains)], label, zero=True)
    text = f"What a policy adds to {reference}: little where everything fits, and where nothing"
    return Plot("contention", "Contention", f"{text} does.", figure, "11")


def mixes(study: Study) -> Plot | None:
    """Hit rate by layers of each kind."""
    values, series = study.sweep("mix")
    if not values:
        return None
    ticks = [str(value) for value in values]
    panel = plots.Panel(range(len(values)), series, "state-space : attention layers", ticks)
    figure = plots.lines([panel], HIT_RATE)
    return Plot("layers", "Layer mix", _geometry(study), figure, "12a")


def states(study: Study) -> Plot | None:
    """Hit rate by the size of a state."""
    values, series = study.sweep("state")
    if not values:
        return None
    panel = plots.Panel([float(value) for value in values], series, "state dimension N")
    figure = plots.lines([panel], HIT_RATE)
    return Plot("state_size", "State size", _geometry(study), figure, "12b")


def arrivals(study: Study) -> Plot:
    """Hit rate by how often sessions come and how fast they go on."""
    panels = []
    for kind, label in (("rate", "sessions a second"), ("think", "think time")):
        factors, series = study.sweep(kind)
        x = [float(factor) for factor in factors]
        panels.append(plots.Panel(x, series, f"{label} (times the trace's)"))
    figure = plots.lines(panels, HIT_RATE)
    text = f"The same sessions, closer together or slower, at {study.swept_at}."
    return Plot("arrivals", "Arrival patterns", text, figure, "13")


def efficiency(study: Study) -> Plot:
    """FLOPs saved per byte of a cached prefix."""
    x = [float(length) for length in range(250, 32_001, 250)]
    models = {
        "attention only": paper_model(0, 28),
        "hybrid, 1 : 6": paper_model(24, 4),
        "state-space only": paper_model(28, 0),
    }
    own = study.first.cost
    if own not in models.values():
        models["this model"] = own
    series = {
        name: [1e-3 * flop_efficiency(cost, int(length)) for length in x]
        for name, cost in models.items()
    }
    figure = plots.curves(x, series, "prefix (tokens)", "FLOP efficiency (kFLOP per byte)")
    text = "FLOPs that a cached prefix saves per byte it takes. With states, long prefixes pay."
    return Plot("flop_efficiency", "FLOP efficiency", text, figure, "5")


def tiers(study: Study) -> Plot | None:
    """Hits by the tier that they came from."""
    parts = hits_by_tier(study.at_compared())
    if not parts:
        return None
    figure = plots.bars(parts, "prompt tokens (%)")
    text = "Prompt tokens that were not computed: what the device alone would have given, what the"
    text += " host would have added to that, and the disk to both."
    return Plot("tiers", "Hits by tier", text, figure, "")


def losses(study: Study) -> Plot | None:
    """Tokens that were computed though they had a state once, by what became of it."""
    parts = lost_tokens(study.at_compared())
    if not any(parts.values()):
        return None
    figure = plots.bars(parts, "prompt tokens (%)")
    text = "Prompt tokens that would not have been computed if no state had been lost, by what"
    text += " became of the deepest state of each prompt: it found no room; it was not worth its"
    text += " copy in the next tier; a tier dropped it; or it is there, and computing was faster."
    if NEVER in next(iter(parts.values())):
        text += f" {NEVER}: an unbounded cache found more, at a branch that was not seen here."
    return Plot("losses", "Where hits are lost", text, figure, "")


def blocks(study: Study) -> Plot | None:
    """The worth of a state per block, and its cost."""
    if study.first.tiers is not None:
        return None
    kv, states = [], []
    for _, result in study.swept("block"):
        if result.blocks is not None:
            stored, kv_reused, state_reused = result.blocks
            kv.append(100 * kv_reused / max(stored, 1))
            states.append(100 * state_reused / max(stored, 1))
    cost = study.first.cost
    lengths = [float(length) for length in range(500, 20_001, 500)]
    memory = {
        "KV and one state": [_gigabytes(cost, length, length) for length in lengths],
        **{
            f"blocks of {block}": [_gigabytes(cost, length, block) for length in lengths]
            for block in (64, 32, 16)
        },
    }
    figure = plots.blocks(BLOCKS, {"KV": kv, "states": states}, lengths, memory)
    text = "Left: blocks of vLLM+ whose KV and whose state was ever reused. Right: a state per"
    return Plot("blocks", "Why not a state per block", f"{text} block.", figure, "3")


def lengths(study: Study) -> Plot:
    """The lengths of prompts and answers."""
    requests = study.requests
    answers = np.array([max(len(r.tokens) - r.input_len, 1) for r in requests], dtype=float)
    prompts = np.array([r.input_len for r in requests], dtype=float)
    figure = plots.distribution({"prompt": prompts, "answer": answers}, "tokens")
    text = f"{len(requests):,} requests of {len({r.session for r in requests}):,} sessions."
    return Plot("lengths", "Lengths", text, figure, "6")


def clock(study: Study) -> str:
    time = study.first.time
    if time is None:
        return "By the paper's linear model, without a queue: hit rate in other words."
    return f"Queueing included, by {time.about}."


def _geometry(study: Study) -> str:
    return f"The paper's 7B geometry and formulas, {study.swept_at} of cache."


def flop_efficiency(cost: CostModel, length: int) -> float:
    """FLOPs saved per byte by a cached prefix of `length` tokens with one state (paper section
    4.2).
    """
    return cost.flops(length) / (cost.state_bytes + length * cost.kv_bytes_per_token)


def cached_bytes(cost: CostModel, length: int, block: int) -> int:
    """Bytes of one cached sequence with a state per block."""
    return length * cost.kv_bytes_per_token + length // block * cost.state_bytes


def _gigabytes(cost: CostModel, length: float, block: float) -> float:
    return cached_bytes(cost, int(length), int(block)) / 1e9


def _by_size(sizes: Sequence[Budget], series: plots.Series) -> plots.Panel:
    if isinstance(sizes[0], Split):
        return plots.Panel([float(order(size)) for size in sizes], series, "state slots")
    return plots.Panel([order(size) / 1e9 for size in sizes], series, "cache (GB)")


ALL: tuple[Callable[[Study], Plot | None], ...] = (
    hit_rate,
    tiers,
    losses,
    ttft,
    p95,
    by_length,
    contention,
    mixes,
    states,
    arrivals,
    efficiency,
    blocks,
    lengths,
)
