"""Hints that are added to a trace: who says what."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.simulation.traces.declared_hints import KINDS, with_hints

TOKENS = np.arange(50, dtype=np.int32)
TRACE = [Request(session, 0, float(n), TOKENS, 40) for n, session in enumerate([1, 2, 1, 1, 2])]
ENDS, RETURNS = Hint.ENDS, Hint.RETURNS


@pytest.mark.parametrize(
    ("kind", "hints"),
    [
        ("true", [None, None, None, ENDS, ENDS]),
        ("both", [RETURNS, RETURNS, RETURNS, ENDS, ENDS]),
        ("lies", [ENDS, ENDS, ENDS, None, None]),
        ("when", [Hint.after(2), Hint.after(3), Hint.after(1), ENDS, ENDS]),
    ],
)
def test_hints_follow_from_sessions(kind: str, hints: list[Hint | None]) -> None:
    assert [request.hint for request in with_hints(TRACE, kind)] == hints


def test_random_hints_come_from_a_seed() -> None:
    trace = TRACE * 40
    hints = [request.hint for request in with_hints(trace, "random", 3)]
    assert hints == [request.hint for request in with_hints(trace, "random", 3)]
    assert 0.1 < sum(hint is ENDS for hint in hints) / len(trace) < 0.4
    assert set(hints) == {ENDS, None}


def test_seconds_of_other_requests_are_as_long_in_all() -> None:
    hints = [request.hint for request in with_hints(TRACE, "whenever", 1)]
    assert sorted(hint.seconds for hint in hints if hint and hint.seconds) == [1, 2, 3]
    assert hints[3:] == [ENDS, ENDS]


def test_another_kind_is_a_sentence() -> None:
    with pytest.raises(ValueError, match=f"known are {', '.join(KINDS)}"):
        with_hints(TRACE, "loud")
