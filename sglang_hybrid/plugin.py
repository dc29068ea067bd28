"""The plugin that SGLang loads in every process it starts (entry points, pyproject.toml)."""

import logging
import multiprocessing
import os
import secrets
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import wrapt

from sglang_hybrid.core.extensions import GUARD, OFF, extension, guard, has_guard
from sglang_hybrid.core.records.tenant_names import KEY_VARIABLE
from sglang_hybrid.hooks import patching
from sglang_hybrid.hooks.hook import HookError
from sglang_hybrid.hooks.sources import UnsupportedSGLang, check_sglang_version
from sglang_hybrid.serving import log_lines
from sglang_hybrid.serving.config import BACKEND, HybridConfig
from sglang_hybrid.serving.devices import CPU_PLATFORM, is_ours, serves_on_cpu

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


@cache
def why_not() -> str | None:
    """Put patches and hooks in place for what this process will import; a sentence where that
    cannot be, or is not wanted. Then nothing of SGLang is changed.
    """
    wanted = os.environ.get("SGLANG_PLUGINS")
    if wanted and "sglang_hybrid" not in map(str.strip, wanted.split(",")):
        return f"SGLANG_PLUGINS is {wanted!r}."
    try:
        check_sglang_version()
        patching.verify()
        patching.install()
    except (UnsupportedSGLang, patching.PatchError, HookError) as error:
        return str(error)
    return None


def activate() -> str | None:
    """Name the class of the platform that this package brings, or None (entry point group
    `sglang.srt.platforms`).

    SGLang calls this before it imports any module that we patch or hook, whichever program started
    it, so this is also where both are installed.
    """
    if why_not() is not None:
        return None
    wrapt.register_post_import_hook(_add_warm_up, "sglang.srt.entrypoints.warmup")
    if not is_ours():
        return None
    extension("cpu.activation").activate()
    return CPU_PLATFORM


def _add_warm_up(module: ModuleType) -> None:
    """SGLang knows our warm-up by its name, in each process that has warm-ups."""
    from sglang_hybrid.serving import warm_up

    module.warmup(warm_up.NAME)(warm_up.send_hits)


def register() -> None:
    """Register everything we add to SGLang (entry point group `sglang.srt.plugins`). Called once in
    each of its processes. SGLang goes on as if we were not installed where we cannot extend it: our
    own launcher has refused to start before (`launch_server.py`). A wrong setting ends the process
    with a sentence.
    """
    why = why_not()
    if why is not None:
        if multiprocessing.parent_process() is None:
            logger.warning("sglang_hybrid does nothing here: %s", why)
        return
    try:
        HybridConfig.from_environment()
    except ValueError as error:
        raise SystemExit(str(error)) from None
    lacking = patching.lacking()
    if lacking and multiprocessing.parent_process() is None:
        logger.warning(
            "sglang_hybrid: not available beside this SGLang: %s",
            "; ".join(f"{need.what} ({misfit.piece})" for need, misfit in lacking.items()),
        )
    if not has_guard() and multiprocessing.parent_process() is None:
        logger.warning(
            "sglang_hybrid: the guard is off (%s=%s): beside what concerns the cache and its "
            "tenants, requests are checked and done as by SGLang alone.",
            *(GUARD, OFF),
        )
    log_lines.install()
    # All ranks and HTTP processes, which are started after this, give a tenant the same name.
    os.environ.setdefault(KEY_VARIABLE, secrets.token_hex(16))
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    if (processes := guard("processes")) is not None:
        processes.ignore_signals_for_the_first_process()
    register_radix_cache_backend(BACKEND, _build_cache)
    bring_storage()
    _resolve_states()
    if serves_on_cpu():
        extension("cpu.activation").register()


def _build_cache(context: "TreeCacheBuildContext") -> "UnifiedRadixCache":
    """`--radix-cache-backend hybrid`. The cache is loaded in the processes that have one."""
    from sglang_hybrid.cache.factory import build_cache

    return build_cache(context)


def bring_storage() -> None:
    """SGLang builds our store for `--hicache-storage-backend file`, and loads it then."""
    from sglang.srt.mem_cache.storage import backend_factory

    noisy = backend_factory.logger  # it warns of every replacement, in every process
    noisy.disabled, before = True, noisy.disabled
    backend_factory.StorageBackendFactory.register_backend(
        "file", "sglang_hybrid.extensions.disk.file_backend", "FileBackend"
    )
    noisy.disabled = before


def _resolve_states() -> None:
    """Steps of SGLang's resolution settle how states are kept and what room they get."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    @register_resolution_hook("handle_platform_defaults")
    def handle_platform_defaults(
        server_args: "ServerArgs", previous: Callable[["ServerArgs"], None]
    ) -> None:
        from sglang_hybrid.cache.memory_choice import choose_one_memory
        from sglang_hybrid.hooks.needs import Need

        previous(server_args)
        misfit = patching.lacking().get(Need.UNIFIED_MEMORY)
        choose_one_memory(server_args, misfit.why if misfit else "")

    @register_resolution_hook("handle_page_major_kv_layout")
    def handle_page_major_kv_layout(
        server_args: "ServerArgs", previous: Callable[["ServerArgs"], None]
    ) -> None:
        from sglang_hybrid.cache.memory_choice import fall_back_to_two_pools

        fall_back_to_two_pools(server_args, previous)

    @register_resolution_hook("handle_mamba_backend")
    def handle_mamba_backend(
        server_args: "ServerArgs", previous: Callable[["ServerArgs"], None]
    ) -> None:
        from sglang_hybrid.cache.resolution import resolve_state_flags
        from sglang_hybrid.hooks import needs

        previous(server_args)
        needs.refuse(patching.lacking(), server_args)
        resolve_state_flags(server_args)
