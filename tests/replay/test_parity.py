"""The simulator is the server's cache: every request of real traces hits the same tokens in
`ServedCache` and in `HybridRadixCache` on SGLang's pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from sglang_hybrid.replay.served import ServedCache, Serving
from sglang_hybrid.replay.simulator import Split
from sglang_hybrid.replay.systems import Setting, Spec
from sglang_hybrid.replay.traces import Request, read_compact, read_mooncake

pytest.importorskip("sglang")
from tests.cache.backends import options
from tests.cache.driver import Server, Sizes, build_cache

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"
SERVING = Serving(chunk=2_048, grid=64)
POLICIES = {
    "lru": options("lru"),
    "marconi:0.3": options("marconi", hybrid_alpha=0.3),
    "marconi:1": options("marconi", hybrid_alpha=1.0),
    "reuse": options("reuse"),
}

# KV tokens and state slots: under pressure, some pressure, hardly any.
POOLS = {
    "bbh_fewshot": [Split(15_000, 10), Split(60_000, 40), Split(250_000, 200)],
    "sharegpt_55": [Split(20_000, 12), Split(60_000, 48), Split(250_000, 256)],
    "taubench_airline": [Split(40_000, 16), Split(120_000, 64), Split(400_000, 256)],
    "claude_code_64k": [Split(150_000, 24), Split(600_000, 96), Split(2_000_000, 400)],
    "mooncake_conversation_trace": [
        Split(200_000, 24),
        Split(800_000, 128),
        Split(3_000_000, 600),
    ],
}


@cache
def trace(name: str, limit: int | None = None) -> list[Request]:
    path = TRACES / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"../shared/traces/{path.name} is not here")
    if name.startswith("mooncake"):
        return read_mooncake(path, limit or 2_000)
    return read_compact(path, limit)


def compare(requests: Sequence[Request], pools: Split, policy: str) -> None:
    longest = max(len(request.tokens) for request in requests) + 64
    sizes = Sizes(
        kv=max(pools.kv_tokens, longest),
        states=pools.slots,
        grid=SERVING.grid,
        rows=4,
        context=longest,
    )
    server = Server(build_cache(sizes, POLICIES[policy]), sizes, SERVING.chunk)
    setting = Setting(server.cache.cost, Split(sizes.kv, sizes.states), requests, serving=SERVING)
    simulator = Spec.parse(policy).build(setting)
    assert isinstance(simulator, ServedCache)
    hits = 0
    for number, request in enumerate(requests):
        (theirs,) = server.play([request])
        ours = simulator.serve(request).hit_len
        assert ours == theirs, f"request {number}"
        hits += theirs
    assert hits > 0
    server.check()
    kv, states = server.free()
    assert (sizes.kv - kv, sizes.states - states) == (simulator.kv_used, simulator.states_used)
    assert simulator.kv_in_use == simulator.slots_in_use == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["sharegpt_55", "taubench_airline"])
def test_the_simulator_is_the_server(name: str, policy: str) -> None:
    compare(trace(name, 200), POOLS[name][0], policy)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [0, 1, 2], ids=["small", "middle", "large"])
@pytest.mark.parametrize("name", POOLS)
def test_the_simulator_is_the_server_on_whole_traces(name: str, size: int, policy: str) -> None:
    compare(trace(name), POOLS[name][size], policy)
