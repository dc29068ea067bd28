"""Learnt parameters are read once, sent to all ranks, and written in the background."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.core.records.nodes import Clock
from sglang_hybrid.core.returns.history import History, SavedHistory
from sglang_hybrid.extensions.disk.folder import RankFolder
from sglang_hybrid.extensions.disk.learning import (
    IDLE_SECONDS,
    SAVE_SECONDS,
    TENANTS_AT_ONCE,
    Learning,
)
from sglang_hybrid.extensions.disk.learnt_file import save
from sglang_hybrid.serving.tenants import TenantNames
from tests.extensions.disk.test_learnt_file import expectations, serve, taught


class Watch:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> Any:
    folder = RankFolder(tmp_path / "disk", {"model": "a"}, "rank-0")
    yield SimpleNamespace(folder=folder, in_use=True)
    folder.close()


def make(history: History, store: Any) -> tuple[Learning, Watch]:
    watch = Watch()
    return Learning(history, lambda: store, watch), watch


def wait_for(learning: Learning) -> None:
    assert learning._writer is not None
    learning._writer.join()


def test_two_ranks_begin_with_what_one_of_them_saved(store: Any) -> None:
    history, _ = taught(120)
    learning, _ = make(history, store)
    assert learning.poll() == []
    learning.save()
    wait_for(learning)
    assert learning.counts.saved == 1
    first, _ = make(History(), store)
    (before,) = first.poll()
    assert first.poll() == []
    sent = pickle.loads(pickle.dumps(before))
    ranks = [first, make(History(), None)[0]]
    for rank in ranks:
        rank.restore(sent)
        assert rank.counts.restored == 2
    found = [expectations(rank._history, Clock(), "a") for rank in ranks]
    assert found[0] == found[1]
    assert found[0][0] is not None


def test_names_of_tenants_are_not_in_the_file(store: Any) -> None:
    history, clock = History(), Clock()
    serve(history, clock, [1] * 40, [2], "a tenant")
    learning, _ = make(history, store)
    learning.save()
    wait_for(learning)
    content = store.folder.learnt.read_bytes()
    assert b"a tenant" not in content


def test_it_is_saved_now_and_then_and_when_nothing_happens(store: Any) -> None:
    learning, watch = make(History(), store)
    learning.poll()
    watch.now = 1_000.0
    assert learning.poll() == [] and learning._writer is None, "nothing was learnt"
    for _ in range(3):
        learning.on_request_end()
        learning.poll()
    wait_for(learning)
    assert learning.counts.saved == 1
    learning.on_request_end()
    learning.poll()
    watch.now += IDLE_SECONDS
    learning.poll()
    wait_for(learning)
    assert learning.counts.saved == 2
    for _ in range(int(2 * SAVE_SECONDS)):
        watch.now += 1.0
        learning.on_request_end()
        learning.poll()
        wait_for(learning)
    assert learning.counts.saved == 4


def test_many_tenants_are_collected_a_few_at_a_step(store: Any) -> None:
    """Tenants that come or go meanwhile change nothing for the others."""
    history, clock = History(), Clock()
    for number in range(2 * TENANTS_AT_ONCE + 1):
        session = [number] * 40
        for _ in range(2):
            serve(history, clock, session, [2], f"tenant {number}")
    learning, _ = make(history, store)
    learning.poll()
    learning.save()
    learning.poll()
    assert learning._writer is None
    history._answers._drop((f"tenant {2 * TENANTS_AT_ONCE}", None))
    serve(history, clock, [1], [2], "another tenant")
    learning.poll()
    wait_for(learning)
    first, _ = make(History(), store)
    first.restore(*first.poll())
    assert first.counts.restored == 2 * TENANTS_AT_ONCE


def test_a_bad_file_is_one_line_and_counted(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    store.folder.learnt.write_bytes(b"nothing of ours")
    learning, _ = make(History(), store)
    assert learning.poll() == []
    assert learning.counts.ignored == 1
    assert len([r for r in caplog.records if "is not used" in r.message]) == 1


def test_a_part_that_cannot_be_read_is_one_line_and_counted(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    learnt = taught(20)[0].export(TenantNames(store.folder.key_for("tenants")).name)
    next(iter(learnt.answers.values())).numbers[-1] = -1.0
    save(store.folder.learnt, store.folder.identity, learnt, 1.0)
    learning, _ = make(History(), store)
    (before,) = learning.poll()
    assert len([r for r in caplog.records if "1 part of" in r.message]) == 1
    learning.restore(before)
    assert (learning.counts.restored, learning.counts.unreadable) == (1, 1)
    assert learning.counts.ignored == 0


def test_a_disk_that_refuses_is_one_line(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    store.folder.learnt.mkdir()
    learning, _ = make(History(), store)
    for _ in range(2):
        learning.save()
        wait_for(learning)
    assert learning.counts.failed == 2
    assert len([r for r in caplog.records if "cannot be written" in r.message]) == 1


def test_without_a_disk_nothing_is_read_or_written() -> None:
    learning, _ = make(taught(8)[0], None)
    learning.on_request_end()
    assert learning.poll() == []
    learning.save()
    assert learning._writer is None
    assert not isinstance(learning.as_dict(), SavedHistory)
