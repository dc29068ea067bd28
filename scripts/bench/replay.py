"""The benchmark `replay`: the speed of a replay."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np

from scripts.bench.commands import Count
from scripts.bench.report import BenchFailed, Table, seconds_of
from scripts.bench.traces import COST, find, write_longer
from sglang_hybrid.core.server_settings import Serving
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.core.victims.eviction import POLICIES
from sglang_hybrid.extensions.lab.runner import Job, Runner
from sglang_hybrid.extensions.lab.simulation.future import Oracle
from sglang_hybrid.extensions.lab.simulation.prefill_time import PAPER
from sglang_hybrid.extensions.lab.simulation.traces.formats import read_trace
from sglang_hybrid.extensions.lab.simulation.traces.generators import generate, traffic
from sglang_hybrid.extensions.lab.simulation.traces.lines import Reading
from sglang_hybrid.extensions.lab.systems import Setting, Spec, build_system, parse_spec, systems

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
            cache = build_system(Spec(name), setting)
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


def longer(trace: Path, requests: int, budget: int, policies: Sequence[str]) -> None:
    """Print what so many requests take that are made of Mooncake's `trace`."""
    table = Table("requests", "prompt tokens", "policy", "read, s", "replayed, s", "peak, GB")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "mooncake.jsonl"
        write_longer(trace, requests, path)
        begin = time.process_time()
        runner = Runner({"longer": read_trace(path)})
        reading = time.process_time() - begin
    for policy in policies:
        begin = time.process_time()
        job = Job(parse_spec(policy), "longer", COST, budget, serving=Serving())
        tokens = int(runner.run(job).input_len.sum())
        seconds = time.process_time() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        cells = (f"{reading:.0f}", f"{seconds:.0f}", f"{peak:.2f}")
        table.row(f"{requests:,}", f"{tokens:,}", policy, *cells)


def replay(
    trace: Annotated[str, "instead of tau-bench, or of generated agents"] = "",
    gigabytes: float = 10.0,
    workers: int = 2,
    rounds: int = 3,
    long: Annotated[Count | None, "requests made of Mooncake's trace instead: time, memory"] = None,
    policy: Annotated[str, "--long: policies, by comma"] = "lru",
) -> None:
    """The speed of a replay.

    Per policy, and for a tuner's candidates on two workers. Processor time in one process, except
    for the workers, where it is wall time. With `--long` the time and the peak memory of a trace of
    so many requests, as served.
    """
    if long is not None:
        found = find(trace or "mooncake_conversation_trace")
        longer(found, long, int(gigabytes * 1e9), policy.split(","))
        return
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
