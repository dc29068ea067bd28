"""A tree of KV only, whose requests bring their states: that of a decode server."""

from __future__ import annotations

import pytest

from tests.cache.backends import options
from tests.cache.driver import Server, Sizes
from tests.cache.test_rules import run

SLOTS = 4
ANSWER = [7, 8, 9, 10, 11]


def server(page: int, policy: str) -> Server:
    sizes = Sizes(kv=320, states=SLOTS, page=page, extra_buffer=page > 1, grid=page)
    return Server.on(sizes, options(policy), unplanned="it has none", states_arrive=True)


@pytest.mark.parametrize("policy", ["reuse", "marconi", "sglang-lru"])
@pytest.mark.parametrize("page", [1, 16])
def test_any_prefix_is_a_hit_and_no_state_is_kept(page: int, policy: str) -> None:
    it, prompt = server(page, policy), run(100)
    assert it.serve(prompt, ANSWER) == 0
    for more, known in (
        ([*prompt, *ANSWER, *run(20, 2)], 104),  # the last token of an answer is never read
        ([*prompt[:50], *run(20, 3)], 50),
        ([*prompt[:70], *run(20, 4)], 70),
    ):
        assert it.serve(more, ANSWER) == known // page * page
        it.check()
        assert it.free()[1] == SLOTS


def test_whoever_ends_gives_back_the_slots_of_its_states() -> None:
    it = server(16, "reuse")
    first, second, third = (it.begin(run(40, number)) for number in range(3, 6))
    for req in (first, second, third)[:1]:
        it.prefill(req)
    assert it.free()[1] < SLOTS
    it.finish(first)
    it.abort_before_prefill(second)
    it.abort_before_prefill(third)
    it.check()
    assert it.free()[1] == SLOTS
    again = it.begin(run(40, 6))
    it.prefill(again)
    again = it.retract(again)
    assert it.free()[1] == SLOTS
    assert it.admit(again)
    it.prefill(again)
    it.abort(again)
    it.check()
    assert it.free()[1] == SLOTS


def test_kv_is_evicted_where_it_runs_short() -> None:
    it = server(1, "reuse")
    for number in range(8):
        assert it.serve(run(100, number), ANSWER) == 0
        it.check()
    assert it.probe(run(100, 7)) == 99 and it.probe(run(100, 0)) == 0


def test_sglang_knows_that_requests_hold_states() -> None:
    it = server(1, "reuse")
    assert it.cache.supports_mamba() and not it.cache.is_mamba_enabled
