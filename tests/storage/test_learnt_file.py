"""What was learnt comes back from a file as it was, or not at all."""

from __future__ import annotations

import random
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_hybrid.core.records.nodes import Clock
from sglang_hybrid.core.returns.answers import MODEL_BYTES
from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.core.returns.history import History, Learnt, TimeUnit
from sglang_hybrid.core.returns.history_tree import HistoryNode, fingerprint_tokens
from sglang_hybrid.serving.tenants import TenantNames
from sglang_hybrid.storage.disk.learnt_file import load, pack, save, unpack
from sglang_hybrid.storage.disk.object_file import BadFile

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
    """For tenant a nobody comes back after goodbye; b says so and ends with anything."""
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
    """Of classes and of answers; another tenant's models are not used."""
    before, _ = taught(500)
    path = tmp_path / "learnt"
    save(path, IDENTITY, before.export(NAMES), 1.0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    after, content = History(), load(path, IDENTITY)
    assert content is not None
    learnt = unpack(content)
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
    again = unpack(pack(learnt))
    assert pack(again) == pack(learnt)
    assert set(again.answers) == names("ab")
    other = History()
    other.restore(again, NAMES)
    assert pack(other.export(NAMES)) == pack(learnt), "tenants that do not come stay in the file"


def test_models_that_were_saved_are_bounded() -> None:
    learnt = taught(42, tenants="abcdef")[0].export(NAMES)
    history = History(answer_bytes=3 * MODEL_BYTES)
    history.restore(learnt, NAMES)
    assert set(history.export(NAMES).answers) == names("def")
    clock = Clock()
    for tenant in "xy":
        serve(history, clock, [1] * 40, [2], tenant)
    assert set(history.export(NAMES).answers) == names("fxy")
    without = History(answer_bytes=0)
    without.restore(learnt, NAMES)
    assert without.export(NAMES).answers == {}


def test_a_history_that_saw_requests_is_not_replaced() -> None:
    history, clock = History(), Clock()
    serve(history, clock, [1] * 40, [2], "a")
    assert not history.restore(taught(8)[0].export(NAMES), NAMES)


def names(tenants: str) -> set[str]:
    return {NAMES((tenant, None)) for tenant in tenants}


def damaged(learnt: Learnt) -> list[bytes]:
    """Contents with a right checksum that contradict themselves."""
    import msgspec

    found, owner = [], NAMES(("a", None))
    for change in (
        lambda it: it.update(shape=[1, 2, 3]),
        lambda it: it["learnt"]["classes"].update(classes=b""),
        lambda it: it["learnt"]["classes"].update(classes=np.arange(10**6).tobytes()),
        lambda it: it["learnt"]["classes"]["long"].update(ended=bytes(8)),
        lambda it: it["learnt"]["classes"]["long"].update(ended=bytes(7)),
        lambda it: it["learnt"]["classes"]["short"].update(
            unended=b"\xff" * len(it["learnt"]["classes"]["short"]["unended"])
        ),
        lambda it: it["learnt"]["answers"][owner].update(
            weights=b"\xff" * len(it["learnt"]["answers"][owner]["weights"])
        ),
        lambda it: it["learnt"]["answers"][owner].update(features="no bytes"),
        lambda it: it["learnt"]["answers"][owner].update(numbers=[1.0]),
        lambda it: it["learnt"]["answers"][owner].update(hints=[1.0] * 99),
        lambda it: it["learnt"].pop("classes"),
        lambda it: it.pop("learnt"),
    ):
        content = msgspec.msgpack.decode(pack(learnt))
        change(content)
        found.append(msgspec.msgpack.encode(content))
    return found


def test_what_contradicts_itself_is_not_believed() -> None:
    for content in [b"", b"\x93", *damaged(taught(20)[0].export(NAMES))]:
        with pytest.raises(BadFile):
            unpack(content)


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
