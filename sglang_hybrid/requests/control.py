"""A scheduler outlives what it is asked: what it refuses and what fails is an answer (patch 0016).

SGLang's scheduler ends when the handler of a request raises, and all requests with it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from sglang.utils import TypeBasedDispatcher

from sglang_hybrid.requests.control_messages import ControlFailed
from sglang_hybrid.requests.errors import Refused
from sglang_hybrid.requests.refusals import REFUSALS, released

if TYPE_CHECKING:
    from sglang.srt.managers.communicator import FanOutCommunicator
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

SINGLE = (TokenizedGenerateReqInput, TokenizedEmbeddingReqInput)
BATCHES = (BatchTokenizedGenerateReqInput, BatchTokenizedEmbeddingReqInput)


# In the scheduler.


def dispatch(scheduler: Scheduler, request: Any) -> Any:
    """What the scheduler's handler of `request` returns; a `ControlFailed` if it cannot.

    Prompts are handled one by one: one that fails ends with an error of status 500.
    """
    if isinstance(request, BATCHES):
        for one in request:
            dispatch(scheduler, one)
        return None
    prompt = isinstance(request, SINGLE)
    try:
        if prompt and released(scheduler):
            raise Refused(
                "the memory of the model was released (/release_memory_occupation); call "
                "/resume_memory_occupation first.",
                HTTPStatus.SERVICE_UNAVAILABLE,
            )
        for kind, check in REFUSALS:
            if isinstance(request, kind):
                check(scheduler, request)
        return scheduler._request_dispatcher(request)
    except Refused as refused:
        status, message = refused.status_code, str(refused)
    except (ValueError, AssertionError) as error:  # SGLang's own checks
        logger.error("sglang_hybrid: %s is refused: %s", type(request).__name__, error)
        status, message = HTTPStatus.BAD_REQUEST, str(error) or type(error).__name__
    except Exception as error:
        logger.exception("sglang_hybrid: %s failed; the server goes on.", type(request).__name__)
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        message = f"the server could not do that: {type(error).__name__}: {error}"
    if not prompt:
        return ControlFailed(request=type(request).__name__, message=message, status=int(status))
    reason = {"type": "abort", "message": message, "status_code": int(status)}
    abort = AbortReq(rid=request.rid, finished_reason=reason)
    scheduler.ipc_channels.send_to_tokenizer.send_output(abort, request)
    return None


def profile_step(profiler: Any, batch: Any) -> None:
    """A step of SGLang's profiler; if it fails, profiling ends and the server goes on."""
    try:
        profiler._profile_batch_predicate(batch)
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
    """What the manager's dispatcher of answers must know."""

    def failed(answer: ControlFailed) -> None:
        for communicator in communicators(manager):
            if communicator.in_flight == answer.request:
                communicator.handle_recv(answer)

    return TypeBasedDispatcher([(ControlFailed, failed)])


def communicators(manager: TokenizerManager) -> Iterable[FanOutCommunicator]:
    """All that wait for answers of schedulers."""
    from sglang.srt.managers.communicator import FanOutCommunicator

    return [it for it in vars(manager).values() if isinstance(it, FanOutCommunicator)]


def raise_failure(answers: Iterable[Any]) -> None:
    """Raise `Refused` if a scheduler did not do what it was asked."""
    for answer in answers:
        if isinstance(answer, ControlFailed):
            raise Refused(answer.message, HTTPStatus(answer.status))
