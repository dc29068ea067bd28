"""A request that a scheduler refuses, or that fails, gets an answer; the scheduler goes on.

SGLang's scheduler ends when the handler of a request raises, and all requests with it. Here (patch
0016) it ends only where it cannot go on: failures.py says when.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import (
    AbortReq,
    BaseReq,
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
    hook_custom_types,
)
from sglang.utils import TypeBasedDispatcher

from sglang_hybrid.extensions.guard.failures import (
    PROMPTS,
    Failure,
    RanksDiffer,
    failure,
    is_answered,
    ranks_of,
)
from sglang_hybrid.extensions.guard.refusals import REFUSALS, is_released
from sglang_hybrid.serving.requests.errors import Refused

if TYPE_CHECKING:
    from sglang.srt.managers.communicator import FanOutCommunicator
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

BATCHES = (BatchTokenizedGenerateReqInput, BatchTokenizedEmbeddingReqInput)


class ControlFailed(BaseReq):
    """A scheduler's answer: the request of type `request` was not done, for the reason `message`.

    status: the HTTP status of the answer, 4xx if it was refused, 500 if it failed.
    """

    request: str
    message: str
    status: int


hook_custom_types(ControlFailed)

# In the scheduler.


def dispatch(scheduler: Scheduler, request: Any) -> Any:
    """The result of the scheduler's handler of `request`; a `ControlFailed` if it fails. Raises
    what ends the scheduler.

    Prompts are handled one by one: one that fails ends with an error.
    """
    if isinstance(request, BATCHES):
        for one in request:
            dispatch(scheduler, one)
        return None
    if isinstance(request, PROMPTS):
        _prompt(scheduler, request)
        return None
    if not is_answered(request):
        return scheduler._request_dispatcher(request)
    return _control(scheduler, request)


def _control(scheduler: Scheduler, request: Any) -> Any:
    """All ranks do it at the same step. What fails on some of them only has left others with
    another state, or waiting.
    """
    ranks = ranks_of(scheduler)
    answer, failed = None, None
    try:
        answer = _handle(scheduler, request)
    except Exception as error:
        failed = failure(request, error)
    if not ranks.has_equal_end(failed=failed is not None):
        raise RanksDiffer(type(request).__name__) from (None if failed is None else failed.error)
    if failed is None:
        return answer
    _log(request, failed)
    name = type(request).__name__
    return ControlFailed(request=name, message=failed.message, status=int(failed.status))


def _prompt(scheduler: Scheduler, request: Any) -> None:
    try:
        if is_released(scheduler):
            raise Refused(
                "the memory of the model was released (/release_memory_occupation); call "
                "/resume_memory_occupation first.",
                HTTPStatus.SERVICE_UNAVAILABLE,
            )
        _handle(scheduler, request)
    except Exception as error:
        failed = failure(request, error)
        if any(req.rid == request.rid for req in getattr(scheduler, "waiting_queue", ())):
            raise
        _log(request, failed)
        reason = {
            "type": "abort",
            "message": failed.message,
            "status_code": int(failed.status),
        }
        abort = AbortReq(rid=request.rid, finished_reason=reason)
        scheduler.ipc_channels.send_to_tokenizer.send_output(abort, request)


def _handle(scheduler: Scheduler, request: Any) -> Any:
    for kind, check in REFUSALS:
        if isinstance(request, kind):
            check(scheduler, request)
    return scheduler._request_dispatcher(request)


def _log(request: Any, failed: Failure) -> None:
    name = type(request).__name__
    if failed.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.error("sglang_hybrid: %s is refused: %s", name, failed.message)
    else:
        logger.error("sglang_hybrid: %s failed; the server goes on.", name, exc_info=failed.error)


def profile_step(step: Callable[[Any, Any], None], profiler: Any, batch: Any) -> None:
    """A step of SGLang's profiler; if it fails, profiling ends and the server goes on."""
    try:
        step(profiler, batch)
    except Exception:
        logger.exception("sglang_hybrid: profiling failed and has ended; the server goes on.")
        profiler.torch_profiler = None
        profiler.profile_in_progress = profiler.profile_by_stage = False
        profiler.profiler_start_forward_ct = profiler.profiler_target_forward_ct = None


def export_trace(profiler: Any, path: str) -> str:
    """Write a profile; returns what went wrong. Other ranks wait for this one after it."""
    try:
        profiler.export_chrome_trace(path)
    except Exception as error:
        logger.error("sglang_hybrid: the profile %s cannot be written: %s.", path, error)
        return f"the profile {path} cannot be written: {error}."
    return ""


# In the tokenizer manager.


def handlers(manager: TokenizerManager) -> TypeBasedDispatcher:
    """Hands `ControlFailed` to whoever waits for the answer; for the manager's dispatcher. New
    weights from disk have no communicator.
    """

    def failed(answer: ControlFailed) -> None:
        if answer.request == UpdateWeightFromDiskReqInput.__name__:
            failure = UpdateWeightFromDiskReqOutput(success=False, message=answer.message)
            manager._handle_update_weights_from_disk_req_output(failure)
            return
        for communicator in communicators(manager):
            if communicator.in_flight == answer.request:
                communicator.handle_recv(answer)

    return TypeBasedDispatcher([(ControlFailed, failed)])


def communicators(manager: TokenizerManager) -> Iterable[FanOutCommunicator]:
    """All communicators of a manager, which wait for answers of schedulers."""
    from sglang.srt.managers.communicator import FanOutCommunicator

    return [it for it in vars(manager).values() if isinstance(it, FanOutCommunicator)]


def raise_failure(answers: Iterable[Any]) -> None:
    """Raise `Refused` if a scheduler did not do what it was asked."""
    for answer in answers:
        if isinstance(answer, ControlFailed):
            raise Refused(answer.message, HTTPStatus(answer.status))
