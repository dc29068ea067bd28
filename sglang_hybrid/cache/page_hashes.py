"""SGLang's hashes of pages, by which files on disk and KV events name them."""

from __future__ import annotations

import logging
from hashlib import sha256
from textwrap import shorten
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.mem_cache.cpp_utils import native_hash
from sglang.srt.mem_cache.utils import get_hash_str

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

FLAGS = ("hicache_storage_backend", "kv_events_config")
"""SGLang's flags that need these hashes."""


def compile_hashes(server_args: ServerArgs) -> None:
    """Compile them before the server takes requests, where any flag wants them.

    SGLang compiles them with a C++ compiler when the first page is named, once for each folder that
    it is installed in (mem_cache/cpp_utils/native_hash.py): ten seconds, for which its scheduler
    would wait. Where there is no compiler, Python stands for them, and the log says so.
    """
    if not any(getattr(server_args, flag, None) for flag in FLAGS):
        return
    try:
        get_hash_str([0])
    except RuntimeError as error:
        why = shorten(str(error.__cause__ or error), 100, placeholder=" ...")
        logger.warning(
            "sglang_hybrid: SGLang's hashes of pages cannot be compiled (%s); Python stands for "
            "them. A C++ compiler and OpenSSL's headers (g++, libssl-dev) make them faster.",
            why,
        )
        native_hash._load_native_hash_module = lambda: SimpleNamespace(get_hash=plain_hash)


def plain_hash(
    ids: Any, length: int, width: int, is_bigram: bool, prior: bytes | None, page: int | None
) -> str | list[str]:
    """The result of SGLang's C++ function `get_hash` (mem_cache/cpp_utils/hash_binding.cpp), in
    hex.

    ids: an array of token ids, `width` for each of `length` units, or of length + 1 ids whose pairs
    of neighbours are the units (`is_bigram`). page: units of a page; None: all are one page, whose
    hash alone is returned. The hash of a page is SHA-256 over that of the page before it (`prior`
    for the first one) and its ids: four bytes each, or a byte 0xff and eight bytes each where one
    needs more than four; little-endian.
    """
    numbers = np.asarray(ids).astype(np.uint64)
    if is_bigram:
        units = np.column_stack((numbers[:length], numbers[1 : length + 1]))
    else:
        units = numbers[: length * width].reshape(length, width)
    found = []
    for start in range(0, length, page) if page else (0,):
        part = units[start : start + page] if page else units
        is_wide = bool((part >> np.uint64(32)).any())
        said = b"\xff" + part.tobytes() if is_wide else part.astype(np.uint32).tobytes()
        prior = sha256((prior or b"") + said).digest()
        found.append(prior.hex())
    return found if page else found[0]
