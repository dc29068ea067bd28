"""Decides whether a server gets `--radix-cache-backend hybrid`, and checks what that backend cannot
be combined with.

Decided from the command line, before the model is loaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.serving.advice import RADIX_CACHE_DISABLED
from sglang_hybrid.serving.config import BACKEND, HybridConfig
from sglang_hybrid.serving.flag_values import SHARED, Eviction, Memory, Schedule, flag_name
from sglang_hybrid.serving.model_directory import read_config
from sglang_hybrid.serving.startup import StartupError

REFUSED = {
    "enable_int8_mamba_checkpoint": "its states live in a pool of their own",
    "enable_unified_cache_external_linker": "SGLang allows no other cache backend beside it",
    "enable_lmcache": "LMCache brings its own tree",
    "enable_flexkv": "FlexKV brings its own tree",
}
"""SGLang's flags that the backend cannot honour, and why."""


HEADS = ("EAGLE", "EAGLE3", "NEXTN")
"""Algorithms of speculative decoding whose KV lies beside the model's in SGLang's unified pool."""


def why_not_unified(flags: Any) -> tuple[str, str]:
    """A flag beside which our cache does not serve SGLang's unified pool, and why; two empty texts
    if there is none. flags: SGLang's server arguments, or its view of them.
    """
    drafts = (flags.speculative_algorithm or "").upper()
    several = {
        f"--speculative-algorithm {drafts}": (
            drafts not in ("", *HEADS),
            "SGLang has room in it for the drafts of a model's own heads only",
        ),
        "--disaggregation-mode": (
            flags.disaggregation_mode != "null",
            "other servers reach rows where they lie",
        ),
        "--pp-size": (
            flags.pp_size > 1,
            "each stage of a pipeline has layers, and so sizes, of its own",
        ),
        "--dcp-size": (flags.dcp_size > 1, "a rank holds a part of each page"),
    }
    return next(((flag, why) for flag, (given, why) in several.items() if given), ("", ""))


OF_OUR_CACHE = (
    *("hybrid_admission", "hybrid_min_branch_tokens", "hybrid_history_mb", "hybrid_answers_mb"),
    *("hybrid_tuner_workers", "hybrid_tuner_window", "hybrid_record", "hybrid_pin_share"),
    *("hybrid_offload_watermark", "hybrid_ui", "hybrid_full_hit", "hybrid_device_codec"),
)
"""Our settings that nothing but our cache reads."""


def choose_backend(flags: argparse.Namespace, options: HybridConfig) -> list[str]:
    """SGLang arguments that select our backend, or none where SGLang's own should serve.

    Raises `StartupError` if our backend was asked for, by name or by a policy, together with
    something that it cannot honour; if copies are to be smaller that nobody would mark as such; or
    if two pools and one memory were asked for.
    """
    if flags.enable_unified_memory and options.hybrid_memory is Memory.SPLIT:
        raise StartupError(
            "--enable-unified-memory and --hybrid-memory split contradict each other; leave out "
            "one of them."
        )
    arguments = _choose(flags, options)
    ours = bool(arguments) or flags.radix_cache_backend == BACKEND
    if not ours:
        for line in _without_effect(options):
            print(f"sglang_hybrid: {line}", flush=True)
    theirs = getattr(flags, "radix_eviction_policy", "lru")
    if ours and theirs != "lru" and options.policy is not Eviction.SGLANG_LRU:
        print(
            f"sglang_hybrid: --radix-eviction-policy {theirs} does nothing with --hybrid-eviction "
            f"{options.hybrid_eviction.value}; leave it out, or give --hybrid-eviction sglang-lru.",
            flush=True,
        )
    marked = ours and options.policy is not Eviction.SGLANG_LRU and flags.enable_hierarchical_cache
    if options.smaller_copies and not marked:
        raise StartupError(
            f"{options.smaller_copies} needs the {BACKEND} cache with "
            "--enable-hierarchical-cache and a --hybrid-eviction of its own, which marks what "
            "comes from copies that are not exact; leave the flag out."
        )
    _check_device_codec(flags, options, ours=ours)
    storage = getattr(flags, "hicache_storage_backend", None)
    if options.smaller_copies and storage not in (None, "file"):
        raise StartupError(
            f"{options.smaller_copies} goes with --hicache-storage-backend file, not {storage}; "
            "leave out one of them."
        )
    return arguments


def _check_device_codec(flags: argparse.Namespace, options: HybridConfig, *, ours: bool) -> None:
    """Raise `StartupError` where entries are to be coded on the device and cannot be."""
    if not options.hybrid_device_codec.may_change or not ours:
        return
    asked = f"--hybrid-device-codec {options.hybrid_device_codec}"
    if options.policy is Eviction.SGLANG_LRU:
        raise StartupError(
            f"{asked} needs a --hybrid-eviction of its own: under sglang-lru SGLang decides."
        )
    for name, why in NOT_CODED.items():
        if getattr(flags, name, None):
            raise StartupError(f"{asked} cannot be combined with {flag_name(name)}: {why}.")


NOT_CODED = {
    "enable_hierarchical_cache": "what the device gives up is copied to the host there",
    "speculative_algorithm": "the KV of drafts would be lost where that of the model is coded",
}
"""Flags that entries cannot be coded beside, and why."""


def check_disk(flags: argparse.Namespace, options: HybridConfig) -> None:
    """Raise `StartupError` for flags of the disk tier on a server that has none."""
    if flags.enable_hierarchical_cache and flags.hicache_storage_backend == "file":
        shared = options.hybrid_disk_folder.startswith(SHARED)
        for name in ("hybrid_disk_mb", "hybrid_warm_start") if shared else ():
            if getattr(options, name):
                raise StartupError(
                    f"{flag_name(name)} means nothing with {flag_name('hybrid_disk_folder')} "
                    f"{options.hybrid_disk_folder}: Mooncake divides its memory by itself."
                )
        return
    for name in ("hybrid_disk_folder", "hybrid_disk_mb", "hybrid_warm_start"):
        value = getattr(options, name)
        if value:
            raise StartupError(
                f"{flag_name(name)} {value} means nothing without "
                "--enable-hierarchical-cache and --hicache-storage-backend file; give both, or "
                "leave it out."
            )
    backend = flags.hicache_storage_backend
    if backend and not (
        flags.enable_hierarchical_cache
        or getattr(flags, "disaggregation_decode_enable_offload_kvcache", False)
    ):
        print(
            f"sglang_hybrid: --hicache-storage-backend {backend} does nothing "
            "without --enable-hierarchical-cache; give both, or leave it out.",
            flush=True,
        )


def _choose(flags: argparse.Namespace, options: HybridConfig) -> list[str]:
    ordered = options.hybrid_schedule.is_ours
    asked = flags.radix_cache_backend == BACKEND or options.is_pinned or ordered
    known = registered_backends()
    if flags.radix_cache_backend not in (None, *known):
        raise StartupError(
            f"--radix-cache-backend {flags.radix_cache_backend} is not known; known are "
            f"{', '.join(known)}, and SGLang's own without the flag."
        )
    if flags.radix_cache_backend not in (None, BACKEND):
        if ordered:
            raise StartupError(
                f"--hybrid-schedule {options.hybrid_schedule.value} needs --radix-cache-backend "
                f"{BACKEND}, not {flags.radix_cache_backend}."
            )
        if options.is_pinned:
            raise StartupError(
                f"--hybrid-eviction {options.policy.value} needs --radix-cache-backend "
                f"{BACKEND}, not {flags.radix_cache_backend}."
            )
        return []
    flag, why = _refused(flags)
    if flag and asked:
        raise StartupError(
            f"{flag} cannot be combined with the {BACKEND} cache, because {why}; leave out one of "
            "them."
        )
    if flag:
        print(f"sglang_hybrid: {flag} is served by SGLang's own prefix cache.", flush=True)
        return []
    if flags.disable_radix_cache and ordered:
        raise StartupError(
            f"--hybrid-schedule {options.hybrid_schedule.value} orders requests by what they can "
            "reuse, which is nothing with --disable-radix-cache; leave out one of them."
        )
    if flags.disable_radix_cache:
        print(f"sglang_hybrid: {RADIX_CACHE_DISABLED}", flush=True)
        return []
    if flags.radix_cache_backend == BACKEND:
        return []
    if asked or has_recurrent_state(flags.model_path):
        return ["--radix-cache-backend", BACKEND]
    return []


def choose_schedule(flags: argparse.Namespace, options: HybridConfig) -> list[str]:
    """SGLang arguments for `--hybrid-schedule`: its own policies by their names; beside ours, it
    leaves the queue as requests came. Raises `StartupError` for another --schedule-policy.
    """
    if options.hybrid_schedule is Schedule.SGLANG:
        return []
    ours = options.hybrid_schedule.is_ours
    wanted = "fcfs" if ours else options.hybrid_schedule.value
    if flags.schedule_policy not in ("fcfs", wanted):
        raise StartupError(
            f"--hybrid-schedule {options.hybrid_schedule.value} and --schedule-policy "
            f"{flags.schedule_policy} contradict each other; leave out one of them."
        )
    return ["--schedule-policy", wanted]


def _without_effect(options: HybridConfig) -> list[str]:
    """A line for each setting that was given and that only our cache would read."""
    given = options.changed()
    return [
        f"{given[name]} does nothing without the {BACKEND} cache; leave "
        f"it out, or give --radix-cache-backend {BACKEND}."
        for name in OF_OUR_CACHE
        if name in given
    ]


def _refused(flags: argparse.Namespace) -> tuple[str, str]:
    """The first flag that our backend cannot honour, and why; two empty texts if there is none."""
    if getattr(flags, "hicache_host_memory_mode", "cache") == "buffer_only":
        return "--hicache-host-memory-mode buffer_only", "it keeps copies on the host, by value"
    for name, why in REFUSED.items():
        if getattr(flags, name, None):
            return flag_name(name), why
    flag, why = why_not_unified(flags) if flags.enable_unified_memory else ("", "")
    return (f"--enable-unified-memory with {flag}", why) if flag else ("", "")


def registered_backends() -> list[str]:
    """Names that SGLang knows for --radix-cache-backend in this process."""
    from sglang.srt.mem_cache.registry import registered_radix_cache_backends

    return sorted({BACKEND, *registered_radix_cache_backends()})


def has_recurrent_state(model_path: str) -> bool:
    """True if a model keeps states; True where its config is not at hand, for it may."""
    directory = Path(model_path).expanduser()
    if not directory.is_dir():
        return True
    try:
        cost = CostModel.from_config(read_config(directory))
    except ValueError:
        return True
    return cost.state_bytes > 0 or bool(cost.assumed)
