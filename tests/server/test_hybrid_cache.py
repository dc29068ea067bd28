"""Our cache: a starved server serves, what it did is told, a model without states is served too."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from sglang_hybrid.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.serving.server_process import ServerProcess
from tests import dashboard
from tests.server.client import ask, flush, hybrid_cache, metric, random_prompt


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


STARVED = (
    *("--max-mamba-cache-size", "12", "--max-running-requests", "16"),
    *("--mamba-full-memory-ratio", "0.5"),
)
"""The ratio asks for two pools."""


@pytest.mark.slow
def test_a_server_short_of_slots_serves_a_burst(model_directory: Callable[[str], Path]) -> None:
    """12 slots, and as many running requests: checkpoints go, requests stay."""
    model = model_directory(DEFAULT_ARCHITECTURE)
    flags = ["--model-path", str(model), *STARVED]
    documents = [random_prompt(150 + 37 * i, seed=i) for i in range(8)]
    prompts = [documents[i % 8] + random_prompt(1 + i % 40, seed=100 + i) for i in range(200)]
    with ServerProcess(flags, environment={"SGLANG_HYBRID_SLOTS_PER_REQUEST": "1"}) as server:
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
        let, leave = seen["advice"]
        assert "let 12 requests run at once instead of 16" in let
        assert "leave 0 for checkpoints" in leave
        flush(server.url)
        assert hybrid_cache(server.url)["state_slots_free"] == 12
        assert seen["memory"] is None
        log = server.log.read_text(errors="replace")
        assert log.count("KV and states have a pool each: --mamba-full-memory-ratio") == 1
        assert server.process is not None and server.process.poll() is None
        assert "exception" not in log


def test_what_the_cache_did_is_told(model_directory: Callable[[str], Path]) -> None:
    """One request after another; the report, /server_info and /metrics say the same."""
    model = model_directory(DEFAULT_ARCHITECTURE)
    document = random_prompt(701, seed=11)
    flags = ["--model-path", str(model), "--enable-metrics"]
    with ServerProcess([*flags, "--hybrid-eviction", "marconi:0.5"]) as server:
        flush(server.url)
        before = hybrid_cache(server.url)
        reports = [
            ask(server.url, document + random_prompt(20, seed=seed))["meta_info"]["hybrid_cache"]
            for seed in (12, 13, 14)
        ]
        after = hybrid_cache(server.url)
        hits, alpha = metric(server.url, "hit_tokens_total"), metric(server.url, "alpha")
        branches = metric(server.url, 'checkpoints_admitted_total{.*reason="branch".*}')
        text = requests.get(server.url + "/metrics", timeout=30).text
    assert [report["hit_tokens"] for report in reports] == [0, 0, 701]
    assert [report["missed"] for report in reports] == ["not_stored", "no_state", "not_stored"]
    assert [report["kv_only_tokens"] for report in reports] == [0, 701, 0]
    left = [{(one["position"], one["kind"]) for one in report["checkpoints"]} for report in reports]
    tail = (736, "tail")  # 721 tokens and 16 of an answer, but the last one, which was not read
    assert left[0] == {(704, "chunk"), (720, "prompt_end"), tail}
    assert left[1] == {(701, "branch"), (720, "prompt_end"), tail}
    assert left[2] == {(720, "prompt_end"), tail}
    assert after["hit_tokens"] - before["hit_tokens"] == 701
    assert after["kv_only_tokens"] - before["kv_only_tokens"] == 701
    assert after["flops_saved"] > before["flops_saved"]
    assert (after["eviction"], after["alpha"]) == ("marconi", 0.5)
    assert (hits, branches, alpha) == (after["hit_tokens"], 1, 0.5)
    assert after["advice"] == [], "nothing but what was asked for"
    exported = {
        sample.name for family in text_string_to_metric_families(text) for sample in family.samples
    }
    asked = {name for name in dashboard.metrics() if name.startswith("sglang:")}
    assert len(asked) == 7 and asked <= exported


@pytest.mark.slow
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
