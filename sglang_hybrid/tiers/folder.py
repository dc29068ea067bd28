"""The folder of the disk tier: who may read it, whose objects are in it, and who writes there now.

    FOLDER/                     mode 0700
      key                       a secret, from which names of objects are made
      IDENTITY/                 objects of one model and one way to store them
        manifest.json           what IDENTITY is the hash of, for people
        rank-0-0-0-0/           objects of one rank (tensor, pipeline, context, replica)
          lock                  held by the server that uses them
          ab/ab12....safetensors
        schemas/              in the place of a rank's folder: what clients declared (prompts/)
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
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

KEY_VARIABLE = "SGLANG_HYBRID_TIER_KEY"
"""A secret that several servers' folders share, or that is not to lie in the folder itself."""

SCHEMAS = "schemas"
"""The folder, in the place of a rank's, of what clients declared; it is never removed for room."""

_KEY_BYTES = 32
_KEY, _LOCK, _MANIFEST = "key", "lock", "manifest.json"


class FolderError(Exception):
    """A folder that cannot be used; the sentence says why and what to do."""


def disk_folder(named: str, extra_config: Mapping[str, Any]) -> Path:
    """The folder `named`, or what SGLang's own backend would be told, or a default."""
    named = (
        named
        or os.environ.get("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "")
        or extra_config.get("file_storage_path", "")
    )
    if named:
        return Path(named).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "sglang_hybrid" / "tiers"


def identity_of(facts: Mapping[str, Any]) -> str:
    """32 hex digits that differ as soon as one of the facts does."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()


class RankFolder:
    """The objects of one rank of one model. Held by one server at a time.

    Raises FolderError if it cannot be made, is somebody else's, or is in use.
    """

    def __init__(self, top: Path, facts: Mapping[str, Any], rank: str) -> None:
        self.top = top
        self.identity = identity_of(facts)
        self.path = top / self.identity / rank
        try:
            _make_private(top)
            self._secret = _secret(top / _KEY)
            _make_private(self.path.parent)
            _describe(self.path.parent / _MANIFEST, facts)
            _make_private(self.path)
            self._lock = _locked(self.path / _LOCK)
        except OSError as error:
            raise FolderError(f"{top}: {error.strerror or error}") from error

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
    def held(self) -> bool:
        """Whether the folder is still the one that was opened, and not removed or replaced."""
        try:
            here, ours = os.stat(self.path / _LOCK), os.fstat(self._lock)
        except OSError:
            return False
        return (here.st_dev, here.st_ino) == (ours.st_dev, ours.st_ino)

    def files(self) -> Iterator[os.DirEntry[str]]:
        """Everything in the rank's folders but its lock; folders that go meanwhile are left out."""
        for folder in _entries(self.path):
            if folder.is_dir(follow_symlinks=False):
                yield from _entries(Path(folder.path))
            elif folder.name != _LOCK:
                yield folder

    def others(self) -> list[Path]:
        """Folders of other models or settings that no server uses, the longest unused first."""
        found = []
        for entry in _entries(self.top):
            path = Path(entry.path)
            if (
                entry.is_dir(follow_symlinks=False)
                and entry.name != self.identity
                and not (path / SCHEMAS).exists()
            ):
                with contextlib.suppress(OSError):
                    found.append((_last_used(path), path))
        return [path for _, path in sorted(found) if not _in_use(path)]

    def remove_other(self, path: Path) -> None:
        """Remove a folder that `others` named."""
        shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Let another server use the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def bytes_below(path: Path) -> int:
    """Bytes of all files in a folder; 0 if it cannot be read."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _entries(path: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            yield from entries
    except OSError:
        return


def _make_private(path: Path) -> None:
    """Make the folder for its owner alone; an existing one must be the owner's already."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise FolderError(f"{path} is no folder; name another one")
    if found.st_uid != os.geteuid():
        raise FolderError(f"{path} belongs to another user; name a folder of the server's own")
    if stat.S_IMODE(found.st_mode) != 0o700:
        if any(_entries(path)):
            raise FolderError(
                f"{path} is open to other users and not empty; name an empty folder, or chmod 700"
            )
        os.chmod(path, 0o700)


def _secret(path: Path) -> bytes:
    if given := os.environ.get(KEY_VARIABLE):
        return blake2b(given.encode(), digest_size=_KEY_BYTES).digest()
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            key = path.read_bytes()
            if len(key) == _KEY_BYTES:
                return key
            path.unlink()  # torn; what was stored under it cannot be found any more
        _create_key(path)
    raise FolderError(f"{path} cannot be written; remove it")


def _create_key(path: Path) -> None:
    """Several ranks may come at once: all use the key of the first one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(_KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)


def _describe(path: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest. It is for people: a damaged one is written again."""
    text = json.dumps(facts, sort_keys=True, indent=2, default=str) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _locked(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise FolderError(
            f"another server uses {path.parent}; give each server a folder of its own"
        ) from None
    os.utime(path)
    return descriptor


def _in_use(model: Path) -> bool:
    return any(_is_locked(lock) for lock in model.glob(f"*/{_LOCK}"))


def _is_locked(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _last_used(model: Path) -> float:
    return max((os.stat(lock).st_mtime for lock in model.glob(f"*/{_LOCK}")), default=0.0)
