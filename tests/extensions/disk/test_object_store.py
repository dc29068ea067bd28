"""Objects on disk: found again, never wrong, and never in the way of serving."""

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.core import own_files
from sglang_hybrid.extensions.disk import object_file, object_store, store_start
from sglang_hybrid.extensions.disk.folder import KEY_VARIABLE, RankFolder
from sglang_hybrid.extensions.disk.object_file import Header
from sglang_hybrid.extensions.disk.object_store import RETRY_SECONDS, ObjectStore
from sglang_hybrid.extensions.disk.store_start import open_store
from sglang_hybrid.extensions.disk.tier_folder import TIER, FolderError
from tests.extensions.disk.objects import (
    FACTS,
    RANK,
    SIZE,
    Open,
    held,
    opened,
    put,
    put_each,
    warnings_of,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def start(folder: Path) -> Iterator[Open]:
    stores = []

    def start(facts: dict[str, str] = FACTS, rank: str = RANK, budget: int = 0) -> ObjectStore:
        for store in stores:
            store.close()
        stores.append(opened(folder, facts, rank, budget=budget))
        return stores[-1]

    yield start
    for store in stores:
        store.close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{TIER}/*/rank-*/*/*.safetensors"))


def test_objects_are_found_again_after_a_restart(start: Open) -> None:
    store = start()
    assert put(store, 1, 2, 3) and put(store, 4, kind="mamba", size=1000)
    store = start()
    assert held(store, 1, 2, 3, 9) == [1, 2, 3]
    assert held(store, 4, kind="mamba", size=1000) == [4]
    assert store.contains("kv", ["k3", "k9", "k1"]) == [True, False, True]
    assert store.info()["found_at_start"] == 4


def test_an_object_is_written_once(start: Open, folder: Path) -> None:
    store = start()
    put(store, 1, 2)
    assert put(store, 2, 1) and put(store, 1, 2, 3)
    assert len(files(folder)) == 2 and store.counts.written == 3


def test_a_kind_has_objects_of_its_own(start: Open) -> None:
    store = start()
    put(store, 1)
    assert not held(store, 1, kind="mamba")
    assert not held(store, 1, size=SIZE + 1)


@pytest.mark.parametrize("other", [{"weights": "1235"}, {"dtype": "bfloat16"}, {"page_size": "16"}])
def test_another_model_finds_nothing(start: Open, other: dict[str, str]) -> None:
    put(start(), 1)
    assert not held(start({**FACTS, **other}), 1)
    assert held(start(), 1) == [1]


def test_another_rank_finds_nothing(start: Open) -> None:
    put(start(rank=RANK), 1)
    assert not held(start(rank="rank-1"), 1)


def test_only_the_owner_may_read(start: Open, folder: Path) -> None:
    put(start(), 1)
    for path in [folder, *folder.rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode in (0o700, 0o600), path


def test_a_file_name_does_not_tell_the_key(start: Open, folder: Path) -> None:
    store = start()
    put(store, 1)
    name = files(folder)[0].stem.split("-")[0]
    assert name == store.folder.name("kv", "k1").hex()
    (folder / TIER / "key").write_bytes(bytes(32))
    assert start().folder.name("kv", "k1").hex() != name


def test_a_secret_may_be_given(start: Open, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "a secret")
    put(start(), 1)
    assert not (folder / TIER / "key").exists()
    assert held(start(), 1) == [1]
    monkeypatch.setenv(KEY_VARIABLE, "another secret")
    assert not held(start(), 1)


def test_two_servers_do_not_share_a_folder(start: Open, folder: Path) -> None:
    start()
    with pytest.raises(FolderError, match="another server uses"):
        RankFolder(folder, FACTS, RANK)
    RankFolder(folder, FACTS, "rank-1").close()


def flip(path: Path, at: int) -> None:
    whole = bytearray(path.read_bytes())
    whole[at] ^= 1
    path.write_bytes(whole)


@pytest.mark.parametrize("at", [-1, -SIZE, -2 * SIZE])
def test_a_damaged_object_is_not_used(
    start: Open, folder: Path, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    put(start(), 1, 2)
    flip(files(folder)[0], at)
    store = start()
    wrong = 2 if at >= -SIZE else 1
    assert held(store, 1, 2) == [3 - wrong]
    assert not held(store, 1, 2), "a file with a damaged object is given up"
    assert "checksum" in caplog.text


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 1_000), value=st.integers(0, 255))
def test_any_changed_byte_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    folder = tmp_path_factory.mktemp("disk")
    os.chmod(folder, 0o700)
    store = opened(folder)
    put(store, 1, 2, 3)
    store.close()
    path = files(folder)[0]
    whole = bytearray(path.read_bytes())
    whole[at % len(whole)] = value
    path.write_bytes(whole)
    store = opened(folder)
    held(store, 1, 2, 3)  # asserts that what is found is right
    store.close()


def test_files_that_are_not_whole_are_ignored_with_one_line(
    start: Open, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = start()
    put(store, 1), put(store, 2), put(store, 3), put(store, 4)
    one, two, three, _ = files(folder)
    one.write_bytes(one.read_bytes()[:-1])
    two.write_bytes(b"")
    three.write_bytes(b"\xff" * 50)
    half = one.with_name(f".{one.name}.0123abcd.tmp")
    half.write_bytes(b"half")
    os.utime(half, (1, 1))
    (one.parent / "notes.txt").write_text("a note")
    caplog.clear()
    store = start()
    assert len(held(store, 1, 2, 3, 4)) == 1
    assert store.counts.files_ignored == 5
    assert len(caplog.records) == 1 and "5 files" in caplog.text
    assert not half.exists() and not one.exists(), "the header says whose they are"
    assert two.exists() and three.exists() and (one.parent / "notes.txt").exists()
    assert put(store, 1, 2, 3) and held(store, 1, 2, 3) == [1, 2, 3]


def test_a_file_under_the_name_of_another_is_not_used(start: Open, folder: Path) -> None:
    store = start()
    put(store, 1), put(store, 2)
    one, two = files(folder)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second), two.write_bytes(first)
    assert held(start(), 1, 2) == [1, 2]


def test_the_least_recently_used_is_forgotten_first(start: Open, folder: Path) -> None:
    store = start()
    put(store, 1)
    budget = int(3.5 * store.used_bytes)
    store = start(budget=budget)
    put(store, 2), put(store, 3)
    held(store, 1)
    put(store, 4)
    assert held(store, 1, 2, 3, 4) == [1, 3, 4]
    assert store.used_bytes <= budget and store.counts.files_evicted == 1
    assert sum(path.stat().st_size for path in files(folder)) == store.used_bytes


def test_of_a_prompt_its_end_is_forgotten_first(start: Open) -> None:
    store = start()
    put(store, 1)
    store.budget = int(3.5 * store.used_bytes)
    put(store, 2), put(store, 3)
    store.contains("kv", ["k1", "k2", "k3"])
    put(store, 4)
    assert held(store, 1, 2, 3, 4) == [1, 2, 4]


def test_asking_what_is_known_is_no_use(start: Open) -> None:
    store = start()
    put(store, 1)
    store.budget = int(3.5 * store.used_bytes)
    for number in (2, 3):
        store._now.now += 60  # type: ignore[attr-defined]
        put(store, number)
    assert store.knows("kv", ["k1", "k9"]) == [True, False]
    put(store, 4)
    assert held(store, 1, 2, 3, 4) == [2, 3, 4]


def test_what_is_used_again_and_again_outlasts_what_was_used_once(start: Open) -> None:
    """The disk is full of newer files when the old ones, which come back every hour, are due."""
    store = start()
    put(store, 0)
    store.budget = int(30.5 * store.used_bytes)
    put(store, 1)
    for hour in range(12):
        store._now.now += 3_000  # type: ignore[attr-defined]
        assert held(store, 0, 1) == [0, 1]
        for number in range(10):
            store._now.now += 60  # type: ignore[attr-defined]
            put(store, 100 * hour + 10 + number)
    store._now.now += 60  # type: ignore[attr-defined]
    put(store, *range(10_000, 10_001))
    for number in range(35):
        put(store, 20_000 + number)
    assert held(store, 0, 1) == [0, 1]
    assert store.counts.files_evicted > 100


def test_what_is_larger_than_the_budget_is_not_kept(start: Open) -> None:
    store = start(budget=1_000)
    assert not put(store, 1, size=2_000)
    assert store.info()["refused"] and not store.used_bytes


def test_a_file_that_is_evicted_while_the_start_reads_it_is_not_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written before the start listed it."""
    made = threading.Event()
    written: list[bool] = []
    read_header = object_file.read_header

    def put_one_first(*_: object) -> None:
        made.wait(20)
        written.append(put(store, 1))

    def put_one_meanwhile(path: Path, identity: str) -> Header:
        header = read_header(path, identity)
        written.append(put(store, 2))
        return header

    monkeypatch.setattr(store_start, "load_uses", put_one_first)
    monkeypatch.setattr(store_start, "read_header", put_one_meanwhile)
    store = open_store(RankFolder(folder, FACTS, RANK), budget=600)
    made.set()
    assert store.ready.wait(20) and written == [True, True]
    assert store.counts.files_evicted == 1
    assert store.used_bytes == sum(path.stat().st_size for path in files(folder)) <= 600
    assert held(store, 1, 2) == [2]
    store.close()


def test_what_is_put_during_the_start_and_what_was_there_keep_the_budget(
    start: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = start()
    put(store, 1), put(store, 2)
    budget = store.used_bytes
    store.close()
    made = threading.Event()

    def put_meanwhile(*_: object) -> None:
        made.wait(20)
        assert put(later, 3)

    monkeypatch.setattr(store_start, "load_uses", put_meanwhile)
    later = open_store(RankFolder(folder, FACTS, RANK), budget)
    made.set()
    assert later.ready.wait(20) and held(later, 3) == [3]
    assert sum(path.stat().st_size for path in files(folder)) == later.used_bytes <= budget
    later.close()


def test_two_threads_that_write_keep_the_budget(
    start: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has found that there is room before the other has written."""
    store = start()
    put(store, 0)
    store.budget = int(2.5 * store.used_bytes)
    both, write_file = threading.Barrier(2), own_files.write_file

    def write_together(path: Path, content: bytes) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        write_file(path, content)

    monkeypatch.setattr(object_store, "write_file", write_together)
    threads = [threading.Thread(target=put, args=(store, number)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.used_bytes <= store.budget and len(held(store, 1, 2)) == 2


def test_others_may_ask_while_files_are_evicted(
    start: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing many files takes long."""
    store = start()
    put_each(store, range(50))
    answered: list[bool] = []
    remove = own_files.remove

    def remove_and_ask(path: Path, size: int) -> None:
        if not answered:
            asking = threading.Thread(target=store.knows, args=("kv", ["k0"]))
            asking.start()
            asking.join(10)
            answered.append(not asking.is_alive())
        remove(path, size)

    monkeypatch.setattr(object_store, "remove", remove_and_ask)
    assert store.evict(2 * store.used_bytes // 50)
    assert answered == [True] and store.counts.files_evicted >= 2


def test_the_report_waits_for_nobody(start: Open) -> None:
    """The scheduler asks for it."""
    store, found = start(), []
    put(store, 1)
    asking = threading.Thread(target=lambda: found.append(store.info()["files"]), daemon=True)
    with store._lock:
        asking.start()
        asking.join(20)
    assert found == [1]


def test_what_was_written_again_is_not_removed_for_what_was_damaged_before(
    start: Open, folder: Path
) -> None:
    """Two threads found the same damage; the object was written again between their answers."""
    store = start()
    put(store, 1)
    (damaged,) = store._index.files()
    store._lose(damaged)
    assert put(store, 1)
    store._lose(damaged)
    assert held(store, 1) == [1] and len(files(folder)) == 1


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_one_line_and_tried_again(
    start: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, folder: Path
) -> None:
    store = start()
    put(store, 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        assert not put(store, 2) and not put(store, 3)
    assert held(store, 1, 2, 3) == [1], "what is there can still be read"
    assert not put(store, 2), "it is not tried at once"
    store._now.now += RETRY_SECONDS  # type: ignore[attr-defined]
    assert put(store, 2) and held(store, 2) == [2]
    lines = warnings_of(caplog)
    assert len(lines) == 2 and "No space left" in lines[0] and "again" in lines[1]
    if store._saver is not None:
        store._saver.join()  # it writes how often files were used
    assert not list(folder.rglob("*.tmp")) and store.counts.not_written == 3


def test_a_clock_that_goes_back_stops_nothing(
    start: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that refused is tried again, and uses are written down."""
    store = start()
    put(store, 1), put(store, 2)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        assert not put(store, 3)
    store._now.now -= 900_000  # type: ignore[attr-defined]
    assert put(store, 3) and held(store, 1, 2, 3) == [1, 2, 3]
    assert sum(path.stat().st_mtime < 200_000 for path in files(folder)) == 2
    assert store._saver is not None
    store._saver.join()
    assert store.folder.uses.exists()


def test_a_folder_that_is_removed_turns_the_tier_off(
    start: Open, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = start()
    put(store, 1), put(store, 2)
    folder.rename(folder.with_name("elsewhere"))
    assert not held(store, 1, 2) and not put(store, 3)
    lines = warnings_of(caplog)
    assert len(lines) == 1 and "was removed" in lines[0]
    assert store.info()["off"] and not folder.exists()


def test_files_that_may_not_be_read_are_not_there(
    start: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    store = start()
    put(store, 1)
    with monkeypatch.context() as patched:
        patched.setattr(object_store, "read_objects", refused)
        assert not held(store, 1)
    assert store.info()["off"] == ""


def test_a_link_in_the_place_of_an_object_is_left_alone(
    start: Open, folder: Path, tmp_path: Path
) -> None:
    """The times of the linked file stay as they are, too."""
    store = start()
    put(store, 1)
    (file,) = files(folder)
    other = tmp_path / "other"
    other.write_bytes(file.read_bytes())
    os.utime(other, (1, 1))
    file.unlink()
    file.symlink_to(other)
    store._now.now += 100  # type: ignore[attr-defined]
    assert store.contains("kv", ["k1"]) == [True] and other.stat().st_mtime == 1
    assert not held(store, 1) and not store.contains("kv", ["k1"])[0]
    assert file.is_symlink() and other.exists()
    assert not put(store, 1) and put(store, 2), "only this one has no place"


def test_what_was_used_last_is_read_ahead_states_first(
    start: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = start()
    kinds = {1: "kv", 2: "mamba", 3: "kv", 4: "mamba"}
    for number, kind in kinds.items():
        put(store, number, kind=kind)
    for file in store._index.files():
        old = file.header.names[0] in (
            store.folder.name("kv", "k1"),
            store.folder.name("mamba", "k2"),
        )
        os.utime(file.path, (0, 60_000 if old else 120_000 + (file.header.kind == "kv")))
    budget = store.used_bytes - 1
    store.close()
    read: list[Path] = []
    monkeypatch.setattr(store_start, "_advise", read.append)
    store = opened(folder, warm_bytes=budget)
    store._starter.join()
    store.close()
    names = [
        store.folder.name(*each).hex() for each in (("mamba", "k4"), ("kv", "k3"), ("mamba", "k2"))
    ]
    assert [path.name.split("-")[0] for path in read] == names
    assert 0 < store.counts.bytes_read_ahead <= budget


def test_clear_removes_everything(start: Open, folder: Path) -> None:
    store = start()
    put(store, 1), put(store, 2, kind="mamba")
    store.clear()
    assert store.used_bytes == 0 and not held(store, 1)
    put(store, 1)
    assert held(store, 1) == [1]
    store.close()
    assert len(files(folder)) == 1 and held(start(), 1) == [1]


def test_clear_waits_for_no_file(
    start: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for those that are removed, nor while a start finds others."""
    put(start(), 1, 2)
    start().close()
    may_go_on = threading.Event()

    def learn_later(store: ObjectStore) -> None:
        may_go_on.wait(10)
        store_start.learn_files(store, 0)

    def remove_later(path: Path, size: int | None = None) -> None:
        assert path.suffix != ".safetensors" or may_go_on.wait(10)
        own_files.remove(path, size)

    monkeypatch.setattr(object_store, "remove", remove_later)
    store = ObjectStore(RankFolder(folder, FACTS, RANK), learn_later)
    put(store, 3)
    store.clear()
    assert not may_go_on.is_set() and not store.ready.is_set()
    may_go_on.set()
    store.ready.wait(10)
    store.close()
    assert not files(folder) and store.counts.found_at_start == 0


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("put"), st.lists(st.integers(0, 30), min_size=1, max_size=5, unique=True)
            ),
            st.tuples(st.just("get"), st.lists(st.integers(0, 30), max_size=8)),
            st.tuples(st.just("restart"), st.just([])),
        ),
        max_size=40,
    )
)
def test_against_a_plain_dictionary(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, list[int]]]
) -> None:
    folder = tmp_path_factory.mktemp("disk") / "disk"
    plain: set[int] = set()
    store = opened(folder)
    for what, numbers in steps:
        if what == "put":
            assert put(store, *numbers)
            plain |= set(numbers)
        elif what == "get":
            assert held(store, *numbers) == [number for number in numbers if number in plain]
        else:
            store.close()
            store = opened(folder)
    store.close()
