"""The study of a report: the runs asked for, and those it adds: cache sizes, layer mixes, state
sizes, arrivals, block sizes. Where hits in tiers came from, and where others were lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.server_settings import Budget, Split
from sglang_hybrid.core.specs import Spec
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.reports import plots
from sglang_hybrid.extensions.lab.runner import Job, Result, Runner
from sglang_hybrid.extensions.lab.simulation.system_names import HINDSIGHT
from sglang_hybrid.extensions.lab.simulation.traces.generators import retime

SWEPT = ("vllm+", "sglang+", "lru", HINDSIGHT, "reuse")  # the policies of sweeps, where asked for
MIXES = ((32, 4), (30, 5), (28, 7), (24, 12), (0, 36))  # SSM and attention layers, paper figure 12a
STATES = (16, 32, 64, 128)  # paper figure 12b
FACTORS = (0.5, 1.0, 2.0, 4.0)  # of session rate and of think time
SIZES = (0.25, 0.5, 2.0, 4.0)  # of the one cache size that was asked for
BLOCKS = (16, 32, 64, 128)
HIDDEN = 4096
NEVER = "never stored"


class Study:
    """The jobs asked for and the extra ones; their results, once they are in.

    Sweeps are at the middle cache size, and what compares policies at one size is at that where
    they differ most. Retimed traces are added to the runner.
    """

    def __init__(self, runner: Runner, jobs: Sequence[Job]) -> None:
        self.jobs = list(jobs)
        self.results: list[Result] = []
        self._runner = runner
        self._extra: list[tuple[str, float | str, Job]] = []
        self._swept: list[Result] = []
        self._plan()

    @property
    def extra_jobs(self) -> list[Job]:
        return [job for _, _, job in self._extra]

    @property
    def first(self) -> Job:
        return self.jobs[0]

    @property
    def requests(self) -> Sequence[Request]:
        return self._runner.traces[self.first.trace]

    def take(self, results: Sequence[Result]) -> None:
        """Results of the jobs asked for and then of the extra ones, in order."""
        self.results = list(results[: len(self.jobs)])
        self._swept = list(results[len(self.jobs) :])

    @property
    def budgets(self) -> list[Budget]:
        return list(dict.fromkeys(job.budget for job in self.jobs))

    @property
    def middle(self) -> Budget:
        """The cache size that sweeps are at."""
        return self.budgets[len(self.budgets) // 2]

    @property
    def compared(self) -> Budget:
        """The cache size where the hit rates of policies differ most, bounds aside."""

        def spread(budget: Budget) -> float:
            of_size = [r for r in self.results if r.job.budget == budget]
            rates = [r.hit_rate for r in of_size if r.job.spec.name not in plots.BOUNDS]
            return max(rates, default=0.0) - min(rates, default=0.0)

        return max((self.middle, *self.budgets), key=spread)

    @property
    def where(self) -> str:
        """The size of `compared` in words, or the tiers."""
        return self._words(self.compared)

    @property
    def swept_at(self) -> str:
        """The size of sweeps in words, or the tiers."""
        return self._words(self.middle)

    def _words(self, budget: Budget) -> str:
        tiers = self.first.tiers
        return size_words(budget) if tiers is None else f"{tiers} in tiers"

    def at_compared(self) -> dict[str, Result]:
        """Results at the size of `compared` by the policy's name."""
        budget = self.compared
        return {r.job.policy: r for r in self.results if r.job.budget == budget}

    def reference(self) -> str | None:
        """The reference of gains: LRU under the same admission, else SGLang+."""
        names = self.at_compared()
        return next((name for name in ("lru", "sglang+") if name in names), None)

    def swept(self, kind: str) -> list[tuple[float | str, Result]]:
        """Values and results of a kind of extra job."""
        pairs = zip(self._extra, self._swept, strict=True)
        return [(value, result) for (of, value, _), result in pairs if of == kind]

    def sweep(self, kind: str) -> tuple[list[float | str], dict[str, list[float]]]:
        """Values of a kind of extra job, and hit rates in percent by policy."""
        series: dict[str, list[float]] = {}
        for _, result in self.swept(kind):
            series.setdefault(result.job.policy, []).append(100 * result.hit_rate)
        return list(dict.fromkeys(value for value, _ in self.swept(kind))), series

    def sizes(self) -> tuple[list[Budget], dict[str, list[float]]]:
        """Cache sizes, rising, and hit rates in percent by policy; where only one size was asked
        for, the extra ones and the policies that were run at them.
        """
        found: dict[str, dict[Budget, float]] = {}
        for result in [*self.results, *(result for _, result in self.swept("size"))]:
            rates = found.setdefault(result.job.policy, {})
            rates[result.job.budget] = 100 * result.hit_rate
        sizes = sorted({size for rates in found.values() for size in rates}, key=order)
        whole = {name: rates for name, rates in found.items() if len(rates) == len(sizes)}
        return sizes, {name: [rates[size] for size in sizes] for name, rates in whole.items()}

    def _plan(self) -> None:
        base = replace(self.first, budget=self.middle, losses=False)
        tiered = self.first.tiers is not None
        asked = [replace(job, losses=False) for job in self.jobs if job.budget == self.middle]
        for job in [job for job in asked if job.spec.name in SWEPT] or asked[:3]:
            if isinstance(self.middle, int):
                if len(self.budgets) < 2:
                    for factor in SIZES:
                        self._add("size", factor, replace(job, budget=int(self.middle * factor)))
                for ssm, attention in MIXES:
                    cost = paper_model(ssm, attention)
                    self._add("mix", f"{ssm}:{attention}", replace(job, cost=cost))
                for state in STATES:
                    self._add("state", state, replace(job, cost=paper_model(24, 4, state)))
            for factor in FACTORS:
                self._add("rate", factor, replace(job, trace=self._retimed(factor, 1.0)))
                self._add("think", factor, replace(job, trace=self._retimed(1.0, factor)))
        for block in () if tiered else BLOCKS:
            spec = Spec("vllm+", (("block", float(block)),))
            self._add("block", block, replace(base, spec=spec, time=None))

    def _add(self, kind: str, value: float | str, job: Job) -> None:
        self._extra.append((kind, value, job))

    def _retimed(self, rate: float, think: float) -> str:
        """The name of the trace with its arrivals changed."""
        own = self.first.trace
        if rate == think == 1.0:
            return own
        name = f"{own} rate x{rate:g} think x{think:g}"
        if name not in self._runner.traces:
            self._runner.traces[name] = retime(list(self.requests), rate, think)
        return name


def paper_model(ssm: int, attention: int, state: int = 128) -> CostModel:
    """The paper's 7B geometry with another mix of layers; an MLP after each."""
    return CostModel.paper(
        hidden=HIDDEN,
        state=state,
        ssm_layers=ssm,
        attention_layers=attention,
        mlp_layers=ssm + attention,
    )


def order(size: Budget) -> int:
    """The key by which cache sizes are sorted: bytes, or slots."""
    return size.slots if isinstance(size, Split) else size or 0


def size_words(budget: Budget) -> str:
    if isinstance(budget, Split):
        return f"{budget.kv_tokens:,} KV tokens and {budget.slots:,} states"
    return f"{(budget or 0) / 1e9:g} GB"


def hits_by_tier(results: Mapping[str, Result]) -> dict[str, dict[str, float]]:
    """Percent of the prompt tokens by policy and tier; nothing without tiers."""
    found: dict[str, dict[str, float]] = {}
    for name, result in results.items():
        tiers, total = result.job.tiers, int(result.input_len.sum())
        if tiers is not None and result.tiers is not None:
            hits = result.tiers.hit_tokens
            found[name] = {tier.name.lower(): 100 * hits[tier] / total for tier in tiers.present}
    return found


def lost_tokens(results: Mapping[str, Result]) -> dict[str, dict[str, float]]:
    """Percent of the prompt tokens by policy and reason; what was never stored is known only beside
    an unbounded cache. Reasons that nobody had are left out. Nothing without tiers.
    """
    found: dict[str, dict[str, float]] = {}
    for name, result in results.items():
        if result.lost is None:
            continue
        total = int(result.input_len.sum())
        found[name] = {why: 100 * tokens / total for why, tokens in result.lost.items()}
        if "unbounded" in results:
            more = results["unbounded"].hit_tokens - result.hit_tokens - sum(result.lost.values())
            found[name][NEVER] = 100 * max(0, more) / total
    seen = {why for shares in found.values() for why, share in shares.items() if share}
    return {
        name: {why: share for why, share in shares.items() if why in seen}
        for name, shares in found.items()
    }
