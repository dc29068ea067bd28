"""SGLang's hashes of pages, by which files on disk and KV events name them."""

from __future__ import annotations

from textwrap import shorten
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.utils import get_hash_str

from sglang_hybrid.serving.startup import StartupError

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def compile_hashes(server_args: ServerArgs) -> None:
    """Compile them before the server takes requests, where any flag wants them.

    SGLang compiles them with a C++ compiler when the first page is named, once for each folder that
    it is installed in (mem_cache/cpp_utils/native_hash.py): ten seconds, for which its scheduler
    would wait. Raises StartupError where they cannot be compiled.
    """
    flags = ("hicache_storage_backend", "kv_events_config")
    wanting = [f"--{name.replace('_', '-')}" for name in flags if getattr(server_args, name, None)]
    if not wanting:
        return
    try:
        get_hash_str([0])
    except RuntimeError as error:
        why = shorten(str(error.__cause__ or error), 100, placeholder=" ...")
        raise StartupError(
            f"{wanting[0]} needs SGLang's hashes of pages, which cannot be compiled ({why}); "
            "install a C++ compiler and OpenSSL's headers (g++, libssl-dev)."
        ) from error
