"""Full hits (`--hybrid-full-hit on`) on a real server: prompts that were asked twice are answered
without a forward, with the same tokens and log probabilities.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

import pytest

from tests.server.client import (
    CHECKED,
    Serve,
    ask,
    cached,
    cold,
    flush,
    hybrid_cache,
    random_prompt,
    said,
    same,
)
from tests.server.test_checkpoints import CONFIGURATIONS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ON = ("--hybrid-full-hit", "on")
MODELS = (
    "nemotron-h",
    "qwen3-next",
    "kimi-linear",
    "falcon-h1",
    "granite-hybrid",
    "lfm2",
    "mamba2",
)
WITH = ("extra buffer", "chunks of 128", "lazy", "no overlap", "two ranks", "SGLang's pool")
ROWS = [*((model, "default") for model in MODELS), *(("nemotron-h", each) for each in WITH)]


def is_full(record: dict[str, Any]) -> bool:
    return bool(record["meta_info"]["hybrid_cache"].get("full_hit"))


@pytest.mark.parametrize(("architecture", "configuration"), ROWS)
def test_answers_are_those_of_an_empty_cache(
    architecture: str, configuration: str, serve: Serve
) -> None:
    flags = CONFIGURATIONS[configuration]
    with serve(*ON, *flags, of=architecture, **CHECKED) as server:
        url = server.url
        prompts = [random_prompt(length, seed=length) for length in (300, 700, 333)]
        right = [cold(url, prompt) for prompt in prompts]
        flush(url)
        for times in range(4):
            for prompt, record in zip(prompts, right, strict=True):
                answer = ask(url, prompt)
                assert same(answer, record)
                assert is_full(answer) is (times >= 2)
                assert cached(answer) == (len(prompt) - 1 if times else 0)
        with ThreadPoolExecutor(8) as pool:  # with one another, and beside others
            others = [random_prompt(200, seed=number) for number in range(4)]
            asked = list(pool.map(partial(ask, url), [*prompts, *others, *prompts]))
        for answer, record in zip(asked, [*right, *[None] * 4, *right], strict=True):
            assert record is None or same(answer, record)
        further = [ask(url, [*prompts[1], *right[1]["output_ids"], 5, number]) for number in (6, 7)]
        assert cached(further[0]) >= len(prompts[1]) + len(right[1]["output_ids"]) - 1
        samples = ask(url, prompts[0], sampling_params={"n": 3, "temperature": 0})
        assert len(samples) == 3
        whole = ask(url, prompts[0], logprob_start_len=0)
        assert not is_full(whole) and cached(whole) == 0
        theirs = ask(url, prompts[0], cache_salt="another tenant")
        assert not is_full(theirs) and cached(theirs) == 0 and same(theirs, right[0])
        seen = hybrid_cache(url)["full_hits"]
        assert seen["kept"] == len(prompts) and seen["answered"] >= 6 and seen["bytes"] > 0
        flush(url)
        assert hybrid_cache(url)["full_hits"]["kept"] == 0
        assert same(ask(url, prompts[0]), right[0])
        assert said(server)


def test_the_first_token_is_sooner(serve: Serve) -> None:
    """Printed, not tested: seconds until one token, of full hits and of ordinary ones."""
    with serve(*ON) as server:
        full, ordinary = [], []
        for number in range(30):
            prompt = random_prompt(2000, seed=number)
            records = []
            for times in range(3):
                began = time.perf_counter()
                records.append(ask(server.url, prompt, 1))
                taken = time.perf_counter() - began
                ordinary += [taken] if times == 1 else []
                full += [taken] if times == 2 else []
            assert is_full(records[2]) and same(records[2], records[1])
        print(f"median ms: full {median(full) * 1e3:.1f}, ordinary {median(ordinary) * 1e3:.1f}")


@pytest.mark.parametrize("flags", [("--page-size", "16"), ("--enable-mixed-chunk",)])
def test_where_it_cannot_be_the_server_says_so(flags: tuple[str, ...], serve: Serve) -> None:
    with serve(*ON, *flags) as server:
        prompt = random_prompt(320, seed=1)
        records = [ask(server.url, prompt) for _ in range(3)]
        assert not any(map(is_full, records)) and same(records[2], records[0])
        advice = hybrid_cache(server.url)["advice"]
        assert any("--hybrid-full-hit does nothing: " in line for line in advice)
