"""Replays a server's live traffic under other policies: `replay FILE --follow`.

A server writes finished requests into a recording (`--hybrid-record`); this program reads the lines
as they come, and serves each request to a simulated cache of every policy, without a model. It runs
beside the server, which knows nothing of it. The server's own hits are in the recording.
"""

from __future__ import annotations

import heapq
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from rich.console import Console

from sglang_hybrid.core.named_files import decode_as, open_named
from sglang_hybrid.core.programs import UsageError
from sglang_hybrid.core.sentences import escape
from sglang_hybrid.extensions.lab.simulation.system_names import (
    BEST_OF,
    ORACLES,
    build_system,
)
from sglang_hybrid.extensions.lab.simulation.traces.line_formats import (
    RecordedLine,
    recorded_lines,
)
from sglang_hybrid.extensions.lab.simulation.traces.lines import Reading

if TYPE_CHECKING:
    from sglang_hybrid.core.traffic.requests import Request
    from sglang_hybrid.extensions.lab.runner import Job

logger = logging.getLogger(__name__)

PREFIX: Final = "sglang_hybrid_shadow:"

LATEST_SECONDS: Final = 600.0
"""Seconds that a request may take until its line is written. Lines come as requests end and are
served as they arrived, as a replay of the whole file serves them; one that takes longer is served
late.
"""

STEP_SECONDS: Final = 1.0
"""Time between two looks at the file."""

FORESEEING: Final = (*ORACLES, *BEST_OF)
"""Policies that need the whole trace before its first request."""

POLICIES: Final = "sglang,lru"
"""The policies that are followed where none is named: what the server has is in the recording."""

SERVED: Final = "served"
"""The name of what the server did hit, beside the policies."""

LONGEST_LINE: Final = 64 << 20
"""Bytes; a longer one is no line of a recording."""


@dataclass
class Shadow:
    """One policy, or with SERVED as its name the server itself. requests, tokens, hit: how many
    there were, their prompt tokens, and those that it hit; today: the tokens of the day, and those
    that it hit.
    """

    name: str
    requests: int = 0
    tokens: int = 0
    hit: int = 0
    today: list[int] = field(default_factory=lambda: [0, 0])

    def count(self, tokens: int, hit: int) -> None:
        self.requests += 1
        self.tokens += tokens
        self.hit += hit
        self.today[0] += tokens
        self.today[1] += hit


@dataclass
class Arrival:
    """A request of the recording, and the tokens that the server hit of it, None if that is not
    told.
    """

    request: Request
    hit: int | None


class ShadowMetrics(Collector):
    """The sums of shadows, whenever Prometheus asks; nothing tells of prompts or tenants."""

    def __init__(self, shadows: Sequence[Shadow]) -> None:
        self._shadows = shadows

    def collect(self) -> Iterator[CounterMetricFamily]:
        tokens = CounterMetricFamily(
            PREFIX + "prompt_tokens", "Prompt tokens that were replayed.", labels=["policy"]
        )
        hit = CounterMetricFamily(
            PREFIX + "hit_tokens", "Tokens that this policy would have hit.", labels=["policy"]
        )
        for shadow in self._shadows:
            tokens.add_metric([shadow.name], shadow.tokens)
            hit.add_metric([shadow.name], shadow.hit)
        yield from (tokens, hit)


def follow(
    path: Path,
    jobs: Sequence[Job],
    port: int | None,
    console: Console,
    *,
    going_on: Callable[[], bool] = lambda: True,
    today: Callable[[], date] = date.today,
) -> list[Shadow]:
    """Serve what is in the recording and what comes, until Ctrl-C; prints one line a day and one at
    the end. Raises UsageError for policies that know the future, FileError.

    port: of this machine, at which Prometheus may ask; None: it cannot.
    """
    for job in jobs:
        if job.tiers is not None or job.replicas > 1:
            raise UsageError("--follow is for one cache without tiers")
        if job.spec.name in FORESEEING:
            raise UsageError(f"--follow: {job.spec.name} needs the whole trace beforehand")
    caches = [build_system(job.spec, job.setting((), {})) for job in jobs]
    followed = [Shadow(_name(job)) for job in jobs]
    served = Shadow(SERVED)
    shadows = [*followed, served]
    if port is not None:
        registry = CollectorRegistry()
        registry.register(ShadowMetrics(shadows))
        start_http_server(port, "127.0.0.1", registry)
    day = today()
    try:
        for arrival in _arrivals(path, going_on):
            if today() != day:
                console.print(_line(day, shadows), soft_wrap=True)
                day = today()
                for shadow in shadows:
                    shadow.today = [0, 0]
            for shadow, cache in zip(followed, caches, strict=True):
                outcome = cache.serve(arrival.request)
                shadow.count(outcome.input_len, outcome.hit_len)
            if arrival.hit is not None:
                served.count(arrival.request.input_len, arrival.hit)
    except KeyboardInterrupt:
        pass
    console.print(_line(day, shadows), soft_wrap=True)
    return shadows


def _name(job: Job) -> str:
    """The policy, with the size of its cache where that is one number."""
    return f"{job.name} {job.budget / 1e9:g}GB" if isinstance(job.budget, int) else job.name


def _line(day: date, shadows: Sequence[Shadow]) -> str:
    *followed, served = [
        f"{shadow.name} {100 * shadow.today[1] / max(1, shadow.today[0]):.1f} %"
        for shadow in shadows
    ]
    if shadows[-1].today[0]:
        followed.append(served)
    tokens = max(shadow.today[0] for shadow in shadows)
    return escape(f"{day}: {tokens:,} prompt tokens, hit: {', '.join(followed)}")


def _arrivals(path: Path, going_on: Callable[[], bool]) -> Iterator[Arrival]:
    """Requests by arrival, each when no line of an earlier one is expected any more."""
    waiting: list[tuple[float, int, Arrival]] = []
    latest = 0.0
    for number, arrival in enumerate(_requests(path, going_on)):
        heapq.heappush(waiting, (arrival.request.arrival, number, arrival))
        latest = max(latest, arrival.request.arrival)
        while waiting and waiting[0][0] <= latest - LATEST_SECONDS:
            yield heapq.heappop(waiting)[2]
    while waiting:
        yield heapq.heappop(waiting)[2]


def _requests(path: Path, going_on: Callable[[], bool]) -> Iterator[Arrival]:
    """Requests in the order of lines; lines that are none are left out, with a warning."""
    convert = recorded_lines(Reading())
    with open_named(path) as file:
        for number, text in enumerate(_lines(file, going_on), start=1):
            try:
                line = decode_as(text, RecordedLine)
                yield Arrival(convert(number, line), line.hit)
            except (msgspec.DecodeError, ValueError, OverflowError) as error:
                logger.warning("%s:%d is no line of a recording (%s).", path, number, error)


def _lines(file: BinaryIO, going_on: Callable[[], bool]) -> Iterator[bytes]:
    """Whole lines, also those that are written later; ends when `going_on` says so and nothing is
    left. Raises UsageError for a line that does not end.
    """
    rest = b""
    while True:
        try:
            found = file.read(1 << 20)
            if not found and not going_on():
                return
            if not found:
                time.sleep(STEP_SECONDS)
        except KeyboardInterrupt:
            return
        if not found and os.fstat(file.fileno()).st_size < file.tell():
            raise UsageError("the recording became shorter; start --follow again")
        *lines, rest = (rest + found).split(b"\n")
        yield from (line for line in lines if line.strip())
        if len(rest) > LONGEST_LINE:
            raise UsageError("a line of the recording does not end; --follow reads --hybrid-record")
