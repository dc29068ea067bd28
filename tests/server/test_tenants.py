"""Answers of real servers to a tenant do not depend on what another one sent."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_hybrid.extensions.cpu.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import hybrid_cache, random_prompt

TIMES = ("when", "taken", "last_used", "unused", "emptied")
"""Fields of an explanation that hold seconds; no two runs have the same."""

ROUNDING = 1e-4
"""Rounding of logprobs: sums depend on where KV is in memory, and on what is computed together."""


def send(url: str, prompt: list[int], rid: str, **whose: str) -> dict[str, Any]:
    """A response but for what differs from run to run: durations and the machine's load."""
    body = {
        "input_ids": prompt,
        "rid": rid,
        "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
        "return_logprob": True,
        **whose,
    }
    response = requests.post(url + "/generate", json=body, timeout=300)
    response.raise_for_status()
    answer = response.json()
    meta = answer["meta_info"]
    kept = ("id", "prompt_tokens", "cached_tokens", "hybrid_cache", "output_token_logprobs")
    return {"tokens": answer["output_ids"], **{name: meta[name] for name in kept}}


def explain(url: str, question: dict[str, Any], **whose: str) -> Any:
    """An explanation without its times."""
    response = requests.post(url + "/hybrid_cache/explain", json={**question, **whose}, timeout=60)
    return without_times(response.json())


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: None
            if name in TIMES and part is None
            else "a time"
            if name in TIMES
            else without_times(part)
            for name, part in value.items()
        }
    return [without_times(part) for part in value] if isinstance(value, list) else value


def labels(url: str) -> set[str]:
    """Names and labels of our metrics, without their values."""
    text = requests.get(url + "/metrics", timeout=30).text
    return {
        re.sub(r" \S+$", "", line)
        for line in text.splitlines()
        if line.startswith("sglang_hybrid:")
    }


def traffic(seed: int, count: int) -> list[list[int]]:
    """Prompts of few families that branch, repeat and go on."""
    source = random.Random(seed)
    families = [random_prompt(400, seed=k) for k in range(3)]
    return [
        families[source.randrange(3)][: source.choice([150, 321, 400])]
        + random_prompt(source.choice([1, 40, 130]), seed=source.randrange(6))
        for _ in range(count)
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["cache_salt", "extra_key"])
def test_another_tenants_traffic_changes_nothing_that_is_told(
    kind: str, model_directory: Callable[[str], Path]
) -> None:
    """One server serves b alone, the other one a's requests between b's, of the same families."""
    model = model_directory(DEFAULT_ARCHITECTURE)
    flags = ["--model-path", str(model), "--enable-metrics", "--enable-cache-report"]
    mine, theirs = traffic(1, 24), traffic(2, 48)
    seen: list[list[Any]] = []
    rounded: list[list[float]] = []
    names: list[set[str]] = []
    for with_a in (False, True):
        with ServerProcess(flags) as server:
            told: list[Any] = []
            logprobs: list[float] = []
            for number, prompt in enumerate(mine):
                if with_a:
                    for k in (0, 1):
                        send(server.url, theirs[2 * number + k], f"{number + k}", **{kind: "a"})
                answer = send(server.url, prompt, f"{number}", **{kind: "b"})
                logprobs += [value for value, _, _ in answer.pop("output_token_logprobs")]
                told.append(answer)
                for question in ({"input_ids": prompt}, {"request_id": f"{number}"}):
                    told.append(explain(server.url, question, **{kind: "b"}))
            seen.append(told)
            rounded.append(logprobs)
            send(server.url, mine[0], "last", **{kind: "a"})  # so that every counter has counted
            names.append(labels(server.url))
            assert not hybrid_cache(server.url)["evicted"]
    assert seen[0] == seen[1]
    assert rounded[0] == pytest.approx(rounded[1], abs=ROUNDING)
    assert names[0] == names[1]
    hits = [one["cached_tokens"] for one in seen[0] if "cached_tokens" in one]
    assert any(hits)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_short_of_room_a_tenant_sees_that_room_was_taken(
    model_directory: Callable[[str], Path],
) -> None:
    model = model_directory(DEFAULT_ARCHITECTURE)
    flags = ["--max-mamba-cache-size", "8", "--max-running-requests", "2"]
    flags += ["--hybrid-memory", "split", "--hybrid-eviction", "marconi:0"]
    with ServerProcess(["--model-path", str(model), *flags]) as server:
        own = random_prompt(300, seed=90)
        send(server.url, own, "b", cache_salt="b")
        for number in range(20):
            prompt = random_prompt(200, seed=100 + number)
            send(server.url, prompt, f"of a {number}", cache_salt="a")
        assert hybrid_cache(server.url)["evicted"]
        account = explain(server.url, {"input_ids": own}, cache_salt="b")
        assert account["deeper"][0]["reason"] == "evicted"
        assert "of a" not in str(account)
        for gap in account["deeper"]:
            assert (gap["score"], gap["victim_score"], gap["recipient"]) == (None, None, None)
