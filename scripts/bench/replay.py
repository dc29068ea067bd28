"""How fast a replay is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Annotated

import numpy as np

from scripts.bench.report import BenchFailed, Table, seconds_of
from scripts.bench.traces import COST, find
from sglang_hybrid.core.server_settings import Serving
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.core.victims.eviction import POLICIES
from sglang_hybrid.extensions.lab.runner import Job, Runner
from sglang_hybrid.extensions.lab.simulation.future import Oracle
from sglang_hybrid.extensions.lab.simulation.prefill_time import PAPER
from sglang_hybrid.extensions.lab.simulation.simulator import Simulator
from sglang_hybrid.extensions.lab.simulation.traces.formats import read_trace
from sglang_hybrid.extensions.lab.simulation.traces.generators import generate, traffic
from sglang_hybrid.extensions.lab.simulation.traces.lines import Reading
from sglang_hybrid.extensions.lab.systems import Setting, Spec, systems

ALPHAS = [0.0, *np.geomspace(0.01, 10, 19).round(3).tolist()]


def processor(work: Callable[[], object], rounds: int) -> float:
    """The least processor time of `rounds` runs, in seconds."""
    return min(seconds_of(work, time.process_time) for _ in range(rounds))


def per_policy(
    requests: list[Request], budget: int, rounds: int, serving: Serving | None = None
) -> None:
    tokens = sum(len(request.tokens) for request in requests) / len(requests)
    rules = "the paper's rules" if serving is None else "as served"
    size = f"{budget / 1e9:g} GB"
    print(f"\n{len(requests):,} requests of {tokens:,.0f} tokens, {size}, {rules}, one core:\n")
    table = Table("policy", "seconds")
    shared: dict[int, Oracle] = {}
    for name in (
        systems(tiered=False) if serving is None else (*POLICIES, "clairvoyant", "unbounded")
    ):
        setting = Setting(COST, budget, requests, serving=serving, oracles=shared)

        def work(name: str = name, setting: Setting = setting) -> None:
            cache = Spec(name).build(setting)
            for request in requests:
                cache.serve(request)

        work() if name == "clairvoyant" else None
        table.row(name, f"{processor(work, rounds):.2f}")


def candidates(requests: list[Request], budget: int, workers: int) -> None:
    specs = [Spec("marconi", (("alpha", alpha),)) for alpha in ALPHAS]
    specs += [Spec(name) for name in ("lru", "reuse", "seglen", "gdsf")]
    print(f"\n{len(specs)} candidates on {workers} workers, wall time:\n")
    table = Table("each request", "seconds")
    for clock in (None, PAPER):
        jobs = [Job(spec, "window", COST, budget, clock) for spec in specs]
        spent = seconds_of(lambda: Runner({"window": requests}).run_all(jobs, workers))  # noqa: B023
        table.row("at once" if clock is None else "in time", f"{spent:.1f}")


def by_length(rounds: int) -> None:
    """Templates and questions of one proportion, at five lengths; the cache holds a fixed share."""
    print("\nCost of a request by its tokens, microseconds:\n")
    lengths = [1_000, 4_000, 16_000, 64_000]
    table = Table("policy", *(f"{length:,}" for length in lengths), "grows as length ^")
    rng = np.random.default_rng(0)
    for name in POLICIES:
        spent = []
        for length in lengths:
            shared = [rng.integers(0, 32_000, length // 2) for _ in range(10)]
            requests = []
            for number in range(300):
                own = rng.integers(0, 32_000, length // 2)
                tokens = np.concatenate([shared[number % 10], own]).astype(np.int32)
                requests.append(Request(number, 0, float(number), tokens, length - 10))
            budget = 30 * (COST.state_bytes + length * COST.kv_bytes_per_token)

            def work(requests: list[Request] = requests, budget: int = budget) -> None:
                simulator(name, budget).run(requests)  # noqa: B023

            spent.append(processor(work, rounds) / len(requests) * 1e6)
        slope = math.log(spent[-1] / spent[0]) / math.log(lengths[-1] / lengths[0])
        table.row(name, *(f"{one:,.0f}" for one in spent), f"{slope:.2f}")


def by_checkpoints(rounds: int) -> None:
    """Short prompts, none of which comes back, through caches that are full of them."""
    print("\nCost of a request by the checkpoints in the cache, microseconds:\n")
    counts = [100, 1_000, 10_000]
    table = Table("policy", *(f"{count:,}" for count in counts))
    rng = np.random.default_rng(0)
    for name in POLICIES:
        spent = []
        for count in counts:
            requests = [
                Request(number, 0, float(number), rng.integers(0, 2**30, 48).astype(np.int32), 40)
                for number in range(count + 2_000)
            ]
            cache = simulator(name, count * (COST.state_bytes + 48 * COST.kv_bytes_per_token))
            cache.run(requests[:count])
            seconds = processor(lambda: cache.run(requests[count:]), 1)  # noqa: B023
            spent.append(seconds / 2_000 * 1e6)
        table.row(name, *(f"{one:,.0f}" for one in spent))


def simulator(name: str, budget: int) -> Simulator:
    cache = Spec(name).build(Setting(COST, budget, []))
    assert isinstance(cache, Simulator)
    return cache


def replay(
    trace: Annotated[str, "instead of tau-bench, or of generated agents"] = "",
    gigabytes: float = 10.0,
    workers: int = 2,
    rounds: int = 3,
) -> None:
    """How fast a replay is.

    Per policy; for a tuner's candidates on two workers; how the cost of a request grows with its
    length and with the number of checkpoints. Processor time in one process, except for the
    workers, where it is wall time.
    """
    name = trace or "taubench_airline"
    try:
        requests = read_trace(find(name), Reading())
    except BenchFailed:
        if trace:
            raise
        print("There is no tau-bench trace beside the repository: generated agents instead.")
        requests = generate("agent", traffic("agent", sessions=150), 0)
    budget = int(gigabytes * 1e9)
    per_policy(requests, budget, rounds)
    per_policy(requests, budget, rounds, Serving())
    candidates(requests, budget, workers)
    by_length(rounds)
    by_checkpoints(rounds)
