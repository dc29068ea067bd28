"""`--hybrid-memory`: KV and states share one memory, SGLang's unified pool, or have a pool each.

Under `auto` they share it where they can on the CPU platform, and on a GPU where
scripts/gpu_check.sh has passed on such a one (serving/gpu_verdict.py). A line of the log says why
they do not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.kv_cache_hook import handle_unified_memory_pool
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

from sglang_hybrid.cache.resolution import (
    OURS,
    declared_sources,
    has_states,
    why_not_in_unified_pool,
)
from sglang_hybrid.cache.state_slots.spill_choice import PLAIN_KV
from sglang_hybrid.checkpoints.support import plans_checkpoints, why_unplanned
from sglang_hybrid.core.extensions import extension
from sglang_hybrid.serving.config import BACKEND, HybridConfig
from sglang_hybrid.serving.devices import serves_on_cpu
from sglang_hybrid.serving.flag_values import Eviction, Memory
from sglang_hybrid.serving.gpu_verdict import find_verdict

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

BY_DEFAULT = "sglang_hybrid: --hybrid-memory auto"
"""The name under which one memory is declared that nobody asked for."""


def choose_one_memory(server_args: ServerArgs, lacking: str = "") -> None:
    """KV and states share SGLang's unified pool where `--hybrid-memory one` asks for it, and under
    `auto` where they can and that was checked. To be called when the device and the model are
    known, and before anything reads SGLang's flag.

    lacking: a sentence on the piece of the installed SGLang without which our cache does not serve
    its unified pool; "" if there is none.

    Raises ValueError where one memory was asked for and cannot be.
    """
    view = resolving_view(server_args)
    asked = HybridConfig.from_environment().hybrid_memory
    ours = view.radix_cache_backend == BACKEND and not view.disable_radix_cache
    if not ours or view.enable_unified_memory or asked is Memory.SPLIT:
        return
    why = _why_two_pools(server_args)
    if asked is Memory.ONE and why:
        raise ValueError(f"--hybrid-memory one cannot be: {why}; use --hybrid-memory split.")
    if asked is Memory.AUTO and has_states(server_args):
        why = why or lacking.rstrip(".") or _why_not_by_default(server_args)
        why = why or ("" if serves_on_cpu() else _why_not_on_a_gpu(server_args))
    if not why:
        declared: dict[str, Any] = {"enable_unified_memory": True}
        if view.max_mamba_cache_size is not None:
            # The row of a state for padding lies within this pool, and beside those of two pools.
            declared["max_mamba_cache_size"] = view.max_mamba_cache_size + 1
        declare_resolution(server_args, OURS if asked is Memory.ONE else BY_DEFAULT, **declared)
    elif has_states(server_args):
        _log_two_pools(why)


def fall_back_to_two_pools(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """SGLang's own conditions on its unified pool, when attention backends are resolved. One memory
    that nobody asked for gives way to them; one that was asked for ends the start.
    """
    if serves_on_cpu() or declared_sources(server_args, "enable_unified_memory") != {BY_DEFAULT}:
        previous(server_args)
        return
    slots = resolving_view(server_args).max_mamba_cache_size
    two_pools = {} if slots is None else {"max_mamba_cache_size": slots - 1}
    try:
        previous(server_args)
        handle_unified_memory_pool(server_args)
    except (AssertionError, ValueError) as error:
        declare_resolution(
            *(server_args, BY_DEFAULT),
            enable_unified_memory=False,
            enable_page_major_kv_layout=False,
            **two_pools,
        )
        _log_two_pools(f"by SGLang, {str(error).partition(chr(10))[0].rstrip('.')}")
        return
    logger.info(
        "sglang_hybrid: KV and states share one memory, SGLang's unified pool: that was checked on "
        "%s with SGLang %s; --hybrid-memory split leaves it out.",
        *(_gpu_name(), version("sglang")),
    )


def _log_two_pools(why: str) -> None:
    logger.info("sglang_hybrid: KV and states have a pool each: %s.", why)


def _why_two_pools(server_args: ServerArgs) -> str:
    """The reason why KV and states cannot share one memory; "" if they can, as far as this is known
    before SGLang's flags are resolved (`check_unified_memory`).
    """
    view, options = resolving_view(server_args), HybridConfig.from_environment()
    reasons = {
        "the model has no recurrent states": not has_states(server_args),
        f"checkpoints are not planned ({why_unplanned(view) or 'admission'})": not (
            plans_checkpoints(view)
        ),
        "--hybrid-eviction sglang-lru is SGLang's own order, which knows two pools": (
            options.policy is Eviction.SGLANG_LRU
        ),
        "--mamba-full-memory-ratio, which may be left out, divides the memory": (
            view.mamba_full_memory_ratio is not None
        ),
        "the memory does not hold one request, whose states are up to three": (
            serves_on_cpu() and _is_too_small(server_args)
        ),
    }
    return _first(reasons)


def _why_not_by_default(server_args: ServerArgs) -> str:
    """The reason why KV and states have a pool each unless somebody asks for one memory; "" if they
    share one.
    """
    view, text = resolving_view(server_args), model_config_of(server_args).hf_text_config
    flag, why = why_not_in_unified_pool(server_args)
    reasons = {
        "drafts of speculative decoding have states of their own": (
            view.speculative_algorithm is not None
        ),
        "--enable-memory-saver moves pools itself": bool(view.enable_memory_saver),
        "the model's KV has an index beside it": any(
            getattr(text, name, None) for name in ("index_topk", "indexer_n_heads")
        ),
        f"with {flag}, {why}": bool(flag),
    }
    return _first(reasons)


def _why_not_on_a_gpu(server_args: ServerArgs) -> str:
    """The reason why this server's GPU has two pools unless somebody asks; "" if there is none."""
    view = resolving_view(server_args)
    reasons = {
        "several machines have to divide alike": view.nnodes > 1,
        "--hybrid-device-codec was not checked in one memory": (
            HybridConfig.from_environment().hybrid_device_codec.may_change
        ),
        f"one memory has no KV of type {view.kv_cache_dtype}": (
            view.kv_cache_dtype not in PLAIN_KV
        ),
        "--enable-kv-cache-sharding needs them": view.enable_kv_cache_sharding,
    }
    return _first(reasons) or _why_unchecked(view.device)


def _first(reasons: Mapping[str, bool]) -> str:
    return next((reason for reason, holds in reasons.items() if holds), "")


def _is_too_small(server_args: ServerArgs) -> bool:
    """True if the KV tokens and state slots that were asked for take less, on a CPU, than SGLang's
    unified pool must hold: three states of a request, and a row for padding.
    """
    view = resolving_view(server_args)
    sizes = extension("cpu.sizing").model_sizes(view.model_path, view.dtype)
    tokens, slots = view.max_total_tokens, view.max_mamba_cache_size
    if sizes is None or tokens is None or slots is None:
        return False
    padding = max(sizes.state, (view.page_size or 1) * sizes.kv_token)
    return bool(tokens * sizes.kv_token + slots * sizes.state < 3 * sizes.state + padding)


def _why_unchecked(device: str) -> str:
    """The reason why this machine's GPUs are not known to serve one memory; "" if they are."""
    gpu = _gpu_name() if device == "cuda" else ""
    if not gpu:
        return "one memory is checked on machines with one kind of NVIDIA GPU"
    here = f"{gpu} with SGLang {version('sglang')}"
    verdict = find_verdict(gpu, version("sglang"))
    if verdict is None:
        return f"one memory was not checked on {here}; scripts/gpu_check.sh --one-memory checks it"
    if not verdict.passed:
        wrong = ", ".join(verdict.wrong) or "something"
        return f"scripts/gpu_check.sh found {wrong} wrong with one memory on {here}"
    return ""


def _gpu_name() -> str:
    """The name of all GPUs of this machine; "" where they differ, or there are none."""
    import torch

    names = {torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())}
    return names.pop() if len(names) == 1 else ""
