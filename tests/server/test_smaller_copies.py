"""--hybrid-tier-codec: smaller copies answer almost as cold, say so, and
are refused to requests that ask for exactness.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_hybrid.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.serving.server_process import ServerProcess
from tests.releases import smaller_copies
from tests.server.client import TOLERANCE, ask, logprobs, random_prompt

FLAGS = (
    *("--max-total-tokens", "2000", "--max-mamba-cache-size", "10", "--enable-cache-report"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "3"),
)
PROMPTS = [random_prompt(700, seed=seed) for seed in range(5)]
"""More than the device holds, and less than the host does."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), smaller_copies]


@pytest.fixture(scope="module")
def int8(model_directory: Callable[[str], Path]) -> Iterator[ServerProcess]:
    model = str(model_directory(DEFAULT_ARCHITECTURE))
    with ServerProcess(["--model-path", model, *FLAGS, "--hybrid-tier-codec", "int8"]) as server:
        yield server


def ask_exactly(url: str, prompt: list[int]) -> dict[str, Any]:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": -1,
    }
    headers = {"X-Hybrid-Exact": "true"}
    response = requests.post(f"{url}/generate", json=body, headers=headers, timeout=300)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def said(answer: dict[str, Any]) -> dict[str, Any]:
    report: dict[str, Any] = answer["meta_info"]["hybrid_cache"]
    return report


def from_host(answer: dict[str, Any]) -> int:
    return (answer["meta_info"].get("cached_tokens_details") or {}).get("host", 0)


def largest_error(answer: dict[str, Any], right: dict[str, Any]) -> float:
    """Of log probabilities, up to and with the first token that differs."""
    pairs = zip(answer["output_ids"], right["output_ids"], strict=True)
    same = next((n for n, (one, two) in enumerate(pairs) if one != two), len(right["output_ids"]))
    errors = zip(logprobs(answer)[: same + 1], logprobs(right)[: same + 1], strict=True)
    return max(abs(one - two) for one, two in errors)


def test_hits_on_smaller_copies_say_so(int8: ServerProcess) -> None:
    cold = [ask(int8.url, prompt, 4) for prompt in PROMPTS]
    assert all(said(answer)["exact"] for answer in cold)
    loaded = 0
    for prompt, right in zip(PROMPTS, cold, strict=True):
        answer = ask(int8.url, prompt, 4)
        if from_host(answer):
            loaded += 1
            assert said(answer)["exact"] is False
            assert 0 < largest_error(answer, right) < 0.5
            again = ask(int8.url, [*prompt, 301, 302], 4)
            assert said(again)["exact"] is False, "what was computed behind it is as inexact"
        else:  # computed again, or still on the device
            assert said(answer)["exact"]
            assert largest_error(answer, right) < TOLERANCE
    assert loaded >= 3


def test_a_request_may_ask_for_exact_copies_only(int8: ServerProcess) -> None:
    prompts = [random_prompt(700, seed=seed) for seed in range(50, 55)]
    cold = [ask_exactly(int8.url, prompt) for prompt in prompts]
    for prompt in prompts[::-1]:
        ask(int8.url, prompt, 4)
    answers = [ask_exactly(int8.url, prompt) for prompt in prompts]
    for answer, right in zip(answers, cold, strict=True):
        assert said(answer)["exact"] and not from_host(answer)
        assert answer["output_ids"] == right["output_ids"]
        assert logprobs(answer) == pytest.approx(logprobs(right), abs=TOLERANCE)
    again = ask_exactly(int8.url, prompts[-1])
    assert again["meta_info"]["cached_tokens"] > 600, "they share what they computed"


def test_what_cannot_be_asked_for_is_said(int8: ServerProcess) -> None:
    url, body = f"{int8.url}/generate", {"input_ids": [300, 301]}
    answer = requests.post(url, json=body, headers={"X-Hybrid-Exact": "yes"}, timeout=60)
    assert answer.status_code == 400 and "may be 'true'" in answer.text


@pytest.mark.parametrize("architecture", ["nemotron-h", "qwen3-next", "transformer"])
def test_codecs_are_chosen_by_what_they_change(
    model_directory: Callable[[str], Path], architecture: str
) -> None:
    model = str(model_directory(architecture))
    flags = ["--model-path", model, *FLAGS, "--hybrid-tier-codec", "auto:0.01"]
    with ServerProcess([*flags, "--radix-cache-backend", "hybrid"]) as server:
        cold = [ask(server.url, prompt, 4) for prompt in PROMPTS]
        answers = [ask(server.url, prompt, 4) for prompt in PROMPTS]
        errors = list(map(largest_error, answers, cold))
        (line,) = re.findall(r"smaller copies: .*", server.log.read_text())
    print(
        f"{architecture}: {line} Largest error of {sum(map(bool, map(from_host, answers)))} loads: "
        f"{max(errors):.1e}."
    )
    (alone,) = re.findall(r"move by (\S+) at most for one layer", line)
    assert float(alone) <= 0.01 and max(errors) < 0.5
