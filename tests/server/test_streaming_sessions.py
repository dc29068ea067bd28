"""Streaming sessions (`--enable-streaming-session`) on a real server: a session keeps the KV and
the state of its last turn to itself, and its next turn goes on from there, to the token.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.server.client import (
    CHECKED,
    STRICT,
    Serve,
    ask,
    cached,
    flush,
    hybrid_cache,
    random_prompt,
    said,
    same,
    send,
    until,
)
from tests.server.one_memory import TWO_POOLS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STREAMING = "--enable-streaming-session"
OFTEN = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
SESSIONS, TURNS, NEW_TOKENS = 4, 4, 12

CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "default": (),
    "two pools": TWO_POOLS,
    "extra buffer": ("--mamba-radix-cache-strategy", "extra_buffer"),
    "page 16": ("--page-size", "16"),
    "chunks of 128": ("--chunked-prefill-size", "128"),
    "no overlap": ("--disable-overlap-schedule", "--schedule-policy", "dfs-weight"),
    "host memory": (
        *("--enable-hierarchical-cache", "--hicache-ratio", "2"),
        *("--hicache-storage-backend", "file"),
    ),
    "two ranks": ("--tp-size", "2"),
}


class Session:
    """A streaming session of one client, and the tokens that it has seen."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.seed = url, seed
        self.tokens: list[int] = []
        self.turns: list[tuple[list[int], dict[str, Any]]] = []
        body = {"capacity_of_str_len": 100_000, "streaming": True}
        self.id = requests.post(url + "/open_session", json=body, timeout=60).json()

    def turn(self, new_tokens: int = NEW_TOKENS, **more: Any) -> dict[str, Any]:
        """The record of the next turn."""
        turn = len(self.turns)
        added = random_prompt(300 if turn == 0 else 37, seed=100 * self.seed + turn)
        params = {"id": self.id, "rid": None}
        record: dict[str, Any] = ask(self.url, added, new_tokens, session_params=params, **more)
        prompt = self.tokens + added
        self.turns.append((prompt, record))
        self.tokens = prompt + record["output_ids"]
        return record

    def close(self) -> None:
        body = {"session_id": self.id}
        requests.post(self.url + "/close_session", json=body, timeout=60).raise_for_status()


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_turns_go_on_exactly(configuration: str, serve: Serve, tmp_path: Path) -> None:
    disk = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)}
    environment = CHECKED["environment"] | disk
    flags = (STREAMING, *CONFIGURATIONS[configuration])
    with serve(*flags, module=CHECKED["module"], environment=environment) as server:
        url = server.url
        session = Session(url, seed=1)
        session.turn()
        for _ in range(TURNS):
            had = len(session.tokens)
            assert cached(session.turn()) in (had - 1, had)  # the last one may not have been read
        before = hybrid_cache(url)["requests"]
        session.turn()
        assert hybrid_cache(url)["requests"] == before + 1
        beside(url)
        one_that_is_aborted(url)
        one_that_is_refused(url)
        session.close()
        answers_stand(url, [session])
        assert said(server)


def test_turns_that_are_retracted(serve: Serve) -> None:
    """Their states have read the last token by then, and cannot be set back."""
    with serve(STREAMING, module=CHECKED["module"], environment=STRICT | OFTEN) as server:
        sessions = [Session(server.url, seed=10 + number) for number in range(SESSIONS)]
        with ThreadPoolExecutor(SESSIONS) as pool:
            list(pool.map(lambda session: [session.turn(40) for _ in range(TURNS)], sessions))
        assert "#retracted_reqs" in said(server)
        for session in sessions:
            session.close()
        answers_stand(server.url, sessions)


def beside(url: str) -> None:
    """Other prompts are cached as ever, also those that begin as a session did."""
    prompt = [*random_prompt(300, seed=100), 5, 6, 7]
    first = ask(url, prompt)
    again = ask(url, prompt)
    assert cached(again) >= 288 and same(again, first)


def one_that_is_aborted(url: str) -> None:
    """An aborted turn gives its session's memory back; the next one begins anew, and is right."""
    session = Session(url, seed=5)
    session.turn()
    seen = hybrid_cache(url)["requests"]
    with ThreadPoolExecutor() as pool:
        params = {"id": session.id, "rid": None}
        more = {"session_params": params, "rid": "aborted"}
        turn = pool.submit(send, url, random_prompt(30, seed=7), 2000, **more)
        until(lambda: hybrid_cache(url)["requests"] > seen)
        requests.post(url + "/abort_request", json={"rid": "aborted"}, timeout=60)
        assert turn.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
    session.turn()
    session.close()
    answers_stand(url, [session])


def one_that_is_refused(url: str) -> None:
    """A request beside another one of its session is refused, and that one goes on."""
    session = Session(url, seed=6)
    session.turn()
    seen = hybrid_cache(url)["requests"]
    with ThreadPoolExecutor() as pool:
        turn = pool.submit(session.turn, 400)
        until(lambda: hybrid_cache(url)["requests"] > seen)
        params = {"id": session.id, "rid": None}
        refused = send(url, random_prompt(5, seed=8), 4, session_params=params)
        assert "already has an active request" in refused.text
        turn.result()
    session.turn()
    session.close()
    answers_stand(url, [session])


def answers_stand(url: str, sessions: list[Session]) -> None:
    """A tenant that nothing is stored of is told the same."""
    flush(url, 60)
    for session in sessions:
        for turn, (prompt, record) in enumerate(session.turns):
            tenant = f"{session.id} {turn}"
            alone = ask(url, prompt, len(record["output_ids"]), extra_key=tenant)
            assert cached(alone) == 0 and same(record, alone)
