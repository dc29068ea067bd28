"""SGLang's own server kits, from its wheel, against a CPU server with our cache.

What of the kits does not run here:

| kit | why |
|---|---|
| cache_hit_kit.py | asks for the whole previous turn, token by token, which no hybrid model's grid of states gives; its server tests in SGLang use models without recurrent state |
| basic_scheduler_stress_kit.py: streaming, concurrent | look for "paris" and other capitals in the answers of a trained model; `test_long_prompt` runs |
| unified_radix_cache_kit.py: gsm8k, two passes | need a data set and a trained model |
| kl_divergence_kit.py | reads LongBench from the network; it runs with random prompts in their place |
"""  # noqa: E501

import random
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from sglang.test import kl_test_utils
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin
from sglang.test.kits.prefix_cache_branching_kit import PrefixCacheBranchingMixin
from sglang.test.kits.radix_cache_server_kit import run_radix_attention_test
from sglang.test.kits.unified_radix_cache_kit import UnifiedRadixTreeTestMixin
from sglang.test.kl_multiturn_utils import make_mamba_decode_assert, make_mamba_prefill_assert

from sglang_hybrid.extensions.cpu.models.tiny import DEFAULT_ARCHITECTURE
from tests.server.client import Serve, flush, random_prompt

pytestmark = pytest.mark.slow

CHUNK = 64  # mamba chunk of the tiny models
KL = 1e-6  # float32 on both sides; a state one token off gives more than 1e-2


@pytest.fixture(scope="module")
def served(model_directory: Callable[[str], Path], serve: Serve) -> Iterator[tuple[str, str]]:
    with serve("--mamba-track-interval", str(CHUNK)) as server:
        yield server.url, str(model_directory(DEFAULT_ARCHITECTURE))
        assert server.process is not None and server.process.poll() is None


def case(mixin: type, served: tuple[str, str], **attributes: Any) -> Any:
    """An instance of a kit's mixin that is pointed at our server."""
    url, model = served

    class Case(mixin, unittest.TestCase):
        base_url = url

        @classmethod
        def flush_cache(cls) -> None:
            flush(cls.base_url)

    Case.model = model
    for name, value in attributes.items():
        setattr(Case, name, value)
    return Case("run")


def test_branching(served: tuple[str, str]) -> None:
    """The kit rounds its branch at 257 tokens down to SGLang's grid; ours is hit whole."""
    case(PrefixCacheBranchingMixin, served, cache_chunk_size=257).test_prefix_cache_branching()


def test_radix_tree_of_400_requests(served: tuple[str, str]) -> None:
    random.seed(0)
    run_radix_attention_test(served[0])


def test_long_prompt(served: tuple[str, str]) -> None:
    case(BasicSchedulerStressMixin, served).test_long_prompt()


@pytest.mark.parametrize(
    "test",
    [
        "test_input_output_logprobs_match_prefill_cache_hit",
        "test_input_output_logprobs_match_decode_cache_hit",
    ],
)
def test_kl_divergence(served: tuple[str, str], test: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [random_prompt(300 + 17 * i, seed=i) for i in range(12)]
    monkeypatch.setattr(kl_test_utils, "get_input_ids", lambda **_: prompts)
    attributes = {
        "kl_div_thres": KL,
        "kl_div_max_samples": len(prompts),
        "kl_div_prefill_max_new_tokens": 64,
        "kl_div_decode_max_new_tokens": 64,
    }
    getattr(case(KLDivergenceMixin, served, **attributes), test)()


@pytest.mark.parametrize(
    "test",
    [
        "test_multiturn_logprobs_match",
        "test_multiturn_prefill_cache_hit_branching",
        "test_multiturn_decode_cache_hit_branching",
    ],
)
def test_multiturn(served: tuple[str, str], test: str) -> None:
    attributes = {
        "kl_threshold": KL,
        "max_new_tokens": 64,
        "input_ids": [random_prompt(700, seed=i) for i in range(4)],
        "prefill_cache_assert": staticmethod(make_mamba_prefill_assert(CHUNK)),
        "decode_cache_assert": staticmethod(make_mamba_decode_assert(CHUNK)),
        "sampling_temperature": 0,
    }
    getattr(case(UnifiedRadixTreeTestMixin, served, **attributes), test)()


def test_the_server_is_still_there(served: tuple[str, str]) -> None:
    assert requests.get(served[0] + "/health_generate", timeout=30).ok
