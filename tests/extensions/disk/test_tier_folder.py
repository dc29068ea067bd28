"""The folder that the operator names, ours in it, and the secret there."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hybrid.extensions.disk import folder as folder_module
from sglang_hybrid.extensions.disk.folder import RankFolder
from sglang_hybrid.extensions.disk.tier_folder import TIER, FolderError
from tests.extensions.disk.foreign import a_link, a_pipe, checksum

FACTS = {"weights": "1234"}


def opened(top: Path, rank: str = "rank-0") -> RankFolder:
    return RankFolder(top, FACTS, rank)


def refused(top: Path, why: str) -> None:
    """The folder cannot be used, and nothing in it changes."""
    before = checksum(top)
    with pytest.raises(FolderError, match=why):
        opened(top)
    assert checksum(top) == before


def test_a_folder_in_use_is_used_in_a_folder_of_ours_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("notes")
    os.chmod(tmp_path, 0o755)
    opened(tmp_path).close()
    assert sorted(os.listdir(tmp_path)) == ["notes", TIER]
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    for path in (tmp_path / TIER).rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    assert stat.S_IMODE((tmp_path / TIER).stat().st_mode) == 0o700


def test_a_folder_that_is_not_there_is_made(tmp_path: Path) -> None:
    opened(tmp_path / "a" / "b").close()
    assert (tmp_path / "a" / "b" / TIER).is_dir()


def test_a_link_to_a_folder_is_that_folder(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    folder = opened(tmp_path / "link")
    assert folder.path.is_relative_to(tmp_path / "there")
    folder.close()


@pytest.mark.parametrize("what", ["file", "link to nothing"])
def test_what_is_no_folder_is_refused(tmp_path: Path, what: str) -> None:
    top = tmp_path / "top"
    top.touch() if what == "file" else top.symlink_to("nothing")
    with pytest.raises(FolderError, match="is no folder; name another one"):
        opened(top)


def test_a_folder_in_which_everybody_may_write_is_refused(tmp_path: Path) -> None:
    """A folder like /tmp, where nobody can replace another's files, is not refused."""
    os.chmod(tmp_path, 0o777)
    refused(tmp_path, "may be written by all users")
    os.chmod(tmp_path, 0o1777)
    opened(tmp_path).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
@pytest.mark.parametrize("whose", ["the operator's", "ours"])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, whose: str) -> None:
    opened(tmp_path).close()
    os.chown(tmp_path if whose == "the operator's" else tmp_path / TIER, 12_345, 12_345)
    refused(tmp_path, "belongs to another user")


def test_a_folder_of_ours_that_others_may_read_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    os.chmod(tmp_path / TIER, 0o750)
    refused(tmp_path, "is open to other users")


def test_a_link_in_place_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o700)
    (tmp_path / TIER).symlink_to("there")
    refused(tmp_path, "is no folder")


def test_somebody_elses_folder_of_our_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / TIER / "deep").mkdir(parents=True)
    os.chmod(tmp_path / TIER, 0o700)
    (tmp_path / TIER / "key").write_bytes(bytes(32))
    refused(tmp_path, r"has no file sglang_hybrid\.tier")


@pytest.mark.parametrize("content", ["", "sglang_hybrid.tiers/1\n"])
def test_without_our_mark_it_is_not_ours(tmp_path: Path, content: str) -> None:
    opened(tmp_path).close()
    (tmp_path / TIER / "sglang_hybrid.tier").write_text(content)
    refused(tmp_path, "is not what this version of sglang_hybrid writes")


def test_a_start_that_was_killed_before_the_mark_is_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / TIER).mkdir(mode=0o700)
    (tmp_path / TIER / "sglang_hybrid.tier").touch()
    opened(tmp_path).close()
    opened(tmp_path).close()


def short(path: Path) -> None:
    path.write_bytes(bytes(17))


def long(path: Path) -> None:
    path.write_bytes(bytes(33))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        (short, "has 17 bytes instead of 32"),
        (long, "more than 32 bytes"),
        (a_pipe, "no regular file"),
        (a_link, "no regular file"),
        (a_folder, "no regular file"),
    ],
)
def test_a_key_that_is_none_is_refused_and_stays(
    tmp_path: Path, happens: Callable[[Path], None], why: str
) -> None:
    opened(tmp_path).close()
    happens(tmp_path / TIER / "key")
    refused(tmp_path, why)


@pytest.mark.parametrize("happens", [a_pipe, a_link, a_folder])
@pytest.mark.parametrize("name", ["sglang_hybrid.tier", "*/manifest.json", "*/rank-0/lock"])
def test_what_has_the_name_of_a_file_of_ours_is_refused_and_stays(
    tmp_path: Path, happens: Callable[[Path], None], name: str
) -> None:
    opened(tmp_path).close()
    (path,) = (tmp_path / TIER).glob(name)
    happens(path)
    refused(tmp_path, f"{path}: it is no regular file")


def test_a_damaged_manifest_is_written_again(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (path,) = (tmp_path / TIER).glob("*/manifest.json")
    right = path.read_bytes()
    for wrong in (b"", right + b" " * 1_000_000, right[:-2]):
        path.write_bytes(wrong)
        opened(tmp_path).close()
        assert path.read_bytes() == right


def test_ranks_that_start_at_once_have_one_key(tmp_path: Path) -> None:
    names: list[bytes] = []
    everybody = threading.Barrier(8)

    def start(number: int) -> None:
        everybody.wait()
        folder = opened(tmp_path / "new", f"rank-{number}")
        names.append(folder.name("kv", "a"))
        folder.close()

    threads = [threading.Thread(target=start, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names) == 8 and len(set(names)) == 1


def test_a_lock_that_nobody_gives_back_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "_START_SECONDS", 0.1)
    opened(tmp_path).close()
    with open(tmp_path / TIER / "sglang_hybrid.tier", "rb") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        refused(tmp_path, r"another server has locked .* for 0\.1 s")
    opened(tmp_path).close()
