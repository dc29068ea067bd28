"""Servers on an NVIDIA GPU: hits are exact and answer as a cold prefill does. Skipped without one.

Answers are compared by the log probabilities of the same tokens, since of two tokens that are
nearly as likely either may win; and in float32, since bfloat16 hides a state that is wrong by one
token. What SGLang chooses by itself is asked only for its hits.
"""

from __future__ import annotations

import pytest
import torch

from sglang_hybrid.extensions.cpu.models import ARCHITECTURES
from sglang_hybrid.extensions.cpu.models.tiny import DEFAULT_ARCHITECTURE
from tests.server.client import (
    Serve,
    ask,
    cached,
    flush,
    hybrid_cache,
    logprobs,
    prompt_logprobs,
    random_prompt,
    said,
)
from tests.server.test_checkpoints import NEW_TOKENS, cases, page_and_chunk, play, wrong_hits

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(600),
]

SMALL = ("--mem-fraction-static", "0.1", "--max-total-tokens", "65536")
FLOAT32 = ("--dtype", "float32", "--attention-backend", "triton")
HALF = {"qwen3-next", "qwen3.5", "qwen4-exp", "kimi-linear", "glm-5-next"}
"""SGLang's Triton kernels of the delta rule refuse float32: hits only, as by default."""
CONFIGURATIONS = {
    "default": (),
    "float32": FLOAT32,
    "chunks of 128": (*FLOAT32, "--chunked-prefill-size", "128"),
    "page 16": (*FLOAT32, "--page-size", "16"),
    "no graphs": (*FLOAT32, "--disable-cuda-graph"),
}
MATRIX = [
    pytest.param(architecture, configuration, id=f"{architecture}, {configuration}")
    for architecture in sorted(set(ARCHITECTURES) - {"transformer"})
    for configuration in CONFIGURATIONS
    if configuration in ("default", "float32")
    or architecture in (DEFAULT_ARCHITECTURE, "qwen3-next")
]
ROUNDING = 0.01
"""Largest difference of a log probability in float32, its products in tf32. On a CPU hits differ by
less than 1e-4 here and a state that is one token too early by 0.03.
"""


def scores(url: str, prompt: list[int], answer: list[int]) -> list[float]:
    """Log probabilities of `answer` behind `prompt` from a prefill with an empty cache."""
    flush(url)
    record = ask(url, prompt + answer, 1, logprob_start_len=len(prompt) - 1)
    return prompt_logprobs(record)[-len(answer) :]


def worst(url: str, record: dict, prompt: list[int]) -> float:
    """The largest difference between what a request said and what a cold prefill says of it."""
    right = scores(url, prompt, record["output_ids"])
    return max(abs(one - other) for one, other in zip(logprobs(record), right, strict=True))


@pytest.mark.parametrize(("architecture", "configuration"), MATRIX)
def test_hits_are_exact(architecture: str, configuration: str, serve: Serve) -> None:
    flags = [*SMALL, *CONFIGURATIONS[configuration]]
    if architecture in HALF:
        flags = ["bfloat16" if flag == "float32" else flag for flag in flags]
    page, chunk = page_and_chunk(configuration)
    hits, colds, wrong = [0.0], [0.0], []
    with serve(*flags, of=architecture) as server:
        for name, case in cases().items():
            records = play(server.url, case)
            wrong += [(name, *one) for one in wrong_hits(case, records, page, chunk)]
            for record, prompt in zip(records, case.prompts, strict=True):
                (hits if cached(record) else colds).append(worst(server.url, record, prompt))
        log = said(server)
    print(f"largest difference: hits {max(hits):.4f}, cold {max(colds):.4f}")
    print("\n".join(line for line in log.splitlines() if "sglang_hybrid" in line or "WARN" in line))
    assert not wrong
    if "float32" in flags:
        assert max(hits) < ROUNDING


def test_a_state_that_is_off_by_one_would_be_seen(serve: Serve) -> None:
    """The comparison catches a server that takes every state one token too early."""
    with serve(*SMALL, *FLOAT32, module="tests.server.off_by_one") as server:
        case = cases()["siblings in turn"]
        *_, last = play(server.url, case)
        assert cached(last) == case.cached[-1]
        difference = worst(server.url, last, case.prompts[-1])
    print(f"difference of a state one token too early: {difference:.3f}")
    assert difference > 2 * ROUNDING


def test_a_starved_server_serves(serve: Serve) -> None:
    """Twelve state slots, a hundred requests at once."""
    flags, one_slot = (*SMALL, "--max-mamba-cache-size", "12"), "SGLANG_HYBRID_SLOTS_PER_REQUEST"
    prompts = [random_prompt(200, seed=i % 8) + random_prompt(20, seed=100 + i) for i in range(100)]
    with serve(*flags, environment={one_slot: "1"}) as server:
        assert len(ask(server.url, prompts, NEW_TOKENS)) == 100
        flush(server.url)
        assert hybrid_cache(server.url)["state_slots_free"] == 12
