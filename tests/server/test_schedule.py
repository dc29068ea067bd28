"""The window on a real server: nobody is overtaken beyond the bound, and ranks agree."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import requests

from tests.server.client import (
    Serve,
    ask,
    cached,
    completed,
    flush,
    greedy,
    hybrid_cache,
    metric,
    random_prompt,
    until,
)

pytestmark = pytest.mark.slow

CHECKED = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
"""Ends the server at the first match, insert or eviction in which the ranks differ."""

MOST_OVERTAKEN = 8


@pytest.fixture(scope="module")
def url(serve: Serve) -> Iterator[str]:
    flags = ["--tp-size", "2", "--max-running-requests", "2", "--enable-metrics"]
    flags += ["--hybrid-schedule", f"window:overtaken={MOST_OVERTAKEN}"]
    flags += ["--enable-priority-scheduling", "--max-prefill-tokens", "512"]
    with serve(*flags, environment=CHECKED) as server:
        yield server.url


@pytest.fixture(autouse=True)
def nothing_is_left(url: str) -> Iterator[None]:
    """After every test the server is idle, nobody holds a node, and the cache can be emptied."""
    yield
    seen = hybrid_cache(url)["schedule"]
    assert seen["holds"] == 0
    assert seen["most_overtaken"] <= MOST_OVERTAKEN
    flush(url)


def test_a_cold_request_among_a_stream_of_hits(url: str) -> None:
    """Eight clients ask about one document without a pause; a ninth sends something else."""
    document = random_prompt(400, seed=1)
    ask(url, document, 1)
    answered: list[str] = []
    stop = threading.Event()

    def client(number: int) -> None:
        turn = 0
        while not stop.is_set():
            ask(url, [*document, *random_prompt(5, seed=1_000 * number + turn)], 2)
            answered.append("hit")
            turn += 1

    before = hybrid_cache(url)["schedule"]
    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(client, number) for number in range(8)]
        until(lambda: len(answered) >= 16)
        begin = len(answered)
        try:
            ask(url, random_prompt(450, seed=2), 1)
            passed = len(answered) - begin
        finally:
            stop.set()
        for one in clients:
            one.result()
    seen = hybrid_cache(url)["schedule"]
    assert seen["started"]["on_device"] > before["started"].get("on_device", 0)
    assert seen["overtaken"] > before["overtaken"], "hits were meant to overtake the cold request"
    most_at_once = 2 + 8  # those that ran, and one answer of each client that was on its way
    assert passed <= MOST_OVERTAKEN + most_at_once


def test_a_queue_of_more_than_128(url: str) -> None:
    documents = [random_prompt(200, seed=seed) for seed in range(3, 7)]
    prompts = [[*documents[i % 4], *random_prompt(5, seed=i)] for i in range(160)]
    prompts[0] = random_prompt(300, seed=9)
    with ThreadPoolExecutor(160) as pool:
        records = list(pool.map(lambda prompt: ask(url, prompt, 1), prompts))
    assert completed(records) == [1] * 160
    assert sum(map(bool, map(cached, records))) > 120
    started = metric(url, 'schedule_started_total{.*reuse="on_device".*}')
    assert started == hybrid_cache(url)["schedule"]["started"]["on_device"]


def test_aborted_and_urgent_requests(url: str) -> None:
    """Clients that go away while they wait or run, among others that are more urgent."""
    document = random_prompt(300, seed=20)
    ask(url, document, 1)

    def impatient(number: int) -> None:
        prompt = [*document, *random_prompt(20, seed=number)]
        body = greedy(prompt, 60, priority=number % 3)
        with suppress(requests.exceptions.Timeout):
            requests.post(url + "/generate", json=body, timeout=0.05 + number % 5 / 2)

    with ThreadPoolExecutor(40) as pool:
        list(pool.map(impatient, range(60)))
    requests.post(url + "/abort_request", json={"abort_all": True}, timeout=60)
    until(lambda: hybrid_cache(url)["schedule"]["holds"] == 0, 20)
    assert completed([ask(url, document, 2)]) == [2]
    assert hybrid_cache(url)["schedule"]["aborted"] > 0


def test_a_pause(url: str) -> None:
    """Requests wait while the server is paused, and go on."""
    document = random_prompt(300, seed=30)
    ask(url, document, 1)
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(ask, url, [*document, seed], 4) for seed in range(300, 303)]
        requests.post(url + "/pause_generation", json={"mode": "retract"}, timeout=60)
        waiting += [pool.submit(ask, url, [*document, seed], 4) for seed in range(310, 313)]
        time.sleep(0.5)
        requests.post(url + "/continue_generation", json={}, timeout=60)
        assert completed(one.result() for one in waiting) == [4] * 6
