"""Two tensor-parallel ranks say what transformers says, and decide alike."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_hybrid.core.records.pin import PinRequest
from sglang_hybrid.core.returns.hints import PromptHints
from sglang_hybrid.extensions.cpu.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.serving.requests import kv_hints
from tests.server.client import (
    Serve,
    ask,
    cached,
    completed,
    hybrid_cache,
    metric,
    random_prompt,
    said,
)
from tests.server.expected import agree, expect

pytestmark = pytest.mark.slow

CHECKED = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
"""Ends the server at the first match, insert or eviction in which the ranks differ."""


FLAGS = ("--tp-size", "2", "--max-mamba-cache-size", "10", "--hybrid-memory", "split")


def test_two_ranks(model_directory: Callable[[str], Path], serve: Serve) -> None:
    expected = expect(model_directory(DEFAULT_ARCHITECTURE))
    with serve(*FLAGS, "--enable-metrics", environment=CHECKED) as server:
        agree(server.url, expected, prompts=True)
        agree(server.url, expected)
        again = agree(server.url, expected)
        documents = [random_prompt(150 + 70 * i, seed=i) for i in range(6)]
        crowd = [documents[i % 6] + random_prompt(9, seed=50 + i) for i in range(30)]
        with ThreadPoolExecutor(4) as pool:
            records = pool.map(lambda prompt: ask(server.url, prompt, 4), crowd)
            assert completed(records) == [4] * len(crowd)
        seen = hybrid_cache(server.url)
        counted = metric(server.url, "hit_tokens_total")
        log = server.log.read_text(errors="replace")
    assert cached(again[-1]) > 0
    assert seen["eviction"] == "reuse"
    assert seen["hit_tokens"] == counted, "both ranks hit the same, which counts once"
    assert "10 state slots let 5 requests run" in seen["advice"][0]
    assert log.count(seen["advice"][0]) == 1
    assert sum(seen["evicted"].values()) > 5, "the pool was meant to be too small"


def test_two_ranks_keep_the_same_pins(serve: Serve) -> None:
    """Pins that hold and pins that end between requests, in a pool that is too small: a rank that
    evicts another state ends the server.
    """
    prompts = [random_prompt(120 + 10 * number, seed=number) for number in range(12)]
    with serve(*FLAGS, environment=CHECKED) as server:

        def send(number: int) -> dict:
            prompt = prompts[number % 12]
            ttl = 0.05 + 0.2 * (number % 4) if number % 3 else 60.0
            pins = (PinRequest(50, ttl), PinRequest(len(prompt) - 1, ttl))
            return ask(server.url, prompt, 4, kv_hints=kv_hints.write(PromptHints(pins=pins)))

        with ThreadPoolExecutor(3) as pool:
            assert completed(pool.map(send, range(72))) == [4] * 72
        seen = hybrid_cache(server.url)["pins"]
        assert seen["expired"] > 0 and seen["gave_way"] > 0
        assert sum(hybrid_cache(server.url)["evicted"].values()) > 5


def test_ranks_that_measure_different_things_decide_alike(serve: Serve) -> None:
    """Their clocks, speeds and random numbers differ on purpose: each match, insertion and eviction
    is compared, with copies on the host, pins, a queue of ours and a pool that is too small.
    """
    flags = ("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hybrid-schedule", "window")
    how = {"module": "tests.server.unequal_ranks", "environment": CHECKED}
    with serve(*FLAGS, *flags, **how) as server:
        documents = [random_prompt(300 + 90 * number, seed=number) for number in range(8)]

        def send(number: int) -> dict:
            prompt = documents[number * number % 8] + random_prompt(9, seed=50 + number % 30)
            pins = (PinRequest(200, 0.1 + number % 3),) if number % 4 == 0 else ()
            return ask(server.url, prompt, 4, kv_hints=kv_hints.write(PromptHints(pins=pins)))

        with ThreadPoolExecutor(4) as pool:
            assert completed(pool.map(send, range(90))) == [4] * 90
        seen = hybrid_cache(server.url)
        assert sum(seen["evicted"].values()) > 5 and seen["pins"]["expired"] > 0
        assert seen["tiers"]["written_states"] > 0
        print({name: seen["tiers"][name] for name in ("written_states", "loads", "hit_tokens")})
        assert said(server)
