"""Objects of other models and settings in the disk tier's folder, which are removed for room.

Nothing is removed but what was listed, and what says that it is ours:

1. a folder is an identity whose manifest can be read and has that identity;
2. nobody holds the lock of any rank in it;
3. a file has a name of our form, and its header says the identity; files that were not finished
   and have no header yet, locks and the manifest have the name alone;
4. a folder is removed when it is empty.

All else stays where it is, and so do the folders that it is in.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_hybrid.core.own_files import (
    finished_name,
    identity_of,
    open_folder,
    open_regular,
    read_file,
    remove_regular,
)
from sglang_hybrid.extensions.disk.object_file import has_identity, is_object_path

LOCK, MANIFEST = "lock", "manifest.json"

_IDENTITY = re.compile(r"[0-9a-f]{32}")
_RANK = re.compile(r"rank(-[0-9]+)+")
_OBJECTS = re.compile(r"[0-9a-f]{2}")
_LONGEST_MANIFEST = 1 << 20


@dataclass(frozen=True)
class OtherModel:
    """identity: the name of its folder. bytes: of files whose names are those of its objects.
    last_use: when a server opened it last, in seconds since the epoch.
    """

    identity: str
    bytes: int
    last_use: float


def unused_models(tier: Path) -> list[str]:
    """Identities with objects that no server uses now. The caller holds the tier's lock, without
    which a starting server might find a lock taken that is only looked at here. Raises OSError.
    """
    found = []
    with open_folder(tier) as top:
        for name in filter(_IDENTITY.fullmatch, os.listdir(top)):
            with contextlib.suppress(OSError), _claimed(top, name):
                found.append(name)
    return found


def measure(tier: Path, identity: str) -> OtherModel:
    """The bytes and the last use of an identity's files. Raises OSError."""
    total, last_use = 0, 0.0
    with open_folder(tier) as top, open_folder(identity, top) as model:
        for name in _ranks(model):
            with open_folder(name, model) as rank:
                last_use = max(last_use, os.lstat(LOCK, dir_fd=rank).st_mtime)
                for folder, file in _object_files(rank):
                    with contextlib.suppress(OSError):
                        total += os.lstat(file, dir_fd=folder).st_size
    return OtherModel(identity, total, last_use)


def remove_model(tier: Path, identity: str) -> tuple[int, int]:
    """Remove the objects of an identity, and what was kept beside them. The caller holds the tier's
    lock. Returns files and bytes that were removed. Raises OSError if a server uses the identity by
    now, or if it is none.
    """
    removed = []
    with open_folder(tier) as top:
        with _claimed(top, identity) as model:
            for name in _ranks(model):
                with open_folder(name, model) as rank:
                    for folder, file in _object_files(rank):
                        if _is_unfinished(file) or has_identity(file, identity, folder):
                            with contextlib.suppress(OSError):
                                removed.append(remove_regular(file, folder))
                    _remove_empty_folders(rank)
                    _remove_last(LOCK, rank)
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=model)
            for file in filter(_is_file_of_rank, os.listdir(model)):
                if _is_unfinished(file) or has_identity(file, identity, model):
                    with contextlib.suppress(OSError):
                        removed.append(remove_regular(file, model))
            _remove_last(MANIFEST, model)
        with contextlib.suppress(OSError):
            os.rmdir(identity, dir_fd=top)
    return len(removed), sum(removed)


@contextlib.contextmanager
def _claimed(top: int, identity: str) -> Iterator[int]:
    """The folder of an identity, with the locks of all its ranks. Raises OSError if it has another
    manifest, no ranks, or a rank that is in use or has no lock.
    """
    with contextlib.ExitStack() as held:
        model = held.enter_context(open_folder(identity, top))
        ranks = _ranks(model)
        if not ranks or _manifest_identity(model) != identity:
            raise OSError(f"{identity} is no folder of objects")
        for name in ranks:
            with open_folder(name, model) as rank:
                lock = open_regular(LOCK, os.O_RDWR, rank)
            held.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield model


def _manifest_identity(model: int) -> str:
    try:
        return identity_of(json.loads(read_file(MANIFEST, _LONGEST_MANIFEST, model)))
    except (OSError, ValueError, RecursionError):
        return ""


def _ranks(model: int) -> list[str]:
    return [name for name in os.listdir(model) if _RANK.fullmatch(name)]


def _object_files(rank: int) -> Iterator[tuple[int, str]]:
    """Folder and name of everything whose name is that of an object's file, finished or not."""
    for name in filter(_OBJECTS.fullmatch, os.listdir(rank)):
        with contextlib.suppress(OSError), open_folder(name, rank) as folder:
            for file in os.listdir(folder):
                if is_object_path(name, file):
                    yield folder, file


def _is_unfinished(name: str) -> bool:
    return finished_name(name) != name


def _is_file_of_rank(name: str) -> bool:
    rank, _, suffix = finished_name(name).rpartition(".")
    own = suffix in ("learnt", "uses") and _RANK.fullmatch(rank) is not None
    return own or (_is_unfinished(name) and finished_name(name) == MANIFEST)


def _remove_empty_folders(rank: int) -> None:
    for name in filter(_OBJECTS.fullmatch, os.listdir(rank)):
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=rank)


def _remove_last(name: str, folder: int) -> None:
    """Remove a file if nothing else is left in its folder."""
    with contextlib.suppress(OSError):
        if os.listdir(folder) == [name]:
            remove_regular(name, folder)
