"""The log of decisions: found by a prompt's tokens, bounded, and never confused."""

from __future__ import annotations

import random
from array import array

from sglang_hybrid.core.admission import Skip
from sglang_hybrid.core.intent import Wish
from sglang_hybrid.core.nodes import Kind
from sglang_hybrid.telemetry.decisions import Decisions, NotTaken, first_mark, next_mark


def decision(order: int) -> NotTaken:
    return NotTaken(order, (order, float(order)), Wish(order, Kind.BRANCH), Skip.NO_SLOT)


def mark(tokens: list[int], position: int) -> int:
    return next_mark(first_mark(), array("q", tokens), 0, position)


def test_marks_go_on_from_one_another() -> None:
    source = random.Random(1)
    tokens = array("q", [source.randrange(150_000) for _ in range(999)])
    whole = next_mark(first_mark(), tokens, 0, 999)
    cut = first_mark()
    for start, end in ((0, 7), (7, 8), (8, 8), (8, 640), (640, 999)):
        cut = next_mark(cut, tokens, start, end)
    assert cut == whole
    assert next_mark(first_mark(), tokens[:998], 0, 998) != whole
    assert first_mark() != first_mark("adapter") != first_mark(None, "adapter")
    assert first_mark(None, "") == first_mark()


def test_decisions_are_found_along_a_prompt() -> None:
    log = Decisions()
    prompt, other = [*range(50)], [*range(30), 99, *range(31, 50)]
    log.add(20, mark(prompt, 20), decision(0))
    log.add(40, mark(prompt, 40), decision(1))
    log.add(40, mark(other, 40), decision(2))
    log.add(20, mark(prompt, 20), decision(3))

    def orders(tokens: list[int]) -> dict[int, list[int]]:
        found = log.along(array("q", tokens), first_mark())
        return {position: [one.order for one in there] for position, there in found}

    assert orders(prompt) == {20: [0, 3], 40: [1]}
    assert orders(other) == {20: [0, 3], 40: [2]}
    assert orders(prompt[:39]) == {20: [0, 3]}
    assert orders(prompt[1:]) == {}
    assert list(log.along(array("q", prompt), first_mark("adapter"))) == []


def test_the_oldest_are_forgotten() -> None:
    log = Decisions(entries=3)
    tokens = array("q", range(50))
    for order in range(5):
        log.add(10, mark([*range(50)], 10), decision(order))
        assert log.full == (order >= 2)
    ((position, there),) = log.along(tokens, first_mark())
    assert (position, [one.order for one in there]) == (10, [2, 3, 4])
    assert (len(log), log.count) == (3, 5)
    for order in (5, 6, 7):
        log.add(20, mark([*range(50)], 20), decision(order))
    assert [position for position, _ in log.along(tokens, first_mark())] == [20]
    assert len(log._at) == 1  # nothing is left of position 10
    log.clear((9, 9.0))
    assert (len(log), log.count, log.emptied) == (0, 8, (9, 9.0))
    assert list(log.along(tokens, first_mark())) == []
