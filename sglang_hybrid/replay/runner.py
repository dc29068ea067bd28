"""Runs systems over traces, some at once in worker processes, and sums up what they did."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.costs.cost import MIN_BRANCH_TOKENS, CostModel
from sglang_hybrid.core.server_settings import Budget, Serving, Split
from sglang_hybrid.core.systems import Setting, Spec
from sglang_hybrid.replay import systems  # noqa: F401, it registers them
from sglang_hybrid.simulation.baselines import BlockCache
from sglang_hybrid.simulation.future import Oracle
from sglang_hybrid.simulation.prefill_time import PrefillTime
from sglang_hybrid.simulation.simulator import Outcome
from sglang_hybrid.simulation.tiers.losses import Loss, Losses
from sglang_hybrid.simulation.tiers.tier_budgets import TierBudgets, TierCounts
from sglang_hybrid.simulation.tiers.tier_simulator import TieredSimulator
from sglang_hybrid.simulation.timing import Timeline, paper_ttft
from sglang_hybrid.simulation.traces.requests import Request

LOOK_EVERY = 0.2
"""Seconds between two looks at how far the workers are."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Job:
    """One system on one trace. trace: its name among the runner's. time: None to serve request
    after request, each at once, as the paper does. serving: how the server runs that policies are
    replayed in, None for the paper's rules. tiers: what there is instead of `budget`. losses: find
    out where hits are lost in tiers.
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


@dataclass(frozen=True)
class Result:
    """What a job found, per request [n]. ttft: queueing included, empty without time.

    chosen: the options that were best in hindsight. blocks: stored, KV reused, states reused, of a
    cache of blocks. tiers: what the tiers of a cache in tiers did. lost: tokens that it would have
    hit if it had lost no state, by why it had not, where the job asks for it.
    """

    job: Job
    input_len: Ints
    hit_len: Ints
    paper_ttft: Floats
    ttft: Floats
    seconds: float
    chosen: Spec | None = None
    blocks: tuple[int, int, int] | None = None
    tiers: TierCounts | None = None
    lost: dict[str, int] | None = None

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
        """In seconds, by the model of time, or by the paper's if there was none."""
        return float(np.percentile(self.ttft if len(self.ttft) else self.paper_ttft, percent))

    def as_dict(self) -> dict[str, Any]:
        """The summary, for JSON."""
        budget = self.job.budget
        split = isinstance(budget, Split)
        kept: dict[str, Any] = {
            "policy": str(self.job.spec),
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
    """Traces by name, and what is known of their future. served: called after each request."""

    traces: dict[str, Sequence[Request]]
    oracles: dict[int, Oracle] = field(default_factory=dict)
    served: Callable[[], None] = lambda: None

    def steps(self, job: Job) -> int:
        """Requests that `run` serves."""
        return len(job.spec.candidates()) * len(self.traces[job.trace])

    def run(self, job: Job) -> Result:
        """The best in hindsight is that with the most hit tokens; the first of equals."""
        results = [self._run(job, spec) for spec in job.spec.candidates()]
        best = max(results, key=lambda result: result.hit_tokens)
        seconds = sum(result.seconds for result in results)
        chosen = best.chosen if len(results) > 1 else None
        fields = {**best.__dict__, "seconds": seconds, "chosen": chosen}
        return Result(**fields)

    def _run(self, job: Job, spec: Spec) -> Result:
        requests = self.traces[job.trace]
        setting = Setting(
            job.cost,
            job.budget,
            requests,
            job.min_branch_tokens,
            job.serving,
            self.oracles,
            job.tiers,
            None if job.tiers is None else job.tiers.speeds(job.cost, job.time),
        )
        begin = time.perf_counter()
        cache = spec.build(setting)
        tiers = cache.memory if isinstance(cache, TieredSimulator) else None
        if job.losses and tiers is not None:
            tiers.losses = Losses()
        outcomes: list[Outcome]
        ttft: list[float] = []
        if job.time is None:
            outcomes = []
            for request in requests:
                outcomes.append(cache.serve(request))
                self.served()
        else:
            served = Timeline(cache, job.time, self.served).run(requests)
            outcomes = [one.outcome for one in served]
            ttft = [one.ttft for one in served]
        lost = None
        if tiers is not None and tiers.losses is not None:
            lost = {loss.value: tiers.losses.tokens[loss] for loss in Loss}
        blocks = None
        if isinstance(cache, BlockCache):
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
            None if tiers is None else tiers.counts,
            lost,
        )


def run_all(
    runner: Runner,
    jobs: Sequence[Job],
    workers: int = 1,
    served: Callable[[int], None] = lambda _: None,
) -> list[Result]:
    """Results in the jobs' order.

    Args:
        runner: holds the traces.
        jobs: what to run.
        workers: processes; with one, none is started.
        served: called with the number of requests served since it was called last.

    Raises:
        ChildProcessError: a process died.
    """
    if workers <= 1 or len(jobs) <= 1:
        alone = Runner(runner.traces, runner.oracles, lambda: served(1))
        return [alone.run(job) for job in jobs]
    context = multiprocessing.get_context("spawn")
    count = context.Value("q", 0)
    seen = 0
    with ProcessPoolExecutor(workers, context, _start_worker, (runner.traces, count)) as pool:
        futures = [pool.submit(_work, job) for job in jobs]
        waiting = set(futures)
        try:
            while waiting:
                done, waiting = wait(waiting, LOOK_EVERY, FIRST_COMPLETED)
                now = count.value
                served(now - seen)
                seen = now
                for future in done:
                    future.result()  # one that failed ends it all
        except BrokenProcessPool as error:
            raise ChildProcessError("a worker died, perhaps for memory: use fewer") from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _start_worker(traces: dict[str, Sequence[Request]], count: Synchronized[int]) -> None:
    global _worker

    def served() -> None:
        with count.get_lock():
            count.value += 1

    _worker = Runner(traces, served=served)


def _work(job: Job) -> Result:
    return _worker.run(job)


_worker: Runner
