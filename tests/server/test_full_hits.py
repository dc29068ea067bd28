"""Full hits (`--hybrid-full-hit on`) on a real server: prompts that were asked twice are answered
without a forward, with the same tokens and log probabilities.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

import pytest
import requests

from tests.server.client import (
    CHECKED,
    TOLERANCE,
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
from tests.server.one_memory import TWO_POOLS, all_is_free
from tests.server.repeats import LONGEST_ANSWER, WISHES, Repeats
from tests.server.test_checkpoints import CONFIGURATIONS
from tests.server.test_soak import CHECKED as SOAKED
from tests.server.test_soak import PRIORITIES

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
WITH = ("extra buffer", "chunks of 128", "lazy", "no overlap", "two ranks", "two pools")
ROWS = [*((model, "default") for model in MODELS), *(("nemotron-h", each) for each in WITH)]


REPEATS = 1_000
SLOTS = 24
SMALL = (
    *("--max-running-requests", "8", "--max-total-tokens", "4000", "--chunked-prefill-size", "256"),
    *("--max-mamba-cache-size", str(SLOTS), *PRIORITIES),
)
OFTEN = {**SOAKED, "SGLANG_TEST_RETRACT_INTERVAL": "7"}
LOADED = {
    "default": ("nemotron-h", ()),
    "two pools": ("qwen3.5", TWO_POOLS),
    "no overlap": ("kimi-linear", ("--disable-overlap-schedule",)),
    "extra buffer": ("falcon-h1", CONFIGURATIONS["extra buffer"]),
}


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


@pytest.mark.parametrize("configuration", LOADED)
def test_repeats_under_load_are_answered_as_by_an_empty_cache(
    configuration: str, serve: Serve, seed: int
) -> None:
    """Few prompts again and again, on small pools, streamed, in batches, as samples, aborted,
    retracted and pushed out by others. Hundreds of answers need no forward of a prompt.
    """
    of, flags = LOADED[configuration]
    with serve(*ON, *SMALL, *flags, of=of, module=CHECKED["module"], environment=OFTEN) as server:
        repeats = Repeats(server.url, seed)
        asyncio.run(repeats.send(REPEATS))
        seen = hybrid_cache(server.url)
        full = [asked for asked in repeats.asked if is_full(asked.record)]
        print(f"{len(full)} of {len(repeats.asked)} full hits", repeats.outcomes)
        assert len(full) > len(repeats.asked) / 4
        assert {asked.how for asked in full} == {"alone", "batch", "samples", "stream"}
        assert {asked.wish for asked in full} == set(range(len(WISHES)))
        assert any(asked.record["meta_info"]["num_retractions"] for asked in full)
        assert repeats.outcomes["abort"] and repeats.outcomes["hung up"]
        assert seen["evicted"] and seen["happened"]["preemptions"]
        right = {}
        for asked in repeats.asked:
            key = asked.prompt, asked.wish
            if key not in right:
                body = repeats.body_of(*key, LONGEST_ANSWER) | {"cache_salt": f"cold {key}"}
                right[key] = requests.post(server.url + "/generate", json=body, timeout=300).json()
                assert cached(right[key]) == 0
            is_beginning_of(asked.record, right[key])
        flush(server.url, 60)
        assert all_is_free(hybrid_cache(server.url), SLOTS)
        assert said(server)


def is_beginning_of(record: dict[str, Any], right: dict[str, Any]) -> None:
    """Asserts that a shorter answer is that of a longer one, up to where two tokens are tied."""
    answers = [it["meta_info"]["output_token_logprobs"] for it in (record, right)]
    assert len(answers[0]) == len(record["output_ids"]) <= len(answers[1])
    for mine, other in zip(*answers, strict=False):
        assert mine[0] == pytest.approx(other[0], abs=TOLERANCE)
        if mine[1] != other[1]:
            return


def test_the_first_token_is_sooner(serve: Serve) -> None:
    """Printed, not tested: seconds until one token, of full hits and of ordinary ones."""
    with serve(*ON) as server:
        full, ordinary = [], []
        for number in range(10):
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
