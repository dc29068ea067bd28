"""Whatever else is in the disk tier's folder, and in ours below it, stays as it is."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.extensions.disk.folder import RankFolder
from sglang_hybrid.extensions.disk.object_store import ObjectStore
from sglang_hybrid.extensions.disk.store_start import open_store
from tests.extensions.disk.foreign import (
    a_link,
    a_pipe,
    checksum,
    checksum_of,
    home,
    makers,
    outside,
)
from tests.extensions.disk.objects import RANK, Open, held, opened, put, put_each

FACTS, OTHER = {"weights": "1234"}, {"weights": "old"}
KINDS = sorted(makers(Path()))
IN_EVERY_RUN = ("file", "folder", "link to a file", "link to a folder", "pipe")
every_kind = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in IN_EVERY_RUN else pytest.mark.slow) for kind in KINDS],
)
"""Things that may be in a folder. Other kinds take the same way."""


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    return outside(tmp_path / "elsewhere")


@pytest.fixture
def folder(tmp_path: Path, elsewhere: Path) -> Path:
    return home(tmp_path / "home", elsewhere)


@pytest.fixture
def start(folder: Path) -> Iterator[Open]:
    stores = []

    def started(facts: dict[str, str] = FACTS, rank: str = RANK, **more: int) -> ObjectStore:
        stores.append(opened(folder, facts, rank, time.time, **more))
        return stores[-1]

    yield started
    for store in stores:
        store.close()


def left_behind(start: Open, facts: dict[str, str] = OTHER, objects: int = 20) -> Path:
    """The folder of a model that no server uses any more."""
    store = start(facts)
    put_each(store, range(objects))
    store.close()
    return store.folder.path.parent


def bytes_in(path: Path) -> int:
    return sum(each.lstat().st_size for each in path.rglob("*") if each.suffix == ".safetensors")


def fill_disk(monkeypatch: pytest.MonkeyPatch, free: int, used: Callable[[], int]) -> None:
    """A disk that has `free` bytes now; what is `used` takes them."""
    before = used()

    def statvfs(_: object) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=free + before - used(), f_frsize=1)

    monkeypatch.setattr(os, "statvfs", statvfs)


@pytest.mark.parametrize("full", ["budget", pytest.param("disk", marks=pytest.mark.slow)])
def test_two_thousand_writes_over_the_budget(
    start: Open, folder: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    """Beside all that may be in a folder, and beside another server that runs."""
    left = left_behind(start)
    live = start({"weights": "live"})
    assert put(live, 1, 2, 3)
    ours = start()
    others = checksum(folder, but=[ours.folder.path.parent, left])
    assert len(others) > 30
    if full == "disk":
        size = bytes_in(left)
        fill_disk(monkeypatch, 20_000, lambda: ours.used_bytes + size * left.exists())
        ours.least_free = 5_000
    else:
        ours.budget = bytes_in(left) + 10_000
    put_each(ours, range(2_000))
    assert ours.counts.files_evicted > 1_000 and held(ours, 1_999) == [1_999]
    assert not left.exists()
    now = checksum(folder, but=[ours.folder.path.parent])
    changed = {path for path in {**others, **now} if others.get(path) != now.get(path)}
    assert changed <= {str(left.parent)}, "the tier's own folder has one identity less"
    assert held(live, 1, 2, 3) == [1, 2, 3]


@every_kind
def test_what_is_put_into_the_folders_of_a_model_that_is_removed_stays(
    start: Open, kind: str, elsewhere: Path
) -> None:
    left = left_behind(start)
    make = makers(elsewhere)[kind]
    (prefix, *_) = (each for each in (left / RANK).iterdir() if each.is_dir())
    places = [left / "notes", left / RANK / "notes", prefix / "notes"]
    places += [left / RANK / "zz", prefix / f"{prefix.name}{'0' * 30}-1.safetensors"]
    places += [prefix / "model.safetensors", left / RANK / ".x.0123abcd.tmp"]
    for place in places:
        make(place)
    before = {place: checksum_of(place) for place in places}
    outside_before = checksum(elsewhere)
    store = start(budget=2_000)
    put_each(store, range(50))
    assert {place: checksum_of(place) for place in places} == before
    assert checksum(elsewhere) == outside_before
    assert len(list(left.rglob("*.safetensors"))) == 2
    assert not list(left.rglob("*-2.safetensors")) and (left / "manifest.json").exists()


@every_kind
def test_what_is_put_into_the_folder_of_a_model_that_is_served_stays(
    start: Open, kind: str, elsewhere: Path
) -> None:
    """The start lists it, and every object is written that has a place."""
    store = start()
    put(store, 1)
    (file,) = store.folder.path.glob("*/*.safetensors")
    store.close()
    make, rank = makers(elsewhere)[kind], store.folder.path
    places = [rank / "notes", file.parent / "notes", file.parent / ".x.0123abcd.tmp"]
    places += [file.with_name(f"{file.name[:31]}_-1.safetensors"), rank / "x.tmp"]
    if kind not in ("folder", "empty folder"):  # these would be ours
        places += [rank / f"{number:02x}" for number in range(256) if number % 8 == 0]
        places = [place for place in places if not place.exists()]
    for place in places:
        make(place)
    before = {place: checksum_of(place) for place in places}
    outside_before = checksum(elsewhere)
    store = start()
    assert held(store, 1) == [1]
    written = [put(store, number) for number in range(2, 300)]
    assert 200 < sum(written) <= 298 and not store.refused
    store.budget = store.used_bytes // 2
    put(store, *range(300, 310))
    for place, was in before.items():
        assert checksum_of(place) == was
    assert checksum(elsewhere) == outside_before


def test_an_object_of_another_model_under_our_name_stays(start: Open) -> None:
    left = left_behind(start, objects=1)
    (file,) = left.rglob("*.safetensors")
    third = left_behind(start, {"weights": "third"}, objects=1)
    (place,) = third.rglob("*.safetensors")
    shutil.copy(file, place)
    store = start(budget=1_000)
    for number in range(20):
        put(store, number)
    assert place.read_bytes() and not file.exists()
    mine = store.folder.path / place.parent.name / place.name
    mine.parent.mkdir(exist_ok=True)
    shutil.copy(place, mine)
    store.close()
    start()
    assert mine.exists()


def without(path: Path) -> None:
    path.unlink()


def changed(path: Path) -> None:
    path.write_text(path.read_text().replace("old", "new"))


def no_json(path: Path) -> None:
    path.write_text("[" * 100_000)


@pytest.mark.parametrize("happens", [without, changed, no_json, a_pipe, a_link])
@pytest.mark.parametrize("which", ["manifest.json", f"{RANK}/lock"])
def test_without_its_own_manifest_and_locks_nothing_is_removed(
    start: Open, happens: Callable[[Path], None], which: str
) -> None:
    left = left_behind(start)
    happens(left / which)
    store = start(budget=2_000)
    before = checksum(left)
    put_each(store, range(50))
    readable = which.endswith("lock") and happens in (changed, no_json)  # a lock has no content
    assert readable or checksum(left) == before
    assert store.used_bytes <= 2_000


def test_what_is_locked_is_not_removed(start: Open) -> None:
    """One locked rank is enough."""
    left = left_behind(start)
    live = start(OTHER, "rank-1-0-0-0")
    before = checksum(left)
    store = start(budget=2_000)
    put_each(store, range(50))
    assert checksum(left) == before
    live.close()
    put_each(store, range(50, 100))
    assert not left.exists()


def test_each_removal_is_a_line_that_says_what_and_why(
    start: Open, caplog: pytest.LogCaptureFixture
) -> None:
    left, third = left_behind(start), left_behind(start, {"weights": "third"}, 3)
    os.utime(third / RANK / "lock", (1, 1))
    size = bytes_in(left)
    store = start(budget=size + 2_000)
    with caplog.at_level(logging.WARNING):
        put_each(store, range(50))
    first, second = [record.getMessage() for record in caplog.records]
    assert str(third) in first, "what was unused for longest goes first"
    assert str(left) in second and "because the budget is used" in second
    assert " 21 files (" in second and not third.exists()


def test_the_folder_takes_no_more_than_the_budget(start: Open, folder: Path) -> None:
    """The budget includes what other models left, which is removed only when its room is wanted."""
    left = left_behind(start)
    budget = bytes_in(left) + 4_000
    store = start(budget=budget)
    for number in range(100):
        put(store, number)
        assert bytes_in(left.parent) <= budget
        assert left.exists() or store.used_bytes > 3_000
    assert not left.exists()


def test_ranks_have_a_part_each_of_what_others_left(start: Open) -> None:
    left = left_behind(start)
    size = bytes_in(left)
    store = start(budget=size, ranks=4)
    number = 0
    while store.used_bytes < size * 0.6:  # files differ by some bytes: their headers have times
        put(store, number := number + 1)
        assert left.exists()
    while left.exists():
        put(store, number := number + 1)
    assert store.used_bytes > 0.7 * size


def test_nothing_is_removed_that_does_not_help(
    start: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = left_behind(start)
    store = start(budget=20_000)
    put(store, 1, 2)
    before = checksum(left.parent)
    assert not put(store, 3, size=25_000), "it is larger than the budget"
    assert checksum(left.parent) == before
    store.budget, store._retry_at = 0, 0.0
    fill_disk(monkeypatch, 1_000, lambda: store.used_bytes)
    store.least_free = 1_000 + store.used_bytes + bytes_in(left)
    assert not put(store, 3), "the disk is filled by others"
    assert checksum(left.parent) == before and held(store, 1, 2) == [1, 2]


def test_what_cannot_be_removed_is_tried_once(
    start: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Files that have our names and nothing of ours in them."""
    left = left_behind(start, objects=1)
    (file,) = left.rglob("*.safetensors")
    file.write_bytes(bytes(100_000))
    for each in left.glob("*.uses"):
        each.unlink()
    store = start(budget=50_000)
    asked: list[str] = []
    remove = store.folder.remove_other
    store.folder.remove_other = lambda other: asked.append("") or remove(other)  # type: ignore[func-returns-value,method-assign]
    put_each(store, range(300))
    assert len(asked) == 1 and file.exists() and not caplog.records


def test_a_server_may_start_while_another_removes_what_it_left(start: Open, folder: Path) -> None:
    """The folder is there for one of them: the other waits, and never loses what it has opened."""
    store, ends = start(budget=3_000), threading.Event()

    def remove() -> None:
        number = 0
        while not ends.is_set():
            put(store, number := number + 1)

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for number in range(40):
            other = open_store(RankFolder(folder, OTHER, RANK))
            assert put(other, number), other.refused
            assert other.folder.is_held and held(other, number) == [number]
            other.close()
    finally:
        ends.set()
        remover.join()


MOUNTS = f"""
import subprocess, sys
from pathlib import Path
from tests.extensions.disk.foreign import checksum, outside
from tests.extensions.disk.objects import put
from sglang_hybrid.extensions.disk.folder import RankFolder
from sglang_hybrid.extensions.disk.store_start import open_store

def started(facts, **more):
    store = open_store(RankFolder(folder, facts, {RANK!r}), **more)
    assert store.ready.wait(20)
    return store

def mount(*what):
    subprocess.run(["mount", *map(str, what)], check=True)

folder, elsewhere = Path(sys.argv[1]), outside(Path(sys.argv[2]))
other = started({OTHER!r})
for number in range(40):
    put(other, number)
other.close()
left = other.folder.path.parent
first, second, third, *_ = (each for each in other.folder.path.iterdir() if each.is_dir())
(folder / "mounted").mkdir()
mount("-t", "tmpfs", "none", folder / "mounted")
(folder / "mounted" / "file").write_text("on another file system")
copies = {{each.name: each.read_bytes() for each in second.iterdir()}}
mount("-t", "tmpfs", "none", second)
for name, whole in copies.items():
    (second / name).write_bytes(whole)
assert copies
mount("--bind", elsewhere, first)
(a_file,) = list(third.iterdir())[:1]
mount("--bind", elsewhere / "photo", a_file)
kept = [folder / "mounted", first, second, elsewhere]
before = [checksum(each) for each in kept], a_file.read_bytes()
store = started({FACTS!r}, budget=2_000)
for number in range(100):
    assert put(store, number)
assert ([checksum(each) for each in kept], a_file.read_bytes()) == before
assert len([each for each in other.folder.path.iterdir() if each.is_dir()]) == 3
store.close()
print("all is as it was")
"""


def test_mounts_stay_as_they_are(tmp_path: Path) -> None:
    try:
        subprocess.run(["unshare", "--mount", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"nothing can be mounted here: {error}")
    (tmp_path / "home").mkdir()
    command = ["unshare", "--mount", sys.executable, "-c", MOUNTS]
    run = subprocess.run(
        [*command, str(tmp_path / "home"), str(tmp_path / "elsewhere")],
        capture_output=True,
        text=True,
    )
    assert run.stdout.endswith("all is as it was\n"), run.stderr


places = st.sampled_from(["top", "tier", "identity", "rank", "prefix"])
names = st.sampled_from(
    [
        *("notes", "x.tmp", ".y.0123abcd.tmp", "model.safetensors", "ab", "0" * 32, "rank-7"),
        *(f"{RANK}.uses", f"{RANK}.learnt", "schemas", f"{'ab' * 16}-1.safetensors", "a\nb"),
    ]
)
steps = st.one_of(
    st.tuples(st.just("put"), st.lists(st.integers(0, 40), min_size=1, max_size=4, unique=True)),
    st.tuples(st.just("get"), st.lists(st.integers(0, 40), max_size=8)),
    st.tuples(st.just("restart"), st.sampled_from([FACTS, OTHER])),
    st.tuples(st.just("make"), st.tuples(places, names, st.sampled_from(KINDS))),
    st.tuples(st.just("clear"), st.none()),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(steps, max_size=40), st.sampled_from([600, 1_500, 4_000]))
def test_whatever_is_put_wherever(
    tmp_path_factory: pytest.TempPathFactory, todo: list[tuple[str, object]], budget: int
) -> None:
    """Objects that are found are right, the budget is kept, and nothing that somebody has put
    changes.
    """
    base = tmp_path_factory.mktemp("disk")
    elsewhere = outside(base / "elsewhere")
    folder = home(base / "home", elsewhere)
    store = open_store(RankFolder(folder, FACTS, RANK), budget)
    tier = store.folder.path.parents[1]
    foreign = checksum(folder, but=[tier])
    everything = checksum(elsewhere)
    plain: dict[str, set[int]] = {"1234": set(), "old": set()}
    served = FACTS
    for what, how in todo:
        own = plain[served["weights"]]
        if what == "put":
            if put(store, *how):  # type: ignore[misc]
                own |= set(how)  # type: ignore[call-overload]
        elif what == "get":
            found = held(store, *how)  # type: ignore[misc]
            assert set(found) <= own
        elif what == "restart":
            store.close()
            served = how  # type: ignore[assignment]
            store = opened(folder, served, budget=budget)
        elif what == "clear":
            store.clear()
            own.clear()
        else:
            where, name, kind = how  # type: ignore[misc]
            rank = store.folder.path
            ours = (each for each in rank.iterdir() if len(each.name) == 2 and each != rank / "ab")
            prefix = next(ours, rank / "gone")
            at = {"top": folder, "tier": tier, "identity": rank.parent, "rank": rank}
            place = at.get(where, prefix) / name
            regular = kind in ("file", "empty file")
            if place.parent.is_dir() and not os.path.lexists(place):
                if regular and name.endswith((".uses", ".learnt")):
                    continue  # a file of this name is ours
                if kind in ("folder", "empty folder") and name == "ab":
                    continue  # so is a folder
                makers(elsewhere)[kind](place)
                foreign[str(place)] = checksum_of(place)
        assert store.used_bytes <= budget
    store.close()
    assert {path: checksum_of(Path(path)) for path in foreign} == foreign
    assert checksum(elsewhere) == everything


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices and gives files away")
def test_a_device_is_not_opened(start: Open) -> None:
    store = start()
    put(store, 1)
    (file,) = store.folder.path.glob("*/*.safetensors")
    store.close()
    device = file.with_name(f"{file.name[:2]}{'0' * 30}-1.safetensors")
    try:
        os.mknod(device, 0o600 | 0o020000, os.makedev(1, 3))
    except PermissionError as error:
        pytest.skip(f"no device can be made here: {error}")
    store = start()
    assert held(store, 1) == [1] and store.counts.files_ignored == 1
    assert device.is_char_device()


def test_the_manifest_says_what_the_identity_is_the_hash_of(start: Open) -> None:
    """Facts may be no JSON by themselves."""
    facts = {"shape": (1, 2), "type": Path("float32"), "ä": None, "n": 0.1}
    left = left_behind(start, facts)  # type: ignore[arg-type]
    assert json.loads((left / "manifest.json").read_text())["shape"] == [1, 2]
    store = start(budget=2_000)
    put_each(store, range(50))
    assert not left.exists()
