"""Two servers behind routers: what is hit, and how long the first token takes."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace
from typing import Annotated, Any, Protocol

import numpy as np
import requests

from scripts.bench.commands import Count
from scripts.bench.report import Table
from scripts.bench.servers import events, flush, greedy, percentile, random_tokens
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.cpu.models import ensure_tiny_model
from sglang_hybrid.extensions.lab.simulation.replicas import ROUTERS
from sglang_hybrid.serving.server_process import ServerProcess, event_flags

SECONDS = 45.0
"""Time in which sessions begin."""

POOLS = ("--max-total-tokens", "12000", "--max-mamba-cache-size", "60")
"""Flags of each server; all sessions together have some 60,000 tokens."""

ANSWER = 8
MODULE = "sglang_hybrid.replicas"


@dataclass(frozen=True)
class Step:
    """The next prompt of a session. begins: it repeats nothing of the session's earlier ones.
    samples: how many times it is asked at once. pause: seconds before it.
    """

    tokens: list[int]
    begins: bool = False
    samples: int = 1
    pause: float = 0.0


Session = tuple[str, float, list[Step]]
"""The kind of a session, when it begins, and its steps."""


def sessions(source: random.Random) -> Iterator[Session]:
    """Five kinds, which begin at any time."""
    rules = random_tokens(source, 600)
    shots = [random_tokens(source, 400) for _ in range(3)]

    def turn(least: int, most: int) -> list[int]:
        return random_tokens(source, source.randint(least, most))

    def pause() -> float:
        return source.uniform(0.5, 4.0)

    def start() -> float:
        return source.uniform(0, SECONDS)

    for _ in range(8):
        first = [Step(rules + turn(60, 150), begins=True)]
        yield "agents", start(), first + [Step(turn(60, 150), pause=pause()) for _ in range(6)]
    for _ in range(10):
        first = [Step(turn(40, 80), begins=True)]
        yield "chats", start(), first + [Step(turn(30, 60), pause=pause()) for _ in range(5)]
    for _ in range(6):
        text = random_tokens(source, 900)
        asked = [Step(text + turn(20, 40), begins=True, pause=pause()) for _ in range(4)]
        yield "documents", start(), asked
    for _ in range(8):
        yield "fan-out", start(), [Step(random_tokens(source, 500), begins=True, samples=4)]
    for _ in range(40):
        yield "few-shot", start(), [Step(source.choice(shots) + turn(30, 60), begins=True)]


class Chooser(Protocol):
    """Says which server gets a prompt of a session, and hears of the answer's first token."""

    def choose(self, prompt: list[int], session: int) -> tuple[str, Any]:
        """The server, and what `on_answer` wants of the choice."""

    def on_answer(self, choice: Any, cached: int) -> None: ...


class OfReplay:
    """A router of the replay (extensions/lab/simulation/replicas.py)."""

    def __init__(self, name: str, urls: list[str]) -> None:
        self._router, self._urls = ROUTERS[name](), urls
        self._loads: list[Any] = [SimpleNamespace(unfinished=0) for _ in urls]
        self._lock = threading.Lock()

    def choose(self, prompt: list[int], session: int) -> tuple[str, Any]:
        request = Request(session, 0, 0.0, np.array(prompt, np.int32), len(prompt))
        with self._lock:
            at = self._router.choose(request, self._loads, 0.0)
            self._loads[at].unfinished += 1
        return self._urls[at], at

    def on_answer(self, choice: Any, cached: int) -> None:
        with self._lock:
            self._loads[choice].unfinished -= 1


class Behind:
    """A router that is a program of its own, at a URL."""

    def __init__(self, url: str) -> None:
        self._url = url

    def choose(self, prompt: list[int], session: int) -> tuple[str, Any]:
        return self._url, None

    def on_answer(self, choice: Any, cached: int) -> None: ...


def ours(urls: list[str]) -> ServerProcess:
    """Our router, `python -m sglang_hybrid.replicas route`; it follows what the servers publish."""
    return ServerProcess(urls, program=[sys.executable, "-m", MODULE, "route"], health="/health")


class Run:
    """All sessions behind one router. found: of each request its kind, tokens that were hit, its
    tokens, and seconds to the first token.
    """

    def __init__(self, router: Chooser) -> None:
        self.found: list[tuple[str, int, int, float]] = []
        self._router = router

    def all(self, plan: list[Session]) -> None:
        begin = time.monotonic()
        with ThreadPoolExecutor(len(plan)) as threads:
            for done in [
                threads.submit(self._session, number, begin, *session)
                for number, session in enumerate(plan)
            ]:
                done.result()

    def _session(
        self, number: int, begin: float, kind: str, start: float, steps: list[Step]
    ) -> None:
        time.sleep(max(0.0, begin + start - time.monotonic()))
        said: list[int] = []
        for step in steps:
            time.sleep(step.pause)
            prompt = step.tokens if step.begins else said + step.tokens
            with ThreadPoolExecutor(step.samples) as threads:
                answers = list(
                    threads.map(
                        lambda prompt: self._ask(kind, prompt, number), [prompt] * step.samples
                    )
                )
            said = prompt + answers[0]

    def _ask(self, kind: str, prompt: list[int], session: int) -> list[int]:
        url, choice = self._router.choose(prompt, session)
        body = greedy(prompt, ANSWER) | {"stream": True}
        begin, first, last = time.perf_counter(), 0.0, {}
        answer = requests.post(f"{url}/generate", json=body, stream=True, timeout=120)
        for event in events(answer.iter_lines()):
            if not first:
                first = time.perf_counter() - begin
                self._router.on_answer(choice, event["meta_info"]["cached_tokens"])
            last = event
        self.found.append((kind, last["meta_info"]["cached_tokens"], len(prompt), first))
        return list(last["output_ids"])


NAMES = ("round_robin", "sticky", "cache_aware", "by_events")


def fleet(
    *routers: Annotated[
        str, {"default": list(NAMES), "metavar": "ROUTER"}, f"of {', '.join(NAMES)}"
    ],
    rounds: Annotated[Count, "of each router, by turns"] = 2,
    servers: Annotated[Count, "behind each router"] = 2,
) -> None:
    """Servers with little room behind four routers: requests of five kinds, by turns.

    round_robin, sticky and cache_aware are those of the replay, asked by the benchmark; by_events
    is our router, with Envoy. Of each kind the share of prompt tokens that is hit; of all also the
    median and the 95th percentile of the seconds to the first token.
    """
    kinds = ("agents", "chats", "documents", "fan-out", "few-shot")
    table = Table("router", *kinds, "all", "first token, median", "P95")
    with ExitStack() as stack:
        urls = []
        for _ in range(servers):
            flags = ["--model-path", str(ensure_tiny_model()), *POOLS, *event_flags()]
            urls.append(stack.enter_context(ServerProcess(flags)).url)
        behind = Behind(stack.enter_context(ours(urls)).url)
        runs: dict[str, list[Run]] = {name: [] for name in routers}
        for number, name in itertools.product(range(rounds), routers):
            for url in urls:
                flush(url)
            run = Run(behind if name == "by_events" else OfReplay(name, urls))
            run.all(list(sessions(random.Random(number))))
            runs[name].append(run)
        for name in routers:
            found = [each for run in runs[name] for each in run.found]
            cells = [rate([each for each in found if each[0] == kind]) for kind in kinds]
            first = sorted(each[3] for each in found)
            times = (f"{1000 * each:.0f} ms" for each in (median(first), percentile(first, 0.95)))
            table.row(name, *cells, rate(found), *times)


def rate(found: list[tuple[str, int, int, float]]) -> str:
    return f"{100 * sum(each[1] for each in found) / sum(each[2] for each in found):.1f}%"
