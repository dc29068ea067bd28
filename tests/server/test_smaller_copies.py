"""--hybrid-tier-codec: smaller copies answer almost as cold, say so, and
are refused to requests that ask for exactness.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import TOLERANCE, Serve, ask, cached, logprobs, random_prompt, same
from tests.server.one_memory import ONE_MEMORY, TWO_POOLS
from tests.server.test_host_tier import FLAGS, PROMPTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=["one memory", "two pools"])
def int8(serve: Serve, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    pool = ONE_MEMORY if request.param == "one memory" else TWO_POOLS
    with serve(*FLAGS, *pool, "--hybrid-tier-codec", "int8") as server:
        yield server


EXACTLY = {"X-Hybrid-Exact": "true"}


def report(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["meta_info"]["hybrid_cache"]
    return found


def from_host(answer: dict[str, Any]) -> int:
    return (answer["meta_info"].get("cached_tokens_details") or {}).get("host", 0)


def largest_error(answer: dict[str, Any], right: dict[str, Any]) -> float:
    """The largest error of log probabilities, up to and with the first token that differs."""
    pairs = zip(answer["output_ids"], right["output_ids"], strict=True)
    same = next((n for n, (one, two) in enumerate(pairs) if one != two), len(right["output_ids"]))
    errors = zip(logprobs(answer)[: same + 1], logprobs(right)[: same + 1], strict=True)
    return max(abs(one - two) for one, two in errors)


def test_hits_on_smaller_copies_say_so(int8: ServerProcess) -> None:
    cold = [ask(int8.url, prompt, 4) for prompt in PROMPTS]
    assert all(report(answer)["exact"] for answer in cold)
    loaded = 0
    for prompt, right in zip(PROMPTS, cold, strict=True):
        answer = ask(int8.url, prompt, 4)
        if from_host(answer):
            loaded += 1
            assert report(answer)["exact"] is False
            assert 0 < largest_error(answer, right) < 0.5
            again = ask(int8.url, [*prompt, 301, 302], 4)
            assert report(again)["exact"] is False, "what was computed behind it is as inexact"
        else:  # computed again, or still on the device
            assert report(answer)["exact"]
            assert largest_error(answer, right) < TOLERANCE
    assert loaded >= 3


def test_a_request_may_ask_for_exact_copies_only(int8: ServerProcess) -> None:
    prompts = [random_prompt(700, seed=seed) for seed in range(50, 55)]
    cold = [ask(int8.url, prompt, 4, EXACTLY) for prompt in prompts]
    for prompt in prompts[::-1]:
        ask(int8.url, prompt, 4)
    answers = [ask(int8.url, prompt, 4, EXACTLY) for prompt in prompts]
    for answer, right in zip(answers, cold, strict=True):
        assert report(answer)["exact"] and not from_host(answer)
        assert same(answer, right)
    again = ask(int8.url, prompts[-1], 4, EXACTLY)
    assert cached(again) > 600, "they share what they computed"


def test_what_cannot_be_asked_for_is_report(int8: ServerProcess) -> None:
    url, body = f"{int8.url}/generate", {"input_ids": [300, 301]}
    answer = requests.post(url, json=body, headers={"X-Hybrid-Exact": "yes"}, timeout=60)
    assert answer.status_code == 400 and "may be 'true'" in answer.text


@pytest.mark.parametrize("architecture", ["nemotron-h", "qwen3-next", "kimi-linear", "transformer"])
def test_codecs_are_chosen_by_what_they_change(serve: Serve, architecture: str) -> None:
    """The bound is on prompts of the measurement. A token of Kimi Linear's moves by 0.5."""
    flags = ("--hybrid-tier-codec", "auto:0.01", "--radix-cache-backend", "hybrid")
    with serve(*FLAGS, *flags, of=architecture) as server:
        cold = [ask(server.url, prompt, 4) for prompt in PROMPTS]
        answers = [ask(server.url, prompt, 4) for prompt in PROMPTS]
        errors = list(map(largest_error, answers, cold))
        (line,) = re.findall(r"smaller copies: .*", server.log.read_text())
    print(
        f"{architecture}: {line} Largest error of {sum(map(bool, map(from_host, answers)))} loads: "
        f"{max(errors):.1e}."
    )
    (alone,) = re.findall(r"move by (\S+) at most for one layer", line)
    assert float(alone) <= 0.01 and max(errors) < 1
