"""Two tensor-parallel ranks say what transformers says, and decide alike."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_hybrid.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.server_process import ServerProcess
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
