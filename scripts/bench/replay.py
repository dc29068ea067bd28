"""How fast a replay is.

Per policy; for a tuner's candidates on two workers; how the cost of a request grows with its length
and with the number of checkpoints. Processor time in one process, except for the workers, where it
is wall time.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import numpy as np

from scripts.bench.report import BenchFailed, Table
from scripts.bench.traces import find
from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.server_settings import Serving
from sglang_hybrid.core.victims.eviction import POLICIES
from sglang_hybrid.replay.runner import Job, Runner
from sglang_hybrid.replay.systems import Setting, Spec, systems
from sglang_hybrid.simulation.future import Oracle
from sglang_hybrid.simulation.prefill_time import PAPER
from sglang_hybrid.simulation.simulator import Simulator
from sglang_hybrid.simulation.traces.formats import read_trace
from sglang_hybrid.simulation.traces.generators import generate, traffic
from sglang_hybrid.simulation.traces.lines import Reading
from sglang_hybrid.simulation.traces.requests import Request

COST = CostModel.paper_7b()
ALPHAS = [0.0, *np.geomspace(0.01, 10, 19).round(3).tolist()]


def processor(work: Callable[[], object], rounds: int) -> float:
    """The least processor time of `rounds` runs, in seconds."""
    spent = []
    for _ in range(rounds):
        begin = time.process_time()
        work()
        spent.append(time.process_time() - begin)
    return min(spent)


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
        begin = time.perf_counter()
        Runner({"window": requests}).run_all(jobs, workers)
        spent = time.perf_counter() - begin
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
            begin = time.process_time()
            cache.run(requests[count:])
            spent.append((time.process_time() - begin) / 2_000 * 1e6)
        table.row(name, *(f"{one:,.0f}" for one in spent))


def simulator(name: str, budget: int) -> Simulator:
    cache = Spec(name).build(Setting(COST, budget, []))
    assert isinstance(cache, Simulator)
    return cache


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", help="instead of tau-bench, or of generated agents")
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)


def run(options: argparse.Namespace) -> None:
    name = options.trace or "taubench_airline"
    try:
        requests = read_trace(find(name), Reading())
    except BenchFailed:
        if options.trace:
            raise
        print("There is no tau-bench trace beside the repository: generated agents instead.")
        requests = generate("agent", traffic("agent", sessions=150), 0)
    budget = int(options.gigabytes * 1e9)
    per_policy(requests, budget, options.rounds)
    per_policy(requests, budget, options.rounds, Serving())
    candidates(requests, budget, options.workers)
    by_length(options.rounds)
    by_checkpoints(options.rounds)
