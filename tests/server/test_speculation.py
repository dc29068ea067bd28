"""Speculative decoding beside exact states: hits to the token, and answers that drafts do not
change.

A kept state never has read a token that was drafted and not accepted. Where a reply ends is known
only when the next step has begun, so that its last states are kept within two steps' tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median

import pytest
import requests

from sglang_hybrid.extensions.cpu.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import Serve, ask, flush, random_prompt, said, same
from tests.server.draft_heads import SAID, Headed, question
from tests.server.expected import agree, expect
from tests.server.one_memory import ONE_MEMORY
from tests.server.test_checkpoints import (
    cases,
    page_and_chunk,
    plays_hits,
    reply_is_cached,
    samples_share,
    second_turn_is_cached,
)

DRAFTED = 4
"""Tokens that a step reads of each request."""

NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(DRAFTED))
CHAIN = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1")
CHAIN += ("--speculative-num-draft-tokens", str(DRAFTED))
HEAD = ("--speculative-algorithm", "NEXTN", *CHAIN)


def next_turn_is_cached(url: str, page: int = 1) -> None:
    """Assert that the reply is cached but for two steps' tokens, and those of its last step."""
    lost = -(-2 * DRAFTED // page) * page + DRAFTED
    second_turn_is_cached(url, url, page, reply=40, lost=lost)


def repeats_are_accepted(url: str) -> float:
    """A prompt that is asked again is drafted from its own answer; accepted tokens of a step."""
    flush(url)
    prompt = random_prompt(40, seed=60)
    first, second = (ask(url, prompt, 40) for _ in range(2))
    assert same(second, first)
    return float(second["meta_info"]["spec_accept_length"])


def says_the_same(url: str, headed: Headed) -> list[float]:
    """Each answer is what the model says without its head; accepted tokens of a step, of each."""
    lengths = []
    for name, tokens in headed.said.items():
        sampling = {"temperature": 0, "max_new_tokens": SAID}
        body = {"text": question(name), "sampling_params": sampling}
        record = requests.post(url + "/generate", json=body, timeout=60).json()
        assert record["output_ids"] == tokens
        lengths.append(record["meta_info"]["spec_accept_length"])
    return lengths


@pytest.mark.slow
@pytest.mark.parametrize("pool", [(), ONE_MEMORY], ids=["two pools", "one memory"])
def test_a_draft_head_changes_nothing(headed: Headed, pool: tuple[str, ...]) -> None:
    """Neither what is said nor what is hit; some of its tokens are accepted, and some are not."""
    with ServerProcess(["--model-path", str(headed.directory), *HEAD, *pool]) as server:
        plays_hits(server.url, server.url, "siblings in turn")
        next_turn_is_cached(server.url)
        lengths = says_the_same(server.url, headed)
        assert max(lengths) > 3 and min(lengths) < DRAFTED
        assert said(server)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [
        *("qwen3-next", "qwen3.5", "kimi-linear", "falcon-h1", "granite-hybrid", "nemotron-3"),
        *("lfm2", "ling-2.5", "ling-3"),
    ],
)
def test_drafts_of_every_kind_of_layer(architecture: str, serve: Serve) -> None:
    """Trees, and chains where SGLang knows no trees."""
    breadth = ("--speculative-ngram-max-bfs-breadth", "1")
    chain = breadth if architecture in ("lfm2", "ling-2.5") else ()
    with serve(*NGRAM, *chain, of=architecture) as server:
        plays_hits(server.url, server.url, *cases())
        next_turn_is_cached(server.url)
        assert repeats_are_accepted(server.url) > 3
        samples_share(server.url, 699)
        assert said(server)


CONFIGURATIONS = {
    "default": (),
    "chunks of 128": ("--chunked-prefill-size", "128"),
    "page 16": ("--page-size", "16", "--speculative-ngram-max-bfs-breadth", "1"),
    "lazy": ("--mamba-radix-cache-strategy", "extra_buffer_lazy"),
    "no overlap": ("--disable-overlap-schedule",),
    "no buffer": ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
    "two ranks": ("--tp-size", "2"),
    "host memory": ("--enable-hierarchical-cache", "--hicache-ratio", "2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_drafts_change_nothing(
    configuration: str, model_directory: Callable[[str], Path], serve: Serve
) -> None:
    page, chunk = page_and_chunk(configuration)
    with serve(*NGRAM, *CONFIGURATIONS[configuration]) as server:
        plays_hits(server.url, server.url, *cases(), page=page, chunk=chunk)
        if configuration not in ("lazy", "no buffer"):
            next_turn_is_cached(server.url, page)
            for end in ("length", "stop token", "abort"):
                reply_is_cached(server.url, server.url, end, lost=3 * DRAFTED + page)
        assert repeats_are_accepted(server.url) > 3
        samples_share(server.url, 699 - 699 % page)
        agree(server.url, expect(model_directory(DEFAULT_ARCHITECTURE)))
        assert said(server)


@pytest.mark.slow
def test_a_model_beside_it_drafts(model_directory: Callable[[str], Path], serve: Serve) -> None:
    draft = ("--speculative-draft-model-path", str(model_directory("transformer")))
    with serve("--speculative-algorithm", "STANDALONE", *draft, *CHAIN) as server:
        plays_hits(server.url, server.url, *cases())
        next_turn_is_cached(server.url)
        agree(server.url, expect(model_directory(DEFAULT_ARCHITECTURE)))
        assert said(server)


@pytest.mark.slow
def test_as_many_drafts_are_accepted_as_under_sglangs_own(serve: Serve) -> None:
    """The same requests are sent to both in turn. Times are only printed."""
    with serve(*NGRAM) as ours, serve(*NGRAM, module="sglang.launch_server") as theirs:
        accepted: dict[str, list[float]] = {ours.url: [], theirs.url: []}
        seconds: dict[str, list[float]] = {ours.url: [], theirs.url: []}
        for seed in (*range(12), *range(12)):  # the second time drafts come from the first
            prompt = random_prompt(300, seed=200 + seed)
            for url in (ours.url, theirs.url) if seed % 2 else (theirs.url, ours.url):
                start = time.perf_counter()
                record = ask(url, prompt, 80)
                seconds[url].append(time.perf_counter() - start)
                accepted[url].append(record["meta_info"]["spec_accept_length"])
    mean = {url: fmean(lengths) for url, lengths in accepted.items()}
    ratios = [b / a for a, b in zip(seconds[ours.url], seconds[theirs.url], strict=True)]
    print(
        f"accepted tokens of a step: {mean[ours.url]:.2f}, SGLang's own {mean[theirs.url]:.2f}; "
        f"tokens/s, median of ours over theirs: {median(ratios[:12]):.2f} when a prompt is new, "
        f"{median(ratios[12:]):.2f} when it comes again"
    )
    assert mean[ours.url] >= 0.98 * mean[theirs.url]


@pytest.mark.slow
@pytest.mark.parametrize("leak", ["kept", "live"])
def test_one_drafted_token_too_many_would_be_seen(
    leak: str, model_directory: Callable[[str], Path], serve: Serve
) -> None:
    wrong = {"module": "tests.server.leaky", "environment": {"LEAK": leak}}
    with serve(*NGRAM, **wrong) as server, pytest.raises(AssertionError):
        if leak == "kept":
            next_turn_is_cached(server.url)
        else:
            agree(server.url, expect(model_directory(DEFAULT_ARCHITECTURE)))
