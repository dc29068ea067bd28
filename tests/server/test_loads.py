"""Loads that begin before their requests' turns, on a real server with two ranks: answers stay
right, nothing is held afterwards, and a session is loaded before it is expected.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import TOLERANCE, ask, flush, hybrid_cache, logprobs, random_prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DOCUMENTS = [random_prompt(700, seed=seed) for seed in range(6)]
VARIABLES = {
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
    "SGLANG_HYBRID_SIMULATE_BANDWIDTH": "host=50MB/s+1ms",
    "SGLANG_HYBRID_OFFLOAD_WATERMARK": "1",  # copied at once: that prompt leaves no time later
}


@pytest.fixture(scope="module", params=["window", "car"])
def url(request: Any) -> Iterator[str]:
    flags = ["--tp-size", "2", "--hybrid-schedule", request.param, "--max-running-requests", "2"]
    flags += ["--max-total-tokens", "3000", "--max-mamba-cache-size", "12"]
    flags += ["--hybrid-memory", "split"]  # so that one prompt can push out all others
    flags += ["--enable-hierarchical-cache", "--hicache-ratio", "8", "--enable-metrics"]
    with ServerProcess(flags, environment=VARIABLES) as server:
        yield server.url


def schedule(url: str) -> dict[str, Any]:
    found: dict[str, Any] = hybrid_cache(url)["schedule"]
    return found


def settled(url: str) -> dict[str, Any]:
    """When nothing is loaded or written any more."""
    for _ in range(100):
        before = schedule(url)
        time.sleep(0.2)
        if schedule(url)["loads"] == before["loads"]:
            return before
    raise AssertionError("loads do not end")


def test_a_session_that_is_expected_back(url: str) -> None:
    """The first test: a load for an expected session pushes out only what is worth no more, and
    requests that ask for the same documents teach the index that others are worth more.
    """
    before = schedule(url)["loads"]["expected"]
    session = random_prompt(700, seed=77)
    body = {
        "input_ids": session,
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
    }
    said = {"X-Hybrid-Session": "return; seconds=25"}
    answer = requests.post(url + "/generate", json=body, headers=said, timeout=60).json()
    ended = {**body, "input_ids": random_prompt(2_900, seed=91)}  # it needs all of the device
    says_end = {"X-Hybrid-Session": "end"}
    requests.post(url + "/generate", json=ended, headers=says_end, timeout=60).raise_for_status()
    deadline = time.monotonic() + 40
    while schedule(url)["loads"]["expected"] == before and time.monotonic() < deadline:
        time.sleep(0.5)
    assert schedule(url)["loads"]["expected"] == before + 1
    settled(url)
    again = ask(url, [*session, *answer["output_ids"], 500, 501], 1)
    assert again["meta_info"]["hybrid_cache"]["tiers"]["host_tokens"] == 0
    assert again["meta_info"]["cached_tokens"] >= 700


def test_a_queue_of_requests_whose_documents_are_on_the_host(url: str) -> None:
    prompts = [[*document, *random_prompt(5, seed=90)] for document in DOCUMENTS]
    expected = [ask(url, prompt, 4) for prompt in prompts]
    before = hybrid_cache(url)["tiers"]["held"]["host"]["kv_tokens"]
    assert before > 3_000, "documents were meant to be on the host"
    order = [number % len(prompts) for number in range(30)]
    with ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(lambda number: ask(url, prompts[number], 4), order))
    for number, answer in zip(order, answers, strict=True):
        assert answer["output_ids"] == expected[number]["output_ids"]
        assert logprobs(answer) == pytest.approx(logprobs(expected[number]), abs=TOLERANCE)
    seen = settled(url)
    loads = seen["loads"]
    assert loads["started"] > 0 and loads["used"] + loads["late"] > 0
    assert loads["used"] + loads["late"] + loads["cancelled"] == loads["started"]
    assert seen["holds"] == 0
    assert seen["most_overtaken"] <= seen["overtaken_at_most"]


def test_requests_that_go_leave_nothing(url: str) -> None:
    def impatient(number: int) -> None:
        body = {
            "input_ids": [*DOCUMENTS[number % 6], *random_prompt(9, seed=200 + number)],
            "sampling_params": {"max_new_tokens": 30, "ignore_eos": True},
        }
        try:
            requests.post(url + "/generate", json=body, timeout=0.05 + number % 4 / 2)
        except requests.exceptions.Timeout:
            return

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(impatient, range(48)))
    requests.post(url + "/abort_request", json={"abort_all": True}, timeout=60)
    assert ask(url, random_prompt(20, seed=1), 1)["meta_info"]["completion_tokens"] == 1
    seen = settled(url)
    loads = seen["loads"]
    assert loads["used"] + loads["late"] + loads["cancelled"] == loads["started"]
    assert seen["holds"] == 0
    flush(url)
