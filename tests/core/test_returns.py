"""Sessions that are expected back: the load begins in time, once."""

from __future__ import annotations

import random
from itertools import pairwise

from sglang_hybrid.core.returns.sessions import OVERDUE, POSITIONS_PER_CALL, ExpectedReturns


def test_a_load_is_due_when_it_would_end_late_otherwise() -> None:
    returns = ExpectedReturns()
    returns.expect(1, 20.0)
    sizes = {1: 5}
    assert returns.due(14.9, float, sizes.__getitem__) is None
    assert returns.due(15.0, float, sizes.__getitem__) == 1
    assert returns.due(15.0, float, sizes.__getitem__) is None


def test_what_needs_nothing_now_may_need_it_later() -> None:
    returns = ExpectedReturns()
    returns.expect(1, 20.0)
    returns.expect(2, 30.0)
    assert returns.due(19.0, float, {1: 0, 2: 15}.__getitem__) == 2
    assert returns.due(19.5, float, {1: 1}.__getitem__) == 1


def test_a_load_is_due_behind_any_number_that_need_nothing() -> None:
    """Their prefixes are on the device, until they are overdue."""
    returns = ExpectedReturns()
    for position in range(1_000):
        returns.expect(position, 20.0 + position / 1_000)
    returns.expect(2_000, 25.0)
    asked: list[int] = []

    def size(position: int) -> int:
        asked.append(position)
        return 5 * (position == 2_000)

    assert returns.due(19.9, float, size, longest=5.05) is None
    assert max(asked) < 1_000, "who is expected so late cannot be due yet"
    calls = [len(asked)]
    found = None
    while found is None and len(calls) < 40:
        found = returns.due(20.5, float, size, longest=5.05)
        calls.append(len(asked))
    assert found == 2_000
    assert max(after - before for before, after in pairwise(calls)) == POSITIONS_PER_CALL
    assert returns.due(20.5, float, size, longest=5.05) is None


def test_the_last_word_counts_and_who_does_not_come_is_forgotten() -> None:
    returns = ExpectedReturns()
    returns.expect(1, 20.0)
    returns.expect(1, 50.0)
    assert returns.due(25.0, float, lambda position: 1) is None
    returns.forget(1)
    returns.forget(1)
    assert len(returns) == 0
    returns.expect(2, 60.0)
    assert returns.due(60.0 + OVERDUE + 1, float, lambda position: 1) is None
    assert len(returns) == 0


def test_only_so_many_are_kept() -> None:
    returns, rng = ExpectedReturns(most=50), random.Random(1)
    for position in range(500):
        returns.expect(position % 120, rng.uniform(0, 100))
        assert len(returns) == len(returns._sorted) <= 50
        assert returns._sorted == sorted((time, at) for at, time in returns._times.items())
