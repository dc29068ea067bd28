"""Prefill and decode servers: hits to the token, and the answers of one server.

A prefill server leaves the states that it wants, and hands over the state of the whole prompt. A
decode server is given a state with every request, so that what it keeps is KV only.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_hybrid.extensions.cpu.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import (
    STRICT,
    answer,
    answered_at_last,
    ask,
    cached,
    cold,
    flush,
    hybrid_cache,
    random_prompt,
    said,
    same,
    send,
)
from tests.server.divided import Divide, Divided, needs_transfers
from tests.server.draft_heads import with_draft_head
from tests.server.expected import agree, expect
from tests.server.soak import Soak
from tests.server.test_checkpoints import cases, page_and_chunk, plays_hits
from tests.server.test_soak import answers_stand
from tests.server.test_speculation import HEAD, says_the_same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_transfers]

KEEPS_KV = ("--disaggregation-decode-enable-radix-cache",)

WHOLE_PROMPT = 1
"""A prefill server has the state of a whole prompt; one that goes on to decode has not."""

ANY = 1 << 20
"""A decode server that keeps KV counts that as cached, too, whatever was prefilled."""

KILLS = int(os.environ.get("KILLS", "4"))

SOON = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "30",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "30",
}
"""Seconds for which a server waits for its peer; SGLang's default is 300."""

HOST = ("--enable-hierarchical-cache", "--hicache-ratio", "2")

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "decode servers keep KV": {"decode": KEEPS_KV},
    "chunks of 128": {"flags": ("--chunked-prefill-size", "128")},
    "page 16": {"flags": ("--page-size", "16"), "decode": KEEPS_KV},
    "no overlap": {"flags": ("--disable-overlap-schedule",), "decode": KEEPS_KV},
    "two ranks": {"flags": ("--tp-size", "2")},
    "two stages": {"prefill": ("--pp-size", "2")},
    "host memory": {"prefill": HOST},
}
"""Flags of all servers, and more of prefill and of decode servers."""


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_it_is_exact(
    configuration: str, divide: Divide, model_directory: Callable[[str], Path]
) -> None:
    page, chunk = page_and_chunk(configuration)
    which = dict(CONFIGURATIONS[configuration])
    more = ANY if "decode" in which else WHOLE_PROMPT
    with divide(*which.pop("flags", ()), **which) as servers:
        plays_hits(servers.url, servers.url, *cases(), page=page, chunk=chunk, more=more)
        turns_are_cached(servers, page)
        agree(servers.url, expect(model_directory(DEFAULT_ARCHITECTURE)))
        all_is_given_back(servers)


@pytest.mark.parametrize(
    "architecture", ["qwen3-next", "kimi-linear", "falcon-h1", "granite-hybrid", "lfm2"]
)
def test_states_of_every_kind_arrive(architecture: str, divide: Divide) -> None:
    with divide(of=architecture) as servers:
        plays_hits(servers.url, servers.url, *cases(), more=WHOLE_PROMPT)
        turns_are_cached(servers)
        all_is_given_back(servers)


def test_a_draft_head_changes_nothing(
    model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    headed = with_draft_head(model_directory("trained"), tmp_path / "model")
    with Divided(["--model-path", str(headed.directory), *HEAD]) as servers:
        plays_hits(servers.url, servers.url, *cases(), more=WHOLE_PROMPT)
        turns_are_cached(servers, lost=1)  # a head reads pairs of tokens, one fewer than tokens
        assert max(says_the_same(servers.url, headed)) > 3
        all_is_given_back(servers)


def test_prefills_that_are_begun_again(
    divide: Divide, model_directory: Callable[[str], Path]
) -> None:
    """They began before a decode server had room, and gave back what they held."""
    often = {"SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB": "0.5"}
    early = ("--optimistic-prefill-attempts", "2")
    with divide(prefill=early, environment=often) as servers:
        for _ in range(3):
            agree(servers.url, expect(model_directory(DEFAULT_ARCHITECTURE)))
            flush(servers.url)
        assert "optimistic prefill yielded" in said(servers.servers[0])
        all_is_given_back(servers)


def test_only_new_tokens_are_sent(divide: Divide) -> None:
    """A decode server that keeps KV is sent that of a turn's new tokens, and one state."""
    sent = {}
    for decode in ((), KEEPS_KV):
        with divide("--enable-metrics", decode=decode) as servers:
            prompt, megabytes = random_prompt(700, seed=60), []
            for turn in range(2):
                before = megabytes_sent(servers)
                reply = ask(servers.url, prompt, 20)["output_ids"]
                megabytes.append(megabytes_sent(servers) - before)
                prompt = prompt + reply + random_prompt(17, seed=61 + turn)
            sent[decode] = megabytes
    whole, next_turn = sent[()]
    token = (next_turn - whole) / 37
    state = whole - 700 * token
    assert sent[KEEPS_KV][0] == pytest.approx(whole, rel=0.01)
    new = (sent[KEEPS_KV][1] - state) / token  # the last token of a reply may not have been read
    print(f"a state {state:.4f} MB, a token {token:.6f}, of the next turn {new:.1f} tokens")
    assert 17 <= round(new) <= 18


def test_a_state_that_lacks_a_token_would_be_seen(
    divide: Divide, model_directory: Callable[[str], Path]
) -> None:
    with divide(module="tests.server.lacks_last") as servers, pytest.raises(AssertionError):
        agree(servers.url, expect(model_directory(DEFAULT_ARCHITECTURE)))


def test_two_of_each(divide: Divide, model_directory: Callable[[str], Path]) -> None:
    """Two prefill and two decode servers, among which the router divides what it gets."""
    with divide(prefills=2, decodes=2) as servers:
        agree(servers.url, expect(model_directory(DEFAULT_ARCHITECTURE)))
        prompts = [random_prompt(700, seed=90 + number) for number in range(6)]
        with ThreadPoolExecutor(len(prompts)) as pool:
            first = list(pool.map(partial(ask, servers.url), prompts))
            for _ in range(3):
                again = list(pool.map(partial(ask, servers.url), prompts))
                assert all(map(same, again, first))
        assert {cached(record) for record in again} <= {0, 699}  # by which prefill server has it
        assert any(map(cached, again))
        for server in servers.servers[: servers.prefills]:
            assert hybrid_cache(server.url)["requests"] > 0, "both are used"
        all_is_given_back(servers)


@pytest.mark.timeout(1800)
def test_nothing_is_lost_or_wrong_under_load(divide: Divide, seed: int) -> None:
    """Random traffic in small pools, with clients that hang up: all is given back, and answers are
    those of servers whose caches are empty. The router gives requests names of its own, by which no
    client can abort them.
    """
    room = ("--max-running-requests", "8", "--max-total-tokens", "4000")
    with divide(
        *(*room, "--chunked-prefill-size", "256"),
        prefill=("--max-mamba-cache-size", "16"),
        decode=(*KEEPS_KV, "--max-mamba-cache-size", "16"),
        environment={**STRICT, **SOON},
    ) as servers:
        behind = [server.url for server in servers.servers]
        soak = Soak(servers.url, seed, priorities=False, behind_router=True)
        for _ in range(3):
            asyncio.run(soak.send(200))
            all_is_given_back(servers)
            flush(servers.url)
            for url in behind:  # a decode server's tree has no states
                assert hybrid_cache(url)["state_slots_free"] in (16, None)
        print(soak.outcomes)
        assert soak.outcomes["hung up"]
        assert {"state", "leaf"} <= hybrid_cache(behind[0])["evicted"].keys()
        answers_stand(servers.url, soak.watched)


@pytest.mark.timeout(900 + 60 * KILLS)
def test_whoever_is_killed_costs_an_error_and_never_an_answer(divide: Divide) -> None:
    """One of two prefill and two decode servers is killed at random while requests run, again and
    again: each request is answered rightly or ends with an error, in time, and the others give back
    what they held.
    """
    chance = random.Random(7)
    prompts = [random_prompt(700, seed=70 + number) for number in range(6)]
    with divide(decode=KEEPS_KV, prefills=2, decodes=2, environment=SOON) as servers:
        right = [ask(servers.url, prompt) for prompt in prompts]
        answered = failed = 0
        for number in range(KILLS):
            with ThreadPoolExecutor(12) as pool:
                asked = [chance.randrange(len(prompts)) for _ in range(12)]
                replies = [pool.submit(send, servers.url, prompts[which]) for which in asked]
                time.sleep(chance.uniform(0, 1.5))
                killed = chance.randrange(len(servers.servers))
                kill(servers.servers[killed])
                for which, reply in zip(asked, replies, strict=True):
                    record = answer(reply.result())
                    assert record is None or same(record, right[which])
                    answered, failed = answered + bool(record), failed + (not record)
            for other in servers.servers:
                if other is not servers.servers[killed]:
                    flush(other.url, seconds=120)  # it is idle again
            servers.restart(killed)
            for prompt, record in zip(prompts, right, strict=True):
                # once the router has found the server that was started again
                found = answered_at_last(lambda asked=prompt: answer(send(servers.url, asked)))
                assert same(found, record)
            print(f"{number + 1} kills: {answered} answered, {failed} failed", flush=True)
        all_is_given_back(servers)


def kill(server: ServerProcess) -> None:
    for process in server.processes():
        process.kill()


def megabytes_sent(servers: Divided) -> float:
    """The requests that prefill servers have handed over so far."""
    total = 0.0
    for server in servers.servers[: servers.prefills]:
        text = requests.get(server.url + "/metrics", timeout=30).text
        total += sum(
            map(float, re.findall(r"^sglang:kv_transfer_total_mb_sum{.*} (.*)$", text, re.M))
        )
    return total


def turns_are_cached(servers: Divided, page: int = 1, lost: int = 0) -> None:
    """Assert that a prefill server has all of a conversation's earlier prompt but `lost` tokens:
    the reply was computed elsewhere.
    """
    flush(servers.url)
    prompt = random_prompt(332, seed=50)
    for turn in range(3):
        record = ask(servers.url, prompt, 20)
        longer = prompt + record["output_ids"] + random_prompt(17, seed=51 + turn)
        again = ask(servers.url, longer, 20)
        assert cached(again) >= (len(prompt) - lost) // page * page
        prompt = longer
    assert same(again, cold(servers.url, prompt, 20))


def all_is_given_back(servers: Divided) -> None:
    """Nothing runs: SGLang, which looks when a server is idle, finds no slot and no token missing,
    and no error has left a trace.
    """
    flush(servers.url)
    for server in servers.servers:
        requests.get(server.url + "/health_generate", timeout=60).raise_for_status()
        assert said(server)
