"""The plots of a report: numbers in, a figure out. No state is shared and no display is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from sglang_hybrid.core.costs.cost import FloatArray
from sglang_hybrid.extensions.lab.simulation.system_names import FORESIGHT, ORACLES

Series = Mapping[str, Sequence[float]]
Params = ParamSpec("Params")

# A policy's colour, everywhere; mostly Okabe and Ito's, which the colour-blind can tell apart.
COLOURS = {
    "none": "#9a9a9a",
    "vllm+": "#e69f00",
    "sglang+": "#56b4e9",
    "sglang": "#0072b2",
    "lru": "#333333",
    "marconi": "#009e73",
    "seglen": "#8c6d31",
    "gdsf": "#b5bd61",
    "tlru": "#bcbd22",
    "density": "#cc79a7",
    "reuse": "#d55e00",
    "hicache": "#0072b2",
    "clairvoyant": "#7b4fa3",
    "oracle": "#7b4fa3",
    "unbounded": "#c4c4c4",
    "prompt": "#0072b2",
    "answer": "#e69f00",
}
PARTS = ("#333333", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#9a9a9a")  # of a stacked bar
BOUNDS = (*ORACLES, FORESIGHT, "unbounded", "none")
"""Policies drawn dashed: those that no server can have, or that none should have."""
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#ececec",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "sglang-hybrid",
}
WIDTH, HEIGHT = 7.2, 3.8  # inches


def colour(policy: str) -> str:
    """The colour of a policy or of one of its settings ("marconi 0.3")."""
    name = policy.split(" ")[0]
    return COLOURS.get("marconi" if name.startswith("marconi") else name, "#555555")


def _styled(draw: Callable[Params, Figure]) -> Callable[Params, Figure]:
    """`draw` in the style of all plots."""

    @wraps(draw)
    def styled(*args: Params.args, **kwargs: Params.kwargs) -> Figure:
        with rc_context(STYLE):
            return draw(*args, **kwargs)

    return styled


@dataclass(frozen=True)
class Panel:
    """Lines of policies over common x. ticks: names for the values of x, evenly spaced; otherwise x
    is on a scale of factors.
    """

    x: Sequence[float]
    series: Series
    x_label: str
    ticks: Sequence[str] | None = None


@_styled
def lines(panels: Sequence[Panel], y_label: str, *, zero: bool = False) -> Figure:
    """Panels side by side with one y axis. zero: a line to compare with at 0."""
    figure, all_axes = _figure(len(panels))
    for axes, panel in zip(all_axes, panels, strict=True):
        places = list(range(len(panel.x))) if panel.ticks else list(panel.x)
        for name, values in panel.series.items():
            axes.plot(places, values, **_look(name))
        axes.set(xlabel=panel.x_label, ylabel=y_label if axes is all_axes[0] else "")
        if not panel.ticks:
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.minorticks_off()
        axes.set_xticks(places, panel.ticks or [f"{value:g}" for value in panel.x])
    if zero:
        all_axes[0].axhline(0, color="#555555", linewidth=0.8)
    else:
        top = max(axes.get_ylim()[1] for axes in all_axes)
        for axes in all_axes:
            axes.set_ylim(0, top)
    _legend(figure, all_axes[0], len(panels[0].series))
    return figure


@_styled
def bars(values: Mapping[str, Mapping[str, float]], x_label: str) -> Figure:
    """One bar per policy with its number, of parts with the same names in each; parts that are 0 in
    all are left out. A bar of one part has the policy's colour.
    """
    names = list(values)[::-1]
    parts = [part for part in values[names[0]] if any(values[name][part] for name in names)]
    several = len(values[names[0]]) > 1
    figure, (axes,) = _figure(height=(1.3 if several else 0.9) + 0.33 * len(names))
    ends = np.zeros(len(names))
    for number, part in enumerate(parts):
        widths = np.array([values[name][part] for name in names])
        shade = PARTS[number % len(PARTS)] if several else [colour(name) for name in names]
        axes.barh(names, widths, left=ends, color=shade, height=0.65, label=part)
        ends += widths
    for row, end in enumerate(ends):
        axes.annotate(f"{end:.1f}", (end, row), (4, 0), textcoords="offset points", va="center")
    axes.set_xlabel(x_label)
    axes.margins(x=0.12)
    axes.grid(axis="y", visible=False)
    _legend(figure, axes, len(parts) if several else 0)
    return figure


@_styled
def distribution(series: Mapping[str, FloatArray], x_label: str) -> Figure:
    """Cumulative distributions on a logarithmic axis; the 5th, 50th and 95th percentile marked."""
    figure, (axes,) = _figure()
    shares = np.linspace(0, 100, 201)
    for name, values in series.items():
        axes.plot(np.percentile(values, shares), shares, **_look(name, marker=""))
    for share in (5, 50, 95):
        axes.axhline(share, color="#bbbbbb", linewidth=0.7, zorder=0)
    axes.set(xscale="log", xlabel=x_label, ylabel="requests (%)", ylim=(0, 100.5))
    axes.set_yticks([0, 5, 25, 50, 75, 95, 100])
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    _legend(figure, axes, len(series))
    return figure


@_styled
def by_bin(
    edges: Sequence[float], series: Series, counts: Sequence[int], x_label: str, y_label: str
) -> Figure:
    """Grouped bars, one group per bin of `edges` [n + 1], with the number of requests in each."""
    figure, (axes,) = _figure()
    groups = len(edges) - 1
    width = 0.8 / max(len(series), 1)
    for number, (name, values) in enumerate(series.items()):
        places = np.arange(groups) + (number - (len(series) - 1) / 2) * width
        axes.bar(places, values, width * 0.92, color=colour(name), label=name)
    axes.axhline(0, color="#555555", linewidth=0.8)
    names = [
        f"{short(low)} to {short(high)}\n({count:,})"
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]
    axes.set_xticks(range(groups), names, fontsize=8)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(axis="x", visible=False)
    _legend(figure, axes, len(series))
    return figure


@_styled
def blocks(
    sizes: Sequence[int],
    reused: Mapping[str, Sequence[float]],
    lengths: Sequence[float],
    memory: Series,
) -> Figure:
    """The paper's figure 3: reuse by block size, and bytes of one sequence by its length."""
    figure, (left, right) = _figure(2)
    places = np.arange(len(sizes))
    for number, (name, values) in enumerate(reused.items()):
        shift = (number - 0.5) * 0.38
        shade = ("#56b4e9", "#d55e00")[number]
        drawn = left.bar(places + shift, values, 0.36, label=name, color=shade)
        left.bar_label(drawn, fmt="%.1f", fontsize=8)
    left.set_xticks(places, [str(size) for size in sizes])
    left.set(xlabel="block size (tokens)", ylabel="reused at least once (%)")
    left.grid(axis="x", visible=False)
    left.legend()
    shades = ("#333333", "#009e73", "#e69f00", "#d55e00")
    _curves(right, lengths, memory, shades, "sequence (tokens)", "cached for one sequence (GB)")
    return figure


@_styled
def curves(x: Sequence[float], series: Series, x_label: str, y_label: str) -> Figure:
    """Plain curves that are no policies, y on a scale of factors."""
    figure, (axes,) = _figure()
    _curves(axes, x, series, ("#333333", "#0072b2", "#009e73", "#d55e00"), x_label, y_label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    return figure


def short(value: float) -> str:
    """12,000 as 12K."""
    return f"{value / 1000:.3g}K" if value >= 1000 else f"{value:g}"


def save(figure: Figure, path: Any, kind: str) -> None:
    """Write `figure` as png or svg; the same figure, the same bytes."""
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
    with rc_context(STYLE):
        FigureCanvasAgg(figure)
        figure.savefig(path, format=kind, dpi=160, metadata=metadata)
        figure.set_layout_engine("none")  # it stays as it was laid out


def _figure(columns: int = 1, height: float = HEIGHT) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.subplots(1, columns, squeeze=False)
    return figure, list(axes[0])


def _look(name: str, marker: str = "o") -> dict[str, Any]:
    dashed = name.split(" ")[0] in BOUNDS
    return {
        "color": colour(name),
        "label": name,
        "linestyle": "--" if dashed else "-",
        "marker": "" if dashed else marker,
    }


def _curves(
    axes: Axes,
    x: Sequence[float],
    series: Series,
    shades: Sequence[str],
    x_label: str,
    y_label: str,
) -> None:
    for (name, values), shade in zip(series.items(), shades, strict=False):
        axes.plot(x, values, label=name, color=shade)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.legend()


def _legend(figure: Figure, axes: Axes, count: int) -> None:
    if count:
        figure.legend(
            *axes.get_legend_handles_labels(), loc="outside upper center", ncols=min(count, 5)
        )
