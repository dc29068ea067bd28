"""The control: `--hybrid-eviction sglang-lru --hybrid-admission all` is SGLang's own cache.

Real traces, SGLang's pools, no model. The same calls go to SGLang's `UnifiedRadixCache` and to
ours; every request must hit the same tokens. The other policies go the same way and must keep every
account.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.base import TreeComponent

from sglang_hybrid.cache.tree.components import with_our_components
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.simulation.traces.formats import read_trace
from sglang_hybrid.extensions.lab.simulation.traces.lines import Reading
from sglang_hybrid.serving.config import HybridConfig
from tests.cache.backends import options
from tests.cache.driver import Server, Sizes
from tests.traces import TRACES

CHUNK = 2_048

# (KV tokens, state slots): under pressure, some pressure, hardly any.
POOLS = {
    "taubench_airline": [(40_000, 16), (120_000, 64), (400_000, 256)],
    "sharegpt_55": [(20_000, 12), (60_000, 48), (250_000, 256)],
}


@pytest.mark.parametrize("shadow_tree", [None, object()])
def test_sglang_is_given_components_by_their_classes(shadow_tree: object) -> None:
    """Later releases take nothing else that can be called."""
    kinds = (ComponentType.FULL, ComponentType.MAMBA)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        page_size=1,
        tree_components=kinds,
    )
    parts: Any = SimpleNamespace(shadow_tree=shadow_tree)
    given = with_our_components(params, parts).component_registry_override
    assert given is not None and tuple(given) == kinds
    assert all(isinstance(one, type) and issubclass(one, TreeComponent) for one in given.values())


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
    server = Server.on(sizes, how, CHUNK, tree_core=tree_core)
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


TRACES_AND_POOLS = [
    ("sharegpt_55", 0, None),
    *(pytest.param("sharegpt_55", size, None, marks=pytest.mark.slow) for size in (1, 2)),
    *(
        pytest.param("taubench_airline", size, limit, marks=pytest.mark.slow)
        for limit in (800, None)
        for size in range(3)
    ),
]
"""Names, numbers of pools, and how many requests: all of tau-bench takes half a minute."""


@pytest.mark.parametrize(("name", "size", "limit"), TRACES_AND_POOLS)
def test_lru_all_is_sglang(name: str, size: int, limit: int | None) -> None:
    requests = read(name, limit)
    compare(requests, sizes_for(*POOLS[name][size], requests))


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
    server = Server.on(sizes, options(policy), CHUNK)
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
