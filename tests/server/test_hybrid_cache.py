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
from tests.server.client import TOLERANCE, flush, random_prompt

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
        marks=[] if architecture == DEFAULT_ARCHITECTURE else pytest.mark.slow,
    )
    for architecture in HYBRIDS
    for configuration in CONFIGURATIONS
    if configuration == "no buffer" or architecture not in WITHOUT_EXTRA_BUFFER
]


def ask(url: str, prompt: list[int], new_tokens: int = 16) -> dict:
    """One greedy request; its record with output logprobs, which do not stop a hit."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": -1,
    }
    response = requests.post(url + "/generate", json=body, timeout=300)
    response.raise_for_status()
    return response.json()


def logprobs(record: dict) -> list[float]:
    return [entry[0] for entry in record["meta_info"]["output_token_logprobs"]]


def hybrid_cache(url: str) -> dict:
    """The block of /server_info."""
    return requests.get(url + "/server_info", timeout=30).json()["internal_states"][0][
        "hybrid_cache"
    ]


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
        cold = []
        for prompt in prompts:
            flush(server.url)
            cold.append(ask(server.url, prompt))
        flush(server.url)
        warm = [ask(server.url, prompt) for prompt in prompts]
    assert all(record["meta_info"]["cached_tokens"] == 0 for record in cold)
    assert sum(record["meta_info"]["cached_tokens"] for record in warm) > 1000
    for cold_one, warm_one in zip(cold, warm, strict=True):
        assert warm_one["output_ids"] == cold_one["output_ids"]
        assert logprobs(warm_one) == pytest.approx(logprobs(cold_one), abs=TOLERANCE)
        report = warm_one["meta_info"]["hybrid_cache"]
        assert report["hit_tokens"] == warm_one["meta_info"]["cached_tokens"]


def test_two_ranks_decide_alike(model_directory: Callable[[str], Path]) -> None:
    """SGLang's consensus checker ends the server at the first difference between ranks."""
    model = model_directory(DEFAULT_ARCHITECTURE)
    flags = ["--model-path", str(model), "--tp-size", "2", "--max-mamba-cache-size", "10"]
    prompts = conversation()
    checked = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
    with ServerProcess(flags, environment=checked) as server:
        for _ in range(2):
            with ThreadPoolExecutor(4) as pool:
                records = list(pool.map(lambda prompt: ask(server.url, prompt, 4), prompts))
        assert all(record["meta_info"]["completion_tokens"] == 4 for record in records)
        seen = hybrid_cache(server.url)
    assert seen["eviction"] == "reuse"
    assert seen["evicted"], "the pool was meant to be too small"


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
    """It gets SGLang's own cache, or a policy if one is asked for."""
    model = str(model_directory("transformer"))
    prompts = conversation()
    with ServerProcess(["--model-path", model]) as plain:
        wanted = [ask(plain.url, prompt) for prompt in prompts]
        info = requests.get(plain.url + "/server_info", timeout=30).json()
        assert "hybrid_cache" not in info["internal_states"][0]
    with ServerProcess(["--model-path", model, "--hybrid-eviction", "gdsf"]) as server:
        found = [ask(server.url, prompt) for prompt in prompts]
        assert hybrid_cache(server.url)["eviction"] == "gdsf"
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours["output_ids"] == theirs["output_ids"]
        assert ours["meta_info"]["cached_tokens"] == theirs["meta_info"]["cached_tokens"]


def _metric(text: str, name: str) -> float:
    pattern = rf"^sglang_hybrid:{name}(?:{{.*}})? (\S+)$"
    (value,) = re.findall(pattern, text, re.MULTILINE)
    return float(value)
