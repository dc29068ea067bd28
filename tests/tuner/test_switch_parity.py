"""Policies change in a replay as they do in the server: every request hits the same tokens in
`SwitchingServed` and in `HybridRadixCache` on SGLang's pools.
"""

from __future__ import annotations

import pytest

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.core.serving import Serving
from sglang_hybrid.replay.simulator import Split
from sglang_hybrid.replay.systems import Setting, Spec
from sglang_hybrid.tuner.tuned import switching
from sglang_hybrid.tuner.tuner import PolicySwitch
from tests.tuner.traffic import POOLS, fashions, requests, templates

pytest.importorskip("sglang")
from tests.cache.driver import Server, Sizes, build_cache

REQUESTS = requests(templates(60) + fashions(60) + templates(60, seed=1))
SWITCHES = {40: "lru", 80: "marconi:1", 130: "reuse"}
SERVING = Serving(chunk=64, grid=64)


def server_hits(switches: dict[int, str]) -> tuple[list[int], Server, Split]:
    longest = max(len(request.tokens) for request in REQUESTS) + 64
    pools = Split(POOLS.kv_tokens, POOLS.slots)
    sizes = Sizes(*(pools.kv_tokens, pools.slots), grid=SERVING.grid, context=longest)
    server = Server(build_cache(sizes, HybridConfig()), sizes, SERVING.chunk)
    hits = []
    for number, request in enumerate(REQUESTS):
        if number in switches:
            spec = Spec.parse(switches[number])
            server.cache.tuning.switch(PolicySwitch(1, spec, "a test"))
        hits += server.play([request])
    server.check()
    return hits, server, pools


def replayed_hits(switches: dict[int, str], server: Server, pools: Split) -> list[int]:
    setting = Setting(server.cache.cost, pools, REQUESTS, serving=SERVING)
    cache = switching(setting, Spec("reuse"))
    hits = []
    for number, request in enumerate(REQUESTS):
        if number in switches:
            cache.switch(Spec.parse(switches[number]))
        hits.append(cache.serve(request).hit_len)
    return hits


def test_a_switch_in_a_replay_is_a_switch_in_the_server() -> None:
    theirs, server, pools = server_hits(SWITCHES)
    assert replayed_hits(SWITCHES, server, pools) == theirs
    for left_out in SWITCHES:
        fewer = {number: name for number, name in SWITCHES.items() if number != left_out}
        assert replayed_hits(fewer, server, pools) != theirs, "every switch is seen"
