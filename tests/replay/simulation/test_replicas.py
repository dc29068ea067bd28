"""Requests sent to one of several caches: what routers choose, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.victims.eviction import Lru
from sglang_hybrid.replay.runner import Job, Runner
from sglang_hybrid.replay.simulation.prefill_time import PAPER, PrefillTime
from sglang_hybrid.replay.simulation.replicas import ROUTERS, CacheAware, Replica
from sglang_hybrid.replay.simulation.simulator import Simulator
from sglang_hybrid.replay.simulation.timing import Timeline
from sglang_hybrid.replay.simulation.traces.generators import generate, traffic
from sglang_hybrid.replay.simulation.traces.requests import Request
from sglang_hybrid.replay.systems import Spec

COST = CostModel.paper_7b()
SECOND_A_TOKEN = PrefillTime(0.0, 1.0, 0.0, decode=0.0, about="test")
SHARED = range(100)


def request(
    tokens: Sequence[int], arrival: float = 0.0, session: int = 0, tenant: str = ""
) -> Request:
    ids = np.array([*tokens, 99_999], dtype=np.int32)
    return Request(session, 0, arrival, ids, len(tokens), tenant=tenant)


def server(*held: Sequence[int]) -> Simulator:
    cache = Simulator(COST, None, Lru())
    for tokens in held:
        cache.serve(request(tokens))
    return cache


def replicas(*caches: Simulator) -> list[Replica]:
    return Timeline(caches, SECOND_A_TOKEN).replicas


def chosen(routing: str, caches: list[Replica], asked: Request, now: float = 0.0) -> int:
    return ROUTERS[routing]().choose(asked, caches, now)


def test_by_states_goes_where_the_state_is_and_by_blocks_where_the_kv_is() -> None:
    """A prompt that was cut short: the other replica has its KV, and no state on the way."""
    longer, turn = [*SHARED, *range(500, 600)], [*SHARED, *range(200, 230)]
    caches = replicas(server(longer, longer), server([*SHARED, *range(200, 230), 7, 8]))
    asked = request([*turn, 9])
    assert [one.stored(asked) for one in caches] == [100, 130]
    caches[0].cache.serve(request([*SHARED, 700]))  # a state where both branch
    assert caches[0].cache.peek(asked) == 100 and caches[1].cache.peek(asked) == 0
    assert chosen("by_blocks", caches, asked) == 1
    goes_on = request([*longer, 99_999, 3])
    assert chosen("by_states", caches, goes_on) == 0


@pytest.mark.parametrize(
    ("routing", "backlog", "to"),
    [
        ("by_states", 390.0, 0),
        ("by_states", 410.0, 1),
        ("by_blocks", 190.0, 0),
        ("by_blocks", 210.0, 1),
    ],
)
def test_a_hit_is_weighed_against_the_queue(routing: str, backlog: float, to: int) -> None:
    """A second a token, and 200 tokens in the cache of the first replica. by_states counts twice
    what the second would compute.
    """
    held = [*range(200)]
    caches = replicas(server(held), server())
    caches[0].free_at, caches[0].waiting = 1_000.0, {7: backlog - 50}
    assert caches[0].backlog(950.0) == backlog
    assert chosen(routing, caches, request([*held, 99_999, 5]), now=950.0) == to


def test_cache_aware_follows_texts_until_loads_are_far_apart() -> None:
    caches = replicas(server(), server())
    router = CacheAware()

    def to(*tokens: int, tenant: str = "") -> int:
        return router.choose(request([*tokens], tenant=tenant), caches, 0.0)

    assert [to(*SHARED), to(*range(500, 560)), to(*SHARED, 1)] == [0, 1, 0]
    assert to(*range(500, 530), *range(900, 1_000)) == 1, "under 0.3: where least was sent"
    assert to(*SHARED, tenant="other") == 0, "nothing of it was sent; 160 tokens were there"
    caches[0].unfinished = 65
    assert to(*SHARED, 2) == 1
    caches[1].unfinished = 44
    assert to(*SHARED, 3) == 0, "not 1.5 times as many"


def test_a_session_sticks_to_the_replica_that_had_least_to_do() -> None:
    caches, router = replicas(server(), server()), ROUTERS["sticky"]()
    caches[0].unfinished = 1
    assert router.choose(request([1], session=5), caches, 0.0) == 1
    caches[1].unfinished = 9
    assert router.choose(request([2], session=5), caches, 0.0) == 1
    assert router.choose(request([2], session=6), caches, 0.0) == 0


@pytest.mark.parametrize("routing", ROUTERS)
def test_every_request_is_served_once_by_one_replica(routing: str) -> None:
    """Whatever the router: prefills of one replica come one after the other."""
    requests = generate("agent", traffic("agent", sessions=12, session_rate=4.0), 3)
    caches = [Simulator(COST, 10**10, Lru()) for _ in range(3)]
    timeline = Timeline(caches, PAPER, router=ROUTERS[routing]())
    served = timeline.run(requests)
    assert [one.outcome.input_len for one in served] == [one.input_len for one in requests]
    assert all(one.arrival <= one.start < one.first_token <= one.end for one in served)
    assert all(
        one.unfinished == 0 and not one.waiting and not one.busy for one in timeline.replicas
    )
    steps = sorted([(one.first_token, -1) for one in served] + [(one.start, 1) for one in served])
    assert max(accumulate(step for _, step in steps)) <= len(caches), "one prefill each"


def test_more_replicas_hit_as_one_where_sessions_stick() -> None:
    requests = generate("chat", traffic("chat", sessions=30), 5)
    runner = Runner({"chat": requests})

    def hit(replicas: int, routing: str) -> int:
        job = Job(Spec("lru"), "chat", COST, 10**11, PAPER, replicas=replicas, routing=routing)
        return runner.run(job).hit_tokens

    assert hit(4, "random") < hit(4, "by_states") <= hit(1, "")
