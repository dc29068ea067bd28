"""What a page that is open costs the server (--hybrid-ui)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Annotated

import requests

from scripts.bench.commands import Count
from scripts.bench.report import Table, seconds_of, times_of
from scripts.bench.servers import arrivals, at_once, greedy, percentile, random_tokens
from sglang_hybrid.extensions.page.messages import WatchReq
from sglang_hybrid.extensions.page.watch import EVERY
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import Ui
from sglang_hybrid.serving.server_process import ServerProcess
from tests.cache.driver import Server, Sizes, build_cache

EDGE = 4
"""Tokens of a prompt in the large trees."""


def page(
    nodes: Annotated[tuple[int, ...], "nodes of the tree"] = (1_000, 10_000, 100_000),
    rounds: Annotated[Count, "with the page open, and as many with it closed"] = 12,
) -> None:
    """What an open page costs: answers to it on the scheduler's thread, on SGLang's pools with tiny
    tensors; and the steps of a server that decodes eight answers, with a page open and closed.
    """
    table = Table(
        *("nodes", "answers until all is told", "seconds until then", "answer P50", "P99"),
        *("later P50", "later P99", "of the time", "a request, page open"),
    )
    for count in nodes:
        table.row(f"{count:,}", *_answers(count))
    print()
    steps = Table("page", "steps", "P50", "P99")
    for name, gaps in _steps(rounds):
        p50, p99 = percentile(gaps, 0.5), percentile(gaps, 0.99)
        steps.row(name, len(gaps), f"{1000 * p50:.2f} ms", f"{1000 * p99:.2f} ms")


def _answers(count: int) -> Iterator[str]:
    """Cells of a row."""
    requests_ = count // 2
    sizes = Sizes(kv=requests_ * (EDGE + 4) + 4_096, states=2 * requests_ + 64)
    it = Server(build_cache(sizes, HybridConfig(hybrid_ui=Ui.LENGTHS)), sizes)
    for number in range(requests_):
        it.serve([10 * number + k for k in range(EDGE)], [7])
    view = it.cache.page
    assert view is not None
    busy = SimpleNamespace(reqs=[SimpleNamespace(last_node=None)])
    view.scheduler = SimpleNamespace(running_batch=busy, waiting_queue=[])
    took, more = [], True
    while more:
        begin = time.perf_counter()
        more = view.watch(WatchReq(reader="bench")).more
        took.append(time.perf_counter() - begin)
    took.sort()
    yield f"{len(took):,}"
    yield f"{len(took) * EVERY / 10:.0f}"
    yield from (f"{1000 * percentile(took, share):.2f} ms" for share in (0.5, 0.99))
    source, later, costs = random.Random(1), [], {False: 0.0, True: 0.0}
    for number in range(400):
        opened = bool(number % 2)
        view.watch(WatchReq(reader="bench", leave=not opened))
        for _ in range(5):
            prompt = [source.randrange(1 << 20) for _ in range(EDGE)]
            costs[opened] += seconds_of(partial(it.serve, prompt, [7]))
        if opened:
            later.append(seconds_of(lambda: view.watch(WatchReq(reader="bench"))))
    later.sort()
    yield from (f"{1000 * percentile(later, share):.2f} ms" for share in (0.5, 0.99))
    yield f"{100 * percentile(later, 0.5) / EVERY:.2f} %"
    yield times_of(costs[True], costs[False])


def _steps(rounds: int) -> Iterator[tuple[str, list[float]]]:
    """Seconds between two tokens of an answer, by whether a page is open, ordered."""
    gaps: dict[str, list[float]] = {"closed": [], "open": []}
    flags = ["--hybrid-default-model", "nemotron-h", "--hybrid-ui", "lengths"]
    with ServerProcess(flags) as server:
        for number in range(2 * rounds + 2):
            name = ("closed", "open")[number % 2]
            with _opened(server.url, really=name == "open"):
                found = at_once(
                    lambda seed: _decode(server.url, seed), range(8 * number, 8 * number + 8)
                )
            if number >= 2:
                gaps[name] += [gap for each in found for gap in each]
    for name, each in gaps.items():
        yield name, sorted(each)


@contextmanager
def _opened(url: str, *, really: bool) -> Iterator[None]:
    """A page reads what the server tells it."""
    if not really:
        yield
        return
    ends = threading.Event()

    def read() -> None:
        with requests.get(f"{url}/hybrid_cache/changes", stream=True, timeout=60) as stream:
            for _ in stream.iter_content(1 << 16):
                if ends.is_set():
                    return

    reads = threading.Thread(target=read)
    reads.start()
    try:
        time.sleep(1.0)
        yield
    finally:
        ends.set()
        reads.join()


def _decode(url: str, seed: int) -> list[float]:
    body = greedy(random_tokens(random.Random(seed), 200), 100)
    return [after - before for (before, _), (after, _) in pairwise(arrivals(url, body))]
