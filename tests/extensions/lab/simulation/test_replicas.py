"""Requests sent to one of several caches: what routers choose, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.core.victims.eviction import Lru
from sglang_hybrid.extensions.lab.runner import Job, Runner
from sglang_hybrid.extensions.lab.simulation.prefill_time import PAPER, PrefillTime
from sglang_hybrid.extensions.lab.simulation.replicas import (
    ROUTERS,
    CacheAware,
    Replica,
    Told,
    hear,
)
from sglang_hybrid.extensions.lab.simulation.shared_store import SimulatedStore, StoreBudget
from sglang_hybrid.extensions.lab.simulation.simulator import Simulator
from sglang_hybrid.extensions.lab.simulation.timing import Timeline
from sglang_hybrid.extensions.lab.simulation.traces.generators import generate, traffic
from sglang_hybrid.extensions.lab.systems import Spec

COST = CostModel.paper_7b()
SECOND_A_TOKEN = PrefillTime(0.0, 1.0, 0.0, decode=0.0, about="test")
SHARED = range(100)
FULL = COST.state_bytes + 202 * COST.kv_bytes_per_token
"""Bytes for a prompt of 202 tokens with one state."""


def request(
    tokens: Sequence[int], arrival: float = 0.0, session: int = 0, tenant: str = ""
) -> Request:
    ids = np.array([*tokens, 99_999], dtype=np.int32)
    return Request(session, 0, arrival, ids, len(tokens), tenant=tenant)


def server(*held: Sequence[int], budget: int | None = None) -> Simulator:
    cache = Simulator(COST, budget, Lru())
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
    ("routing", "budget", "backlog", "to"),
    [
        ("by_states", FULL, 430.0, 0),
        ("by_states", FULL, 450.0, 1),
        ("by_states", None, 210.0, 0),
        ("by_states", None, 230.0, 1),
        ("by_blocks", FULL, 210.0, 0),
        ("by_blocks", FULL, 230.0, 1),
    ],
)
def test_a_hit_is_weighed_against_the_queue(
    routing: str, budget: int | None, backlog: float, to: int
) -> None:
    """A second a token, and 201 of 202 tokens in the cache of the first replica. by_states counts
    what is computed twice where that takes the place of something.
    """
    held = [*range(200)]
    caches = replicas(server(held, budget=budget), server(budget=budget))
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


@pytest.mark.parametrize("tenant", ["", "a"])
def test_a_router_hears_late_what_came_and_what_went(tenant: str) -> None:
    """The router knows of a state at 100 tokens three seconds after it came and after it went."""
    cache, now = Simulator(COST, None, Lru()), 0.0
    (replica,) = replicas(cache)
    replica.told = Told(cache.tree, 3.0, lambda: now)
    asked = request([*SHARED, 99_999, 5], tenant=tenant)
    foreign = request([*SHARED, 99_999, 5], tenant="another")

    def heard(of: Request) -> int:
        hear([replica], of)
        return replica.resumable(of)

    cache.serve(request(SHARED, tenant=tenant))
    assert [cache.peek(asked), heard(asked)] == [101, 0]
    now = 3.0
    assert [heard(asked), heard(foreign)] == [101, 0]
    node, _ = cache.resumes_from(asked)
    assert node is not None
    cache.tree.remove(node)
    assert [cache.peek(asked), heard(asked)] == [0, 101]
    now = 6.0
    assert heard(asked) == 0


def test_what_is_heard_in_time_is_what_is_there() -> None:
    """Under evictions: events that are not late tell of every prompt what the cache would hit."""
    requests = generate("agent", traffic("agent", sessions=12, session_rate=4.0), 3)
    cache, now = Simulator(COST, 10**10, Lru()), 0.0
    (replica,) = replicas(cache)
    replica.told = Told(cache.tree, 0.0, lambda: now)
    hit = 0
    for one in requests:
        hear([replica], one)
        assert replica.resumable(one) == cache.peek(one)
        hit += cache.serve(one).hit_len
    assert hit and cache.memory.has_evicted


def test_a_store_gives_a_server_what_another_has_computed() -> None:
    """If loading takes less time than computing, and no more than the server lacks."""
    fast, slow = (StoreBudget.parse(f"1TB@{rate}/s") for rate in ("1TB", "1KB"))
    for budget, loads in ((fast, True), (slow, False)):
        store = SimulatedStore(COST, budget, SECOND_A_TOKEN)
        first, second = server(), server()
        prompt = request([*SHARED, *range(200, 300)])
        assert store.load(prompt, first) == 0.0
        first.serve(prompt)
        store.save(prompt, first, ended=True)
        turn = request([*SHARED, *range(200, 300), 99_999, 3])
        assert store.load(turn, first) == 0.0, "it has that itself"
        seconds = store.load(turn, second)
        assert (0 < seconds < 1.0) is loads
        assert second.serve(turn).hit_len == loads * 201
        assert store.load(request([*SHARED, *range(200, 300), 7], tenant="b"), server()) == 0.0


def test_servers_that_share_a_store_hit_as_one() -> None:
    requests = generate("chat", traffic("chat", sessions=30), 5)
    runner = Runner({"chat": requests})

    def hit(replicas: int, routing: str, store: StoreBudget | None = None) -> int:
        job = Job(
            *(Spec("lru"), "chat", COST, 10**11, PAPER),
            replicas=replicas,
            routing=routing,
            store=store,
        )
        return runner.run(job).hit_tokens

    shared = hit(4, "random", StoreBudget.parse("1TB@100GB/s"))
    assert hit(4, "random") < shared <= hit(1, "")


def test_a_store_of_no_room_changes_nothing() -> None:
    requests = generate("agent", traffic("agent", sessions=12, session_rate=4.0), 3)
    runner = Runner({"agent": requests})
    found = [
        runner.run(
            Job(
                *(Spec("reuse"), "agent", COST, 10**10, PAPER),
                replicas=3,
                routing="by_states",
                store=store,
            )
        )
        for store in (None, StoreBudget.parse("1B@1GB/s"))
    ]
    assert (found[0].hit_len == found[1].hit_len).all()
    assert found[0].hit_tokens
