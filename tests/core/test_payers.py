"""The payer of an entry need not be the tenant that shares it: a client that names a salt with each
request replaces its own entries, as one that names none does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sglang_hybrid.core.records.latest import Latest
from sglang_hybrid.core.records.nodes import Clock
from sglang_hybrid.core.records.pin import PinRequest
from sglang_hybrid.core.records.shares import payer_of
from sglang_hybrid.core.returns.history import History
from sglang_hybrid.core.victims.eviction import Lru
from sglang_hybrid.explain.decisions import Decision, Decisions
from tests.core.test_pins import LEAF, tree_of


class Salted(NamedTuple):
    """A tenant: the name by which a client is known, and a salt that the client chose."""

    payer: str
    salt: int


A = Salted("a", 0)


def of_b(number: int) -> Salted:
    return Salted("b", number)


def test_a_tenant_without_a_payer_pays_itself() -> None:
    assert payer_of("a") == "a" and payer_of(None) is None and payer_of(of_b(3)) == "b"


def test_values_are_shared_by_tenant_and_charged_to_the_payer() -> None:
    kept: Latest[int] = Latest(10_000, 40)
    for number in range(20):
        kept.put(A, str(number), number, 1)
    for number in range(300):
        kept.put(of_b(number), "one", number, 1)
    assert kept.of(A) == list(range(20))
    assert [kept.get(of_b(number), "one") for number in (0, 299)] == [None, 299]
    assert kept.get(of_b(298), "two") is None and kept.of(of_b(298)) == [298]
    assert len(kept) == 40 and len([*kept.all()]) == 40


def test_history() -> None:
    history, clock = History(max_bytes=20_000), Clock()
    for number in range(5):
        history.observe(np.arange(50) + 50 * number, 40, clock, tenant=A)
    for number in range(500):
        clock.advance(float(number))
        history.observe(np.arange(50), 40, clock, tenant=of_b(number))
        assert history.held_bytes <= 20_000
    assert [history.match(np.arange(50) + 50 * n, A).known_len for n in range(5)] == [49] * 5
    found = [history.match(np.arange(50), of_b(number)).known_len for number in (0, 498, 499)]
    assert found == [0, 49, 49]


def test_a_request_without_tokens_leaves_no_history() -> None:
    history, clock = History(max_bytes=2_000), Clock()
    for number in range(100):
        history.observe([], 0, clock, tenant=of_b(number))
        history.observe(np.arange(50), 40, clock, tenant=A)
    assert history.match(np.arange(50), A).known_len == 49
    assert not history._tenants.keys() - {"a"} and len(history._trees) == 1


def test_pins() -> None:
    """A's pin lasts, and B's give way to B's."""
    tree, nodes, _ = tree_of([100] * 5, Lru(), share=0.2, room=10 * LEAF)
    assert tree.pins.pin(nodes[4], PinRequest(100, 1), A)
    for number in range(4):
        assert tree.pins.pin(nodes[number], PinRequest(100, 50), of_b(number))
    assert [node.pin is not None for node in nodes] == [False, False, True, True, True]
    assert tree.pins.of(of_b(7)) == 2 * LEAF and tree.pins.of(A) == LEAF


def test_decisions() -> None:
    log = Decisions(entries=40)

    def add(tenant: Salted, order: int) -> None:
        log.add(tenant, 5, 7, Decision(order, 0.0))

    for number in range(20):
        add(A, number)
    for number in range(300):
        add(of_b(number), 20 + number)
    assert len(log.of(A)) == 20 and not log.of(A).full
    assert [len(log.of(of_b(number))) for number in (0, 279, 280, 299)] == [0, 0, 1, 1]
    assert len(log) == 40
