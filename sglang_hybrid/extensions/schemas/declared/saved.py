"""Schemas on disk, so that they are there again after a restart (with the disk tier).

    FOLDER/sglang_hybrid-tier/IDENTITY/schemas/    of the disk tier (disk/folder.py), mode 0700
      3fa0.../          of one tenant; the name is a keyed hash of its extra key and salt
        91bc....json    one schema; the name is a keyed hash of the schema's

A file says neither whose it is nor needs to: a schema is found when its tenant asks for it. Nothing
that goes wrong with the disk reaches a client; the schema is then in memory alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from sglang_hybrid.core.own_files import finished_name, read_file, remove, write_file
from sglang_hybrid.extensions.disk.folder import SCHEMAS, RankFolder, disk_folder
from sglang_hybrid.extensions.disk.tier_folder import FolderError
from sglang_hybrid.extensions.schemas.declared.xml import MOST_BYTES
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import SHARED
from sglang_hybrid.serving.tenants import Tenant

logger = logging.getLogger(__name__)

SUFFIX = ".json"

_PATH = re.compile(r"[0-9a-f]{32}/[0-9a-f]{32}" + re.escape(SUFFIX))

MOST_FILE_BYTES = 6 * MOST_BYTES + 1_024
"""Bytes of one file: JSON may write a character of a schema as six."""


class SavedFile(msgspec.Struct, forbid_unknown_fields=True):
    """A schema on disk. mark: a keyed hash of where it lies and of all else, 32 hex digits."""

    name: str
    pml: str
    mark: str


class SavedSchemas:
    """The schemas of one server. folder: held by this process.

    What is found at the start and is no schema, or damaged, stays there and is ignored.
    waiting_bytes: of schemas whose tenants have not come yet.
    """

    def __init__(self, folder: RankFolder) -> None:
        self._folder = folder
        self._waiting: dict[str, dict[str, str]] = {}
        self.waiting_bytes = 0
        self._read_all()

    @property
    def waiting_count(self) -> int:
        """The number of schemas whose tenants have not come yet."""
        return sum(map(len, self._waiting.values()))

    def take(self, tenant: Tenant) -> dict[str, str]:
        """Markup by name of a tenant's schemas that were there at the start; once."""
        found = self._waiting.pop(self._tenant(tenant), {}) if self._waiting else {}
        self.waiting_bytes -= _bytes(found.values())
        return found

    def save(self, tenant: Tenant, name: str, pml: str) -> bool:
        """Write a schema, in place of the tenant's earlier one of its name; whether it was."""
        owner = self._tenant(tenant)
        path = self._path(owner, name)
        file = SavedFile(name, pml, self._mark(owner, name, pml))
        try:
            with contextlib.suppress(FileExistsError):
                path.parent.mkdir(mode=0o700)
            write_file(path, msgspec.json.encode(file))
        except OSError as error:
            remove(path)  # the earlier one must not come back
            logger.warning(
                "sglang_hybrid: a schema cannot be written to %s (%s); it is in memory alone.",
                self._folder.path,
                error.strerror,
            )
            return False
        return True

    def delete(self, tenant: Tenant, name: str) -> None:
        """Remove a schema, if it is there."""
        path = self._path(self._tenant(tenant), name)
        remove(path)
        with contextlib.suppress(OSError):
            path.parent.rmdir()  # if it was the last one

    def close(self) -> None:
        """Let another server use the folder."""
        self._folder.close()

    def _read_all(self) -> None:
        ignored: list[str] = []
        for entry in self._folder.files():
            path = Path(entry.path)
            owner, finished = path.parent.name, finished_name(path.name)
            if _PATH.fullmatch(f"{owner}/{finished}") and finished != path.name:
                remove(path)  # it is half written
                continue
            try:
                file = msgspec.json.decode(read_file(path, MOST_FILE_BYTES), type=SavedFile)
                if path != self._path(owner, file.name):
                    raise ValueError("it is not where it was written, or was with another key")
                if file.mark != self._mark(owner, file.name, file.pml):
                    raise ValueError("it is damaged")
                self._waiting.setdefault(owner, {})[file.name] = file.pml
            except (OSError, ValueError, RecursionError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                ignored.append(f"{path.name}: {why}")
        self.waiting_bytes = sum(_bytes(own.values()) for own in self._waiting.values())
        if ignored:
            logger.warning(
                "sglang_hybrid: %d files in %s are no whole schemas of this server and are ignored "
                "(the first: %s).",
                len(ignored),
                self._folder.path,
                ignored[0],
            )

    def _path(self, owner: str, name: str) -> Path:
        return self._folder.path / owner / (self._folder.name("schema", name).hex() + SUFFIX)

    def _tenant(self, tenant: Tenant) -> str:
        return self._folder.name("tenant", json.dumps(tenant)).hex()

    def _mark(self, owner: str, name: str, pml: str) -> str:
        return self._folder.name("file", json.dumps([owner, name, pml])).hex()


def _bytes(texts: Iterable[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def saved_schemas(server_args: Any) -> SavedSchemas | None:
    """The schemas of a server with a folder for its disk tier, or None.

    server_args: SGLang's.
    """
    if not server_args.enable_hierarchical_cache or server_args.hicache_storage_backend != "file":
        return None
    folder = HybridConfig.from_environment().hybrid_disk_folder
    if folder.startswith(SHARED):
        return None
    facts = {"schemas": 1, "model": server_args.model_path, "revision": server_args.revision}
    try:
        extra = json.loads(server_args.hicache_storage_backend_extra_config or "{}")
    except ValueError:
        extra = {}
    try:
        top = disk_folder(folder, extra)
        return SavedSchemas(RankFolder(top, facts, SCHEMAS))
    except (FolderError, OSError) as error:
        logger.warning("sglang_hybrid: schemas are in memory alone: %s.", error)
        return None
