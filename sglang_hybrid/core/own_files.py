"""Reads, writes and removes files of ours in folders that may hold other people's files, too.

Only regular files are opened, replaced and removed: a link, a pipe, a device or a folder is
somebody else's. Folders are opened one at a time, by descriptor: no link is followed, and no mount
is crossed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

UNFINISHED = f".{secrets.token_hex(4)}.tmp"
"""End of the names under which this process writes files."""

OWN_FOLDER = "sglang_hybrid"
"""The name of ours among the user's folders of cached files."""

_UNFINISHED_NAME = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp")


class ForeignFile(OSError):
    """Something that is not ours has the name of a file or folder of ours; `strerror` says what."""


def own_caches() -> Path:
    """Our folder among the user's cached files: below `XDG_CACHE_HOME`, or below `.cache` at home.
    It need not exist. Raises RuntimeError where the user has no home.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / OWN_FOLDER


def check_owner(path: Path, others: int = stat.S_IWGRP | stat.S_IWOTH) -> None:
    """Raises PermissionError unless `path`, which may be a link, is this user's or root's and has
    none of the bits `others`.
    """
    found = path.lstat()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & others:
        raise PermissionError(
            f"another user may write {path}, so it is not used; remove it, or set XDG_CACHE_HOME"
        )


def lock_within(file: int | IO[str], seconds: float) -> bool:
    """Lock an open file for this process alone; False if another one holds it for so long."""
    ends = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= ends:
                return False
            time.sleep(0.01)


def identity_of(facts: Mapping[str, Any]) -> str:
    """32 hex digits that differ as soon as one of the facts does."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def finished_name(name: str) -> str:
    """The name that a file which `write_file` writes has at the end; other names are their own."""
    found = _UNFINISHED_NAME.fullmatch(name)
    return found[1] if found else name


def open_regular(path: Path | str, flags: int = os.O_RDONLY, folder: int | None = None) -> int:
    """The descriptor of a regular file; `folder` is one that the path begins in. Raises ForeignFile
    for a link, a pipe, a device and all else, without waiting for anybody; OSError.
    """
    with contextlib.suppress(FileNotFoundError):  # opening a device may already do something
        _demand_regular(os.lstat(path, dir_fd=folder), path)
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600, dir_fd=folder)
    try:
        _demand_regular(os.fstat(descriptor), path)
    except ForeignFile:
        os.close(descriptor)
        raise
    return descriptor


def _demand_regular(found: os.stat_result, path: Path | str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ForeignFile(errno.EINVAL, "it is no regular file", str(path))


@contextlib.contextmanager
def open_folder(path: Path | str, within: int | None = None) -> Iterator[int]:
    """The descriptor of a folder; `within` is one that the path begins in. Raises ForeignFile for a
    link, a mount, and what is no folder; OSError.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, dir_fd=within)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise ForeignFile(error.errno, "it is no folder", str(path)) from None
        raise
    try:
        if os.fstat(descriptor).st_dev != os.stat("..", dir_fd=descriptor).st_dev:
            raise ForeignFile(errno.EXDEV, "another file system is mounted there", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def read_file(path: Path | str, most: int, folder: int | None = None) -> bytes:
    """The content of a regular file. Raises OSError, also if it has more than `most` bytes."""
    with os.fdopen(open_regular(path, folder=folder), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def write_file(path: Path, content: bytes, synchronize: bool = False) -> None:
    """Write a file that is there whole or not at all: under a temporary name first.

    Without `synchronize` a power failure may leave a file that is not whole. Raises ForeignFile if
    its name is taken by something else than a regular file, or its folder is none of ours; OSError.
    The temporary file is then removed.
    """
    temporary = f".{path.name}{UNFINISHED}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open_folder(path.parent) as folder:
        with contextlib.suppress(FileNotFoundError):
            _demand_regular(os.lstat(path.name, dir_fd=folder), path)
        try:
            descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                rest = memoryview(content)
                while rest:
                    rest = rest[file.write(rest) :]
                if synchronize:
                    os.fsync(descriptor)
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise


def remove(path: Path, size: int | None = None) -> None:
    """Remove a regular file, if that can be done, and if it has this size, where one is given."""
    with contextlib.suppress(OSError), open_folder(path.parent) as folder:
        found = os.lstat(path.name, dir_fd=folder)
        if size is None or found.st_size == size:
            remove_regular(path.name, folder)


def remove_regular(name: str, folder: int) -> int:
    """Remove a regular file of a folder that is open. Returns its bytes. Raises OSError."""
    found = os.lstat(name, dir_fd=folder)
    _demand_regular(found, name)
    os.unlink(name, dir_fd=folder)
    return found.st_size
