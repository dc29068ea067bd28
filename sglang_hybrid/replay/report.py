"""One page about a replay: what each policy was worth, by cache size, prompt length, model and
traffic, with the plots of the paper's evaluation.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from sglang_hybrid.core.cost import CostModel
from sglang_hybrid.replay import plots
from sglang_hybrid.replay.generators import retime
from sglang_hybrid.replay.runner import Job, Result, Runner
from sglang_hybrid.replay.simulator import Budget, Split
from sglang_hybrid.replay.systems import HINDSIGHT, Spec

MARK = "sglang_hybrid replay report"
SWEPT = ("vllm+", "sglang+", "lru", HINDSIGHT, "reuse")  # the policies of sweeps, where asked for
MIXES = ((32, 4), (30, 5), (28, 7), (24, 12), (0, 36))  # SSM and attention layers, paper figure 12a
STATES = (16, 32, 64, 128)  # paper figure 12b
FACTORS = (0.5, 1.0, 2.0, 4.0)  # of session rate and of think time
BLOCKS = (16, 32, 64, 128)
HIDDEN = 4096


@dataclass(frozen=True)
class Plot:
    """A figure, its file's name, and the sentence below it."""

    name: str
    title: str
    caption: str
    figure: Figure
    source: str  # figures of the paper


class Report:
    """A directory that is there with all it should hold, or not at all.

    Enter it before the replay: a directory that cannot be written is an error then, not after
    minutes. `plan` says what must be run beside the jobs asked for, `write` takes all results.
    """

    def __init__(self, directory: Path, command: str, seed: int) -> None:
        self.directory = directory
        self.command = command
        self.seed = seed
        self._extra: list[tuple[str, float | str, Job]] = []

    def __enter__(self) -> Self:
        """Raises ValueError, in one sentence, for a place where a report cannot be."""
        where = self.directory
        if where.exists() and not self._replaceable():
            raise ValueError(f"{where} exists and holds no report; give a new directory")
        try:
            where.absolute().parent.mkdir(parents=True, exist_ok=True)
            prefix = f".{where.name}."
            made = tempfile.mkdtemp(prefix=prefix, dir=where.absolute().parent)
        except OSError as error:
            raise ValueError(f"no report can be written to {where} ({error.strerror})") from error
        self._part = Path(made)
        self._part.chmod(0o755)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._part, ignore_errors=True)

    def plan(self, runner: Runner, jobs: Sequence[Job]) -> list[Job]:
        """Further jobs: cache sizes if there is only one, layer mixes, state sizes, arrivals, block
        sizes. Adds retimed traces to the runner.
        """
        self._jobs = list(jobs)
        self._runner = runner
        middle = self._middle()
        base = replace(jobs[0], budget=middle)
        specs = [job.spec for job in jobs if job.budget == middle]
        swept = [spec for spec in specs if spec.name in SWEPT] or specs[:3]
        for spec in swept:
            job = replace(base, spec=spec)
            if isinstance(middle, int):
                if len(self._budgets()) < 2:
                    for factor in (0.25, 0.5, 2.0, 4.0):
                        self._add("size", factor, replace(job, budget=int(middle * factor)))
                for ssm, attention in MIXES:
                    cost = paper_model(ssm, attention)
                    self._add("mix", f"{ssm}:{attention}", replace(job, cost=cost))
                for state in STATES:
                    self._add("state", state, replace(job, cost=paper_model(24, 4, state)))
            for factor in FACTORS:
                self._add("rate", factor, replace(job, trace=self._retimed(factor, 1.0)))
                self._add("think", factor, replace(job, trace=self._retimed(1.0, factor)))
        for block in BLOCKS:
            spec = Spec("vllm+", (("block", float(block)),))
            self._add("block", block, replace(base, spec=spec, time=None))
        return [job for _, _, job in self._extra]

    def write(self, results: Sequence[Result]) -> None:
        """Draw everything and put the report in its place."""
        self._results = list(results[: len(self._jobs)])
        self._swept = list(zip(self._extra, results[len(self._jobs) :], strict=True))
        drawn = [
            plot
            for plot in (
                self._hit_rate(),
                self._ttft(),
                self._p95(),
                self._by_length(),
                self._contention(),
                self._mixes(),
                self._states(),
                self._arrivals(),
                self._efficiency(),
                self._blocks(),
                self._lengths(),
            )
            if plot is not None
        ]
        for plot in drawn:
            plots.save(plot.figure, self._part / f"{plot.name}.png", "png")
        (self._part / "index.html").write_text(self._page(drawn))
        if self.directory.exists():
            shutil.rmtree(self.directory)
        os.replace(self._part, self.directory)

    # What is compared.

    def _budgets(self) -> list[Budget]:
        return list(dict.fromkeys(job.budget for job in self._jobs))

    def _middle(self) -> Budget:
        budgets = self._budgets()
        return budgets[len(budgets) // 2]

    def _at(self, budget: Budget) -> dict[str, Result]:
        """Results of one cache size by the policy's name."""
        return {str(r.job.spec): r for r in self._results if r.job.budget == budget}

    def _reference(self) -> str | None:
        """What gains are counted from: LRU under the same admission, else SGLang+."""
        names = self._at(self._middle())
        return next((name for name in ("lru", "sglang+") if name in names), None)

    def _sweep(self, kind: str) -> tuple[list[float | str], dict[str, list[float]]]:
        """Values and hit rates in percent of a kind of extra job."""
        values = list(dict.fromkeys(value for (k, value, _), _ in self._swept if k == kind))
        series: dict[str, list[float]] = {}
        for (k, _, job), result in self._swept:
            if k == kind:
                series.setdefault(str(job.spec), []).append(100 * result.hit_rate)
        return values, series

    def _sizes(self) -> tuple[list[Budget], dict[str, list[float]]]:
        """Cache sizes and hit rates in percent; the planned sizes where only one was asked for."""
        found: dict[str, dict[Budget, float]] = {}
        for result in self._results:
            rates = found.setdefault(str(result.job.spec), {})
            rates[result.job.budget] = 100 * result.hit_rate
        for (kind, _, job), result in self._swept:
            if kind == "size":
                found[str(job.spec)][job.budget] = 100 * result.hit_rate
        sizes = sorted({size for rates in found.values() for size in rates}, key=_order)
        if len(self._budgets()) < 2:
            found = {name: rates for name, rates in found.items() if len(rates) == len(sizes)}
        return sizes, {name: [rates[size] for size in sizes] for name, rates in found.items()}

    # One plot each.

    def _hit_rate(self) -> Plot:
        sizes, series = self._sizes()
        middle = self._at(self._middle())
        if len(sizes) < 2 or not series:
            values = {name: 100 * result.hit_rate for name, result in middle.items()}
            figure = plots.bars(values, "token hit rate (%)")
        else:
            x, label = _axis(sizes)
            figure = plots.lines(x, series, label, "token hit rate (%)", log=True)
        ranked = sorted(
            (r.hit_rate, n) for n, r in middle.items() if n.split(" ")[0] not in plots.BOUNDS
        )
        caption = f"Prompt tokens that were not computed again. At {_size(self._middle())}: "
        caption += ", ".join(f"{name} {100 * rate:.1f} %" for rate, name in ranked[::-1][:4])
        return Plot("hit_rate", "Token hit rate", f"{caption}.", figure, "7, 8")

    def _ttft(self) -> Plot:
        series = {
            name: 1000 * (result.ttft if len(result.ttft) else result.paper_ttft)
            for name, result in self._at(self._middle()).items()
        }
        figure = plots.distribution(series, "time to first token (ms)")
        return Plot("ttft", "Time to first token", self._clock(), figure, "10b")

    def _p95(self) -> Plot | None:
        found = self._at(self._middle())
        if "none" not in found or len(found) < 2:
            return None
        without = found["none"].ttft_percentile(95)
        values = {
            name: 100 * result.ttft_percentile(95) / without
            for name, result in found.items()
            if name != "none"
        }
        figure = plots.bars(values, "P95 of time to first token, no cache = 100")
        text = f"Without a cache the 95th percentile is {1000 * without:,.0f} ms. {self._clock()}"
        return Plot("ttft_p95", "The slow end", text, figure, "9")

    def _by_length(self) -> Plot | None:
        reference = self._reference()
        found = self._at(self._middle())
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

    def _contention(self) -> Plot | None:
        sizes, series = self._sizes()
        reference = self._reference()
        if reference is None or reference not in series or len(sizes) < 2:
            return None
        base = series[reference]
        gains = {
            name: [v - b for v, b in zip(values, base, strict=True)]
            for name, values in series.items()
            if name != reference and name.split(" ")[0] not in ("none", "unbounded", "vllm+")
        }
        x, label = _axis(sizes)
        figure = plots.lines(
            x, gains, label, f"hit rate over {reference} (points)", log=True, zero=True
        )
        text = f"What a policy adds to {reference}: little where everything fits, and where nothing"
        return Plot("contention", "Contention", f"{text} does.", figure, "11")

    def _mixes(self) -> Plot | None:
        values, series = self._sweep("mix")
        if not values:
            return None
        figure = plots.lines(
            range(len(values)),
            series,
            "state-space : attention layers",
            "token hit rate (%)",
            ticks=[str(value) for value in values],
        )
        return Plot("layers", "Layer mix", self._geometry(), figure, "12a")

    def _states(self) -> Plot | None:
        values, series = self._sweep("state")
        if not values:
            return None
        x = [float(value) for value in values]
        figure = plots.lines(x, series, "state dimension N", "token hit rate (%)", log=True)
        return Plot("state_size", "State size", self._geometry(), figure, "12b")

    def _arrivals(self) -> Plot:
        rates, by_rate = self._sweep("rate")
        pauses, by_pause = self._sweep("think")
        figure = plots.pair(
            [
                ([float(v) for v in rates], by_rate, "sessions a second (times the trace's)"),
                ([float(v) for v in pauses], by_pause, "think time (times the trace's)"),
            ],
            "token hit rate (%)",
        )
        text = f"The same sessions, closer together or slower, at {_size(self._middle())}."
        return Plot("arrivals", "Arrival patterns", text, figure, "13")

    def _efficiency(self) -> Plot:
        x = [float(length) for length in range(250, 32_001, 250)]
        models = {
            "attention only": paper_model(0, 28),
            "hybrid, 1 : 6": paper_model(24, 4),
            "state-space only": paper_model(28, 0),
        }
        own = self._jobs[0].cost
        if own not in models.values():
            models["this model"] = own
        series = {
            name: [1e-3 * flop_efficiency(cost, int(length)) for length in x]
            for name, cost in models.items()
        }
        figure = plots.curves(x, series, "prefix (tokens)", "FLOP efficiency (kFLOP per byte)")
        text = "FLOPs that a cached prefix saves per byte it takes. With states, long prefixes pay."
        return Plot("flop_efficiency", "FLOP efficiency", text, figure, "5")

    def _blocks(self) -> Plot:
        kv, states = [], []
        for (kind, _, _), result in self._swept:
            if kind == "block" and result.blocks is not None:
                stored, kv_reused, state_reused = result.blocks
                kv.append(100 * kv_reused / max(stored, 1))
                states.append(100 * state_reused / max(stored, 1))
        cost = self._jobs[0].cost
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

    def _lengths(self) -> Plot:
        requests = self._runner.traces[self._jobs[0].trace]
        answers = np.array([max(len(r.tokens) - r.input_len, 1) for r in requests], dtype=float)
        prompts = np.array([r.input_len for r in requests], dtype=float)
        figure = plots.distribution({"prompt": prompts, "answer": answers}, "tokens")
        text = f"{len(requests):,} requests of {len({r.session for r in requests}):,} sessions."
        return Plot("lengths", "Lengths", text, figure, "6")

    # Words.

    def _clock(self) -> str:
        time = self._jobs[0].time
        if time is None:
            return "By the paper's linear model, without a queue: hit rate in other words."
        return f"Queueing included, by {time.about}."

    def _geometry(self) -> str:
        return f"The paper's 7B geometry and formulas, {_size(self._middle())} of cache."

    def _page(self, drawn: Sequence[Plot]) -> str:
        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent),
            autoescape=True,
            undefined=StrictUndefined,
        )
        middle = self._at(self._middle())
        first = self._results[0]
        bests = [r for n, r in middle.items() if n.split(" ")[0] not in plots.BOUNDS]
        best = max(bests or list(middle.values()), key=lambda result: result.hit_tokens)
        return environment.get_template("report.html").render(
            mark=MARK,
            trace=first.job.trace,
            requests=len(first.input_len),
            tokens=int(first.input_len.sum()),
            size=_size(self._middle()),
            best=best,
            middle=middle,
            rows=[(_size(r.job.budget), r, plots.colour(str(r.job.spec))) for r in self._results],
            timed=self._jobs[0].time is not None,
            plots=[(plot, Markup(_svg(plot.figure))) for plot in drawn],
            cost=first.job.cost,
            clock=self._clock(),
            command=self.command,
            seed=self.seed,
        )

    def _replaceable(self) -> bool:
        """Whether what is there is empty, or an earlier report."""
        if not self.directory.is_dir():
            return False
        if not any(self.directory.iterdir()):
            return True
        with suppress(OSError):
            return MARK in (self.directory / "index.html").read_text()[:500]
        return False

    def _retimed(self, rate: float, think: float) -> str:
        own = self._jobs[0].trace
        if rate == think == 1.0:
            return own
        name = f"{own} rate x{rate:g} think x{think:g}"
        if name not in self._runner.traces:
            self._runner.traces[name] = retime(list(self._runner.traces[own]), rate, think)
        return name

    def _add(self, kind: str, value: float | str, job: Job) -> None:
        self._extra.append((kind, value, job))


def paper_model(ssm: int, attention: int, state: int = 128) -> CostModel:
    """The paper's 7B geometry with another mix of layers; an MLP after each."""
    return CostModel.paper(
        hidden=HIDDEN,
        state=state,
        ssm_layers=ssm,
        attention_layers=attention,
        mlp_layers=ssm + attention,
    )


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


def _axis(sizes: Sequence[Budget]) -> tuple[list[float], str]:
    if isinstance(sizes[0], Split):
        return [float(_order(size)) for size in sizes], "state slots"
    return [_order(size) / 1e9 for size in sizes], "cache (GB)"


def _order(size: Budget) -> int:
    assert size is not None
    return size.slots if isinstance(size, Split) else size


def _size(budget: Budget) -> str:
    if isinstance(budget, Split):
        return f"{budget.kv_tokens:,} KV tokens and {budget.slots:,} states"
    return f"{(budget or 0) / 1e9:g} GB"


def _svg(figure: Figure) -> str:
    """The figure as inline SVG, without what comes before its element."""
    buffer = io.StringIO()
    plots.save(figure, buffer, "svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]
