"""The control: `--hybrid-eviction sglang-lru --hybrid-admission all` is SGLang's own cache.

Real traces, SGLang's pools, no model. The same calls go to SGLang's `UnifiedRadixCache` and to
ours; every request must hit the same tokens. The other policies go the same way and must keep every
account.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.simulation.traces.formats import read_trace
from sglang_hybrid.simulation.traces.lines import Reading
from sglang_hybrid.simulation.traces.requests import Request
from tests.cache.backends import options
from tests.cache.driver import Server, Sizes, build_cache

TRACES = Path(__file__).parents[3] / "shared" / "traces"
CHUNK = 2_048

# (KV tokens, state slots): under pressure, some pressure, hardly any.
POOLS = {
    "taubench_airline": [(40_000, 16), (120_000, 64), (400_000, 256)],
    "sharegpt_55": [(20_000, 12), (60_000, 48), (250_000, 256)],
}


def read(name: str, limit: int | None = None) -> list[Request]:
    path = TRACES / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there: the traces are shared beside the repository")
    return read_trace(path, Reading(limit))


def sizes_for(kv: int, states: int, requests: list[Request]) -> Sizes:
    longest = max(len(request.tokens) for request in requests)
    return Sizes(kv=max(kv, longest + 64), states=states, rows=4, context=longest + 64)


def hits(
    requests: list[Request], sizes: Sizes, how: HybridConfig | None, tree_core: str = "python"
) -> list[int]:
    server = Server(build_cache(sizes, how, tree_core=tree_core), sizes, CHUNK)
    start = server.free()
    found = server.play(requests)
    server.check()
    kv, states = server.free()
    assert kv >= 0 and states >= 0
    server.flush()
    assert server.free() == start
    return found


def compare(requests: list[Request], sizes: Sizes) -> None:
    theirs = hits(requests, sizes, None)
    ours = hits(requests, sizes, options("sglang-lru", "all"))
    assert sum(theirs) > 0
    assert ours == theirs


@pytest.mark.parametrize("size", [0, 1, 2], ids=["small", "middle", "large"])
@pytest.mark.parametrize("name", list(POOLS))
def test_lru_all_is_sglang(name: str, size: int) -> None:
    # The whole of tau-bench takes half a minute on the larger pools: below, marked slow.
    requests = read(name, 800 if name == "taubench_airline" and size else None)
    compare(requests, sizes_for(*POOLS[name][size], requests))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2], ids=["middle", "large"])
def test_lru_all_is_sglang_on_all_of_taubench(size: int) -> None:
    requests = read("taubench_airline")
    compare(requests, sizes_for(*POOLS["taubench_airline"][size], requests))


@pytest.mark.parametrize("size", [0, 1, 2], ids=["small", "middle", "large"])
@pytest.mark.parametrize("name", list(POOLS))
def test_lru_all_is_sglang_with_the_extra_buffer(name: str, size: int) -> None:
    requests = read(name, 150)
    sizes = sizes_for(*POOLS[name][size], requests)
    compare(requests, replace(sizes, page=16, kv=sizes.kv // 16 * 16, extra_buffer=True, grid=64))


@pytest.mark.parametrize("policy", ["reuse", "marconi", "seglen", "gdsf"])
@pytest.mark.parametrize("name", list(POOLS))
def test_other_policies_keep_every_account(name: str, policy: str) -> None:
    requests = read(name, 120)
    sizes = sizes_for(*POOLS[name][0], requests)
    server = Server(build_cache(sizes, options(policy)), sizes, CHUNK)
    for number, request in enumerate(requests):
        server.play([request])
        if number % 10 == 0:
            server.check()
    server.check()
    stats = server.cache.stats
    assert stats.requests == len(requests)
    assert stats.prompt_tokens == sum(request.input_len for request in requests)
    assert 0 < stats.hit_tokens < stats.prompt_tokens
    assert sum(stats.evicted.values()) > 0


if __name__ == "__main__":  # how long, and how much: python -m tests.cache.test_lru_control
    import time

    for trace, pools in POOLS.items():
        lines = read_trace(TRACES / f"{trace}.jsonl.gz", Reading(int(os.environ.get("N", "2454"))))
        for pool in pools:
            where = sizes_for(*pool, lines)
            total = sum(line.input_len for line in lines)
            for how in (None, options("sglang-lru", "all"), options("marconi"), options("reuse")):
                begin = time.perf_counter()
                share = sum(hits(lines, where, how)) / total
                spent = (time.perf_counter() - begin) / len(lines) * 1e3
                label = "SGLang" if how is None else how.policy.value
                print(f"{trace} {pool} {label}: {share:.3f} hit, {spent:.1f} ms a request")
