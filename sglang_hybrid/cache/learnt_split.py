"""The split of memory that a server's traffic asked for, as a file that the next server reads.

A server with two pools writes it (split_watch.py); the next one with the same model and flags
divides its memory so, unless a flag says otherwise (resolution.py). It holds sums over all
requests, and nothing of any of them.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated, Any

import msgspec

from sglang_hybrid.core.extensions import extension
from sglang_hybrid.core.own_files import (
    OWN_FOLDER,
    identity_of,
    own_caches,
    read_file,
    write_file,
)
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import SHARED

logger = logging.getLogger(__name__)

SUFFIX = ".split"
MOST_BYTES = 4_096
_FLAGS = ("model_path", "revision", "tp_size", "dp_size", "enable_dp_attention", "context_length")
"""Server arguments by which the best split may differ."""


class LearntSplit(msgspec.Struct, frozen=True):
    """states_to_kv: bytes of states for each byte of KV. hits, hits_now: shares of the prompt
    tokens of `requests` that would have been hit with it, and with the split that there was.
    """

    states_to_kv: Annotated[float, msgspec.Meta(gt=0, le=1e3)]
    hits: float
    hits_now: float
    requests: int


def split_path(server_args: Any) -> Path | None:
    """The file in which a server with these arguments (SGLang's) keeps its split: in the folder of
    its disk tier, or among the user's cached files (`own_caches`). None where several machines,
    which might differ, have to divide alike, and where there is no such folder: the user has no
    home.
    """
    if server_args.nnodes > 1:
        return None
    file = identity_of({flag: getattr(server_args, flag) for flag in _FLAGS}) + SUFFIX
    if server_args.enable_hierarchical_cache and server_args.hicache_storage_backend == "file":
        named = HybridConfig.from_environment().hybrid_disk_folder
        if not named.startswith(SHARED):
            try:
                extra = json.loads(server_args.hicache_storage_backend_extra_config or "{}")
            except ValueError:
                return None
            folder: Path = extension("disk.folder").disk_folder(named, extra)
            tier: str = extension("disk.tier_folder").TIER
            return folder / tier / file
    try:
        return own_caches() / file
    except RuntimeError:
        return None


def read_split(path: Path) -> LearntSplit | None:
    """The split that was written there; None where there is none that can be read."""
    try:
        return msgspec.json.decode(read_file(path, MOST_BYTES), type=LearntSplit)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (msgspec.DecodeError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else "its content cannot be read"
        logger.warning("sglang_hybrid: the split in %s is not used: %s.", path, why)
        return None


def write_split(path: Path, split: LearntSplit) -> None:
    """Write it: among the user's cached files, or where the disk tier has its folder."""
    try:
        if path.parent.name == OWN_FOLDER:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not extension("disk.tier_folder").is_tier(path.parent):
            return
        write_file(path, msgspec.json.encode(split))
    except OSError as error:
        logger.warning("sglang_hybrid: %s cannot be written (%s).", path, error.strerror)
