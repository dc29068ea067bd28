"""Evictions in one call take what SGLang's walk, with its steps, takes."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang_hybrid.cache.memory.device_eviction import DeviceEviction
from tests.cache.backends import options
from tests.cache.driver import ONE_MEMORY, Server, Sizes, build_cache

POOLS = {
    "two pools": Sizes(kv=400, states=7, rows=6, context=512),
    "no states": Sizes(kv=400, states=0, rows=6, context=512),
    "one memory": Sizes(400, 7, rows=6, context=512, **ONE_MEMORY),
    "states that spill": Sizes(300, 5, rows=6, context=512, row=32, spills=True, state_tokens=10),
}


def play(sizes: Sizes) -> tuple[list[Any], Server]:
    """Hits and what is free after each of many prompts that fork, in pools that are too small."""
    server, rng = Server(build_cache(sizes, options("reuse")), sizes), random.Random(1)
    seen: list[Any] = []
    for number in range(120):
        family, member = rng.randrange(6), rng.randrange(5)
        prompt = [*range(100 * family, 100 * family + 40), *range(9_000 + 50 * member, 9_030)]
        prompt += [20_000 + 10 * number + at for at in range(rng.randrange(1, 9))]
        hit = server.serve(prompt, list(range(30_000 + number, 30_000 + number + 8)), float(number))
        seen.append((hit, server.free()))
        server.check()
    return seen, server


@pytest.mark.parametrize("pools", POOLS)
def test_the_same_is_evicted(pools: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []

    def counted(self: DeviceEviction, *args: Any) -> Any:
        calls.append(True)
        return evict_next(self, *args)

    evict_next = DeviceEviction.evict_next
    monkeypatch.setattr(DeviceEviction, "evict_next", counted)
    ours, one = play(POOLS[pools])
    assert len(calls) > 50
    monkeypatch.setattr(DeviceEviction, "serves", lambda self: False)
    calls.clear()
    sglangs, other = play(POOLS[pools])
    assert ours == sglangs and not calls
    assert one.cache.stats.evicted == other.cache.stats.evicted
    assert len(one.cache.decision_log.decisions) == len(other.cache.decision_log.decisions) > 50
