"""What SGLang loads in every process it starts (entry points, pyproject.toml)."""

import importlib.metadata
import logging
import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_hybrid import SGLANG_VERSION, platforms
from sglang_hybrid.core.records.tenant_names import KEY_VARIABLE
from sglang_hybrid.hooks import patching
from sglang_hybrid.serving import log_lines, warm_up
from sglang_hybrid.serving.config import BACKEND, CPU_ATTENTION, HybridConfig

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


class UnsupportedSGLang(RuntimeError):
    """The installed SGLang is not the release that this package extends."""


def check_sglang_version() -> None:
    """Raise `UnsupportedSGLang` unless `SGLANG_VERSION` is installed."""
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedSGLang(
            f"sglang is not installed; install sglang=={SGLANG_VERSION} "
            "(scripts/quickstart.sh does, on a machine with or without a GPU)."
        ) from None
    if found != SGLANG_VERSION:
        raise UnsupportedSGLang(
            f"sglang {found} is installed, but this release of sglang_hybrid extends "
            f"{SGLANG_VERSION} only; install sglang=={SGLANG_VERSION}."
        )


def activate() -> str | None:
    """Name the class of the platform that this package brings, or None (entry point group
    `sglang.srt.platforms`).

    SGLang calls this before it imports any module that we patch or hook, whichever program started
    it, so this is also where both are installed. Where that cannot be, the process ends with a
    sentence: SGLang goes on after an exception.
    """
    try:
        patching.install()
    except patching.PatchError as error:
        raise SystemExit(f"sglang_hybrid: {error}") from None
    warm_up.register_on_import()
    return platforms.activate()


def register() -> None:
    """Register everything we add to SGLang (entry point group `sglang.srt.plugins`). Called once in
    each of its processes, which ends with a sentence where that cannot be.
    """
    try:
        check_sglang_version()
        patching.install()
        HybridConfig.from_environment()  # raises where a setting is wrong
    except (UnsupportedSGLang, patching.PatchError) as error:
        raise SystemExit(f"sglang_hybrid: {error}") from None
    except ValueError as error:
        raise SystemExit(str(error)) from None
    log_lines.install()
    # All ranks and HTTP processes, which are started after this, give a tenant the same name.
    os.environ.setdefault(KEY_VARIABLE, secrets.token_hex(16))
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.platforms import current_platform

    from sglang_hybrid.serving.processes import ignore_signals_for_the_first_process

    ignore_signals_for_the_first_process()
    register_radix_cache_backend(BACKEND, _build_cache)
    bring_storage()
    _settle_states()
    if type(current_platform).__module__ == platforms.CPU_PLATFORM.rpartition(".")[0]:
        from sglang_hybrid.platforms import images

        images.register()
        _use_our_attention_on_cpu()


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
        "file", "sglang_hybrid.storage.file_backend", "FileBackend"
    )
    noisy.disabled = before


def _use_our_attention_on_cpu() -> None:
    """SGLang's CPU defaults name Intel's AMX kernels, which this platform does not need."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if CPU_ATTENTION not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([CPU_ATTENTION])

    @register_attention_backend(CPU_ATTENTION)
    def build_attention(model_runner: "ModelRunner") -> "AttentionBackend":
        from sglang_hybrid.platforms.attention import HybridCpuAttnBackend

        return HybridCpuAttnBackend(model_runner)

    @register_resolution_hook("handle_cpu_backends")
    def handle_cpu_backends(
        server_args: "ServerArgs", previous: Callable[["ServerArgs"], None]
    ) -> None:
        if resolving_view(server_args).attention_backend is None:
            declare_resolution(server_args, "sglang_hybrid", attention_backend=CPU_ATTENTION)

    @register_resolution_hook("handle_page_major_kv_layout")
    def handle_page_major_kv_layout(
        server_args: "ServerArgs", previous: Callable[["ServerArgs"], None]
    ) -> None:
        """The unified pool's rows lie apart, which SGLang allows backends of its own only."""
        if resolving_view(server_args).enable_unified_memory:
            declare_resolution(server_args, "sglang_hybrid", enable_page_major_kv_layout=True)


def _settle_states() -> None:
    """Steps of SGLang's resolution settle how states are kept and what room they get."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    @register_resolution_hook("handle_missing_default_values")
    def handle_missing_default_values(
        server_args: "ServerArgs", previous: Callable[["ServerArgs"], None]
    ) -> None:
        from sglang_hybrid.cache.resolution import take_one_memory

        previous(server_args)
        take_one_memory(server_args)

    @register_resolution_hook("handle_mamba_backend")
    def handle_mamba_backend(
        server_args: "ServerArgs", previous: Callable[["ServerArgs"], None]
    ) -> None:
        from sglang_hybrid.cache.resolution import settle_states

        previous(server_args)
        settle_states(server_args)
