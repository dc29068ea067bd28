"""One configuration of a server, measured on a trace: SGLang's own launcher, or ours."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field

import numpy as np
import requests
from prometheus_client.parser import text_string_to_metric_families

from scripts.bench.pairs import against_the_first
from scripts.bench.report import ROOT, Table, times_of
from scripts.bench.servers import LAUNCHERS, flush
from scripts.bench.traffic import Outcome, drive, drive_in_pairs
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.cpu.models.tokenizer import FIRST_TEXT_ID
from sglang_hybrid.serving.server_process import ServerFailed, ServerProcess

WATCH_SECONDS = 2.0
"""Between looks at a server's metrics while it works."""
KV_EVICTED = "sglang:evicted_tokens_total"


@dataclass(frozen=True)
class Configuration:
    """A server to measure: SGLang's own launcher, or ours; its flags, and variables set for it."""

    name: str
    flags: tuple[str, ...]
    ours: bool
    environment: dict[str, str] = field(default_factory=dict)

    def server(self, common: Sequence[str]) -> ServerProcess:
        """With the flags that all have in common, and its own."""
        module = LAUNCHERS["ours" if self.ours else "SGLang"]
        flags = [*common, *self.flags]
        return ServerProcess(flags, module=module, directory=ROOT, environment=self.environment)


@dataclass
class Result:
    """What one configuration did; an error of the server itself leaves no outcomes. counted: by how
    much the server's own metrics grew; slots_free: the fewest state slots that they said, -1 if
    they did not say.
    """

    configuration: Configuration
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    pools: tuple[str, ...] = ()
    counted: dict[str, float] = field(default_factory=dict)
    slots_free: int = -1
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


async def watched(
    url: str, driving: Awaitable[list[Outcome]], limit: float
) -> tuple[list[Outcome], int]:
    """What `driving` returns, and the fewest free state slots that the server's metrics said.

    Raises `TimeoutError` after `limit` seconds.
    """
    least = math.inf

    async def watch() -> None:
        nonlocal least
        with contextlib.suppress(requests.RequestException):
            while True:
                now = await asyncio.to_thread(metrics, url)
                least = min(least, now.get("sglang:mamba_available_tokens", math.inf))
                await asyncio.sleep(WATCH_SECONDS)

    watching = asyncio.create_task(watch())
    try:
        outcomes = await asyncio.wait_for(driving, limit)
    finally:
        watching.cancel()
    return outcomes, int(least) if math.isfinite(least) else -1


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
            result.pools = pools(server.log.read_text(errors="replace"))
            warm_up(server.url, concurrency)
            before = metrics(server.url)
            start = time.perf_counter()
            result.outcomes, result.slots_free = asyncio.run(
                watched(server.url, drive(server.url, trace, concurrency), limit)
            )
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
    trace: Sequence[Request],
    limit: float,
) -> list[Result]:
    """`measure` for all at once. One that fails fails all; nothing is watched meanwhile."""
    results = [Result(configuration) for configuration in configurations]
    try:
        with contextlib.ExitStack() as stack:
            servers = []
            for result in results:
                servers.append(stack.enter_context(result.configuration.server(common)))
                result.pools = pools(servers[-1].log.read_text(errors="replace"))
                warm_up(servers[-1].url, 1)
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


def pools(log: str) -> tuple[str, ...]:
    """What the server said about the pools that it allocated."""
    return tuple(re.findall(r"(?:Mamba|KV) Cache is allocated\. (.*\S)", log))


def show(results: Sequence[Result]) -> None:
    """Print the table; ratios are to the first row, and `best` is SGLang's own that hits most."""
    own = [result for result in results if not result.configuration.ours and not result.error]
    best = max(own, key=lambda result: result.hit_rate, default=None)
    table = Table(
        *("configuration", "token hit rate", "prefilled tokens", "TTFT P5 / P50 / P95, ms"),
        *("wall, s", "served / failed", "KV evicted, fewest slots free"),
    )
    for result in results:
        name = result.configuration.name + (" (SGLang's best)" if result is best else "")
        if result.error:
            table.row(name, f"failed: {' '.join(result.error.split())[:80]}", *[""] * 5)
        else:
            table.row(name, *cells(result, results[0]))


def cells(result: Result, base: Result) -> list[str]:
    """What one configuration did, beside another one."""
    times = " / ".join(f"{ms:,.0f}" for ms in result.ttft)
    ratio = " / ".join(times_of(ms, of) for ms, of in zip(result.ttft, base.ttft, strict=True))
    return [
        f"{result.hit_rate:.1%} ({times_of(result.hit_rate, base.hit_rate)})",
        f"{result.prefilled:,} ({times_of(result.prefilled, base.prefilled)})",
        f"{times} ({ratio})",
        f"{result.seconds:.0f} ({times_of(result.seconds, base.seconds)})",
        f"{len(result.served)} / {len(result.outcomes) - len(result.served)}",
        f"{result.counted.get(KV_EVICTED, 0.0):,.0f}, {result.slots_free}",
    ]


def report(results: Sequence[Result], paired: bool) -> list[str]:
    """Print pools, failures and the table; returns what failed."""
    for pool in dict.fromkeys(pool for result in results for pool in result.pools):
        print(f"Pool: {pool}.")
    if len({result.pools for result in results if result.pools}) > 1:
        print("The pools are NOT the same for all.")
    errors = [outcome.error for result in results for outcome in result.outcomes if outcome.error]
    print("".join(f"Failed: {error}.\n" for error in dict.fromkeys(errors)))
    if results:
        show(results)
    if paired and results:
        print()
        against_the_first([(r.configuration.name, r.outcomes) for r in results])
    print(flush=True)
    return errors + [result.error for result in results if result.error]
