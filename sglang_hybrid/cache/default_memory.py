"""`--hybrid-memory auto` on a GPU: one memory where scripts/gpu_check.sh has passed on such a GPU
(serving/gpu_verdict.py) and with such flags, two pools elsewhere. A line of the log says which.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.kv_cache_hook import handle_unified_memory_pool
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.configs.hybrid_arch import mambaish_config

from sglang_hybrid.cache.resolution import declared_by, why_not_in_unified_pool
from sglang_hybrid.checkpoints.support import plans_checkpoints
from sglang_hybrid.serving.config import BACKEND, HybridConfig
from sglang_hybrid.serving.devices import serves_on_cpu
from sglang_hybrid.serving.flag_values import Memory
from sglang_hybrid.serving.gpu_verdict import find_verdict

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

BY_DEFAULT = "sglang_hybrid: --hybrid-memory auto"
"""The name under which one memory is declared that nobody asked for."""

CHECKED_KV = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
"""Types of KV that SGLang's unified pool has."""


def choose_memory(server_args: ServerArgs) -> None:
    """Declare one memory where the check has passed. To be called when the device and the model are
    known, before memory is divided and before handlers of single models read the flag.
    """
    view = resolving_view(server_args)
    is_auto = HybridConfig.from_environment().hybrid_memory is Memory.AUTO
    is_ours = view.radix_cache_backend == BACKEND and not view.disable_radix_cache
    if not (is_auto and is_ours) or view.enable_unified_memory or serves_on_cpu():
        return
    if mambaish_config(model_config_of(server_args)) is None:
        return
    if why := _why_two_pools(server_args):
        _say_two_pools(why)
    else:
        declare_resolution(server_args, BY_DEFAULT, enable_unified_memory=True)


def keep_where_sglang_can(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """SGLang's own conditions on its unified pool, when attention backends are resolved. One memory
    that nobody asked for gives way to them; one that was asked for ends the start.
    """
    if declared_by(server_args, "enable_unified_memory") != {BY_DEFAULT}:
        previous(server_args)
        return
    try:
        previous(server_args)
        handle_unified_memory_pool(server_args)
    except (AssertionError, ValueError) as error:
        declare_resolution(
            *(server_args, BY_DEFAULT),
            enable_unified_memory=False,
            enable_page_major_kv_layout=False,
        )
        _say_two_pools(f"by SGLang, {str(error).partition(chr(10))[0].rstrip('.')}")
        return
    logger.info(
        "sglang_hybrid: KV and states share one memory, SGLang's unified pool: that was checked on "
        "%s with SGLang %s; --hybrid-memory split leaves it out.",
        *(_gpu_name(), version("sglang")),
    )


def _say_two_pools(why: str) -> None:
    logger.info("sglang_hybrid: KV and states have a pool each: %s.", why)


def _why_two_pools(server_args: ServerArgs) -> str:
    """The reason why nothing but a flag makes them one; "" if there is none."""
    view = resolving_view(server_args)
    several = {
        "prefills do not leave the states that we want": not plans_checkpoints(view),
        "--mamba-full-memory-ratio divides them": view.mamba_full_memory_ratio is not None,
        "several machines have to divide alike": view.nnodes > 1,
        "one memory was not checked with drafts": view.speculative_algorithm is not None,
        "--hybrid-device-codec needs them": (
            HybridConfig.from_environment().hybrid_device_codec.may_change
        ),
        f"one memory has no KV of type {view.kv_cache_dtype}": (
            view.kv_cache_dtype not in CHECKED_KV
        ),
        "--enable-kv-cache-sharding needs them": view.enable_kv_cache_sharding,
    }
    if why := next((why for why, is_so in several.items() if is_so), ""):
        return why
    flag, why = why_not_in_unified_pool(server_args)
    return f"one memory cannot be with {flag}: {why}" if flag else _why_unchecked(view.device)


def _why_unchecked(device: str) -> str:
    """The reason why this machine's GPUs are not known to serve one memory; "" if they are."""
    gpu = _gpu_name() if device == "cuda" else ""
    if not gpu:
        return "one memory is checked on machines with one kind of NVIDIA GPU"
    here = f"{gpu} with SGLang {version('sglang')}"
    verdict = find_verdict(gpu, version("sglang"))
    if verdict is None:
        return f"one memory was not checked on {here}; scripts/gpu_check.sh does that"
    if not verdict.passed:
        wrong = ", ".join(verdict.wrong) or "something"
        return f"scripts/gpu_check.sh found {wrong} wrong with one memory on {here}"
    return ""


def _gpu_name() -> str:
    """The name of all GPUs of this machine; "" where they differ, or there are none."""
    import torch

    names = {torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())}
    return names.pop() if len(names) == 1 else ""
