"""Refusals of a scheduler: requests that it cannot serve, or not while others run."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from sglang.srt.managers.io_struct import (
    ExpertDistributionReq,
    ProfileReq,
    ProfileReqType,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    SendWeightsToRemoteInstanceReqInput,
    SlowDownReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)

from sglang_hybrid.core.sentences import quote
from sglang_hybrid.extensions.guard.folders import profile_folder
from sglang_hybrid.extensions.guard.parameters import LONGEST_NAME
from sglang_hybrid.serving.requests import fields
from sglang_hybrid.serving.requests.errors import Refused

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

LONGEST_SLEEP = 10.0
"""Seconds before each step that /slow_down may ask for."""

ACTIVITIES = ("CPU", "GPU", "MEM", "CUDA_PROFILER", "RPD", "XPU")
STAGES = ("prefill", "decode")


def is_released(scheduler: Scheduler) -> bool:
    """True if weights or KV are not in memory at the moment."""
    updater = scheduler.weight_updater
    return bool(updater.memory_saver_adapter.enabled and updater.offload_tags)


def expert_distribution(scheduler: Scheduler, request: ExpertDistributionReq) -> None:
    from sglang.srt.runtime_context import get_exec

    if get_exec().moe.expert_distribution_recorder_mode is None:
        raise Refused(
            "the distribution of experts is not recorded; start the server with "
            "--expert-distribution-recorder-mode."
        )


def release_memory(scheduler: Scheduler, request: ReleaseMemoryOccupationReqInput) -> None:
    from sglang_hybrid.storage import weights

    tags = _tags(request.tags)
    weights.end_transfers()  # beside copies between tiers SGLang is not idle
    if not scheduler.is_fully_idle(ignore_waiting=scheduler._engine_paused):
        raise Refused(
            "memory cannot be released while requests run; wait for them, or call "
            "/pause_generation first.",
            HTTPStatus.CONFLICT,
        )
    again = scheduler.weight_updater.offload_tags & set(tags)
    if again:
        raise Refused(f"{_list(again)} is released already; call /resume_memory_occupation.")


def resume_memory(scheduler: Scheduler, request: ResumeMemoryOccupationReqInput) -> None:
    missing = set(_tags(request.tags)) - scheduler.weight_updater.offload_tags
    if missing:
        raise Refused(f"{_list(missing)} was not released; call /release_memory_occupation first.")


def slow_down(scheduler: Scheduler, request: SlowDownReqInput) -> None:
    seconds = request.forward_sleep_time
    if seconds is not None and not seconds <= 0:  # which turns it off
        _within("forward_sleep_time", seconds, 0, LONGEST_SLEEP)


def profile(scheduler: Scheduler, request: ProfileReq) -> None:
    """Check all that could go wrong later, in the middle of a step."""
    running = getattr(scheduler.profiler_manager, "profile_in_progress", None)
    if request.req_type is ProfileReqType.STOP_PROFILE:
        if running is False:
            raise Refused("nothing is profiled; call /start_profile first.")
        return
    if running:
        raise Refused("a profile is being taken already; call /stop_profile first.")
    for name in request.activities or ():
        _one_of("activities", name, ACTIVITIES)
        missing = name in ("MEM", "CUDA_PROFILER") and not torch.cuda.is_available()
        if missing or (name == "RPD" and torch.version.hip is None):
            raise Refused(
                f"activities has {name!r}, which needs another device than this server's."
            )
    for stage in request.profile_stages or ():
        _one_of("profile_stages", stage, STAGES)
    if request.num_steps is not None:
        _within("num_steps", request.num_steps, 1, fields.INT64)
    if request.start_step is not None:
        _within("start_step", request.start_step, 0, fields.INT64)
    for name in ("profile_id", "profile_prefix"):
        text = getattr(request, name) or ""
        if "/" in text or "\0" in text or len(text) > LONGEST_NAME:
            raise Refused(f"{name} is {quote(text)}; it becomes part of a file's name.")
    directory = request.output_dir or profile_folder()
    try:
        path = Path(directory).expanduser()
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise Refused(f"output_dir is {quote(directory)}: {error}.") from None
    if not os.access(path, os.W_OK):
        raise Refused(f"output_dir is {quote(directory)}, which cannot be written.")


def embeddings(
    scheduler: Scheduler, request: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput
) -> None:
    """Embeddings for a model whose forward pass takes token ids only would end that pass."""
    overrides = request.positional_embed_overrides is not None
    if not overrides and getattr(request, "input_embeds", None) is None:
        return
    model = scheduler.tp_worker.model_runner.model
    takes = inspect.signature(model.forward).parameters
    if "input_embeds" not in takes or (overrides and not hasattr(model, "get_input_embeddings")):
        raise Refused(
            f"the request has embeddings, and {type(model).__name__} computes prompts from token "
            "ids only; leave them out."
        )


def send_weights(scheduler: Scheduler, request: SendWeightsToRemoteInstanceReqInput) -> None:
    """A group that was not made, which SGLang looks up as if it were there."""
    exporter, ports = scheduler.tp_worker.model_runner.weight_exporter, request.ports.split(",")
    if exporter.tp_rank >= len(ports):
        return  # SGLang says how many there should be
    group = f"{request.group_name}_{ports[exporter.tp_rank]}_{exporter.tp_rank}"
    if group not in exporter._weights_send_group:
        raise Refused(
            f"there is no group {quote(request.group_name)} with the ports {quote(request.ports)}; "
            "call /init_weights_send_group_for_remote_instance first."
        )


REFUSALS: Sequence[tuple[type, Callable[[Scheduler, Any], None]]] = (
    (ExpertDistributionReq, expert_distribution),
    (ReleaseMemoryOccupationReqInput, release_memory),
    (ResumeMemoryOccupationReqInput, resume_memory),
    (SendWeightsToRemoteInstanceReqInput, send_weights),
    (SlowDownReqInput, slow_down),
    (ProfileReq, profile),
    (TokenizedGenerateReqInput, embeddings),
    (TokenizedEmbeddingReqInput, embeddings),
)


def _tags(given: list[str] | None) -> list[str]:
    tags = given or list(GPU_MEMORY_ALL_TYPES)
    for tag in tags:
        _one_of("tags", tag, GPU_MEMORY_ALL_TYPES)
        if tags.count(tag) > 1:
            raise Refused(f"tags has {quote(tag)} more than once.")
    return tags


def _one_of(field: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise Refused(f"{field} has {quote(value)}; known are {_list(known)}.")


def _within(field: str, value: float, least: float, most: float) -> None:
    try:
        fields.within(field, value, least, most)
    except ValueError as error:
        raise Refused(str(error)) from None


def _list(names: Sequence[str] | set[str]) -> str:
    return ", ".join(sorted(names) if isinstance(names, set) else names)
