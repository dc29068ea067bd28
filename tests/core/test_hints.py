"""Hints: believed at first, doubted when they prove false, and each tenant's own."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sglang_hybrid.core.records.nodes import Clock
from sglang_hybrid.core.returns.answers import EXPECTATIONS, AnswerModel, bucket_of
from sglang_hybrid.core.returns.hint_record import HintedTimes, HintRecord
from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.core.returns.history import History, TimeUnit
from sglang_hybrid.core.returns.history_tree import HistoryNode, fingerprint_tokens


def test_the_first_hint_is_believed_and_a_false_one_doubted() -> None:
    record = HintRecord()
    assert record.probability(Hint.ENDS) == pytest.approx(0.1)
    assert record.probability(Hint.RETURNS) == pytest.approx(0.9)
    record.on_outcome(Hint.ENDS, returned=True)
    assert record.probability(Hint.ENDS) > 0.2
    assert record.probability(Hint.RETURNS) == pytest.approx(0.9), "kinds are judged apart"
    for _ in range(4):
        record.on_outcome(Hint.ENDS, returned=False)
    assert record.probability(Hint.ENDS) < 0.2


def test_what_is_taken_back_is_as_if_it_had_never_been() -> None:
    record = HintRecord()
    for _ in range(3):
        record.on_outcome(Hint.ENDS, returned=False)
    record.retract(Hint.ENDS)
    record.on_outcome(Hint.ENDS, returned=True)
    assert record.probability(Hint.ENDS) == pytest.approx((0.2 + 1) / (2 + 3), rel=0.05)


@pytest.mark.parametrize(("always", "bucket"), [(True, 3), (False, 1)])
def test_hints_that_are_always_wrong_are_known_by_what_follows(always: bool, bucket: int) -> None:
    record = HintRecord()
    hint = Hint.ENDS if always else Hint.RETURNS
    for _ in range(40):
        record.on_outcome(hint, returned=always)
    assert bucket_of(record.probability(hint)) == bucket


@pytest.mark.parametrize("returns", [0.05, 0.95])
def test_hints_given_at_random_do_not_count(returns: float) -> None:
    """After them somebody comes back as often, or as seldom, as without them."""
    model, rng = AnswerModel(), random.Random(1)
    for time in range(400):
        hint = Hint.ENDS if rng.random() < 0.25 else None
        answer = model.on_answer_end([], float(time), hint)
        if rng.random() < returns:
            model.on_return(answer, time + 0.5)
        model.give_up(float(time))
    assert model.expect(answer.features, Hint.ENDS) is None


def test_hints_that_say_nothing_do_not_count() -> None:
    model = AnswerModel()
    rng = random.Random(1)
    for time in range(200):
        answer = model.on_answer_end([], float(time), Hint.ENDS)
        if rng.random() < 0.5:
            model.on_return(answer, time + 0.5)
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
    """Weights of two new sessions of `tenant`: of one that says that it ends, and of the other."""
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


def test_seconds_are_believed_as_far_as_they_are_usual() -> None:
    """They are believed as said at first; as twice as many if they are always half of the time that
    passes; not at all if they have nothing to do with it.
    """
    times = HintedTimes()
    assert times.expected(20.0) == pytest.approx(20.0)
    for _ in range(60):
        times.on_return(10.0, 20.0)
    assert times.expected(10.0) == pytest.approx(20.0, rel=0.05)
    rng = random.Random(1)
    wild = HintedTimes()
    for _ in range(60):
        wild.on_return(10.0, 10.0 * 4 ** rng.uniform(-2, 2))
    assert wild.expected(10.0) is None


def test_a_return_that_is_said_to_come_late_is_worth_more_then_than_at_once() -> None:
    """Two sessions wait; their clients said when they go on, and all clients before were right."""
    history, clock = History(TimeUnit.SECONDS), Clock()
    rng = random.Random(3)

    def turn(session: list[int], stamp: float, seconds: float | None) -> HistoryNode:
        hint = Hint.ENDS if seconds is None else Hint.after(seconds)
        clock.advance(stamp)
        session.append(rng.randrange(5_000, 50_000))
        input_len = len(session)
        session.extend(rng.randrange(5_000, 50_000) for _ in range(20))
        history.observe(session, input_len, clock, hint=hint)
        return history.tree().walk(fingerprint_tokens(np.array(session)), [])[0][-1]

    for number in range(300):
        session, stamp = [number] * 30, 1_000.0 * number
        seconds = 4.0 if number % 2 else 40.0
        turn(session, stamp, seconds)
        turn(session, stamp + seconds, None)
    soon, late = (turn([9_000 + s] * 30, 301_000.0, float(s)) for s in (4, 40))
    assert soon.last is not None and soon.last.wait == pytest.approx(4.0)
    assert late.last is not None and late.last.wait == pytest.approx(40.0)
    index = history.index
    weights = {
        (name, age): index.weight(node.reuse_class, age)
        for name, node in (("soon", soon), ("late", late))
        for age in (1.0, 35.0)
    }
    assert weights["soon", 1.0] > 3 * weights["late", 1.0]
    assert weights["late", 35.0] > 2 * weights["late", 1.0]


def test_seconds_say_nothing_where_time_counts_requests() -> None:
    history, clock = History(TimeUnit.REQUESTS), Clock()
    node = serve(history, clock, [1] * 30, "a", Hint.after(20))
    assert node.last is not None and node.last.wait is None
    assert node.last.expected == pytest.approx(0.9)


def test_a_record_is_kept_whole() -> None:
    record = HintRecord()
    for seconds in (3.0, 5.0):
        record.on_outcome(Hint.after(seconds), returned=True, after=4.0)
    record.on_outcome(Hint.ENDS, returned=False)
    other = HintRecord()
    other.restore(record.as_list())
    assert other.as_list() == record.as_list()
    assert other.times.expected(2.0) == record.times.expected(2.0)
    with pytest.raises(ValueError, match="has 11 values"):
        other.restore([1.0])


def test_when_is_worth_knowing_where_all_sessions_go_on() -> None:
    """A return is as likely without a hint; but nobody else says when."""
    model = AnswerModel()
    for time in range(200):
        answer = model.on_answer_end([], 10.0 * time, Hint.after(5) if time % 4 == 0 else None)
        model.on_return(answer, 10.0 * time + 5.0)
    assert model.expect(answer.features, Hint.RETURNS) is None
    said = model.on_answer_end([], 9_000.0, Hint.after(5))
    assert said.return_after == pytest.approx(5.0)
    assert bucket_of(said.expected, said.wait) == EXPECTATIONS


def test_a_hint_that_comes_after_a_return_changes_nothing() -> None:
    """A request has resumed within the sequence, whose end nobody has continued."""
    history, clock = History(), Clock()
    tokens = np.arange(60)
    clock.advance(1.0)
    end = history.observe(tokens, 50, clock, [40]).nodes[-1]
    answer = end.last
    assert answer is not None
    clock.advance(2.0)
    history.observe(np.concatenate([tokens[:40], 1_000 + np.arange(20)]), 50, clock)
    assert answer.returned is not None and end.last is answer
    history.hint(tokens, Hint.ENDS)
    assert answer.hint is None
