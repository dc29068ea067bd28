"""A server whose traffic changes: the policy follows it, on every rank at the same request, and
clients notice nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sglang_hybrid.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.serving.server_process import ServerProcess
from sglang_hybrid.simulation.tuner.candidates import CANDIDATES
from tests.server.client import ask, hybrid_cache, random_prompt
from tests.simulation.tuner.traffic import POOLS, bursts, conversations, templates

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
    for prompt in prompts:
        record = ask(server.url, words(prompt), 4)
        assert record["meta_info"]["completion_tokens"] == 4


def until(what: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


def workers(server: ServerProcess) -> list[psutil.Process]:
    found = []
    for process in server.processes():
        try:
            if "sglang_hybrid.simulation.workers" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_policy_follows_the_traffic(ranks: int, model_directory: Callable[[str], Path]) -> None:
    """Marconi, whose best alpha differs: reuse serves all of this traffic best."""
    model = model_directory(DEFAULT_ARCHITECTURE)
    flags = ["--model-path", str(model), "--tp-size", str(ranks), *FLAGS]
    flags += ["--hybrid-eviction", "marconi"]
    with ServerProcess(flags, environment=CHECKED) as server:

        def tuner() -> dict:
            return hybrid_cache(server.url)["tuner"]

        def serve(prompts: list[list[int]], switches: int) -> dict:
            """Until the policy has changed so often, or all is sent."""
            for at in range(0, len(prompts), 10):
                send(server, prompts[at : at + 10])
                until(lambda: not tuner()["searching"])
                if tuner()["switches"] >= switches:
                    break
            send(server, prompts[-5:])
            return hybrid_cache(server.url)

        start = hybrid_cache(server.url)
        first = serve(conversations(6 * WINDOW), switches=1)
        then = serve(bursts(12 * WINDOW), switches=2)
        log = server.log.read_text(errors="replace")
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
    assert "Traceback" not in log


def test_a_worker_that_is_killed_changes_nothing_for_clients(
    model_directory: Callable[[str], Path],
) -> None:
    model = model_directory(DEFAULT_ARCHITECTURE)
    with ServerProcess(["--model-path", str(model), *FLAGS], environment=CHECKED) as server:
        killed = False
        for prompt in templates(WINDOW + 40):
            send(server, [prompt])
            for worker in [] if killed else workers(server):
                worker.kill()
                killed = True
        assert killed, "no search was seen"
        until(lambda: hybrid_cache(server.url)["tuner"]["runs"] == 1)
        seen = hybrid_cache(server.url)
        log = server.log.read_text(errors="replace")
    assert seen["tuner"]["failures"] == 1
    assert "status -9" in seen["tuner"]["last_failure"]
    assert seen["eviction"] == "reuse"
    assert "a worker ended with status -9" in log
    assert "Traceback" not in log


def test_policies_are_compared_in_one_memory(model_directory: Callable[[str], Path]) -> None:
    """The workers replay what the server has: all candidates are tried, and the rate that is seen
    stays what was expected.
    """
    model = model_directory(DEFAULT_ARCHITECTURE)
    flags = [flag if flag != "split" else "one" for flag in FLAGS]
    with ServerProcess(["--model-path", str(model), *flags], environment=CHECKED) as server:
        send(server, templates(WINDOW + 40))
        until(lambda: hybrid_cache(server.url)["tuner"]["runs"] >= 1)
        seen = hybrid_cache(server.url)
        log = server.log.read_text(errors="replace")
    assert seen["memory"]["used"]["kv"] > 0
    assert (seen["tuner"]["failures"], seen["tuner"]["last_failure"]) == (0, "")
    assert len(seen["tuner"]["regret"]) == len(CANDIDATES)
    assert "Traceback" not in log


def test_policies_are_compared_in_tiers(
    model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    """With host memory and a disk below the device: a search replays them too, and clients are
    answered from all of them meanwhile.
    """
    model, disk = model_directory(DEFAULT_ARCHITECTURE), tmp_path / "disk"
    flags = ["--model-path", str(model), *FLAGS, "--enable-cache-report"]
    flags += ["--enable-hierarchical-cache", "--hicache-ratio", "1.5"]
    flags += ["--hicache-storage-backend", "file", "--hybrid-disk-folder", str(disk)]
    flags += ["--hicache-storage-backend-extra-config", '{"prefetch_threshold": 32}']
    with ServerProcess(flags, environment=CHECKED) as server:
        prompts = conversations(2 * WINDOW)
        for at in range(0, len(prompts), 10):
            send(server, prompts[at : at + 10])
            if hybrid_cache(server.url)["tuner"]["runs"]:
                break
        until(lambda: hybrid_cache(server.url)["tuner"]["runs"] >= 1)
        send(server, prompts[:40])  # of conversations that the host has forgotten
        seen = hybrid_cache(server.url)
        log = server.log.read_text(errors="replace")
    print(seen)
    assert (seen["tuner"]["failures"], seen["tuner"]["last_failure"]) == (0, "")
    assert len(seen["tuner"]["regret"]) == len(CANDIDATES)
    tiers = seen["tiers"]
    assert tiers["loads"] > 0
    assert tiers["held"]["host"]["states"] > 0
    assert tiers["disk"]["read"] > 0
    assert "Traceback" not in log
