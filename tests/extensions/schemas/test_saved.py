"""Schemas on disk: there again after a restart, for their tenant alone; damage costs one schema."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_hybrid.extensions.disk.folder import SCHEMAS, RankFolder
from sglang_hybrid.extensions.disk.tier_folder import TIER
from sglang_hybrid.extensions.schemas.declared import registry as registry_module
from sglang_hybrid.extensions.schemas.declared.registry import Registry
from sglang_hybrid.extensions.schemas.declared.saved import SavedSchemas, saved_schemas
from sglang_hybrid.extensions.schemas.declared.tokens import PromptTokenizer

A, B = ("a", "secret salt"), ("b", None)
FACTS = {"model": "one"}
Start = Callable[[], Registry]


def schema(name: str, text: str = "text") -> str:
    return f'<schema name="{name}">{text}</schema>'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts a server's registry; the one before it has ended."""
    running: list[SavedSchemas] = []

    def started() -> Registry:
        if running:
            running.pop().close()
        running.append(SavedSchemas(RankFolder(folder, FACTS, SCHEMAS)))
        return Registry(PromptTokenizer(None), running[0])

    yield started
    for one in running:
        one.close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{TIER}/*/{SCHEMAS}/*/*.json"))


def test_schemas_are_there_after_a_restart(start: Start) -> None:
    first = start()
    assert first.register(A, schema("one")).saved
    first.register(A, schema("one", "other text"))
    first.register(None, schema("two"))
    again = start()
    assert [one.schema.name for one in again.of(A)] == ["one"]
    (part,) = again.get(A, "one").schema.parts
    assert part.text == "other text" and again.get(A, "one").saved  # type: ignore[union-attr]
    assert again.get(None, "two").size == len(schema("two"))
    again.register(A, schema("three"))
    assert [one.schema.name for one in start().of(A)] == ["one", "three"]


def test_each_tenant_finds_its_own_and_files_name_nobody(start: Start, folder: Path) -> None:
    first = start()
    first.register(A, schema("one"))
    first.register(B, schema("one", "of b"))
    again = start()
    assert again.of(("a", None)) == again.of(None) == again.of((None, "secret salt")) == []
    assert [part.text for part in again.get(B, "one").schema.parts] == ["of b"]  # type: ignore[union-attr]
    for path in files(folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert b"secret" not in path.read_bytes()
        assert not {"a", "b", "one"} & {*path.relative_to(folder).parts}


def test_a_deleted_schema_stays_away(start: Start, folder: Path) -> None:
    first = start()
    first.register(A, schema("one"))
    first.delete(A, "one")
    assert files(folder) == [] and start().of(A) == []
    assert not list(folder.glob(f"{TIER}/*/{SCHEMAS}/*/"))


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"of a", b"of x"))


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def moved(path: Path) -> None:
    other = next(
        each for each in path.parents[1].iterdir() if each.is_dir() and each != path.parent
    )
    os.replace(path, other / path.name)


def somebody_elses(path: Path) -> None:
    path.write_text("not ours")


@pytest.mark.parametrize("happens", [damaged, torn, moved, somebody_elses])
def test_a_file_that_is_not_whole_is_ignored_with_one_line(
    start: Start, folder: Path, happens: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    first = start()
    for name in ("one", "two"):
        first.register(A, schema(name, "of a"))
    first.register(B, schema("three", "of b"))
    for path in files(folder):
        if b"of a" in path.read_bytes():
            happens(path)
    with caplog.at_level(logging.WARNING):
        again = start()
    assert again.of(A) == []
    assert [one.schema.name for one in again.of(B)] == ["three"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "2 files in " in line and "are ignored" in line
    assert len(files(folder)) == 3
    again.register(A, schema("one"))
    assert [one.schema.name for one in start().of(A)] == ["one"]


@pytest.mark.parametrize("where", ["of a tenant", "of all"])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("elsewhere")])
def test_what_is_no_file_is_ignored_and_stays(
    start: Start, folder: Path, where: str, make: Callable[[Path], None]
) -> None:
    """Nobody writes into the pipe: a start that opened it would wait for ever."""
    start().register(A, schema("one"))
    (file,) = files(folder)
    owner = file.parent if where == "of a tenant" else file.parents[1]
    odd = [owner / "notes", owner / f"{'0' * 32}.json", owner / "x.tmp"]
    for path in odd:
        make(path)
    again = start()
    assert [one.schema.name for one in again.of(A)] == ["one"]
    again.delete(A, "one")
    assert all(os.path.lexists(path) for path in odd)


def test_a_schema_is_not_written_where_something_else_is(start: Start, folder: Path) -> None:
    first = start()
    first.register(A, schema("one"))
    (file,) = files(folder)
    file.unlink()
    file.symlink_to("elsewhere")
    assert not first.register(A, schema("one")).saved
    file.unlink()
    file.parent.rmdir()
    (folder / "elsewhere").mkdir()
    file.parent.symlink_to(folder / "elsewhere")
    assert not first.register(A, schema("one")).saved
    assert os.listdir(folder / "elsewhere") == []
    assert first.get(A, "one") is not None


def test_what_was_half_written_is_removed(start: Start, folder: Path) -> None:
    start().register(A, schema("one"))
    (file,) = files(folder)
    half = file.with_name(f".{file.name}.0123abcd.tmp")
    half.write_text("half")
    assert [one.schema.name for one in start().of(A)] == ["one"]
    assert not half.exists()


def test_another_key_finds_nothing(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start().register(A, schema("one"))
    monkeypatch.setenv("SGLANG_HYBRID_TIER_KEY", "another")
    assert start().of(A) == []
    monkeypatch.delenv("SGLANG_HYBRID_TIER_KEY")
    assert [one.schema.name for one in start().of(A)] == ["one"], "a wrong key removes nothing"


def test_a_disk_that_refuses_costs_the_restart_only(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = start()
    first.register(A, schema("one", "old"))

    def refuse(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sglang_hybrid.extensions.schemas.declared.saved.write_file", refuse)
    assert not first.register(A, schema("one", "new")).saved
    assert [part.text for part in first.get(A, "one").schema.parts] == ["new"]  # type: ignore[union-attr]
    assert "No space left" in caplog.text
    assert start().of(A) == []  # not the old one


def test_bytes_of_tenants_that_have_not_come_yet_count(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start().register(A, schema("one", "x" * 100))
    monkeypatch.setattr(registry_module, "MOST_BYTES", 200)
    again = start()
    with pytest.raises(ValueError, match="of all tenants may have 200 bytes"):
        again.register(B, schema("two", "x" * 100))
    again.delete(A, "one")
    again.register(B, schema("two", "x" * 100))


def test_schemas_of_tenants_that_have_not_come_yet_count(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start().register(A, schema("one"))
    monkeypatch.setattr(registry_module, "MOST_OF_ALL", 1)
    with pytest.raises(ValueError, match="all tenants together may have 1 schemas"):
        start().register(B, schema("two"))


def test_room_for_objects_is_never_made_of_schemas(start: Start, folder: Path) -> None:
    start().register(A, schema("one"))
    start()._saved.close()  # type: ignore[union-attr]
    other = RankFolder(folder, {"model": "two"}, "rank-0")
    assert other.others() == []
    other.close()


@pytest.mark.parametrize(("tiers", "backend"), [(False, "file"), (True, None), (True, "mooncake")])
def test_without_a_disk_tier_there_is_no_folder(tiers: bool, backend: str | None) -> None:
    arguments = SimpleNamespace(enable_hierarchical_cache=tiers, hicache_storage_backend=backend)
    assert saved_schemas(arguments) is None


def test_a_folder_that_another_server_uses_is_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_DISK_FOLDER", str(folder))
    arguments = SimpleNamespace(
        enable_hierarchical_cache=True,
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config=None,
        model_path="model",
        revision=None,
    )
    one = saved_schemas(arguments)
    assert one is not None and saved_schemas(arguments) is None
    assert "in memory alone: another server uses" in caplog.text
    one.close()
