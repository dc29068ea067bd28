"""Draws README's figure from pages of results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.bench.report import RESULTS, ROOT, BenchFailed
from sglang_hybrid.extensions.lab.reports.plots import STYLE, WIDTH

TITLES = {
    "bbh": "few-shot\nprompts",
    "claude": "coding\nagents",
    "taubench": "airline\nagents",
    "sharegpt": "chats",
    "mooncake": "production\nhour",
}
"""Labels of traces, by the first word of their names."""

MEMORIES = {
    "one": "one memory",
    "split, 15% for states": "15 %\nfor states",
    "split, 40% for states": "40 %\nfor states",
    "split, 70% for states": "70 %\nfor states",
}
"""Rows of the page one-memory, and how they are called."""

GREY, BLUE, ORANGE = "#999999", "#0072b2", "#d55e00"

_TRACE = re.compile(r"^(\w+)\.jsonl\.gz: .*?(?=^\w+\.jsonl\.gz: |\Z)", re.MULTILINE | re.DOTALL)
_RATE = r"^\| {}[^|]*\| ([\d.]+)% "
_ALL = re.compile(r"^\| ours, default \| all \|[^|]*\|[^|]*\(([\d.]+)x\) \|[^|]*\(([\d.]+)x\)")


@dataclass(frozen=True)
class Pair:
    """Results of two servers on one trace. Hit rates in percent; tokens prefilled and the sum of
    the times to first token as multiples of SGLang's.
    """

    trace: str
    sglang: float
    ours: float
    tokens: float
    time: float


def read_pairs(text: str) -> list[Pair]:
    """The traces of a page that `ab` made, those of which most time is saved first."""
    found = []
    for part in _TRACE.finditer(text):
        sglang, ours = (_number(_RATE.format(name), part[0]) for name in ("SGLang, d", "ours, d"))
        all_requests = next(filter(None, map(_ALL.match, part[0].splitlines())), None)
        if all_requests is None:
            raise BenchFailed(f"the page has no sums of {part[1]}")
        tokens, time = map(float, all_requests.groups())
        found.append(Pair(part[1], sglang, ours, tokens, time))
    return sorted(found, key=lambda pair: pair.time)


def _number(pattern: str, text: str) -> float:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise BenchFailed(f"nothing on the page matches {pattern}")
    return float(match[1])


def read_rates(text: str, rows: Sequence[str], column: int) -> list[float]:
    """The percentages in a column of the rows with these names; column 0 has the names. Raises
    BenchFailed.
    """
    found = []
    for name in rows:
        row = next((line for line in text.splitlines() if line.startswith(f"| {name} |")), None)
        if row is None:
            raise BenchFailed(f"the page has no row {name!r}")
        found.append(float(row.strip("| ").split(" | ")[column].rstrip(" %")))
    return found


def draw(pairs: Sequence[Pair], memories: Sequence[float], file: Path) -> None:
    """Two groups of bars for each trace: hit rates, and what is left of SGLang's work and time.
    Beside them hit rates in one memory and in three splits of it.
    """
    with rc_context(STYLE | {"svg.hashsalt": "worth"}):
        figure = Figure(figsize=(1.9 * WIDTH, 2.7), layout="constrained")
        hits, left, memory = figure.subplots(1, 3, width_ratios=(3, 3, 2))
        names = [TITLES.get(pair.trace.split("_")[0], pair.trace) for pair in pairs]
        _bars(hits, names, "SGLang's cache", [pair.sglang for pair in pairs], -0.2, GREY)
        _bars(hits, names, "ours", [pair.ours for pair in pairs], 0.2, BLUE)
        _bars(left, names, "tokens prefilled", [pair.tokens for pair in pairs], -0.2, BLUE)
        _bars(left, names, "time to first token", [pair.time for pair in pairs], 0.2, ORANGE)
        left.axhline(1, color="#333333", linewidth=1)
        hits.set(title="prompt tokens from the cache, %", ylim=(0, 120))
        left.set(title="ours, as a multiple of SGLang's", ylim=(0, 1.4))
        for axes in (hits, left):
            axes.legend(loc="upper right", ncols=2)
        _bars(memory, [*MEMORIES.values()], "", [*memories], 0, BLUE)
        memory.set(title="hit rate by memory, %", ylim=(0, 120))
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _bars(
    axes: Axes, names: Sequence[str], label: str, values: list[float], shift: float, colour: str
) -> None:
    places = [at + shift for at in range(len(names))]
    bars = axes.bar(places, values, 0.38, label=label, color=colour)
    axes.bar_label(bars, fmt="{:.1f}" if max(values) > 2 else "{:.2f}", fontsize=7)
    axes.set_xticks(range(len(names)), names, fontsize=7)


def draw_figure(file: Path = ROOT / "docs" / "worth.svg") -> None:
    """Draws README's figure from pages of results: what the cache is worth beside SGLang's own.

    Of each trace of the page `ab`: the share of its prompt tokens that each server hits, and what
    ours prefills and how long its requests wait for their first token, as a multiple of SGLang's.
    What one memory adds, from the page `one-memory`.
    """
    pairs = read_pairs((RESULTS / "ab.md").read_text())
    memories = read_rates((RESULTS / "one-memory.md").read_text(), list(MEMORIES), -1)
    draw(pairs, memories, file)
