"""The folder of the disk tier: who may read it, whose objects are in it, and who writes there now.

    FOLDER/                       named by the operator; whatever else is there stays as it is
      sglang_hybrid-tier/         mode 0700
        sglang_hybrid.tier        says that this folder is ours; its lock is held by who adds or
                                  removes an identity
        key                       a secret, from which names of objects are made
        IDENTITY.split            how memory should be divided (cache/learnt_split.py)
        IDENTITY/                 objects of one model and one way to store them
          manifest.json           what IDENTITY is the hash of
          rank-0-0-0-0/           objects of one rank (tensor, pipeline, context, replica)
            lock                  held by the server that uses them
            ab/ab12....safetensors
          schemas/                in the place of a rank's: what clients declared (prompts/)
          rank-0-0-0-0.learnt     what the cache of this rank has learnt of its traffic
          rank-0-0-0-0.uses       how often the objects of this rank were used

An identity hashes everything that the content of an object depends on, so a server with another
model, another type or another layout finds an empty folder, never an object that it would misread.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sglang_hybrid.core.own_files import (
    identity_of,
    open_regular,
    own_caches,
    read_file,
    write_file,
)
from sglang_hybrid.extensions.disk.other_models import (
    LOCK,
    MANIFEST,
    OtherModel,
    measure,
    remove_model,
    unused_models,
)
from sglang_hybrid.extensions.disk.tier_folder import (
    FolderError,
    make_private,
    make_tier,
    tier_lock,
)

KEY_VARIABLE = "SGLANG_HYBRID_TIER_KEY"
"""A secret that several servers' folders share, or that is not to lie in the folder itself."""

SCHEMAS = "schemas"
"""The folder, in the place of a rank's, of what clients declared."""

_KEY = "key"
_KEY_BYTES = 32
_START_SECONDS, _ROOM_SECONDS = 60.0, 1.0
"""Seconds that a start, and a store that wants room, waits for the tier's lock."""

_HEX = re.compile(r"[0-9a-f]+")


def disk_folder(named: str, extra_config: Mapping[str, Any]) -> Path:
    """The folder `named`, or what SGLang's own backend would be told, or a default."""
    named = (
        named
        or os.environ.get("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "")
        or extra_config.get("file_storage_path", "")
    )
    if named:
        return Path(named).expanduser().absolute()
    return own_caches() / "tiers"


class RankFolder:
    """The folder of one rank's objects of one model, below the operator's folder `top`. Its lock is
    held by one server at a time. facts: what the content of an object depends on.

    Raises FolderError if the folder cannot be made, is somebody else's, or is in use.
    """

    def __init__(self, top: Path, facts: Mapping[str, Any], rank: str) -> None:
        self.identity = identity_of(facts)
        self._kept: set[str] = set()  # other identities of which nothing could be removed
        try:
            self.tier = make_tier(top)
            self.path = self.tier / self.identity / rank
            with tier_lock(self.tier, _START_SECONDS):
                self._secret = _secret(self.tier / _KEY)
                make_private(self.path.parent)
                _describe(self.path.parent / MANIFEST, facts)
                make_private(self.path)
                self._lock = _locked(self.path / LOCK)
        except OSError as error:
            where = error.filename or top
            raise FolderError(f"{where}: {error.strerror or error}") from error

    def name(self, kind: str, key: str) -> bytes:
        """The name of an object, from which nobody without the secret can tell its key, and with
        it the text that the key is the hash of. 16 bytes.
        """
        content = f"{self.identity}\0{kind}\0{key}".encode()
        return blake2b(content, key=self._secret, digest_size=16).digest()

    def key_for(self, purpose: str) -> bytes:
        """A secret of its own for another purpose; the same for all ranks of the folder."""
        return blake2b(purpose.encode(), key=self._secret, digest_size=_KEY_BYTES).digest()

    @property
    def learnt(self) -> Path:
        """The file of what this rank's cache has learnt (`learnt_file.py`)."""
        return self.path.with_name(f"{self.path.name}.learnt")

    @property
    def uses(self) -> Path:
        """The file of how often this rank's objects were used (`uses_file.py`)."""
        return self.path.with_name(f"{self.path.name}.uses")

    @property
    def is_held(self) -> bool:
        """True if the folder is still the one that was opened, and not removed or replaced."""
        try:
            here, ours = os.stat(self.path / LOCK), os.fstat(self._lock)
        except OSError:
            return False
        return (here.st_dev, here.st_ino) == (ours.st_dev, ours.st_ino)

    def files(self) -> Iterator[os.DirEntry[str]]:
        """All entries of the rank's folder but its lock, and of folders there with names of hex
        digits, as ours have; files that others put there are among them.
        """
        for entry in _entries(self.path):
            if _HEX.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path))
            elif entry.name != LOCK:
                yield entry

    def others(self) -> list[OtherModel]:
        """Other models or settings with objects that no server uses, the longest unused first."""
        try:
            with tier_lock(self.tier, _ROOM_SECONDS):
                names = set(unused_models(self.tier))
        except (FolderError, OSError):
            return []
        found = []
        for name in names - self._kept - {self.identity}:
            with contextlib.suppress(OSError):
                found.append(measure(self.tier, name))
        return sorted(found, key=lambda model: (model.last_use, model.identity))

    def remove_other(self, other: OtherModel) -> tuple[int, int]:
        """Remove what is ours of a model that `others` named, unless a server uses it by now.
        Returns files and bytes that were removed.
        """
        files, size = 0, 0
        with (
            contextlib.suppress(FolderError, OSError),
            tier_lock(self.tier, _ROOM_SECONDS),
        ):
            files, size = remove_model(self.tier, other.identity)
            if not files:
                self._kept.add(other.identity)
        return files, size

    def close(self) -> None:
        """Give up the folder's lock, so that another server may use it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _entries(path: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            yield from entries
    except OSError:
        return


def _secret(path: Path) -> bytes:
    """The caller holds the tier's lock."""
    if given := os.environ.get(KEY_VARIABLE):
        return blake2b(given.encode(), digest_size=_KEY_BYTES).digest()
    try:
        key = read_file(path, _KEY_BYTES)
    except FileNotFoundError:
        key = secrets.token_bytes(_KEY_BYTES)
        write_file(path, key, synchronize=True)
    if len(key) != _KEY_BYTES:
        raise FolderError(
            f"{path} has {len(key)} bytes instead of {_KEY_BYTES}; put the right one there, or "
            "remove it: without it nothing is found that was stored"
        )
    return key


def _describe(path: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest, unless it is there."""
    text = json.dumps(facts, sort_keys=True, indent=2, default=str).encode() + b"\n"
    with contextlib.suppress(FileNotFoundError):
        if read_file(path, max(len(text), path.lstat().st_size)) == text:
            return
    write_file(path, text)


def _locked(path: Path) -> int:
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise FolderError(
            f"another server uses {path.parent}; give each server a folder of its own"
        ) from None
    os.utime(descriptor)
    return descriptor
