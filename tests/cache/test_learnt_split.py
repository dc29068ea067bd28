"""The split that a server's traffic asked for, on disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.cache.learnt_split import (
    LearntSplit,
    read_split,
    split_path,
    write_split,
)
from sglang_hybrid.extensions.disk.tier_folder import make_tier, tier_lock

SPLIT = LearntSplit(1.25, 0.72, 0.56, 128)


def arguments(**given: Any) -> SimpleNamespace:
    """SGLang's, of a server with a disk tier."""
    fields = {
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config": None,
        "nnodes": 1,
        "model_path": "m",
        "revision": None,
        "tp_size": 1,
        "dp_size": 1,
        "enable_dp_attention": False,
        "context_length": None,
    }
    return SimpleNamespace(**fields | given)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a server whose disk tier is in use."""
    monkeypatch.setenv("SGLANG_HYBRID_DISK_FOLDER", str(tmp_path))
    with tier_lock(make_tier(tmp_path), 1):
        pass
    found = split_path(arguments())
    assert found is not None
    return found


def test_what_was_written_is_read(path: Path) -> None:
    assert read_split(path) is None
    write_split(path, SPLIT)
    assert read_split(path) == SPLIT
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "other", [{"model_path": "n"}, {"revision": "r"}, {"tp_size": 2}, {"context_length": 4_096}]
)
def test_other_servers_have_another_file(path: Path, other: dict[str, Any]) -> None:
    assert split_path(arguments(**other)) not in (None, path)


@pytest.mark.parametrize("other", [{"nnodes": 2}, {"hicache_storage_backend_extra_config": "{"}])
def test_where_machines_may_differ_or_the_folder_is_unknown_there_is_none(
    path: Path, other: dict[str, Any]
) -> None:
    assert split_path(arguments(**other)) is None


@pytest.mark.parametrize(
    "other", [{"enable_hierarchical_cache": False}, {"hicache_storage_backend": "mooncake"}]
)
def test_without_a_disk_tier_it_is_among_the_cached_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    """Each model, with its flags, has a file of its own, in a folder that nobody else may read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    path = split_path(arguments(**other))
    assert path is not None and path.parent == tmp_path / "caches" / "sglang_hybrid"
    assert path != split_path(arguments(**other, model_path="n"))
    assert read_split(path) is None
    write_split(path, SPLIT)
    assert read_split(path) == SPLIT
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server in a container under an unknown user id has no home; it starts all the same."""

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    assert split_path(arguments(enable_hierarchical_cache=False)) is None


def test_a_store_that_servers_share_has_it_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SGLANG_HYBRID_DISK_FOLDER", "mooncake://localhost:1")
    path = split_path(arguments())
    assert path is not None and path.parent == tmp_path / "sglang_hybrid"


def test_nothing_is_written_where_no_tier_is(path: Path) -> None:
    (path.parent / "sglang_hybrid.tier").unlink()
    write_split(path, SPLIT)
    assert not path.exists()


def test_what_cannot_be_written_is_said(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.mkdir()
    write_split(path, SPLIT)
    assert f"{path} cannot be written" in caplog.text


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'{"states_to_kv": 0, "hits": 1, "hits_now": 0, "requests": 1}']
)
def test_what_cannot_be_is_not_used(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(content)
    assert read_split(path) is None
    assert f"the split in {path} is not used: its content cannot be read." in caplog.text


def test_a_link_is_not_followed(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.symlink_to(path.with_name("elsewhere"))
    assert read_split(path) is None
    assert "it is no regular file" in caplog.text
