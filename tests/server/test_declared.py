"""Positions that a request declares, on a real server: a checkpoint at exactly that token."""

from __future__ import annotations

from typing import Any

import pytest
import requests

from sglang_hybrid.core.records.pin import PinRequest
from sglang_hybrid.core.returns.hints import PromptHints
from sglang_hybrid.serving.requests import kv_hints
from tests.server import client
from tests.server.client import (
    ask,
    cached,
    cold,
    flush,
    hybrid_cache,
    random_prompt,
    same,
    until,
)


def send(url: str, prompt: Any, hints: Any = None) -> requests.Response:
    return client.send(url, prompt, 4, kv_hints=hints)


def at(*positions: int) -> Any:
    return kv_hints.write(PromptHints(positions))


def pinned_at(position: int, ttl: float) -> Any:
    return kv_hints.write(PromptHints(pins=(PinRequest(position, ttl),)))


def test_a_declared_position_is_hit_exactly_the_first_time_it_is_shared(url: str) -> None:
    prompt = random_prompt(700, seed=1)
    first = send(url, prompt, at(123, 301)).json()
    report = first["meta_info"]["hybrid_cache"]
    kinds = {each["position"]: each["kind"] for each in report["checkpoints"]}
    assert (kinds[123], kinds[301]) == ("declared", "declared")
    assert report["declared"] == {"kept": [123, 301], "written_tokens": 301}
    for declared in (301, 123):
        other = prompt[:declared] + random_prompt(50, seed=declared)
        warm = ask(url, other, 4)
        assert cached(warm) == declared
        assert same(warm, cold(url, other, 4))
        send(url, prompt, at(123, 301))


def test_a_pin_lasts_for_its_time_on_an_idle_server(url: str) -> None:
    """It is counted over all tenants, and it ends although no request arrives."""
    prompt = random_prompt(300, seed=5)
    before = pins(url)
    report = send(url, prompt, pinned_at(100, 3_000)).json()["meta_info"]
    assert report["hybrid_cache"]["declared"]["pinned"] == [100]
    held = pins(url)
    assert held["pins"] == before["pins"] + 1 and held["bytes"] > before["bytes"]
    send(url, random_prompt(300, seed=6), pinned_at(200, 0.5))
    until(lambda: pins(url)["expired"] > before["expired"])
    after = pins(url)
    assert (after["pins"], after["bytes"]) == (held["pins"], held["bytes"])
    flush(url)
    assert pins(url)["pins"] == 0


def pins(url: str) -> dict[str, Any]:
    found: dict[str, Any] = hybrid_cache(url)["pins"]
    return found


def test_each_prompt_of_a_batch_declares_its_own(url: str) -> None:
    prompts = [random_prompt(200, seed=2), random_prompt(300, seed=3)]
    answers = send(url, prompts, [at(50), at(260)]).json()
    kept = [answer["meta_info"]["hybrid_cache"]["declared"]["kept"] for answer in answers]
    assert kept == [[50], [260]]


@pytest.mark.parametrize(
    ("positions", "sentence"),
    [
        ([40], "positions[0] of hybrid.checkpoint is 40; in a prompt of 40 tokens a position is"),
        ([-1], "positions[0] of hybrid.checkpoint is -1"),
        (list(range(1, 18)), "kv_hints declares 17 positions"),
    ],
)
def test_what_is_malformed_is_refused(url: str, positions: list[int], sentence: str) -> None:
    response = send(url, random_prompt(40, seed=4), at(*positions))
    assert response.status_code == 400
    assert sentence in response.json()["error"]["message"]


def test_an_envelope_that_sglang_cannot_read_is_refused(url: str) -> None:
    response = send(url, random_prompt(40, seed=4), {"protocol_version": "1"})
    assert response.status_code == 400
    assert "Malformed kv_hints envelope" in response.json()["error"]["message"]
