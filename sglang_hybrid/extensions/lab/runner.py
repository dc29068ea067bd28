"""Runs systems over traces, some at once in worker processes, and sums up what they did."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sglang_hybrid.core.costs.cost import MIN_BRANCH_TOKENS, CostModel, FloatArray, IntArray
from sglang_hybrid.core.server_settings import Budget, Serving, Split
from sglang_hybrid.core.specs import Spec
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab import systems  # noqa: F401, it registers them
from sglang_hybrid.extensions.lab.simulation.block_cache import BlockCache
from sglang_hybrid.extensions.lab.simulation.device_codec import coded_in, left_of
from sglang_hybrid.extensions.lab.simulation.future import Oracle
from sglang_hybrid.extensions.lab.simulation.prefill_time import PrefillTime
from sglang_hybrid.extensions.lab.simulation.replicas import ROUTERS
from sglang_hybrid.extensions.lab.simulation.shared_store import SimulatedStore, StoreBudget
from sglang_hybrid.extensions.lab.simulation.simulator import Outcome
from sglang_hybrid.extensions.lab.simulation.system_names import Setting, best_of, build_system
from sglang_hybrid.extensions.lab.simulation.tiers.losses import Loss, Losses
from sglang_hybrid.extensions.lab.simulation.tiers.tier_budgets import (
    CopyCodec,
    TierBudgets,
    TierCounts,
)
from sglang_hybrid.extensions.lab.simulation.tiers.tier_simulator import TieredSimulator
from sglang_hybrid.extensions.lab.simulation.timing import Timeline, paper_ttft
from sglang_hybrid.extensions.lab.simulation.workers import run_all


@dataclass(frozen=True)
class Job:
    """One system on one trace. trace: its name among the runner's. time: None to serve request
    after request, each at once, as the paper does. serving: how the server runs that policies are
    replayed in, None for the paper's rules. tiers: what there is instead of `budget`. losses: find
    out where hits are lost in tiers. replicas: servers with a cache of `budget` each, and routing:
    the name of the router before them (simulation/replicas.py); they need `time`. late: seconds
    until a router hears of a state. store: what the servers share below their caches. device_codec:
    of entries that the device keeps coded; it needs `serving`.
    """

    spec: Spec
    trace: str
    cost: CostModel
    budget: Budget
    time: PrefillTime | None = None
    min_branch_tokens: int = MIN_BRANCH_TOKENS
    serving: Serving | None = None
    tiers: TierBudgets | None = None
    losses: bool = False
    replicas: int = 1
    routing: str = ""
    late: float = 0.0
    store: StoreBudget | None = None
    device_codec: CopyCodec = CopyCodec.EXACT

    @property
    def policy(self) -> str:
        """The policy, and how its entries are coded."""
        exact = self.device_codec is CopyCodec.EXACT
        return str(self.spec) if exact else f"{self.spec}, {self.device_codec.value}"

    @property
    def name(self) -> str:
        """The policy, and how requests are routed if there are several replicas."""
        return f"{self.policy}, {self.routing}" if self.routing else self.policy

    def setting(self, requests: Sequence[Request], oracles: dict[int, Oracle]) -> Setting:
        """The setting that its system is built for, with `requests` as the whole trace."""
        cost = coded_in(self.cost, self.device_codec)
        return Setting(
            cost,
            left_of(self.budget, self.device_codec, cost, self.serving),
            requests,
            self.min_branch_tokens,
            self.serving,
            oracles,
            self.tiers,
            None if self.tiers is None else self.tiers.speeds(self.cost, self.time),
        )


@dataclass(frozen=True)
class Result:
    """The results of a job, per request [n]. ttft: queueing included, empty without time.

    chosen: of a policy that stands for several, the best. blocks: stored, KV reused, states reused,
    of a cache of blocks. tiers: what the tiers of a cache in tiers did. lost: tokens that it would
    have hit if it had lost no state, by why it had not, where the job asks for it. exact_tokens: of
    those that were hit, how many came from nothing that was ever coded.
    """

    job: Job
    input_len: IntArray
    hit_len: IntArray
    paper_ttft: FloatArray
    ttft: FloatArray
    seconds: float
    chosen: Spec | None = None
    blocks: tuple[int, int, int] | None = None
    tiers: TierCounts | None = None
    lost: dict[str, int] | None = None
    exact_tokens: int = 0

    @property
    def chosen_words(self) -> str:
        """The options of `chosen`, or its name where it has none; nothing without it."""
        if self.chosen is None:
            return ""
        return ", ".join(f"{value:g}" for _, value in self.chosen.options) or self.chosen.name

    @property
    def hit_tokens(self) -> int:
        return int(self.hit_len.sum())

    @property
    def hit_rate(self) -> float:
        """Skipped tokens over prompt tokens."""
        return self.hit_tokens / int(self.input_len.sum())

    @property
    def flops_saved(self) -> float:
        """Share of the prompts' FLOPs that was skipped."""
        cost = self.job.cost
        spent = cost.flops(self.input_len.astype(np.float64)).sum()
        return float(cost.flops(self.hit_len.astype(np.float64)).sum() / spent)

    def ttft_percentile(self, percent: float) -> float:
        """A percentile of times to first token in seconds, by the model of time, or the paper's."""
        return float(np.percentile(self.ttft if len(self.ttft) else self.paper_ttft, percent))

    def as_dict(self) -> dict[str, Any]:
        """The summary, for JSON."""
        budget = self.job.budget
        split = isinstance(budget, Split)
        kept: dict[str, Any] = {
            "policy": self.job.policy,
            "replicas": self.job.replicas,
            "routing": self.job.routing or None,
            "late_s": self.job.late,
            "store_bytes": None if self.job.store is None else self.job.store.size,
            "chosen": None if self.chosen is None else str(self.chosen),
            "trace": self.job.trace,
            "budget_bytes": None if split else budget,
            "kv_tokens": budget.kv_tokens if isinstance(budget, Split) else None,
            "slots": budget.slots if isinstance(budget, Split) else None,
            "tier_bytes": None if self.job.tiers is None else self.job.tiers.sizes,
            "requests": len(self.input_len),
            "input_tokens": int(self.input_len.sum()),
            "hit_tokens": self.hit_tokens,
            "hit_rate": self.hit_rate,
            "device_codec": self.job.device_codec.value,
            "exact_hit_tokens": self.exact_tokens,
            "flops_saved": self.flops_saved,
            "seconds": round(self.seconds, 3),
            "tiers": None if self.tiers is None else self.tiers.as_dict(),
            "lost_tokens": self.lost,
        }
        for name, times in (("ttft", self.ttft), ("paper_ttft", self.paper_ttft)):
            for percent in (5, 50, 95):
                value = float(np.percentile(times, percent)) if len(times) else None
                kept[f"{name}_p{percent}_s"] = value
        return kept


@dataclass
class Runner:
    """Traces by name, and what is known of their future."""

    traces: dict[str, Sequence[Request]]
    oracles: dict[int, Oracle] = field(default_factory=dict)

    def steps(self, job: Job) -> int:
        """Requests that `run` serves."""
        return len(best_of(job.spec)) * len(self.traces[job.trace])

    def run_all(
        self,
        jobs: Sequence[Job],
        workers: int = 1,
        progress: Callable[[int], None] = lambda requests: None,
    ) -> list[Result]:
        """Results in the jobs' order, as `simulation.workers.run_all` finds them. progress: called
        with the number of requests served since it was called last.
        """
        apart = workers > 1  # oracles are known by the addresses of traces in this process
        return run_all(Runner.run, Runner(self.traces) if apart else self, jobs, workers, progress)

    def run(self, job: Job, count_request: Callable[[], None] = lambda: None) -> Result:
        """The results of `job`: of the systems that the best in hindsight is chosen from, that with
        the most hit tokens, the first of equals. count_request: called after each request.
        """
        results = [self._run(job, spec, count_request) for spec in best_of(job.spec)]
        best = max(results, key=lambda result: result.hit_tokens)
        chosen = best.chosen if len(results) > 1 else None
        return replace(best, seconds=sum(result.seconds for result in results), chosen=chosen)

    def _run(self, job: Job, spec: Spec, count_request: Callable[[], None]) -> Result:
        requests = self.traces[job.trace]
        setting = job.setting(requests, self.oracles)
        begin = time.perf_counter()
        cache = build_system(spec, setting)
        tiered = cache.memory if isinstance(cache, TieredSimulator) else None
        if tiered is not None and job.losses:
            tiered.losses = Losses()
        outcomes: list[Outcome] = []
        ttft: list[float] = []
        if job.time is None:
            for request in requests:
                outcomes.append(cache.serve(request))
                count_request()
        else:
            more = [build_system(spec, setting) for _ in range(job.replicas - 1)]
            router = ROUTERS[job.routing]() if more else None
            store = None
            if job.store is not None:
                store = SimulatedStore(job.cost, job.store, job.time)
            timeline = Timeline(
                [cache, *more], job.time, count_request, router=router, late=job.late, store=store
            )
            served = timeline.run(requests)
            outcomes = [one.outcome for one in served]
            ttft = [one.ttft for one in served]
        lost = blocks = None
        if tiered is not None and tiered.losses is not None:
            lost = {loss.value: tiered.losses.tokens[loss] for loss in Loss}
        if isinstance(cache, BlockCache) and job.replicas == 1:
            blocks = (cache.stored, cache.kv_reused, cache.state_reused)
        return Result(
            job,
            np.array([o.input_len for o in outcomes]),
            np.array([o.hit_len for o in outcomes]),
            paper_ttft(outcomes),
            np.array(ttft),
            time.perf_counter() - begin,
            spec,
            blocks,
            None if tiered is None else tiered.counts,
            lost,
            sum(o.hit_len for o in outcomes if o.exact),
        )
