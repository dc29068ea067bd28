"""Agents that are sent at once share what they have in common."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import requests

from tests.server.client import Serve, cached, greedy, random_prompt

pytestmark = pytest.mark.slow

RUNS = 20
AGENTS, TOOLSETS = 12, 3
SYSTEM, TOOLS, TASK = 600, 300, 80
"""Tokens of the system prompt, of a toolset behind it, and of an agent's own task behind that."""

SHARED = [0] + [SYSTEM] * (TOOLSETS - 1) + [SYSTEM + TOOLS] * (AGENTS - TOOLSETS)
"""The hits of the agents of one burst, ascending: the first prompt nothing, the first of each other
toolset the system prompt, all others the toolset, too.
"""


@pytest.fixture(scope="module")
def url(serve: Serve) -> Iterator[str]:
    with serve() as server:
        yield server.url


@pytest.fixture
def busy_core() -> Iterator[None]:
    """Another process keeps a core busy."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield
        process.kill()


def burst(seed: int) -> list[list[int]]:
    """The prompts of twelve agents, in any order."""
    system = random_prompt(SYSTEM, seed)
    tools = [system + random_prompt(TOOLS, seed + 1 + number) for number in range(TOOLSETS)]
    prompts = [
        tools[number % TOOLSETS] + random_prompt(TASK, seed + 10 + number)
        for number in range(AGENTS)
    ]
    random.Random(seed).shuffle(prompts)
    return prompts


@pytest.mark.usefixtures("busy_core")
def test_over_a_connection_each(url: str) -> None:
    """Prompts that the busy machine delivers before the others are computed alone, and the next
    ones compute what they share again: now and then, and in no burst by most of them.
    """
    sessions = [requests.Session() for _ in range(AGENTS)]
    together = Barrier(AGENTS)

    def hit(session: requests.Session, prompt: list[int]) -> int:
        together.wait()
        response = session.post(url + "/generate", json=greedy(prompt, 4), timeout=300)
        response.raise_for_status()
        return cached(response.json())

    with ThreadPoolExecutor(AGENTS) as pool:
        runs = [list(pool.map(hit, sessions, burst(1000 * run))) for run in range(RUNS)]
    assert sum(map(sum, runs)) >= 0.95 * RUNS * sum(SHARED), runs
    assert all(sum(hits) >= 0.7 * sum(SHARED) for hits in runs), runs


@pytest.mark.usefixtures("busy_core")
def test_in_one_body(url: str) -> None:
    with requests.Session() as session:
        for run in range(RUNS):
            body = greedy(burst(1000 * (RUNS + run)), 4)
            records = session.post(url + "/generate", json=body, timeout=300).json()
            assert sorted(map(cached, records)) == SHARED, f"run {run}"
