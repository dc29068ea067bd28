"""Configurations of a server, measured on a trace: SGLang's own launcher, or ours."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import requests
from prometheus_client.parser import text_string_to_metric_families

from scripts.bench.pairs import against_the_first
from scripts.bench.report import ROOT, BenchFailed, Table, times_of
from scripts.bench.servers import LAUNCHERS, flush
from scripts.bench.traffic import Outcome, drive, drive_in_pairs
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.cpu.models.tokenizer import FIRST_TEXT_ID
from sglang_hybrid.extensions.cpu.sizing import Sizes, model_sizes
from sglang_hybrid.serving.server_process import ServerFailed, ServerProcess


@dataclass(frozen=True)
class Configuration:
    """A server to measure: SGLang's own launcher, or ours; its flags, and variables set for it."""

    name: str
    flags: tuple[str, ...]
    ours: bool
    environment: dict[str, str] = field(default_factory=dict)

    def server(self, common: Sequence[str]) -> ServerProcess:
        """A server with the flags that all have in common, and its own."""
        module = LAUNCHERS["ours" if self.ours else "SGLang"]
        flags = [*common, *self.flags]
        return ServerProcess(flags, module=module, directory=ROOT, environment=self.environment)


@dataclass(frozen=True)
class Memory:
    """Bytes that a server has for KV and states together, and how they are divided."""

    budget: int
    division: str


def memory_of_pools(log: str, sizes: Sizes) -> Memory:
    """The memory of a server with a pool for each kind, from what it logged about the pools. Raises
    BenchFailed where it logged nothing.
    """
    tokens = re.search(r"KV Cache is allocated\..*#tokens: (\d+)", log)
    slots = re.search(r"Mamba Cache is allocated\. max_mamba_cache_size: (\d+)", log)
    if tokens is None or slots is None:
        raise BenchFailed("the server's log does not say how large its pools are")
    kv, states = int(tokens[1]), int(slots[1])
    division = f"{kv:,} tokens of KV and {states:,} states"
    return Memory(kv * sizes.kv_token + states * sizes.state, division)


def memory_of(server: ServerProcess, sizes: Sizes) -> Memory:
    """The memory of a running server for KV and states. One memory reports its own budget: the
    pools of its log are as large as either kind could become.
    """
    state = requests.get(server.url + "/server_info", timeout=30).json()["internal_states"][0]
    one = state.get("hybrid_cache", {}).get("memory")
    if one is not None:
        return Memory(one["budget"], "one memory")
    return memory_of_pools(server.log.read_text(errors="replace"), sizes)


def check_budgets(results: Sequence[Result]) -> None:
    """Print each configuration's memory. Raises BenchFailed where the bytes differ."""
    told = [(r.configuration.name, r.memory) for r in results if r.memory is not None]
    for name, memory in told:
        print(f"Memory of {name}: {memory.budget:,} bytes ({memory.division}).", flush=True)
    if len({memory.budget for _, memory in told}) > 1:
        each = ", ".join(f"{name} {memory.budget:,}" for name, memory in told)
        raise BenchFailed(
            f"the servers must have the same bytes for KV and states; they have {each}"
        )


@dataclass
class Result:
    """The results of one configuration; an error of the server itself leaves no outcomes. memory:
    for KV and states. counted: by how much the server's own metrics grew.
    """

    configuration: Configuration
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    memory: Memory | None = None
    counted: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def served(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.error]

    @property
    def hit_rate(self) -> float:
        """Cached tokens over prompt tokens of what was served."""
        prompts = sum(outcome.prompt_tokens for outcome in self.served)
        return sum(outcome.cached_tokens for outcome in self.served) / max(1, prompts)

    @property
    def prefilled(self) -> int:
        return sum(outcome.prefilled for outcome in self.served)

    @property
    def ttft(self) -> tuple[float, float, float]:
        """P5, P50 and P95 of the time to first token, ms."""
        if not self.served:
            return (0.0, 0.0, 0.0)
        times = [outcome.ttft * 1000 for outcome in self.served]
        low, middle, high = np.percentile(times, (5, 50, 95)).tolist()
        return (low, middle, high)


def warm_up(url: str, concurrency: int) -> None:
    """Every kind of step once, with tokens of no trace; then an empty cache."""
    length, answer = 1024, 16
    trace = [
        Request(n, 0, 0.0, np.full(length + answer, n % FIRST_TEXT_ID, dtype=np.int32), length)
        for n in range(2 * concurrency)
    ]
    failed = [o.error for o in asyncio.run(drive(url, trace, concurrency)) if o.error]
    if failed:
        raise ServerFailed(f"the warm-up failed: {failed[0]}")
    flush(url)


def measure(
    configuration: Configuration,
    common: Sequence[str],
    trace: Sequence[Request],
    concurrency: int,
    limit: float,
) -> Result:
    """Start the configuration's server, warm it up, send the trace, stop it.

    A server that has not answered everything after `limit` seconds has failed.
    """
    result = Result(configuration)
    try:
        with configuration.server(common) as server:
            warm_up(server.url, concurrency)
            before = metrics(server.url)
            start = time.perf_counter()
            driving = drive(server.url, trace, concurrency)
            result.outcomes = asyncio.run(asyncio.wait_for(driving, limit))
            result.seconds = time.perf_counter() - start
            if server.process is not None and server.process.poll() is not None:
                result.error = f"the server ended (log: {server.log}):\n{server.tail()}"
            else:
                after = metrics(server.url)
                result.counted = {name: after[name] - before.get(name, 0.0) for name in after}
    except TimeoutError:
        result.error = f"not done after {limit:.0f} s (--limit)"
    except (ServerFailed, requests.RequestException) as error:
        result.error = str(error)
    return result


def measure_in_pairs(
    configurations: Sequence[Configuration],
    common: Sequence[str],
    model: Path,
    trace: Sequence[Request],
    limit: float,
) -> list[Result]:
    """All configurations at once: each request is sent to one server after another. One that fails
    fails all. Raises BenchFailed where the servers' memories have not the same bytes.
    """
    sizes = model_sizes(str(model), "float32")
    if sizes is None:
        raise BenchFailed(f"the bytes of a state are not known for the model in {model}")
    results = [Result(configuration) for configuration in configurations]
    try:
        with contextlib.ExitStack() as stack:
            servers = []
            for result in results:
                servers.append(stack.enter_context(result.configuration.server(common)))
                result.memory = memory_of(servers[-1], sizes)
            check_budgets(results)
            for server in servers:
                warm_up(server.url, 1)
            driving = drive_in_pairs([server.url for server in servers], trace)
            outcomes = asyncio.run(asyncio.wait_for(driving, limit))
    except TimeoutError:
        outcomes, results[0].error = [], f"not done after {limit:.0f} s (--limit)"
    except (ServerFailed, requests.RequestException) as error:
        outcomes, results[0].error = [], str(error)
    for result, of_one in zip(results, outcomes, strict=bool(outcomes)):
        result.outcomes = of_one
        result.seconds = sum(outcome.seconds for outcome in of_one)
    return results


def metrics(url: str) -> dict[str, float]:
    """The server's own metrics, summed over their labels."""
    totals: dict[str, float] = {}
    text = requests.get(url + "/metrics", timeout=30).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def show(results: Sequence[Result]) -> None:
    """Print the table; ratios are to the first row, and `best` is SGLang's own that hits most."""
    own = [result for result in results if not result.configuration.ours and not result.error]
    best = max(own, key=lambda result: result.hit_rate, default=None)
    table = Table(
        *("configuration", "token hit rate", "prefilled tokens", "TTFT P5 / P50 / P95, ms"),
        *("wall, s", "served / failed"),
    )
    for result in results:
        name = result.configuration.name + (" (SGLang's best)" if result is best else "")
        if result.error:
            table.row(name, f"failed: {' '.join(result.error.split())[:80]}", *[""] * 4)
        else:
            table.row(name, *cells(result, results[0]))


def cells(result: Result, base: Result) -> list[str]:
    """The cells of one configuration's results, beside those of another one."""
    times = " / ".join(f"{ms:,.0f}" for ms in result.ttft)
    ratio = " / ".join(times_of(ms, of) for ms, of in zip(result.ttft, base.ttft, strict=True))
    return [
        f"{result.hit_rate:.1%} ({times_of(result.hit_rate, base.hit_rate)})",
        f"{result.prefilled:,} ({times_of(result.prefilled, base.prefilled)})",
        f"{times} ({ratio})",
        f"{result.seconds:.0f} ({times_of(result.seconds, base.seconds)})",
        f"{len(result.served)} / {len(result.outcomes) - len(result.served)}",
    ]


def report(results: Sequence[Result]) -> bool:
    """Print failures and the tables; returns whether something failed."""
    errors = [outcome.error for result in results for outcome in result.outcomes if outcome.error]
    print("".join(f"Failed: {error}.\n" for error in dict.fromkeys(errors)))
    show(results)
    print()
    if any(result.error for result in results):
        return True
    against_the_first([(r.configuration.name, r.outcomes) for r in results])
    print(flush=True)
    return bool(errors)
