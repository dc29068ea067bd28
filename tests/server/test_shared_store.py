"""Several servers with one store, Mooncake's: what one computed, another resumes from; and whoever
is killed costs hits, never an answer.

Needs `pip install mooncake-transfer-engine-non-cuda` and Debian's libibverbs1, librdmacm1 and
libnuma1.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import requests

from sglang_hybrid.extensions.disk.folder import KEY_VARIABLE
from sglang_hybrid.serving.server_process import ServerProcess, free_port
from tests.server.client import (
    Serve,
    answer,
    answered_at_last,
    ask,
    cached,
    hybrid_cache,
    random_prompt,
    said,
    same,
    send,
    until,
)

MASTER = shutil.which("mooncake_master", path=str(Path(sys.executable).parent))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(MASTER is None, reason="there is no mooncake_master"),
]

KILLS = int(os.environ.get("KILLS", "8"))
PROMPTS = [random_prompt(700, seed=seed) for seed in range(6)]
POOLS = ("--max-total-tokens", "4000", "--max-mamba-cache-size", "16", "--enable-cache-report")
SETTINGS = json.dumps({"global_segment_size": 128 << 20})


class Master:
    """Mooncake's master, which may be killed and started again at the same port."""

    def __init__(self, log: Path) -> None:
        self.port = free_port()
        self._log = log
        self.start()

    def start(self) -> None:
        assert MASTER is not None
        ports = ["--rpc_port", str(self.port), "--metrics_port", str(free_port())]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([MASTER, *ports], stdout=log, stderr=log)

    def kill(self) -> None:
        subprocess.run(["pkill", "-9", "-P", str(self._process.pid)], check=False)
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    one = Master(tmp_path_factory.mktemp("master") / "log")
    yield one
    one.kill()


class Pair:
    """Two servers with one store, which publish where their states are. servers: both, by their
    place; each is always started at the same port.
    """

    def __init__(self, serve: Serve, master: Master) -> None:
        flags = (
            *POOLS,
            *("--enable-hierarchical-cache", "--hicache-ratio", "3"),
            *("--hicache-storage-backend", "file"),
            *("--hybrid-disk-folder", f"mooncake://127.0.0.1:{master.port}"),
            *("--hicache-storage-backend-extra-config", SETTINGS),
        )
        self._make = partial(serve, *flags, environment={KEY_VARIABLE: "a secret"})
        self._ports = [(free_port(), free_port()) for _ in range(2)]
        self.servers: list[ServerProcess] = []
        for at in range(2):
            self.start(at)
        for at in range(2):
            self.wait(at)

    def start(self, at: int) -> None:
        port, events = self._ports[at]
        publisher = json.dumps({"publisher": "zmq", "endpoint": f"tcp://*:{events}"})
        server = self._make("--kv-events-config", publisher, port=port)
        server.start()
        self.servers[at:] = [server, *self.servers[at + 1 :]]

    def start_again(self, at: int) -> None:
        self.start(at)
        self.wait(at)

    def wait(self, at: int) -> None:
        self.servers[at].wait_until_healthy()
        until(lambda: not self.store(at)["refused"])

    def kill(self, at: int) -> None:
        for process in self.servers[at].processes():
            process.send_signal(signal.SIGKILL)
        self.servers[at].stop()

    def close(self) -> None:
        for server in self.servers:
            server.stop()

    def url(self, at: int) -> str:
        return self.servers[at].url

    def store(self, at: int) -> dict:
        return hybrid_cache(self.url(at))["tiers"]["disk"]


class Router:
    """The router before servers and its index, which may be killed and started again at the same
    port.
    """

    def __init__(self, urls: list[str]) -> None:
        self._make = partial(
            ServerProcess,
            urls,
            program=[sys.executable, "-m", "sglang_hybrid.replicas", "route"],
            port=free_port(),
            health="/health",
        )
        self.start()

    def start(self) -> None:
        self._process = self._make()
        self._process.start()
        self._process.wait_until_healthy()

    def kill(self) -> None:
        for process in self._process.processes():
            process.kill()
        self._process.stop()

    def answer(self, at: int) -> dict | None:
        """The record of a prompt, by its number; None if the request ended with an error."""
        try:
            return answer(send(self._process.url, PROMPTS[at], 4))
        except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
            return None


@pytest.fixture(scope="module")
def pair(serve: Serve, master: Master) -> Iterator[Pair]:
    both = Pair(serve, master)
    yield both
    both.close()


@pytest.fixture(scope="module")
def cold(serve: Serve) -> Iterator[dict[int, dict]]:
    """Answers of a server without a cache, by the prompt's number."""
    with serve(*POOLS, "--disable-radix-cache") as server:
        yield {at: ask(server.url, prompt, 4) for at, prompt in enumerate(PROMPTS)}


def settled(pair: Pair, at: int) -> None:
    """Wait until a server writes nothing more."""
    written = -1
    while written != (now := pair.store(at)["written"]):
        written = now
        time.sleep(1)


def test_another_server_resumes_what_one_has_computed(pair: Pair, cold: dict[int, dict]) -> None:
    for at, prompt in enumerate(PROMPTS[:3]):
        assert same(ask(pair.url(0), prompt, 4), cold[at])
    settled(pair, 0)
    for at, prompt in enumerate(PROMPTS[:3]):
        answer = ask(pair.url(1), prompt, 4)
        assert cached(answer) >= 690, pair.store(1)
        assert same(answer, cold[at])


def test_another_tenant_finds_nothing(pair: Pair, cold: dict[int, dict]) -> None:
    answer = ask(pair.url(1), PROMPTS[0], 4, cache_salt="another")
    assert cached(answer) == 0
    assert same(answer, cold[0])


def test_a_server_that_starts_anew_finds_what_others_hold(
    pair: Pair, cold: dict[int, dict]
) -> None:
    ask(pair.url(1), PROMPTS[3], 4)
    settled(pair, 1)
    pair.kill(0)
    pair.start_again(0)
    answer = ask(pair.url(0), PROMPTS[3], 4)
    assert cached(answer) >= 690
    assert same(answer, cold[3])


@pytest.mark.timeout(900 + 60 * KILLS)
def test_whoever_is_killed_no_answer_is_wrong(
    pair: Pair, master: Master, cold: dict[int, dict]
) -> None:
    """A server, the master, or the router with its index is killed at random while requests run,
    again and again: each request is answered rightly or ends with an error, in time.
    """
    chance = random.Random(0)
    router = Router([pair.url(at) for at in range(2)])
    victims = {
        "master": (master.kill, master.start),
        "router": (router.kill, router.start),
        **{
            f"server {at}": (partial(pair.kill, at), partial(pair.start_again, at))
            for at in range(2)
        },
    }
    hits = answered = failed = 0
    try:
        for number in range(KILLS):
            victim = chance.choice(list(victims))
            kill, start_again = victims[victim]
            with ThreadPoolExecutor(6) as pool:
                asked = [chance.randrange(len(PROMPTS)) for _ in range(6)]
                replies = [pool.submit(router.answer, at) for at in asked]
                time.sleep(chance.uniform(0, 0.5))
                kill()
                for at, reply in zip(asked, replies, strict=True):
                    record = reply.result()
                    assert record is None or same(record, cold[at])
                    answered, failed = answered + bool(record), failed + (not record)
            if victim != "router":  # the others go on
                at = chance.randrange(len(PROMPTS))
                assert same(answered_at_last(partial(router.answer, at), 30), cold[at])
            start_again()
            for at in range(len(PROMPTS)):
                record = answered_at_last(partial(router.answer, at))
                assert same(record, cold[at])
                hits += cached(record)
            print(f"{number + 1}, {victim}: {answered} answered, {failed} failed", flush=True)
        assert hits > 0
        for at in range(2):
            until(lambda at=at: requests.get(pair.url(at) + "/health", timeout=10).ok)
            assert said(pair.servers[at])
    finally:
        router.kill()
