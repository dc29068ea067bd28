"""Memory that ends in the middle of a prefill: it waits, and every request is answered."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.server import client
from tests.server.client import TOLERANCE, Serve, flush, logprobs, random_prompt, said, until
from tests.server.one_memory import all_is_free
from tests.server.test_soak import CHECKED, emptied

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SLOTS, CHUNK, DECODING, NEW_TOKENS = 16, 64, 4, 200
FLAGS = (
    *("--max-total-tokens", "1000", "--max-mamba-cache-size", str(SLOTS)),
    *("--chunked-prefill-size", str(CHUNK), "--max-running-requests", "5"),
    *("--prefill-decode-interval", "16", "--schedule-conservativeness", "0.1"),
)
"""Between two chunks of a prompt the others decode 16 tokens each, of which SGLang expects few."""


def ask(url: str, prompt: list[int], new_tokens: int) -> Any:
    """No answer ends before `new_tokens`, which the server cannot know beforehand."""
    least = {"min_new_tokens": new_tokens, "ignore_eos": False}
    return client.ask(url, prompt, new_tokens, sampling=least)


def running(url: str) -> int:
    loads = requests.get(url + "/v1/loads", timeout=60).json()["loads"]
    return int(loads[0]["num_running_reqs"])


def test_a_prefill_waits_for_memory(serve: Serve) -> None:
    """560 tokens of a prompt fit when it is admitted, and do not when its last chunks are due."""
    variables = dict(CHECKED, SGLANG_TEST_RETRACT="0", SGLANG_HYBRID_SLOTS_PER_REQUEST="1")
    prompts = [random_prompt(10, seed=1 + i) for i in range(DECODING)]
    with (
        serve("--hybrid-memory", "split", *FLAGS, environment=variables) as server,
        ThreadPoolExecutor() as clients,
    ):
        for seed in range(2):
            flush(server.url)
            decoding = [clients.submit(ask, server.url, each, NEW_TOKENS) for each in prompts]
            until(lambda: running(server.url) >= DECODING)
            long = random_prompt(560 + CHUNK // 2 * seed, seed=100 + seed)
            answers = [ask(server.url, long, 8), *(each.result() for each in decoding)]
            flush(server.url)
            for prompt, mine in zip([long, *prompts], answers, strict=True):
                alone = ask(server.url, prompt, len(mine["output_ids"]))
                assert logprobs(mine) == pytest.approx(logprobs(alone), abs=TOLERANCE)
        (seen,) = emptied(server)
        assert all_is_free(seen, SLOTS)
        assert said(server)
