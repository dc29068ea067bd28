"""The plots of a report: numbers in, a figure out. No state is shared and no display is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

Floats = npt.NDArray[np.float64]
Series = Mapping[str, Sequence[float]]

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
    "unbounded": "#c4c4c4",
    "prompt": "#0072b2",
    "answer": "#e69f00",
}
PARTS = ("#333333", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#9a9a9a")  # of a stacked bar
BOUNDS = ("clairvoyant", "unbounded", "none")  # drawn dashed: not to be had, or not to be wanted
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


def lines(
    x: Sequence[float],
    series: Series,
    x_label: str,
    y_label: str,
    *,
    log: bool = False,
    ticks: Sequence[str] | None = None,
    zero: bool = False,
) -> Figure:
    """One line per policy over common x. ticks: names for the values of x, evenly spaced; log: x on
    a scale of factors; zero: a line to compare with at 0.
    """
    with rc_context(STYLE):
        figure, (axes,) = _figure()
        _lines(axes, x, series, x_label, y_label, log=log, ticks=ticks, zero=zero)
        _legend(figure, axes, len(series))
        return figure


def pair(panels: Sequence[tuple[Sequence[float], Series, str]], y_label: str) -> Figure:
    """Panels side by side with one y axis: (x, series, x label) each, x on a scale of factors."""
    with rc_context(STYLE):
        figure, all_axes = _figure(len(panels))
        for axes, (x, series, x_label) in zip(all_axes, panels, strict=True):
            _lines(axes, x, series, x_label, y_label if axes is all_axes[0] else "", log=True)
        top = max(axes.get_ylim()[1] for axes in all_axes)
        for axes in all_axes:
            axes.set_ylim(0, top)
        _legend(figure, all_axes[0], len(panels[0][1]))
        return figure


def bars(values: Mapping[str, float], x_label: str, form: str = "{:.1f}") -> Figure:
    """One bar per policy, each with its number."""
    with rc_context(STYLE):
        figure, (axes,) = _figure(height=0.9 + 0.33 * len(values))
        names = list(values)[::-1]
        heights = [values[name] for name in names]
        axes.barh(names, heights, color=[colour(name) for name in names], height=0.65)
        for row, value in enumerate(heights):
            axes.annotate(
                form.format(value), (value, row), (4, 0), textcoords="offset points", va="center"
            )
        axes.set_xlabel(x_label)
        axes.margins(x=0.12)
        axes.grid(axis="y", visible=False)
        return figure


def stacked(values: Mapping[str, Mapping[str, float]], x_label: str) -> Figure:
    """One bar per policy, of parts with the same names in each; parts that are 0 in all are left
    out.
    """
    with rc_context(STYLE):
        names = list(values)[::-1]
        figure, (axes,) = _figure(height=1.3 + 0.33 * len(names))
        parts = [part for part in values[names[0]] if any(values[name][part] > 0 for name in names)]
        start = np.zeros(len(names))
        for number, part in enumerate(parts):
            widths = np.array([values[name][part] for name in names])
            shade = PARTS[number % len(PARTS)]
            axes.barh(names, widths, left=start, color=shade, height=0.65, label=part)
            start += widths
        for row, total in enumerate(start):
            axes.annotate(
                f"{total:.1f}", (total, row), (4, 0), textcoords="offset points", va="center"
            )
        axes.set_xlabel(x_label)
        axes.margins(x=0.12)
        axes.grid(axis="y", visible=False)
        _legend(figure, axes, len(parts))
        return figure


def distribution(series: Mapping[str, Floats], x_label: str) -> Figure:
    """Cumulative distributions on a logarithmic axis; the 5th, 50th and 95th percentile marked."""
    with rc_context(STYLE):
        figure, (axes,) = _figure()
        shares = np.linspace(0, 100, 201)
        for name, values in series.items():
            axes.plot(np.percentile(values, shares), shares, **_look(name, marker=""))
        for share in (5, 50, 95):
            axes.axhline(share, color="#bbbbbb", linewidth=0.7, zorder=0)
        axes.set(xscale="log", xlabel=x_label, ylabel="requests (%)", ylim=(0, 100.5))
        axes.set_yticks([0, 5, 25, 50, 75, 95, 100])
        _plain_numbers(axes)
        _legend(figure, axes, len(series))
        return figure


def by_bin(
    edges: Sequence[float], series: Series, counts: Sequence[int], x_label: str, y_label: str
) -> Figure:
    """Grouped bars, one group per bin of `edges` [n + 1], with the number of requests in each."""
    with rc_context(STYLE):
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


def blocks(
    sizes: Sequence[int],
    reused: Mapping[str, Sequence[float]],
    lengths: Sequence[float],
    memory: Series,
) -> Figure:
    """The paper's figure 3: reuse by block size, and bytes of one sequence by its length."""
    with rc_context(STYLE):
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
        for number, (name, values) in enumerate(memory.items()):
            shade = ("#333333", "#009e73", "#e69f00", "#d55e00")[number % 4]
            right.plot(lengths, values, label=name, color=shade)
        right.set(xlabel="sequence (tokens)", ylabel="cached for one sequence (GB)")
        right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        right.legend()
        return figure


def curves(x: Sequence[float], series: Series, x_label: str, y_label: str) -> Figure:
    """Plain curves that are no policies, y on a scale of factors."""
    with rc_context(STYLE):
        figure, (axes,) = _figure()
        shades = ("#333333", "#0072b2", "#009e73", "#d55e00")
        for number, (name, values) in enumerate(series.items()):
            axes.plot(x, values, label=name, color=shades[number % 4])
        axes.set(xlabel=x_label, ylabel=y_label, yscale="log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axes.legend()
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


def _lines(
    axes: Axes,
    x: Sequence[float],
    series: Series,
    x_label: str,
    y_label: str,
    *,
    log: bool = False,
    ticks: Sequence[str] | None = None,
    zero: bool = False,
) -> None:
    places = list(range(len(x))) if ticks else x
    for name, values in series.items():
        axes.plot(places, values, **_look(name))
    axes.set(xlabel=x_label, ylabel=y_label)
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks(list(x), [f"{value:g}" for value in x])
        axes.minorticks_off()
    if ticks:
        axes.set_xticks(list(places), ticks)
    if zero:
        axes.axhline(0, color="#555555", linewidth=0.8)
    else:
        axes.set_ylim(bottom=0)


def _plain_numbers(axes: Axes) -> None:
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, axes: Axes, count: int) -> None:
    if count:
        figure.legend(
            *axes.get_legend_handles_labels(), loc="outside upper center", ncols=min(count, 5)
        )
