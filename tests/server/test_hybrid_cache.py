"""Our cache: a starved server serves, and a model without states is served too."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile

import pytest

from tests.server.client import (
    Serve,
    ask,
    cached,
    cold,
    completed,
    flush,
    hybrid_cache,
    random_prompt,
)
from tests.server.one_memory import SPILLS, TWO_POOLS


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


STARVED = ("--max-mamba-cache-size", "12", "--max-running-requests", "16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pools", "leaves"), [(TWO_POOLS, True), (SPILLS, False)], ids=["two pools", "pools that lend"]
)
def test_a_server_short_of_slots_serves_a_burst(
    serve: Serve, pools: tuple[str, ...], leaves: bool
) -> None:
    """12 slots, and as many running requests: checkpoints go, requests stay. Where pools lend, the
    end of an answer needs no slot, and nothing is said of those that are left for it.
    """
    documents = [random_prompt(150 + 37 * i, seed=i) for i in range(8)]
    prompts = [documents[i % 8] + random_prompt(1 + i % 40, seed=100 + i) for i in range(200)]
    lengths = [1 + i % 12 for i in range(200)]
    with serve(*STARVED, *pools, environment={"SGLANG_HYBRID_SLOTS_PER_REQUEST": "1"}) as server:
        with ThreadPoolExecutor(200) as pool:
            records = pool.map(partial(ask, server.url), prompts, lengths)
            assert completed(records) == lengths
        seen = hybrid_cache(server.url)
        assert seen["checkpoints_skipped"]["no_slot"] > 0
        of_splits = "of the prompts of the last "  # what another split would hit, once it is known
        let, *leave = (line for line in seen["advice"] if not line.startswith(of_splits))
        assert "let 12 requests run at once instead of 16" in let
        assert ["leave 0 for checkpoints" in line for line in leave] == [True] * leaves
        flush(server.url)
        assert hybrid_cache(server.url)["state_slots_free"] == 12
        assert seen["memory"] is None
        log = server.log.read_text(errors="replace")
        said = log.count("KV and states have a pool each: --mamba-full-memory-ratio")
        assert said == (pools is SPILLS)  # nothing is said of what was asked for
        assert server.process is not None and server.process.poll() is None
        assert "exception" not in log


def common(left: list[int], right: list[int]) -> int:
    """Tokens that two sequences begin with alike."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.mark.slow
def test_a_model_without_recurrent_state(serve: Serve) -> None:
    """Our cache serves it with a policy, and every shared prefix is hit to the token."""
    prompts = conversation()
    with serve("--hybrid-eviction", "gdsf", of="transformer") as server:
        right = [cold(server.url, prompt) for prompt in prompts]
        flush(server.url)
        warm = [ask(server.url, prompt) for prompt in prompts]
        assert hybrid_cache(server.url)["eviction"] == "gdsf"
    seen: list[list[int]] = []
    for prompt, expected, answer in zip(prompts, right, warm, strict=True):
        shared = max((common(prompt, earlier) for earlier in seen), default=0)
        assert cached(answer) == min(shared, len(prompt) - 1)
        assert answer["output_ids"] == expected["output_ids"]
        seen.append(prompt + answer["output_ids"])
