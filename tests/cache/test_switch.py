"""Another policy takes over while the cache is full and requests run: nothing is lost."""

from __future__ import annotations

import pickle
import random

import pytest

from sglang_hybrid.cache.tuning import Tuning
from sglang_hybrid.core.specs import PolicySwitch
from sglang_hybrid.extensions.lab.simulation.tuner.candidates import CANDIDATES
from sglang_hybrid.extensions.lab.systems import Spec
from sglang_hybrid.serving.config import HybridConfig
from tests.cache.backends import options
from tests.cache.driver import Server, Sizes, build_cache
from tests.extensions.lab.simulation.tuner.traffic import run

SIZES = {
    "states": Sizes(kv=600, states=8),
    "pages, extra buffer": Sizes(kv=640, states=16, page=16, extra_buffer=True, grid=16),
    "no states": Sizes(kv=600, states=0),
}


def switch(server: Server, spec: Spec) -> None:
    server.cache.parts.use_policy(PolicySwitch(1, spec, "a test"))


def prompt(source: random.Random, number: int) -> list[int]:
    return run(source.randrange(5), source.randrange(20, 90)) + run(50 + number, 9)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_invariant_holds_after_each_switch(sizes: Sizes) -> None:
    source = random.Random(1)
    server = Server.on(sizes, HybridConfig(), 32)
    for number in range(60):
        held = server.arrive(prompt(source, number), stamp=float(number + 1))
        admitted = server.admit(held) and server.prefill_step(held)
        if number % 3 == 0:
            switch(server, source.choice(CANDIDATES))
            server.check()
        while admitted is False and held in server.running:
            admitted = server.prefill_step(held)
            server.check()
        if held in server.running:
            server.decode(held, run(900 + number, 4))
            server.finish(held)
        server.check()
    assert server.cache.stats.evicted.total() > 10
    assert server.cache.stats.hit_tokens


def test_what_is_cached_stays_and_who_decides_changes() -> None:
    server = Server.on(Sizes(kv=600, states=8), HybridConfig())
    server.serve(run(1, 50), [1, 2, 3])
    kept = {(node.depth, node.has_state) for node in server.cache.shadow_tree.tree.walk()}
    history = server.cache.shadow_tree.history
    assert server.cache.policy_name == "reuse"
    switch(server, Spec("marconi", (("alpha", 3.0),)))
    assert (server.cache.policy_name, server.cache.report.alpha) == ("marconi", 3.0)
    assert {(node.depth, node.has_state) for node in server.cache.shadow_tree.tree.walk()} == kept
    assert server.probe(run(1, 60)) == 49  # the prompt end
    assert server.cache.shadow_tree.state_pool.policy.name == "marconi"
    assert server.cache.shadow_tree.history is history
    switch(server, Spec("reuse"))
    assert server.cache.shadow_tree.state_pool.policy.history is history
    assert server.cache.report.alpha is None


def test_the_history_goes_on_learning_under_a_policy_without_one() -> None:
    server = Server.on(Sizes(kv=600, states=8), HybridConfig())
    switch(server, Spec("lru"))
    server.serve(run(1, 50), [1, 2, 3], stamp=1.0)
    assert server.cache.shadow_tree.match_history(run(1, 50)) is None
    switch(server, Spec("reuse"))
    history_match = server.cache.shadow_tree.match_history(run(1, 50))
    assert history_match is not None and history_match.known_len == 49


@pytest.mark.parametrize("policy", ["lru", "marconi"])
def test_after_a_switch_it_decides_as_if_it_had_been_there_from_the_start(policy: str) -> None:
    """LRU and Marconi remember nothing of their own: same hits from the switch on."""
    spec = Spec(policy, (("alpha", 1.0),) if policy == "marconi" else ())
    two = [Server.on(Sizes(kv=600, states=8), HybridConfig()) for _ in range(2)]
    switch(two[0], spec)
    source = random.Random(2)
    prompts = [prompt(source, number) for number in range(60)]
    evictions = []
    for server in two:
        hits = [server.serve(tokens, [7], i + 1.0) for i, tokens in enumerate(prompts[:3])]
        assert not server.cache.stats.evicted
        if server is two[1]:
            switch(server, spec)
        hits += [server.serve(tokens, [7], i + 4.0) for i, tokens in enumerate(prompts[3:])]
        evictions.append((hits, dict(server.cache.stats.evicted)))
    assert evictions[0] == evictions[1]
    assert evictions[0][1]


def test_a_switch_travels_as_the_scheduler_sends_it() -> None:
    sent = PolicySwitch(3, CANDIDATES[4], "because")
    assert pickle.loads(pickle.dumps(sent)) == sent
    sizes = Sizes()
    cache = build_cache(sizes, HybridConfig())
    dict(Tuning(cache, cache.parts).handlers())[PolicySwitch](sent)
    assert cache.policy_name == CANDIDATES[4].name


def test_only_the_rank_that_receives_requests_tunes() -> None:
    sizes = Sizes()
    tuned = HybridConfig(hybrid_tuner_workers=1)
    assert build_cache(sizes, tuned).tuning.tuner is None  # no rank was given
    first = build_cache(sizes, tuned, rank=0).tuning
    assert first.tuner is not None and first.poll() == []
    assert build_cache(sizes, options("reuse"), rank=0).tuning is None
    assert build_cache(sizes, HybridConfig(), rank=0).tuning is None


def test_the_tuner_begins_with_the_first_eviction() -> None:
    server = Server.on(Sizes(kv=200, states=8), HybridConfig(hybrid_tuner_workers=1), rank=0)
    begun = []
    for number in range(8):
        server.serve(run(number, 40), [7], float(number + 1))
        begun.append(server.cache.tuning.info()["window"] > 0)
        assert begun[-1] == bool(server.cache.stats.evicted)
    assert begun[-1] and not begun[0]


def test_the_pool_that_chose_last_is_forgotten_with_its_policy() -> None:
    """An explanation must not name a pool of before."""
    server = Server.on(SIZES["states"], HybridConfig())
    shadow_tree = server.cache.shadow_tree
    for after in (lambda: switch(server, CANDIDATES[1]), server.flush):
        for number in range(12):
            server.serve(run(number, 60), [7], float(number + 1))
        assert shadow_tree.victim_pool is not None
        after()
        assert shadow_tree.victim_pool is None
