"""A server whose traffic changes: the policy follows it, on every rank at the same request, and
clients notice nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from sglang_hybrid.extensions.lab.simulation.tuner.candidates import CANDIDATES
from sglang_hybrid.serving.server_process import ServerProcess
from tests.extensions.lab.simulation.tuner.traffic import POOLS, bursts, conversations, templates
from tests.server.client import Serve, ask, completed, hybrid_cache, random_prompt, said, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WINDOW = 90
FLAGS = (
    *("--max-mamba-cache-size", str(POOLS.slots), "--max-total-tokens", str(POOLS.kv_tokens)),
    *("--max-running-requests", "1"),
    *("--hybrid-memory", "split"),
    *("--hybrid-tuner-workers", "1"),
)
CHECKED = {
    "SGLANG_HYBRID_SLOTS_PER_REQUEST": "1",
    "SGLANG_HYBRID_TUNER_WINDOW": str(WINDOW),
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
    "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1",  # SGLang's tree, and our mirror of it
}
SWITCHED = re.compile(r"eviction is marconi ([\d.]+) from request (\d+) on:")


def words(prompt: list[int]) -> list[int]:
    """The traffic's numbers as tokens of ordinary text: each run of them is one random prompt."""
    starts = [at for at in range(len(prompt)) if prompt[at] % 1_000 == 0]
    ends = [*starts[1:], len(prompt)]
    tokens: list[int] = []
    for start, end in zip(starts, ends, strict=True):
        tokens += random_prompt(end - start, seed=prompt[start])
    return tokens


def send(server: ServerProcess, prompts: list[list[int]]) -> None:
    records = [ask(server.url, words(prompt), 4) for prompt in prompts]
    assert completed(records) == [4] * len(prompts)


def workers(server: ServerProcess) -> list[psutil.Process]:
    found = []
    for process in server.processes():
        try:
            if "sglang_hybrid.extensions.lab.simulation.workers" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_policy_follows_the_traffic(ranks: int, serve: Serve) -> None:
    """Marconi, whose best alpha differs: reuse serves all of this traffic best."""
    flags = (*FLAGS, "--tp-size", str(ranks), "--hybrid-eviction", "marconi")
    with serve(*flags, environment=CHECKED) as server:

        def tuner() -> dict:
            return hybrid_cache(server.url)["tuner"]

        def serve_until(prompts: list[list[int]], switches: int) -> dict:
            """Send prompts until the policy has changed so often, or all are sent."""
            for at in range(0, len(prompts), 10):
                send(server, prompts[at : at + 10])
                until(lambda: not tuner()["searching"])
                if tuner()["switches"] >= switches:
                    break
            send(server, prompts[-5:])
            return hybrid_cache(server.url)

        start = hybrid_cache(server.url)
        first = serve_until(conversations(6 * WINDOW), switches=1)
        then = serve_until(bursts(12 * WINDOW), switches=2)
        log = said(server)
        assert workers(server) == []
    print(start, first, then)
    assert start["alpha"] == 0
    assert first["alpha"] >= 0.1
    assert then["alpha"] < first["alpha"]
    assert [seen["tuner"]["switches"] for seen in (first, then)] == [1, 2]
    assert "instead of marconi 0:" in first["tuner"]["last_switch"]
    assert then["tuner"]["failures"] == 0
    switches = SWITCHED.findall(log)
    assert len(switches) == 2 * ranks
    assert len(set(switches)) == 2, "every rank at the same request"


def test_a_worker_that_is_killed_changes_nothing_for_clients(serve: Serve) -> None:
    with serve(*FLAGS, environment=CHECKED) as server:
        killed = False
        for prompt in templates(WINDOW + 40):
            send(server, [prompt])
            for worker in [] if killed else workers(server):
                worker.kill()
                killed = True
        assert killed, "no search was seen"
        until(lambda: hybrid_cache(server.url)["tuner"]["runs"] == 1)
        seen, log = hybrid_cache(server.url), said(server)
    assert seen["tuner"]["failures"] == 1
    assert "status -9" in seen["tuner"]["last_failure"]
    assert seen["eviction"] == "reuse"
    assert "a worker ended with status -9" in log


def test_policies_are_compared_in_one_memory(serve: Serve) -> None:
    """The workers replay what the server has: all candidates are tried, and the rate that is seen
    stays what was expected.
    """
    flags = [flag if flag != "split" else "one" for flag in FLAGS]
    with serve(*flags, environment=CHECKED) as server:
        send(server, templates(WINDOW + 40))
        seen = searched(server)
    assert seen["memory"]["used"]["kv"] > 0


def searched(server: ServerProcess) -> dict:
    """The server's report when a search has ended, in which all candidates were tried."""
    until(lambda: hybrid_cache(server.url)["tuner"]["runs"] >= 1)
    seen = hybrid_cache(server.url)
    assert (seen["tuner"]["failures"], seen["tuner"]["last_failure"]) == (0, "")
    assert len(seen["tuner"]["regret"]) == len(CANDIDATES)
    assert said(server)
    return seen


def test_policies_are_compared_in_tiers(serve: Serve, tmp_path: Path) -> None:
    """Host memory and a disk are below the device: a search replays them too, and clients are
    answered from all of them meanwhile.
    """
    flags = ["--enable-hierarchical-cache", "--hicache-ratio", "1.5", "--enable-cache-report"]
    flags += ["--hicache-storage-backend", "file", "--hybrid-disk-folder", str(tmp_path / "disk")]
    flags += ["--hicache-storage-backend-extra-config", '{"prefetch_threshold": 32}']
    with serve(*FLAGS, *flags, environment=CHECKED) as server:
        prompts = conversations(2 * WINDOW)
        for at in range(0, len(prompts), 10):
            send(server, prompts[at : at + 10])
            if hybrid_cache(server.url)["tuner"]["runs"]:
                break
        searched(server)
        send(server, prompts[:40])  # of conversations that the host has forgotten
        tiers = searched(server)["tiers"]
    print(tiers)
    assert tiers["loads"] > 0
    assert tiers["held"]["host"]["states"] > 0
    assert tiers["disk"]["read"] > 0
