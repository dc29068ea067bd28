"""Our cache: a hit says what a cold prefill says, a starved server serves, and it tells why."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from sglang_hybrid.models import ARCHITECTURES
from sglang_hybrid.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.server_process import ServerProcess
from tests.server.client import TOLERANCE, ask, flush, generate, hybrid_cache, random_prompt
from tests.server.expected import NEW_TOKENS, agree, expect

EXTRA_BUFFER = ("--mamba-radix-cache-strategy", "extra_buffer")
LAZY = ("--mamba-radix-cache-strategy", "extra_buffer_lazy")
NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")
PAGE_16 = ("--page-size", "16")
CONFIGURATIONS = {
    "extra buffer, page 1": EXTRA_BUFFER,
    "extra buffer, page 16": (*EXTRA_BUFFER, *PAGE_16),
    "lazy extra buffer, page 16": (*LAZY, *PAGE_16),
    "no buffer": NO_BUFFER,
}
WITHOUT_EXTRA_BUFFER = ("mamba2", "falcon-mamba")  # SGLang has it for neither

HYBRIDS = sorted(set(ARCHITECTURES) - {"transformer"})
MATRIX = [
    pytest.param(
        architecture,
        configuration,
        # test_against_transformers.py has every architecture with an extra buffer and page 1.
        marks=[]
        if architecture == DEFAULT_ARCHITECTURE and configuration != "extra buffer, page 1"
        else pytest.mark.slow,
    )
    for architecture in HYBRIDS
    for configuration in CONFIGURATIONS
    if configuration == "no buffer" or architecture not in WITHOUT_EXTRA_BUFFER
]


def logprobs(record: dict) -> list[float]:
    return [entry[0] for entry in record["meta_info"]["output_token_logprobs"]]


def cold_and_warm(url: str, prompts: list[list[int]]) -> tuple[list[dict], list[dict]]:
    """Each prompt with an empty cache, then all of them in turn."""
    cold = []
    for prompt in prompts:
        flush(url)
        cold.append(ask(url, prompt))
    flush(url)
    return cold, [ask(url, prompt) for prompt in prompts]


def conversation() -> list[list[int]]:
    """Prompts that share a document, repeat, go on and branch, at no aligned length."""
    document = random_prompt(701, seed=1)
    questions = [random_prompt(23, seed=seed) for seed in range(2, 6)]
    first = document + questions[0]
    longer = first + random_prompt(130, seed=7)
    return [
        first,
        document + questions[1],
        document + questions[2],
        first,
        longer,
        longer + questions[3],
        document[:333] + questions[2],
        document[:333] + questions[3],
        longer,
    ]


@pytest.mark.parametrize(("architecture", "configuration"), MATRIX)
def test_a_hit_says_what_a_cold_prefill_says(
    architecture: str, configuration: str, model_directory: Callable[[str], Path]
) -> None:
    model = model_directory(architecture)
    prompts = conversation()
    flags = ["--model-path", str(model), "--radix-cache-backend", "hybrid"]
    with ServerProcess([*flags, *CONFIGURATIONS[configuration]]) as server:
        cold, warm = cold_and_warm(server.url, prompts)
        if architecture == DEFAULT_ARCHITECTURE:  # the others: test_against_transformers.py
            expected = expect(model)
            agree(generate(server.url, [right.prompt for right in expected], NEW_TOKENS), expected)
    assert all(record["meta_info"]["cached_tokens"] == 0 for record in cold)
    assert sum(record["meta_info"]["cached_tokens"] for record in warm) > 1000
    for cold_one, warm_one in zip(cold, warm, strict=True):
        assert warm_one["output_ids"] == cold_one["output_ids"]
        assert logprobs(warm_one) == pytest.approx(logprobs(cold_one), abs=TOLERANCE)
        report = warm_one["meta_info"]["hybrid_cache"]
        assert report["hit_tokens"] == warm_one["meta_info"]["cached_tokens"]


STARVED = ("--max-mamba-cache-size", "12", "--max-running-requests", "16")


def test_a_server_short_of_slots_serves_a_burst(model_directory: Callable[[str], Path]) -> None:
    """12 slots for 4 running requests, 5 each by SGLang's count: checkpoints go, requests stay."""
    model = model_directory(DEFAULT_ARCHITECTURE)
    flags = ["--model-path", str(model), *STARVED, "--hybrid-slots-per-request", "3"]
    documents = [random_prompt(150 + 37 * i, seed=i) for i in range(8)]
    prompts = [documents[i % 8] + random_prompt(1 + i % 40, seed=100 + i) for i in range(200)]
    with ServerProcess(flags) as server:
        with ThreadPoolExecutor(200) as pool:
            records = list(
                pool.map(
                    lambda pair: ask(server.url, pair[1], 1 + pair[0] % 12), enumerate(prompts)
                )
            )
        assert [r["meta_info"]["completion_tokens"] for r in records] == [
            1 + i % 12 for i in range(200)
        ]
        seen = hybrid_cache(server.url)
        assert seen["checkpoints_skipped"]["no_slot"] > 0
        flush(server.url)
        assert hybrid_cache(server.url)["state_slots_free"] == 12
        assert server.process is not None and server.process.poll() is None
        assert "exception" not in server.log.read_text(errors="replace")


def test_what_the_cache_did_is_told(model_directory: Callable[[str], Path]) -> None:
    """One request after another; the report, /server_info and /metrics say the same."""
    model = model_directory(DEFAULT_ARCHITECTURE)
    document = random_prompt(701, seed=11)
    flags = ["--model-path", str(model), "--enable-metrics", "--hybrid-eviction", "marconi"]
    with ServerProcess([*flags, "--hybrid-alpha", "0.5"]) as server:
        flush(server.url)
        before = hybrid_cache(server.url)
        reports = [
            ask(server.url, document + random_prompt(20, seed=seed))["meta_info"]["hybrid_cache"]
            for seed in (12, 13, 14)
        ]
        after = hybrid_cache(server.url)
        metrics = requests.get(server.url + "/metrics", timeout=30).text
    assert [report["hit_tokens"] for report in reports] == [0, 0, 640]
    assert [report["missed"] for report in reports] == ["not_stored", "no_state", "no_state"]
    assert [report["kv_only_tokens"] for report in reports] == [0, 701, 61]
    assert reports[0]["checkpoints"] == [{"position": 704, "kind": "prompt_end"}]
    assert reports[1]["checkpoints"] == [{"position": 640, "kind": "branch"}]
    assert after["hit_tokens"] - before["hit_tokens"] == 640
    assert after["kv_only_tokens"] - before["kv_only_tokens"] == 762
    assert after["flops_saved"] > before["flops_saved"]
    assert (after["eviction"], after["alpha"]) == ("marconi", 0.5)
    assert _metric(metrics, "hit_tokens_total") == after["hit_tokens"]
    assert _metric(metrics, 'checkpoints_admitted_total{.*reason="branch".*}') == 1
    assert _metric(metrics, "alpha") == 0.5


def test_a_model_without_recurrent_state(model_directory: Callable[[str], Path]) -> None:
    """With a policy it is served by our cache, and every shared prefix is hit to the token."""
    prompts = conversation()
    flags = ["--model-path", str(model_directory("transformer")), "--hybrid-eviction", "gdsf"]
    with ServerProcess(flags) as server:
        cold, warm = cold_and_warm(server.url, prompts)
        assert hybrid_cache(server.url)["eviction"] == "gdsf"
    seen: list[list[int]] = []
    for prompt, cold_one, warm_one in zip(prompts, cold, warm, strict=True):
        shared = max((_common(prompt, earlier) for earlier in seen), default=0)
        assert warm_one["meta_info"]["cached_tokens"] == min(shared, len(prompt) - 1)
        assert warm_one["output_ids"] == cold_one["output_ids"]
        seen.append(prompt + warm_one["output_ids"])


def _common(left: list[int], right: list[int]) -> int:
    """Tokens that two sequences begin with alike."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _metric(text: str, name: str) -> float:
    pattern = rf"^sglang_hybrid:{name}(?:{{.*}})? (\S+)$"
    (value,) = re.findall(pattern, text, re.MULTILINE)
    return float(value)
