"""Policies change in a replay as they do in the server: every request hits the same tokens in
`SwitchingServed` and in `HybridRadixCache` on SGLang's pools, or in one memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_hybrid.cache.tuning import Tuning
from sglang_hybrid.core.server_settings import Serving, Split
from sglang_hybrid.core.specs import PolicySwitch
from sglang_hybrid.core.traffic.recorder import FinishedRequest, make_window
from sglang_hybrid.extensions.lab.simulation.system_names import parse_spec
from sglang_hybrid.extensions.lab.simulation.tuner.candidates import replay
from sglang_hybrid.extensions.lab.simulation.tuner.tuned import switching
from sglang_hybrid.extensions.lab.systems import Setting, Spec
from sglang_hybrid.serving.config import HybridConfig
from tests.extensions.lab.simulation.tuner.traffic import POOLS, fashions, requests, templates

pytest.importorskip("sglang")
from tests.cache.driver import Server, Sizes, build_cache

REQUESTS = requests(templates(60) + fashions(60) + templates(60, seed=1))
SWITCHES = {40: "lru", 80: "marconi:1", 130: "reuse"}


ALONE, TOGETHER = Serving(chunk=64, grid=64), Serving(chunk=64, grid=64, one_memory=True)
KINDS = pytest.mark.parametrize("serving", [ALONE, TOGETHER], ids=["two pools", "one memory"])
STATE_TOKENS = 512
"""Tokens whose KV takes as much as a state in one memory."""


class Tuner:
    """Keeps what the cache tells a tuner."""

    def __init__(self) -> None:
        self.records: list[FinishedRequest] = []

    def on_request_end(self, record: FinishedRequest, *, evicted: bool) -> None:
        self.records.append(record)

    def on_adoption(self, switch: PolicySwitch) -> None:
        pass


def server_of(serving: Serving) -> tuple[Server, Split | int]:
    """A server, and the memory that it has for KV and states."""
    longest = max(len(request.tokens) for request in REQUESTS) + 64
    sizes = Sizes(POOLS.kv_tokens, POOLS.slots, grid=serving.grid, context=longest)
    if serving.one_memory:
        sizes = replace(sizes, one_memory=True, state_tokens=STATE_TOKENS)
    server = Server(build_cache(sizes, HybridConfig()), sizes, serving.chunk)
    return server, sizes.budget if serving.one_memory else POOLS


def server_hits(switches: dict[int, str], serving: Serving) -> tuple[list[int], Server]:
    server, _ = server_of(serving)
    hits = []
    for number, request in enumerate(REQUESTS):
        if number in switches:
            spec = parse_spec(switches[number])
            server.cache.parts.use_policy(PolicySwitch(1, spec, "a test"))
        hits += server.play([request])
    server.check()
    return hits, server


def replayed_hits(switches: dict[int, str], server: Server, serving: Serving) -> list[int]:
    memory = server.sizes.budget if serving.one_memory else POOLS
    setting = Setting(server.cache.cost, memory, REQUESTS, serving=serving)
    cache = switching(setting, Spec("reuse"))
    hits = []
    for number, request in enumerate(REQUESTS):
        if number in switches:
            cache.switch(parse_spec(switches[number]))
        hits.append(cache.serve(request).hit_len)
    return hits


@KINDS
def test_a_switch_in_a_replay_is_a_switch_in_the_server(serving: Serving) -> None:
    theirs, server = server_hits(SWITCHES, serving)
    assert replayed_hits(SWITCHES, server, serving) == theirs
    for left_out in SWITCHES:
        fewer = {number: name for number, name in SWITCHES.items() if number != left_out}
        assert replayed_hits(fewer, server, serving) != theirs, "every switch is seen"


@KINDS
@pytest.mark.parametrize(
    "name",
    ["reuse", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lru", "marconi:1"))],
)
def test_what_a_server_records_is_replayed_as_it_was(serving: Serving, name: str) -> None:
    """A window of everything that a server served under `name`, from its first request on, tells
    what each request hit; another kind of memory, or less of it, does not.
    """
    server, memory = server_of(serving)
    cache = server.cache
    spec = parse_spec(name)
    cache.parts.use_policy(PolicySwitch(1, spec, "a test"))
    tuner: Any = Tuner()
    cache.tuning = Tuning(cache, cache.parts, tuner)
    server.play(REQUESTS)
    assert {record.room for record in tuner.records} == {memory}
    seen = [record.hit_len for record in tuner.records]
    window = make_window(tuner.records, len(seen), cache.cost, 16, serving, has_states=True)
    assert [outcome.hit_len for outcome in replay(window, spec)] == seen
    if isinstance(memory, Split):
        half: Split | int = Split(memory.kv_tokens // 2, memory.slots // 2)
    else:
        half = memory // 2
    smaller = replace(window, budget=half)
    assert [outcome.hit_len for outcome in replay(smaller, spec)] != seen
