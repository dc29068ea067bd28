"""Hints: believed at first, doubted when they prove false, and each tenant's own."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sglang_hybrid.core.answers import AnswerModel, bucket_of
from sglang_hybrid.core.hints import Hint, HintRecord
from sglang_hybrid.core.history import History, TimeUnit
from sglang_hybrid.core.history_tree import HistoryNode, fingerprint_tokens
from sglang_hybrid.core.nodes import Clock


def test_the_first_hint_is_believed_and_a_false_one_doubted() -> None:
    record = HintRecord()
    assert record.probability(Hint.ENDS) == pytest.approx(0.1)
    assert record.probability(Hint.RETURNS) == pytest.approx(0.9)
    record.followed(Hint.ENDS, returned=True)
    assert record.probability(Hint.ENDS) > 0.2
    assert record.probability(Hint.RETURNS) == pytest.approx(0.9), "kinds are judged apart"
    for _ in range(4):
        record.followed(Hint.ENDS, returned=False)
    assert record.probability(Hint.ENDS) < 0.2


def test_what_is_taken_back_is_as_if_it_had_never_been() -> None:
    record = HintRecord()
    for _ in range(3):
        record.followed(Hint.ENDS, returned=False)
    record.take_back(Hint.ENDS)
    record.followed(Hint.ENDS, returned=True)
    assert record.probability(Hint.ENDS) == pytest.approx((0.2 + 1) / (2 + 3), rel=0.05)


@pytest.mark.parametrize(("always", "bucket"), [(True, 3), (False, 1)])
def test_hints_that_are_always_wrong_are_known_by_what_follows(always: bool, bucket: int) -> None:
    record = HintRecord()
    hint = Hint.ENDS if always else Hint.RETURNS
    for _ in range(40):
        record.followed(hint, returned=always)
    assert bucket_of(record.probability(hint)) == bucket


@pytest.mark.parametrize("returns", [0.05, 0.95])
def test_hints_given_at_random_do_not_count(returns: float) -> None:
    """After them somebody comes back as often, or as seldom, as without them."""
    model, rng = AnswerModel(), random.Random(1)
    for time in range(400):
        hint = Hint.ENDS if rng.random() < 0.25 else None
        answer = model.ended([], float(time), hint)
        if rng.random() < returns:
            model.returned(answer, time + 0.5)
        model.give_up(float(time))
    assert model.expect(answer.features, Hint.ENDS) is None


def test_hints_that_say_nothing_do_not_count() -> None:
    model = AnswerModel()
    rng = random.Random(1)
    for time in range(200):
        answer = model.ended([], float(time), Hint.ENDS)
        if rng.random() < 0.5:
            model.returned(answer, time + 0.5)
        model.give_up(float(time))
    assert model.expect(answer.features, Hint.ENDS) is None
    assert model.expect(answer.features) is None


def serve(
    history: History, clock: Clock, session: list[int], tenant: str, hint: Hint | None = None
) -> HistoryNode:
    """The session goes on by a question and an answer; the node at its end."""
    clock.advance()
    session.append(5_000 + clock.tick)
    input_len = len(session)
    session.extend(range(input_len, input_len + 20))
    history.observe(session, input_len, clock, tenant=tenant, hint=hint)
    return history.tree(tenant).walk(fingerprint_tokens(np.array(session)), [])[0][-1]


def sessions(history: History, clock: Clock, tenant: str, *, lies: bool, count: int = 300) -> None:
    """Sessions of one to three requests; the last one says that it is, or all others say so."""
    rng = random.Random(2)
    for number in range(count):
        session = [number] * 30
        turns = rng.randrange(1, 4)
        for turn in range(turns):
            ends = (turn == turns - 1) != lies
            serve(history, clock, session, tenant, Hint.ENDS if ends else None)


def weights(history: History, clock: Clock, tenant: str) -> tuple[float, float]:
    """Of two new sessions of `tenant`, one of which says that it ends; and of the other."""
    found = []
    for hint in (Hint.ENDS, None):
        node = serve(history, clock, [7_000 + (hint is None)] * 30, tenant, hint)
        found.append(history.index.weight(node.reuse_class, 0.0))
    return found[0], found[1]


def test_a_session_that_is_said_to_end_is_worth_less() -> None:
    history, clock = History(TimeUnit.REQUESTS), Clock()
    sessions(history, clock, "a", lies=False)
    ends, goes_on = weights(history, clock, "a")
    assert ends < goes_on / 2


def test_who_lies_only_loses_influence() -> None:
    """b says of every session but the last request that it ends. It is not worth less by that, and
    a's hints are believed as before.
    """
    history, clock = History(TimeUnit.REQUESTS), Clock()
    for _ in range(10):
        sessions(history, clock, "a", lies=False, count=30)
        sessions(history, clock, "b", lies=True, count=30)
    ends, goes_on = weights(history, clock, "a")
    assert ends < goes_on / 2
    said, not_said = weights(history, clock, "b")
    assert said >= not_said


def test_hints_are_not_heard_where_answers_do_not_count() -> None:
    history, clock = History(TimeUnit.REQUESTS), Clock()
    history.answers_count = False
    sessions(history, clock, "a", lies=False)
    ends, goes_on = weights(history, clock, "a")
    assert ends == goes_on
