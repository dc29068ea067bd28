"""Loads that begin before their requests' turns, on a real server with two ranks: answers stay
right, nothing is held afterwards, and a session is loaded before it is expected.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

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
    random_prompt,
    same,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DOCUMENTS = [random_prompt(700, seed=seed) for seed in range(6)]
VARIABLES = {
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
    "SGLANG_HYBRID_SIMULATE_BANDWIDTH": "host=50MB/s+1ms",
    "SGLANG_HYBRID_OFFLOAD_WATERMARK": "1",  # copied at once: that prompt leaves no time later
}


@pytest.fixture(scope="module", params=["window", "car"])
def url(request: Any, serve: Serve) -> Iterator[str]:
    flags = ["--tp-size", "2", "--hybrid-schedule", request.param, "--max-running-requests", "2"]
    flags += ["--max-total-tokens", "3000", "--max-mamba-cache-size", "12"]
    flags += ["--hybrid-memory", "split"]  # so that one prompt can push out all others
    flags += ["--enable-hierarchical-cache", "--hicache-ratio", "8", "--enable-metrics"]
    with serve(*flags, environment=VARIABLES) as server:
        yield server.url


def schedule(url: str) -> dict[str, Any]:
    found: dict[str, Any] = hybrid_cache(url)["schedule"]
    return found


def settled(url: str) -> dict[str, Any]:
    """When nothing is loaded or written any more."""
    last = schedule(url)

    def is_settled() -> bool:
        nonlocal last
        time.sleep(0.2)
        before, last = last, schedule(url)
        return bool(before["loads"] == last["loads"])

    until(is_settled)
    return last


def test_a_session_that_is_expected_back(url: str) -> None:
    """The first test: a load for an expected session pushes out only what is worth no more, and
    requests that ask for the same documents teach the index that others are worth more.
    """
    before = schedule(url)["loads"]["expected"]
    session = random_prompt(700, seed=77)
    answer = ask(url, session, 4, {"X-Hybrid-Session": "return; seconds=25"})
    all_of_the_device = random_prompt(2_900, seed=91)
    ask(url, all_of_the_device, 4, {"X-Hybrid-Session": "end"})
    until(lambda: schedule(url)["loads"]["expected"] > before, 40)
    assert schedule(url)["loads"]["expected"] == before + 1
    settled(url)
    again = ask(url, [*session, *answer["output_ids"], 500, 501], 1)
    assert again["meta_info"]["hybrid_cache"]["tiers"]["host_tokens"] == 0
    assert cached(again) >= 700


def test_a_queue_of_requests_whose_documents_are_on_the_host(url: str) -> None:
    prompts = [[*document, *random_prompt(5, seed=90)] for document in DOCUMENTS]
    expected = [ask(url, prompt, 4) for prompt in prompts]
    before = hybrid_cache(url)["tiers"]["held"]["host"]["kv_tokens"]
    assert before > 3_000, "documents were meant to be on the host"
    order = [number % len(prompts) for number in range(30)]
    with ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(lambda number: ask(url, prompts[number], 4), order))
    for number, answer in zip(order, answers, strict=True):
        assert same(answer, expected[number])
    seen = settled(url)
    loads = seen["loads"]
    assert loads["started"] > 0 and loads["used"] + loads["late"] > 0
    assert loads["used"] + loads["late"] + loads["cancelled"] == loads["started"]
    assert seen["holds"] == 0
    assert seen["most_overtaken"] <= seen["overtaken_at_most"]


def test_requests_that_go_leave_nothing(url: str) -> None:
    def impatient(number: int) -> None:
        body = greedy([*DOCUMENTS[number % 6], *random_prompt(9, seed=200 + number)], 30)
        with suppress(requests.exceptions.Timeout):
            requests.post(url + "/generate", json=body, timeout=0.05 + number % 4 / 2)

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(impatient, range(48)))
    requests.post(url + "/abort_request", json={"abort_all": True}, timeout=60)
    assert completed([ask(url, random_prompt(20, seed=1), 1)]) == [1]
    seen = settled(url)
    loads = seen["loads"]
    assert loads["used"] + loads["late"] + loads["cancelled"] == loads["started"]
    assert seen["holds"] == 0
    flush(url)
