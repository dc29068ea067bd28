"""Things of others in and around the disk tier's folder, and a checksum of all of them."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
from collections.abc import Callable, Collection
from pathlib import Path


def checksum(top: Path, but: Collection[Path] = ()) -> dict[str, tuple[object, ...]]:
    """Type, mode, owner, times and content of everything below a folder, by path; `but`: of which
    folders only the names of others' things in them may change.
    """
    found: dict[str, tuple[object, ...]] = {}
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if Path(folder, name) not in but]
        for name in [*folders, *files]:
            path = Path(folder, name)
            found[str(path)] = checksum_of(path)
    return found


def checksum_of(path: Path) -> tuple[object, ...]:
    status = os.lstat(path)
    kind = stat.S_IFMT(status.st_mode)
    inside = ""
    if kind == stat.S_IFLNK:
        inside = os.readlink(path)
    elif kind == stat.S_IFREG:
        inside = hashlib.sha256(path.read_bytes()).hexdigest()
    elif kind == stat.S_IFDIR:
        inside = "\0".join(sorted(os.listdir(path)))
    return (status.st_mode, status.st_uid, status.st_ino, status.st_mtime_ns, inside)


def _socket(path: Path) -> None:
    made = socket.socket(socket.AF_UNIX)
    descriptor = os.open(path.parent, os.O_PATH)  # names of sockets must be short
    made.bind(f"/proc/self/fd/{descriptor}/{path.name}")
    made.close()
    os.close(descriptor)


def _folder(path: Path) -> None:
    (path / "deeper").mkdir(parents=True)
    (path / "deeper" / "notes").write_text("notes of somebody")
    os.chmod(path, 0o755)


def makers(outside: Path) -> dict[str, Callable[[Path], object]]:
    """Things that somebody may put somewhere, by names. outside: a folder of theirs."""
    photo = outside / "photo"
    return {
        "file": lambda path: path.write_text("somebody's file"),
        "empty file": lambda path: path.touch(),
        "folder": _folder,
        "empty folder": lambda path: path.mkdir(mode=0o755),
        "link to a file": lambda path: path.symlink_to(photo),
        "link to a folder": lambda path: path.symlink_to(outside),
        "link to nothing": lambda path: path.symlink_to(outside / "gone"),
        "pipe": lambda path: os.mkfifo(path),
        "socket": _socket,
    }


def outside(path: Path) -> Path:
    """A folder of somebody, elsewhere."""
    path.mkdir()
    (path / "photo").write_bytes(b"\xff\xd8" * 500)
    (path / "ab").mkdir()
    return path


def home(path: Path, elsewhere: Path) -> Path:
    """A folder in use, with what people have there, and what resembles what the tier writes."""
    path.mkdir(mode=0o755)
    for name, make in makers(elsewhere).items():
        make(path / name)
    for name in (".ssh/id_rsa", "photos/a/1.jpg", "projects/x/main.py", "schemas/mine.json"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(f"content of {name}")
    for name in ("key", "lock", "manifest.json", "sglang_hybrid.tier", "rank-0-0-0-0.uses"):
        (path / name).write_text("not what it seems")
    earlier = path / ("0123456789abcdef" * 2)  # as earlier versions made them
    (earlier / "rank-0-0-0-0" / "ab").mkdir(parents=True)
    (earlier / "rank-0-0-0-0" / "lock").touch()
    (earlier / "manifest.json").write_text(json.dumps({"weights": "1"}))
    (earlier / "rank-0-0-0-0" / "ab" / f"{'ab' * 16}-1.safetensors").write_bytes(bytes(1_000))
    return path


def a_pipe(path: Path) -> None:
    """A pipe in the place of a file."""
    path.unlink()
    os.mkfifo(path)


def a_link(path: Path) -> None:
    """A link to a file in its place."""
    os.replace(path, path.with_name("there"))
    path.symlink_to("there")
