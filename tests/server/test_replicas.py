"""The knowledge of readers of KV events about servers that work: which prompts can be resumed
where.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import msgspec
import pytest
import requests
import zmq
from sglang.srt.disaggregation.kv_events import BlockStored, KVEventBatch

from sglang_hybrid.core.records.tenant_names import KEY_VARIABLE
from sglang_hybrid.extensions.router import Replicas, tenant_name
from sglang_hybrid.serving.server_process import event_flags
from tests.server.client import RECORD_KEY, Serve, greedy, random_prompt, settle, until

ROUTE = "/hybrid_cache/resumable"
SECONDS = 30
SALTS = (None, "first", "second")


def predicted(replicas: Replicas, url: str, prompt: list[int], salt: str | None = None) -> int:
    said = replicas.resume(prompt, tenant_name(None, salt, RECORD_KEY))
    return next(each.position for each in said if each.replica == url)


def served(url: str, prompt: list[int], salt: str | None = None) -> tuple[int, list[int]]:
    """Cached tokens of a prompt, and it with its answer."""
    body = greedy(prompt, 4, cache_salt=salt)
    answer = requests.post(url + "/generate", json=body, timeout=120).json()
    return answer["meta_info"]["cached_tokens"], prompt + answer["output_ids"]


@pytest.fixture
def replicas(url: str) -> Iterator[Replicas]:
    with closing(Replicas([url])) as it:
        until(lambda: url in it.followers)
        yield it


def test_hits_are_known_before_they_are_served(replicas: Replicas, url: str) -> None:
    """Hits of the next turn, of a branch, of the same prompt again, and of another tenant."""
    shared = random_prompt(300, 50)
    turns = random_prompt(200, 51)
    hits = []
    for salt, (number, begin) in itertools.product(SALTS, enumerate((shared, shared, turns, []))):
        prompt = (begin or turns) + random_prompt(40, 52 + number)
        settle(replicas, url)
        foreseen = predicted(replicas, url, prompt, salt)
        hit, turns = served(url, prompt, salt)
        hits.append(hit)
        assert hit == foreseen
    assert max(hits) > 200 and hits.count(0) >= 3


def test_who_joins_late_knows_the_same(replicas: Replicas, url: str) -> None:
    for seed in range(3):
        served(url, random_prompt(3_000, 60 + seed))  # more than a page of the snapshot
    settle(replicas, url)
    with closing(Replicas([url])) as late:
        until(lambda: url in late.followers)
        settle(late, url)
        known, joined = replicas.index.holdings(url), late.index.holdings(url)
        assert (known.tokens, known.positions) == (joined.tokens, joined.positions)
        assert sum(joined.positions) >= 3


def test_sglangs_own_structures_decode_the_events(url: str) -> None:
    info = requests.get(url + "/server_info", timeout=SECONDS).json()["kv_events"]
    with zmq.Context.instance().socket(zmq.SUB) as socket:
        socket.connect(f"tcp://127.0.0.1:{info['endpoint_port_base']}")
        socket.subscribe(b"")
        found: list[Any] = []
        for seed in itertools.count(70):  # the subscription takes a moment, and may begin amidst
            served(url, random_prompt(50, seed))
            while socket.poll(200):
                payload = socket.recv_multipart()[2]
                found += msgspec.msgpack.decode(payload, type=KVEventBatch).events
            stored = [event for event in found if isinstance(event, BlockStored)]
            if sum(len(event.block_hashes) for event in stored) >= 50:
                break
            assert seed < 100, stored


def test_pages_of_a_snapshot_that_is_over_are_refused(url: str) -> None:
    page = requests.get(url + ROUTE, params={"cursor": "unknown"}, timeout=SECONDS).json()
    assert "begin anew" in page["ranks"][0]["error"]


class Fleet:
    """Two servers with little room, which are restarted now and then, and random requests."""

    REQUESTS, AT_ONCE, RESTARTS = 1_000, 3, (350, 700)

    def __init__(self, serve: Serve, stack: ExitStack) -> None:
        self._stack = stack
        small = ["--max-total-tokens", "6000", "--max-mamba-cache-size", "40"]
        tiers = ["--enable-hierarchical-cache", "--hicache-ratio", "3"]
        named = {KEY_VARIABLE: RECORD_KEY}
        self._make = [
            partial(serve, *small, *tiers, *event_flags(), environment=named) for _ in range(2)
        ]
        self.servers = [stack.enter_context(make()) for make in self._make]
        self.urls = [server.url for server in self.servers]
        self.replicas = stack.enter_context(closing(Replicas(self.urls)))
        until(lambda: len(self.replicas.followers) == 2)
        self.source = random.Random(7)
        self.families = [random_prompt(self.source.randrange(200, 600), s) for s in range(6)]
        self.chats: list[tuple[list[int], str | None]] = []
        self.more: list[tuple[int, int, int]] = []  # number, foreseen, served
        self.fewer: list[tuple[int, int, int]] = []
        self.tokens = self.hits = 0

    def restart(self, number: int) -> None:
        old = self.servers[number]
        old.stop()
        snapshots = self.replicas.followers[old.url].snapshots
        self.servers[number] = self._stack.enter_context(self._make[number](port=old.port))
        until(lambda: self.replicas.followers[old.url].snapshots > snapshots)

    def prompt(self) -> tuple[list[int], str | None]:
        source = self.source
        if self.chats and source.random() < 0.4:
            begin, salt = source.choice(self.chats)
            return begin + random_prompt(source.randrange(5, 60), source.randrange(10**6)), salt
        begin = source.choice(self.families)[: source.randrange(100, 600)]
        more = random_prompt(source.randrange(5, 200), source.randrange(10**6))
        return begin + more, source.choice(SALTS)

    def round(self, number: int, pool: ThreadPoolExecutor) -> None:
        """A few requests at once, each to any of the two."""
        asked = []
        for _ in range(self.AT_ONCE):
            url, (prompt, salt) = self.source.choice(self.urls), self.prompt()
            asked.append((url, prompt, salt))
        for url in self.urls:
            settle(self.replicas, url)
        foreseen = [predicted(self.replicas, *each) for each in asked]
        answers = list(pool.map(lambda each: served(*each), asked))
        for (_, prompt, salt), said, (hit, whole) in zip(asked, foreseen, answers, strict=True):
            self.tokens += len(prompt)
            self.hits += hit
            if hit != said:
                (self.more if hit > said else self.fewer).append((number, said, hit))
            if self.source.random() < 0.5:
                self.chats = [*self.chats[-11:], (whole, salt)]


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_what_is_foreseen_is_served(serve: Serve) -> None:
    """A thousand requests to two servers, three at a time, with evictions, copies on the host, and
    two restarts. Of requests at once one may compute what another then hits, or evict what it was
    about to hit; of the latter there are few.
    """
    with ExitStack() as stack, ThreadPoolExecutor(Fleet.AT_ONCE) as pool:
        fleet = Fleet(serve, stack)
        for number in range(0, Fleet.REQUESTS, Fleet.AT_ONCE):
            for at, which in zip(Fleet.RESTARTS, (0, 1), strict=True):
                if number <= at < number + Fleet.AT_ONCE:
                    fleet.restart(which)
            fleet.round(number, pool)
        print(f"{Fleet.REQUESTS} requests, {fleet.hits / fleet.tokens:.0%} of their tokens hit")
        print(f"{len(fleet.more)} hit more than foreseen, {len(fleet.fewer)} less: {fleet.fewer}")
        assert len(fleet.fewer) < Fleet.REQUESTS // 100
        assert len(fleet.more) < Fleet.REQUESTS // 20
        assert fleet.hits > fleet.tokens // 3
        for follower in fleet.replicas.followers.values():
            assert follower.is_in_step and not follower.malformed
