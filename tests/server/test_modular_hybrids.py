"""Modules computed apart and put together, on a server of a model with recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import TOLERANCE, flush, hybrid_cache, logprobs
from tests.server.composed_reference import composed_logprobs
from tests.server.test_modular import (
    SCHEMA,
    composed,
    composed_in_the_end,
    follows_the_mask,
    pml,
    selections_are_put_together,
    send,
    spans_are_put_together,
)

pytestmark = pytest.mark.slow

ARCHITECTURES = [
    *("nemotron-h", "falcon-h1", "granite-hybrid"),
    *("qwen3-next", "qwen3.5", "kimi-linear"),
]
"""The models whose states are composed."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, model_directory: Callable[[str], Path]) -> Path:
    return model_directory(request.param)


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    flags = ["--model-path", str(model), "--enable-cache-report", "--chunked-prefill-size", "16"]
    with ServerProcess(flags) as running:
        answer = requests.post(running.url + "/v1/prompt_schemas", json={"pml": SCHEMA}, timeout=60)
        answer.raise_for_status()
        yield running.url


@pytest.fixture(autouse=True)
def _empty(url: str) -> None:
    """No segments; those that a test before this one asked for may still be computed."""
    flush(url)


@pytest.mark.parametrize("imports", ["<unit/><map/>", '<sea count="three"/><player/>', "<player/>"])
def test_it_is_the_model_under_the_modules_mask(url: str, model: Path, imports: str) -> None:
    follows_the_mask(url, model, imports, composed_logprobs)


def test_a_selection_that_nobody_sent_before_is_put_together(url: str) -> None:
    selections_are_put_together(url)


def test_spans_of_a_prompt_are_put_together(url: str, model: Path) -> None:
    spans_are_put_together(url, model, composed_logprobs)


def test_exact_prompts_and_those_put_together_never_meet(url: str) -> None:
    cold = send(url, pml("<unit/><map/>", mode="exact"))
    apart = composed_in_the_end(url, pml("<unit/><map/>"))
    assert logprobs(apart) != pytest.approx(logprobs(cold), abs=TOLERANCE)
    again = send(url, pml("<unit/><map/>", mode="exact"))
    assert again["meta_info"]["cached_tokens"] > 0
    assert logprobs(again) == pytest.approx(logprobs(cold), abs=TOLERANCE)
    said = {"X-Hybrid-Exact": "true"}
    body = {"pml": pml("<unit/><map/>"), "sampling_params": {"max_new_tokens": 2}}
    asked = requests.post(url + "/generate", json=body, headers=said, timeout=60).json()
    assert composed(asked) == 0 and asked["meta_info"]["prompt"]["exact"] is True


def test_a_tenant_has_segments_of_its_own(url: str) -> None:
    schema: dict[str, Any] = {"pml": SCHEMA, "cache_salt": "b"}
    requests.post(url + "/v1/prompt_schemas", json=schema, timeout=60).raise_for_status()
    composed_in_the_end(url, pml("<unit/><map/>"))
    assert composed(send(url, pml("<unit/><map/>"), cache_salt="b")) == 0


def test_nothing_is_left_of_them_when_the_cache_is_flushed(url: str) -> None:
    free = hybrid_cache(url)["state_slots_free"]
    composed_in_the_end(url, pml("<unit/><map/>"))
    kept = hybrid_cache(url)["transitions"]
    assert 0 < kept["bytes"] <= kept["limit"]
    flush(url)
    found = hybrid_cache(url)
    assert found["transitions"]["bytes"] == found["transitions"]["kept"] == 0
    assert found["state_slots_free"] == free
