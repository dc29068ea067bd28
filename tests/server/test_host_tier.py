"""SGLang's own prefix cache with --enable-hierarchical-cache on the CPU platform: what does not fit
on the device is backed up to host memory, loaded again, and answered as cold.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hybrid.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.server_process import ServerProcess
from tests.server.client import TOLERANCE, ask, logprobs, random_prompt

FLAGS = (
    *("--max-total-tokens", "2000", "--max-mamba-cache-size", "10", "--enable-cache-report"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "3"),
)
LAYOUTS = ("page_first", "page_first_direct")
PROMPTS = [random_prompt(700, seed=seed) for seed in range(5)]
"""More than the device holds, and less than the host does."""


def loaded_answers_are_cold_ones(url: str) -> None:
    cold = [ask(url, prompt, 4) for prompt in PROMPTS]
    assert all(answer["meta_info"]["cached_tokens"] == 0 for answer in cold)
    for prompt, right in zip(PROMPTS, cold, strict=True):
        answer = ask(url, prompt, 4)
        assert answer["meta_info"]["cached_tokens_details"]["host"] > 0
        assert answer["output_ids"] == right["output_ids"]
        assert logprobs(answer) == pytest.approx(logprobs(right), abs=TOLERANCE)


def unmodified(model: Path, *flags: str, **variables: str) -> ServerProcess:
    """SGLang's own launcher, and so its own cache."""
    command = ["--model-path", str(model), *FLAGS, *flags]
    return ServerProcess(command, module="sglang.launch_server", environment=variables)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "architecture", ["nemotron-h", "falcon-h1", "granite-hybrid", "qwen3-next"]
)
def test_sglangs_cache_loads_what_it_backed_up(
    model_directory: Callable[[str], Path], architecture: str, layout: str
) -> None:
    with unmodified(model_directory(architecture), "--hicache-mem-layout", layout) as server:
        loaded_answers_are_cold_ones(server.url)


@pytest.mark.slow
def test_a_simulated_bandwidth_is_said_and_kept(model_directory: Callable[[str], Path]) -> None:
    """Loading 640 tokens and a state moves some 3 MB."""
    link = "host=3MB/s+1ms"
    model = model_directory(DEFAULT_ARCHITECTURE)
    with unmodified(model, SGLANG_HYBRID_SIMULATE_BANDWIDTH=link) as server:
        loaded_answers_are_cold_ones(server.url)
        assert f"simulated bandwidth ({link})" in server.log.read_text()
