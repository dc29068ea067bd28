"""The log of decisions: found by a prompt's tokens, bounded, and never confused."""

from __future__ import annotations

import random
from array import array

from sglang_hybrid.core.checkpoints.admission import Skip
from sglang_hybrid.core.checkpoints.checkpoint_plan import CheckpointRequest
from sglang_hybrid.core.records.nodes import Kind
from sglang_hybrid.explain.decisions import (
    EMPTY_PREFIX_HASH,
    Decisions,
    NotTaken,
    extend_prefix_hash,
)


def decision(order: int) -> NotTaken:
    request = CheckpointRequest(order, Kind.BRANCH)
    return NotTaken(order, float(order), request, Skip.NO_SLOT)


def prefix_hash(tokens: list[int], position: int) -> int:
    return extend_prefix_hash(EMPTY_PREFIX_HASH, array("q", tokens), 0, position)


def test_marks_go_on_from_one_another() -> None:
    source = random.Random(1)
    tokens = array("q", [source.randrange(150_000) for _ in range(999)])
    whole = extend_prefix_hash(EMPTY_PREFIX_HASH, tokens, 0, 999)
    cut = EMPTY_PREFIX_HASH
    for start, end in ((0, 7), (7, 8), (8, 8), (8, 640), (640, 999)):
        cut = extend_prefix_hash(cut, tokens, start, end)
    assert cut == whole
    assert extend_prefix_hash(EMPTY_PREFIX_HASH, tokens[:998], 0, 998) != whole


def test_decisions_are_found_along_a_prompt() -> None:
    log = Decisions()
    prompt, other = [*range(50)], [*range(30), 99, *range(31, 50)]
    log.add("me", 20, prefix_hash(prompt, 20), decision(0))
    log.add("me", 40, prefix_hash(prompt, 40), decision(1))
    log.add("me", 40, prefix_hash(other, 40), decision(2))
    log.add("me", 20, prefix_hash(prompt, 20), decision(3))

    def orders(tokens: list[int]) -> dict[int, list[int]]:
        found = log.of("me").along(array("q", tokens))
        return {position: [one.order for one in there] for position, there in found}

    assert orders(prompt) == {20: [0, 3], 40: [1]}
    assert orders(other) == {20: [0, 3], 40: [2]}
    assert orders(prompt[:39]) == {20: [0, 3]}
    assert orders(prompt[1:]) == {}
    assert list(log.of("you").along(array("q", prompt))) == []


def test_the_oldest_are_forgotten() -> None:
    log = Decisions(entries=3)
    tokens = array("q", range(50))
    for order in range(5):
        log.add("me", 10, prefix_hash([*range(50)], 10), decision(order))
        assert log.of("me").full == (order > 2)
    ((position, there),) = log.of("me").along(tokens)
    assert (position, [one.order for one in there]) == (10, [2, 3, 4])
    assert (len(log), log.count) == (3, 5)
    for order in (5, 6, 7):
        log.add("me", 20, prefix_hash([*range(50)], 20), decision(order))
    assert [position for position, _ in log.of("me").along(tokens)] == [20]
    assert len(log.of("me")._at) == 1  # nothing is left of position 10
    log.clear(9.0)
    assert (len(log), log.count, log.emptied) == (0, 8, 9.0)
    assert list(log.of("me").along(tokens)) == []


def test_a_flood_of_one_tenant_leaves_the_others_theirs() -> None:
    log = Decisions(entries=100)
    tokens = [*range(50)]
    for order in range(5):
        log.add("small", 10, prefix_hash(tokens, 10), decision(order))
    for order in range(5, 1_000):
        log.add("flood", 10, prefix_hash(tokens, 10), decision(order))
    assert (len(log), len(log.of("small")), len(log.of("flood"))) == (100, 5, 95)
    assert log.of("flood").full and not log.of("small").full
