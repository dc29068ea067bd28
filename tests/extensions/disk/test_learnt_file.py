"""Learnt parameters come back from a file as they were, or not at all."""

from __future__ import annotations

import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.records.nodes import Clock
from sglang_hybrid.core.returns.answer_models import LEAST_BYTES
from sglang_hybrid.core.returns.answers import AnswerModel
from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.core.returns.history import History, LearntHistory, TimeUnit
from sglang_hybrid.core.returns.history_tree import HistoryNode, fingerprint_tokens
from sglang_hybrid.extensions.disk.learnt_file import load, pack, save, unpack
from sglang_hybrid.extensions.disk.object_file import BadFile
from sglang_hybrid.serving.tenants import TenantNames
from tests.examples import examples

GOODBYE = 7
IDENTITY = "a" * 32
NAMES = TenantNames(b"a key").name


def serve(
    history: History, clock: Clock, session: list[int], answer: list[int], tenant: str, **more: Any
) -> HistoryNode:
    clock.advance(clock.stamp + 1.0)
    session.append(5_000 + clock.tick)
    input_len = len(session)
    session.extend(answer)
    history.observe(session, input_len, clock, tenant=(tenant, None), **more)
    return history.tree((tenant, None)).walk(fingerprint_tokens(np.array(session)), [])[0][-1]


def taught(sessions: int = 250, tenants: str = "ab") -> tuple[History, Clock]:
    """A history in which no session of tenant a returns after goodbye; b's end with anything."""
    history, clock, rng = History(), Clock(), random.Random(1)
    for number in range(sessions):
        tenant = tenants[number % len(tenants)]
        session = [rng.randrange(100, 1_000) for _ in range(40)]
        for turn in range(4):
            words = [rng.randrange(100, 1_000) for _ in range(40)]
            last = turn == 3
            if tenant == "a" and last:
                words[-1] = GOODBYE
            hint = Hint.ENDS if tenant == "b" and last else None
            serve(history, clock, session, words, tenant, hint=hint)
    return history, clock


def expectations(history: History, clock: Clock, tenant: str) -> list[Any]:
    """After goodbye, after something else, and after a hint: the probability of a return."""
    rng, found = random.Random(9), []
    for last, hint in ((GOODBYE, None), (500, None), (500, Hint.ENDS)):
        session = [rng.randrange(100, 1_000) for _ in range(40)]
        words = [rng.randrange(100, 1_000) for _ in range(39)]
        node = serve(history, clock, session, [*words, last], tenant, hint=hint)
        assert node.last is not None
        found.append(node.last.expected)
    return found


def test_a_restarted_server_expects_what_it_did(tmp_path: Path) -> None:
    """Classes and answers are restored; another tenant's models are not used."""
    before, _ = taught(500)
    path = tmp_path / "learnt"
    save(path, IDENTITY, before.export(NAMES), 1.0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    after, content = History(), load(path, IDENTITY)
    assert content is not None
    learnt, unreadable = unpack(content)
    assert unreadable == 0
    assert after.restore(learnt, NAMES)
    before.index.rebuild()
    for reuse_class in learnt.classes.classes.tolist():
        for age in (0.5, 3.0, 30.0, 1_000.0):
            had, has = (it.index.weight(reuse_class, age) for it in (before, after))
            assert has == pytest.approx(had, rel=1e-9)
    for tenant in "ab":
        had, has = (expectations(it, Clock(), tenant) for it in (before, after))
        assert has == pytest.approx(had, abs=0.02)
        goodbye, other, said = has
        assert goodbye < other - 0.2 if tenant == "a" else said < 0.2
    assert expectations(after, Clock(), "c")[0] is None


def test_nothing_changes_by_saving() -> None:
    """One rank saves and another does not: they go on alike, bit by bit."""
    two = [taught(120) for _ in range(2)]
    two[0][0].export(NAMES)
    found = [expectations(*it, "a") for it in two]
    assert found[0] == found[1]


def test_what_is_packed_is_unpacked() -> None:
    learnt = taught(120)[0].export(NAMES)
    again, _ = unpack(pack(learnt))
    assert pack(again) == pack(learnt)
    assert set(again.answers) == names("ab")
    other = History()
    other.restore(again, NAMES)
    assert pack(other.export(NAMES)) == pack(learnt), "tenants that do not come stay in the file"


def test_models_that_were_saved_are_bounded() -> None:
    """Models of tenants that were here last are kept until their memory is needed."""
    learnt = taught(60, tenants="abcdef")[0].export(NAMES)
    last_three = [learnt.answers[NAMES((tenant, None))].held_bytes for tenant in "def"]
    history = History(answer_bytes=sum(last_three))
    history.restore(learnt, NAMES)
    assert set(history.export(NAMES).answers) == names("def")
    serve(history, Clock(), [1] * 40, [2], "x")
    assert set(history.export(NAMES).answers) == names("ef")
    without = History(answer_bytes=0)
    without.restore(learnt, NAMES)
    assert without.export(NAMES).answers == {}


def test_a_history_that_saw_requests_is_not_replaced() -> None:
    history, clock = History(), Clock()
    serve(history, clock, [1] * 40, [2], "a")
    assert not history.restore(taught(8)[0].export(NAMES), NAMES)


def names(tenants: str) -> set[str]:
    return {NAMES((tenant, None)) for tenant in tenants}


Change = Callable[[Any], Any]


def damaged(learnt: LearntHistory, change: Change) -> bytes:
    """A content with a right checksum, changed so that it contradicts itself."""
    content = msgspec.msgpack.decode(pack(learnt))
    change(content)
    return msgspec.msgpack.encode(content)


def of_classes(change: Change) -> Change:
    return lambda it: change(it["learnt"]["classes"])


def of_a(change: Change) -> Change:
    """The same change of the model of tenant a's answers."""
    return lambda it: change(it["learnt"]["answers"][NAMES(("a", None))])


def number(name: str, value: float) -> Change:
    """Another number of tenant a's model."""
    at = [*AnswerModel.NUMBERS, "gone", "returned"].index(name)
    return of_a(lambda it: it["numbers"].__setitem__(at, value))


BAD_CLASSES = [
    lambda it: it.update(shape=[1, 2, 3]),
    lambda it: it["learnt"].pop("classes"),
    of_classes(lambda it: it.update(classes=b"")),
    of_classes(lambda it: it.update(classes=np.arange(10**6).tobytes())),
    of_classes(lambda it: it["long"].update(ended=bytes(8))),
    of_classes(lambda it: it["long"].update(ended=bytes(7))),
    of_classes(lambda it: it["short"].update(unended=b"\xff" * len(it["short"]["unended"]))),
]
BAD_ANSWERS = [
    lambda it: it["learnt"]["answers"].update({NAMES(("a", None)): None}),
    of_a(lambda it: it.update(weights=b"\xff" * len(it["weights"]))),
    of_a(lambda it: it.update(features="no bytes")),
    of_a(lambda it: it.update(features=bytes(len(it["features"])))),
    of_a(lambda it: it.update(squares=it["squares"][:-4])),
    of_a(lambda it: it.update(numbers=[1.0])),
    of_a(lambda it: it.update(hints=[1.0] * 99)),
    of_a(lambda it: it.update(hints=[-1.0] * len(it["hints"]))),
    of_a(lambda it: it.update(intervals=[-1.0])),
    number("gone", -1.0),
    number("_share", 1.5),
    number("_weight", -2.0),
    number("_patience", float("nan")),
]


@pytest.fixture(scope="module")
def learnt() -> LearntHistory:
    return taught(20)[0].export(NAMES)


@pytest.mark.parametrize("at", range(len(BAD_ANSWERS)))
def test_a_tenants_part_that_contradicts_itself_costs_no_other_part(
    learnt: LearntHistory, at: int
) -> None:
    found, unreadable = unpack(damaged(learnt, BAD_ANSWERS[at]))
    assert unreadable == 1 and set(found.answers) == names("b")
    (b,) = names("b")
    assert pack(found) == pack(LearntHistory(learnt.classes, {b: learnt.answers[b]}))
    assert History().restore(found, NAMES)


@pytest.mark.parametrize("at", range(len(BAD_CLASSES)))
def test_classes_that_contradict_themselves_cost_no_tenant_anything(
    learnt: LearntHistory, at: int
) -> None:
    found, unreadable = unpack(damaged(learnt, BAD_CLASSES[at]))
    assert unreadable == 1 and set(found.answers) == names("ab")
    after = History()
    assert after.restore(found, NAMES)
    assert not len(found.classes.classes) and not len(after.index.export().classes)


def test_what_has_no_part_that_can_be_read_is_no_file(learnt: LearntHistory) -> None:
    def spoil(it: Any) -> None:
        BAD_CLASSES[0](it)
        for answers in it["learnt"]["answers"].values():
            answers.update(numbers=[])

    for content in (b"", b"\x93", damaged(learnt, spoil), damaged(learnt, dict.clear)):
        with pytest.raises(BadFile):
            unpack(content)


def test_an_answer_returns_late_whose_model_was_dropped() -> None:
    """It was given up by a model that is no more, so this is not taken back from the new one."""
    history, clock, tenant = History(), Clock(), ("a", None)
    session, late = [1] * 40, [2] * 40
    for _ in range(3):
        serve(history, clock, session, [3], "a")
    serve(history, clock, late, [4], "a")
    clock.advance_to(100.0)
    serve(history, clock, [5] * 40, [6], "a")
    assert history.answers.of(tenant).labels[0]  # type: ignore[union-attr]
    history._answers._drop(tenant)
    serve(history, clock, late, [7], "a")
    _, unreadable = unpack(pack(history.export(NAMES)))
    assert unreadable == 0


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 7),  # tenants
        st.integers(0, 3),  # sessions of each
        st.sampled_from([0.0, 0.001, 1.0, 40.0, 1e7]),  # seconds since the request before
        st.sampled_from([0, 1, 30]),  # tokens of the answer
        st.sampled_from([None, None, Hint.ENDS, Hint.RETURNS, Hint.after(0.01), Hint.after(6e5)]),
        st.sampled_from([1, 1, 3, 20]),  # how often
    ),
    max_size=40,
)


@examples(20)
@given(REQUESTS, st.sampled_from([0, LEAST_BYTES, 3 * LEAST_BYTES]), st.sampled_from(TimeUnit))
def test_whatever_a_server_has_learnt_can_be_read(
    requests: list[Any], answer_bytes: int, unit: TimeUnit
) -> None:
    """Models are dropped and made anew, answers return late, and times stand still or jump; also
    another server may go on with the file.
    """
    history, clock, stamp = History(unit, answer_bytes=answer_bytes), Clock(), 0.0
    sessions: dict[tuple[int, int], list[int]] = {}
    for server in range(2):
        for at, (tenant, session, passed, tokens, hint, times) in enumerate(requests):
            for again in range(times):
                stamp += passed
                clock.advance(stamp)
                ids = sessions.setdefault((tenant, session), [tenant, session] * 30)
                ids += [100 + at, 200 + again]
                asked = len(ids)
                ids += [9_000 + token % (at + 1) for token in range(tokens)]
                history.observe(ids, asked, clock, tenant=(str(tenant), None), hint=hint)
        learnt = history.export(NAMES)
        found, unreadable = unpack(pack(learnt))
        assert unreadable == 0 and pack(found) == pack(learnt)
        history, sessions = History(unit, answer_bytes=answer_bytes), {}
        assert history.restore(found, NAMES), server


@pytest.mark.parametrize("where", [3, 40, 700, -1])
def test_a_damaged_file_is_found(tmp_path: Path, where: int) -> None:
    path = tmp_path / "learnt"
    save(path, IDENTITY, taught(20)[0].export(NAMES), 1.0)
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadFile):
        load(path, IDENTITY)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(BadFile):
        load(path, IDENTITY)


def test_another_models_file_is_foreign(tmp_path: Path) -> None:
    path = tmp_path / "learnt"
    save(path, "b" * 32, History(TimeUnit.SECONDS).export(NAMES), 1.0)
    with pytest.raises(BadFile, match="another model"):
        load(path, IDENTITY)
    assert load(tmp_path / "none", IDENTITY) is None
