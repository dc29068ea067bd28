"""Two tensor-parallel ranks say what transformers says, and decide alike."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from sglang_hybrid.core.records.pin import PinRequest
from sglang_hybrid.core.returns.hints import PromptHints
from sglang_hybrid.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.serving.requests import kv_hints
from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import ask, generate, hybrid_cache, metric, random_prompt
from tests.server.expected import NEW_TOKENS, agree, expect

pytestmark = pytest.mark.slow

CHECKED = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
"""Ends the server at the first match, insert or eviction in which the ranks differ."""


def test_two_ranks(model_directory: Callable[[str], Path]) -> None:
    model = model_directory(DEFAULT_ARCHITECTURE)
    expected = expect(model)
    prompts = [right.prompt for right in expected]
    flags = ["--model-path", str(model), "--tp-size", "2", "--max-mamba-cache-size", "10"]
    flags += ["--enable-metrics", "--hybrid-memory", "split"]
    with ServerProcess(flags, environment=CHECKED) as server:
        agree(generate(server.url, prompts, NEW_TOKENS, logprobs=True), expected)
        agree(generate(server.url, prompts, NEW_TOKENS), expected)
        again = generate(server.url, prompts, NEW_TOKENS)
        agree(again, expected)
        documents = [random_prompt(150 + 70 * i, seed=i) for i in range(6)]
        crowd = [documents[i % 6] + random_prompt(9, seed=50 + i) for i in range(30)]
        with ThreadPoolExecutor(4) as pool:
            records = list(pool.map(lambda prompt: ask(server.url, prompt, 4), crowd))
        seen = hybrid_cache(server.url)
        counted = metric(server.url, "hit_tokens_total")
        log = server.log.read_text(errors="replace")
    assert again[-1].cached_tokens > 0
    assert all(record["meta_info"]["completion_tokens"] == 4 for record in records)
    assert seen["eviction"] == "reuse"
    assert seen["hit_tokens"] == counted, "both ranks hit the same, which counts once"
    assert "10 state slots let 3 requests run" in seen["advice"][0]
    assert log.count(seen["advice"][0]) == 1
    assert sum(seen["evicted"].values()) > 5, "the pool was meant to be too small"


def test_two_ranks_keep_the_same_pins(model_directory: Callable[[str], Path]) -> None:
    """Pins that hold and pins that end between requests, in a pool that is too small: a rank that
    evicts another state ends the server.
    """
    model = model_directory(DEFAULT_ARCHITECTURE)
    flags = ["--model-path", str(model), "--tp-size", "2", "--max-mamba-cache-size", "10"]
    prompts = [random_prompt(120 + 10 * number, seed=number) for number in range(12)]
    with ServerProcess([*flags, "--hybrid-memory", "split"], environment=CHECKED) as server:

        def send(number: int) -> int:
            prompt = prompts[number % 12]
            ttl = 0.05 + 0.2 * (number % 4) if number % 3 else 60.0
            body = {
                "input_ids": prompt,
                "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
                "kv_hints": kv_hints.write(
                    PromptHints(pins=(PinRequest(50, ttl), PinRequest(len(prompt) - 1, ttl)))
                ),
            }
            answer = requests.post(server.url + "/generate", json=body, timeout=300)
            answer.raise_for_status()
            return int(answer.json()["meta_info"]["completion_tokens"])

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(send, range(72))) == [4] * 72
        seen = hybrid_cache(server.url)["pins"]
        assert seen["expired"] > 0 and seen["gave_way"] > 0
        assert sum(hybrid_cache(server.url)["evicted"].values()) > 5
