"""Two pools that lend: hits on states that have no slot, and behind KV that lies in slots, are
exact, whatever the layers, and nothing is lost.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import (
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
from tests.server.one_memory import SPILLS, all_is_free

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SLOTS, PROMPTS, TOKENS, NEW_TOKENS = 6, 12, 300, 6
POOLS = ("--max-mamba-cache-size", str(SLOTS), "--max-total-tokens", "24000")
PAGES = ("--page-size", "16")
"""A request holds three slots then."""


KINDS = pytest.mark.parametrize(
    ("architecture", "flags"),
    [
        *((name, ()) for name in ("nemotron-h", "qwen3-next", "kimi-linear", "falcon-h1")),
        ("nemotron-h", PAGES),
        ("kimi-linear", PAGES),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "default",
)


def after_hits(
    server: ServerProcess, prompts: list[list[int]], again: list[dict[str, Any]]
) -> dict[str, Any]:
    """The cache's numbers when it is empty again. again: the records of prompts that were asked a
    second time; they hit nearly all, and say what cold prompts say.
    """
    assert sum(map(cached, again)) > 0.9 * sum(map(len, prompts))
    for prompt, record in zip(prompts, again, strict=True):
        assert same(record, cold(server.url, prompt, NEW_TOKENS))
    flush(server.url)
    seen: dict[str, Any] = hybrid_cache(server.url)
    return seen


@KINDS
def test_hits_on_spilled_states_are_exact(
    architecture: str, flags: tuple[str, ...], serve: Serve, seed: int
) -> None:
    """Twice as many prompts as slots, asked again: most of what they resume from lies in KV. Two
    at a time, for each needs a slot of its own meanwhile, and slots for the states that it leaves.
    """
    prompts = [random_prompt(TOKENS + 7 * at, seed=seed % 2**16 + at) for at in range(PROMPTS)]
    with serve(*SPILLS, *POOLS, *flags, of=architecture) as server:
        assert hybrid_cache(server.url)["memory"] is None
        with ThreadPoolExecutor(2) as pool:
            first = list(pool.map(lambda ids: ask(server.url, ids, NEW_TOKENS), prompts))
            again = list(pool.map(lambda ids: ask(server.url, ids, NEW_TOKENS), prompts))
        assert not any(cached(record) for record in first)
        spilled = hybrid_cache(server.url)["spilled"]
        assert spilled["now"] > PROMPTS - SLOTS
        assert spilled["fetched"] > 0
        seen = after_hits(server, prompts, again)
        assert all_is_free(seen, SLOTS)
        assert seen["spilled"]["now"] == 0
        assert said(server)


@KINDS
def test_hits_behind_parked_kv_are_exact(
    architecture: str, flags: tuple[str, ...], serve: Serve, seed: int
) -> None:
    """More prompts than the pool of KV holds, and slots for more than their states, asked again:
    what they resume behind comes back, in exchange for other KV.
    """
    prompts = [random_prompt(TOKENS + 7 * at, seed=seed % 2**16 + at) for at in range(PROMPTS)]
    slots, kv = 200, 2_400
    pools = ("--max-mamba-cache-size", str(slots), "--max-total-tokens", str(kv))
    with serve(*SPILLS, *pools, *flags, of=architecture) as server:
        for prompt in prompts:
            assert not cached(ask(server.url, prompt, NEW_TOKENS))
        again = [ask(server.url, prompt, NEW_TOKENS) for prompt in prompts]
        seen = hybrid_cache(server.url)
        assert seen["parked"]["now"] > sum(map(len, prompts)) - kv
        assert seen["parked"]["brought_back"] > kv
        assert not sum(seen["evicted"].values())
        seen = after_hits(server, prompts, again)
        assert all_is_free(seen, slots)
        assert seen["parked"]["now"] == seen["parked"]["slots"] == 0
        assert said(server)


def test_pools_lend_nothing_where_that_was_asked_for(serve: Serve) -> None:
    with serve("--hybrid-memory", "split", *POOLS) as server:
        seen = hybrid_cache(server.url)
        assert seen["spilled"] is None
        assert seen["parked"] is None
