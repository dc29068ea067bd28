"""The one folder of ours in the folder that the operator names for the disk tier."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from sglang_hybrid.core.own_files import lock_within, open_regular

TIER = "sglang_hybrid-tier"
"""The folder of ours in the one that the operator names."""

_MARKER = "sglang_hybrid.tier"
_MARK = b"""sglang_hybrid.tiers/2
The disk tier of sglang_hybrid keeps its files in this folder.
Remove the whole folder to forget them.
"""


class FolderError(Exception):
    """A folder that cannot be used; the sentence says why and what to do."""


def make_tier(top: Path) -> Path:
    """Make our folder in `top`, where no other user may replace it. Raises FolderError, OSError."""
    try:
        top.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise FolderError(f"{top} is no folder; name another one") from None
    top = top.resolve()
    found = os.stat(top)
    if found.st_uid not in (0, os.geteuid()):
        raise FolderError(
            f"{top} belongs to another user, who could replace what is kept there; name a folder "
            "of the server's own"
        )
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise FolderError(
            f"{top} may be written by all users, who could replace what is kept there; name a "
            "folder of the server's own"
        )
    make_private(top / TIER)
    return top / TIER


def is_tier(path: Path) -> bool:
    """True if the folder is one that a disk tier has marked as its own."""
    return (path / _MARKER).is_file()


def make_private(path: Path) -> None:
    """Make the folder for its owner alone; an existing one must be the owner's already."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise FolderError(f"{path} is no folder; move it away, or name another folder")
    if found.st_uid != os.geteuid():
        raise FolderError(f"{path} belongs to another user; name another folder")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise FolderError(
            f"{path} is open to other users; if nobody else has read it or written there, "
            "chmod 700 it, otherwise remove it"
        )


@contextlib.contextmanager
def tier_lock(tier: Path, seconds: float) -> Iterator[None]:
    """Hold the lock of a folder of ours, which is marked if it is empty. Raises FolderError if it
    is not ours, or if somebody holds the lock for longer; OSError.
    """
    names = os.listdir(tier)
    if names and _MARKER not in names:
        raise FolderError(
            f"{tier} is not empty and has no file {_MARKER}, so it is not the disk tier's; move it "
            "away, or name another folder"
        )
    marker = open_regular(tier / _MARKER, os.O_RDWR | os.O_CREAT)
    try:
        if not lock_within(marker, seconds):
            raise FolderError(
                f"another server has locked {tier} for {seconds:g} s; start again when it is "
                "done, or name another folder"
            )
        content = os.pread(marker, len(_MARK) + 1, 0)
        if not content and os.listdir(tier) == [_MARKER]:
            os.pwrite(marker, _MARK, 0)
            os.fsync(marker)
        elif content != _MARK:
            raise FolderError(
                f"{tier / _MARKER} is not what this version of sglang_hybrid writes; move {tier} "
                "away, or name another folder"
            )
        yield
    finally:
        os.close(marker)
