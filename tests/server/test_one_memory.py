"""KV and states in one memory: bytes go where the traffic needs them, nothing is lost, and what the
cache did is told.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from sglang_hybrid.serving.server_process import ServerFailed, ServerProcess
from tests import dashboard
from tests.server.client import (
    STRICT,
    Serve,
    ask,
    cached,
    cold,
    completed,
    flush,
    hybrid_cache,
    metric,
    random_prompt,
    same,
)
from tests.server.one_memory import ONE_MEMORY, all_is_free, conserved, memory

TOKENS, SLOTS = 6_000, 20
FLAGS = (
    *("--max-total-tokens", str(TOKENS)),
    *("--max-mamba-cache-size", str(SLOTS), "--enable-metrics"),
)
ROOM = {"kimi-linear": ("--max-total-tokens", "8000")}
"""More of it where a state is small: as many documents fit."""

CHECKED = {
    **STRICT,
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
"""SGLang's checks end a server in which something is lost, free twice, or free and in use."""


TOLD = ("--hybrid-eviction", "marconi:0.5", "--max-running-requests", "4")
"""A policy whose alpha is told, and so few requests at once that there is no advice."""


@pytest.fixture(
    scope="module",
    params=["nemotron-h", "kimi-linear"],
)
def server(serve: Serve, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    model = request.param
    flags = (*FLAGS, *TOLD, *ONE_MEMORY, *ROOM.get(model, ()))
    with serve(*flags, of=model, environment=CHECKED) as running:
        yield running


def documents(seed: int) -> list[list[int]]:
    """Questions behind three long documents: little but KV."""
    texts = [random_prompt(2_300, seed=seed + i) for i in range(3)]
    return [texts[i % 3] + random_prompt(20, seed=seed + 10 + i) for i in range(9)]


def sessions(seed: int) -> list[list[int]]:
    """Short prompts that share nothing, each asked twice: little but states."""
    prompts = [random_prompt(40, seed=seed + i) for i in range(24)]
    return [prompt for prompt in prompts for _ in range(2)]


def what_the_cache_did_is_told(server: ServerProcess) -> dict[str, Any]:
    """One request after another; the report, /server_info and /metrics say the same. Returns what
    /server_info says then.
    """
    admitted = 'checkpoints_admitted_total{.*reason="branch".*}'
    document = random_prompt(701, seed=11)
    flush(server.url)
    before = hybrid_cache(server.url)
    branches = before["checkpoints_admitted"].get("branch", 0)
    reports = [
        ask(server.url, document + random_prompt(20, seed=seed))["meta_info"]["hybrid_cache"]
        for seed in (12, 13, 14)
    ]
    after = hybrid_cache(server.url)
    text = requests.get(server.url + "/metrics", timeout=30).text
    assert [report["hit_tokens"] for report in reports] == [0, 0, 701]
    assert [report["missed"] for report in reports] == ["not_stored", "no_state", "not_stored"]
    assert [report["kv_only_tokens"] for report in reports] == [0, 701, 0]
    left = [{(one["position"], one["kind"]) for one in report["checkpoints"]} for report in reports]
    tail = (736, "tail")  # 721 tokens and 16 of an answer, but the last one, which was not read
    assert left[0] == {(704, "chunk"), (720, "prompt_end"), tail}
    assert left[1] == {(701, "branch"), (720, "prompt_end"), tail}
    assert left[2] == {(720, "prompt_end"), tail}
    assert after["hit_tokens"] - before["hit_tokens"] == 701
    assert after["kv_only_tokens"] - before["kv_only_tokens"] == 701
    assert after["flops_saved"] > before["flops_saved"]
    assert metric(server.url, "hit_tokens_total") == after["hit_tokens"]
    assert metric(server.url, admitted) == branches + 1
    exported = {
        sample.name for family in text_string_to_metric_families(text) for sample in family.samples
    }
    asked = {name for name in dashboard.metrics() if name.startswith("sglang:")}
    assert len(asked) == 10 and asked <= exported
    return after


def test_what_the_cache_of_a_default_server_did_is_told(default_process: ServerProcess) -> None:
    assert what_the_cache_did_is_told(default_process)["eviction"] == "reuse"


@pytest.mark.slow
def test_what_the_cache_did_is_told(server: ServerProcess) -> None:
    """The alpha of a policy is told, too, and no advice."""
    after = what_the_cache_did_is_told(server)
    assert after["checkpoints_admitted"]["branch"] == 1
    assert (after["eviction"], after["alpha"]) == ("marconi", 0.5)
    assert metric(server.url, "alpha") == 0.5
    assert after["advice"] == [], "nothing but what was asked for"


@pytest.mark.slow
def test_bytes_follow_the_traffic_and_answers_stay(server: ServerProcess) -> None:
    """Long documents, many short sessions, and back: what one kind had goes to the other."""
    moved = []
    phases = [documents(0), sessions(1_000), documents(2_000)]
    answers = []
    for phase in phases:
        answers.append([ask(server.url, prompt, 4) for prompt in phase])
        info = memory(server)
        assert conserved(info)
        moved.append(dict(info["moved_to"]))
    assert moved[1]["states"] > moved[0]["states"]
    assert moved[2]["kv"] > moved[1]["kv"]
    assert min(sum(map(bool, map(cached, phase))) for phase in answers) >= 3
    for phase, records in zip(phases, answers, strict=True):
        for prompt, warm in list(zip(phase, records, strict=True))[-3:]:
            assert same(warm, cold(server.url, prompt, 4))


@pytest.mark.slow
def test_metrics_say_the_same(server: ServerProcess) -> None:
    ask(server.url, random_prompt(50, seed=77), 2)
    info = memory(server)
    for kind in ("kv", "states"):
        moved = metric(server.url, f'memory_moved_bytes_total\\{{.*kind="{kind}".*\\}}')
        assert moved == info["moved_to"][kind] > 0
        used = metric(server.url, f'memory_bytes\\{{.*kind="{kind}".*part="used".*\\}}')
        assert used == info["used"][kind]
    assert metric(server.url, "memory_moves_total") == info["moves"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("page", [1, 16])
def test_nothing_leaks_in_a_soak(serve: Serve, page: int) -> None:
    """800 requests, eight at once, of every length: at the end all bytes come back."""
    rng = random.Random(5)
    texts = [random_prompt(rng.randrange(20, 2_000), seed=i) for i in range(40)]

    def one(number: int) -> dict:
        text = texts[(number * 7 + number // 90) % len(texts)]
        prompt = text[: 1 + number * 37 % len(text)] + random_prompt(3, seed=10_000 + number)
        return ask(running.url, prompt, 1 + number % 40)

    with serve(*FLAGS, *ONE_MEMORY, "--page-size", str(page)) as running:
        for start in range(0, 800, 100):
            with ThreadPoolExecutor(8) as pool:
                made = completed(pool.map(one, range(start, start + 100)))
            assert made == [1 + number % 40 for number in range(start, start + 100)]
            info = memory(running)
            assert conserved(info)
        assert min(info["moved_to"].values()) > 0
        flush(running.url)
        assert all_is_free(hybrid_cache(running.url), SLOTS)
        log = running.log.read_text(errors="replace")
        assert "leak detected" not in log
        assert "Retract requests" not in log


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_evict_and_move_alike(serve: Serve) -> None:
    """SGLang's checker ends the server at the first eviction in which the ranks differ."""
    prompts = [*documents(0), *sessions(1_000), *documents(2_000)]
    checked = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
    with serve(*FLAGS, *ONE_MEMORY, "--tp-size", "2", environment=checked) as server:
        with ThreadPoolExecutor(3) as pool:
            records = pool.map(lambda prompt: ask(server.url, prompt, 4), prompts)
            assert completed(records) == [4] * len(prompts)
        info = memory(server)
        assert conserved(info)
        assert min(info["moved_to"].values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--max-total-tokens", "100", "--max-mamba-cache-size", "1"),
            "does not hold one request",
        ),
        (("--hybrid-eviction", "sglang-lru"), "SGLang's own order"),
        (("--hybrid-admission", "all"), "checkpoints are not planned"),
        (("--mamba-full-memory-ratio", "0.5"), "may be left out, divides the memory"),
    ],
)
def test_what_cannot_be_is_one_sentence(serve: Serve, flags: tuple[str, ...], words: str) -> None:
    one_slot = {"SGLANG_HYBRID_SLOTS_PER_REQUEST": "1"}
    server = serve(*ONE_MEMORY, *flags, environment=one_slot)
    with pytest.raises(ServerFailed, match=words), server:
        pass
