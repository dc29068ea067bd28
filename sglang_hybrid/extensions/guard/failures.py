"""Handles a request whose handler raises: an answer, or the end of the scheduler.

| the handler raises | a prompt | what only reads | what takes weights or settings | any other |
|---|---|---|---|---|
| `Refused` | its status | its status | its status | its status |
| ValueError | 400 | 500 | 400 | 500 |
| AssertionError | 500 | 500 | 400 | the server ends |
| another error | 500 | 500 | 500 | 500 |

Refusals are errors of their own type: what a scheduler does not do is checked before
(refusals.py). SGLang's loaders of weights check what they are given by assertions, and so what they
assert is a client's mistake. Elsewhere an assertion is an invariant of what all requests share. A
scheduler that goes on without it may answer wrongly, so it ends, and with it the server
(shutdown.py). So it does where an error is raised on some ranks only, and where nobody waits for an
answer: when a request is aborted, and for messages from one rank to all.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import (
    AbortReq,
    BaseReq,
    CheckWeightsReqInput,
    ConfigureLoggingReq,
    DestroyWeightsUpdateGroupReqInput,
    DumperControlReqInput,
    ExpertDistributionReq,
    FreezeGCReq,
    GetHiCacheL3LayoutReq,
    GetInternalStateReq,
    GetWeightsByNameReqInput,
    InitWeightsSendGroupForRemoteInstanceReqInput,
    InitWeightsUpdateGroupReqInput,
    ListExternalCorporaReqInput,
    LoadLoRAAdapterFromTensorsReqInput,
    LoadLoRAAdapterReqInput,
    ProfileReq,
    SendWeightsToRemoteInstanceReqInput,
    SlowDownReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
)

from sglang_hybrid.serving.ranks import Ranks
from sglang_hybrid.serving.requests.errors import Refused

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

PROMPTS = (TokenizedGenerateReqInput, TokenizedEmbeddingReqInput)

ONLY_READ = (
    CheckWeightsReqInput,
    DumperControlReqInput,
    ExpertDistributionReq,
    GetHiCacheL3LayoutReq,
    GetInternalStateReq,
    GetWeightsByNameReqInput,
    ListExternalCorporaReqInput,
    ProfileReq,
)
"""Requests whose unfinished work changes no answer; those with the attribute `only_reads`, too."""

TAKES_WHAT_CLIENTS_SEND = (
    ConfigureLoggingReq,
    DestroyWeightsUpdateGroupReqInput,
    FreezeGCReq,
    InitWeightsSendGroupForRemoteInstanceReqInput,
    InitWeightsUpdateGroupReqInput,
    LoadLoRAAdapterFromTensorsReqInput,
    LoadLoRAAdapterReqInput,
    SendWeightsToRemoteInstanceReqInput,
    SlowDownReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightVersionReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
"""Settings, groups of processes, and weights, which SGLang checks as it takes them."""

CACHES = ("sglang.srt.mem_cache", "sglang_hybrid.cache")

RANKS = "_sglang_hybrid_ranks"


class RanksDiffer(RuntimeError):
    """A request was done on some ranks, and failed on others."""

    def __init__(self, request: str) -> None:
        super().__init__(
            f"{request} failed on some ranks and was done on others, so they can no longer compute "
            "together."
        )


@dataclass(frozen=True)
class Failure:
    """The message that the client is told."""

    status: HTTPStatus
    message: str
    error: Exception


def is_answered(request: Any) -> bool:
    """True if somebody waits for what becomes of `request`."""
    return isinstance(request, BaseReq) and not isinstance(request, AbortReq)


def failure(request: Any, error: Exception) -> Failure:
    """The answer to the client of `request` about `error`, or `error` itself is raised."""
    if isinstance(error, Refused):
        return Failure(HTTPStatus(error.status_code), str(error), error)
    takes = isinstance(request, TAKES_WHAT_CLIENTS_SEND)
    reads = isinstance(request, ONLY_READ) or getattr(request, "only_reads", False)
    prompt = isinstance(request, PROMPTS)
    broken = isinstance(error, AssertionError)
    takes = takes and not (broken and _in_a_cache(error))
    if broken and not (takes or reads or prompt):
        raise error
    if (takes and broken) or ((takes or prompt) and isinstance(error, ValueError)):
        return Failure(HTTPStatus.BAD_REQUEST, str(error) or type(error).__name__, error)
    message = f"the server could not do that: {type(error).__name__}: {error}"
    return Failure(HTTPStatus.INTERNAL_SERVER_ERROR, message, error)


def _in_a_cache(error: Exception) -> bool:
    """True if `error` was raised there, as when a cache is emptied because weights have changed."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    module = "" if at is None else str(at.tb_frame.f_globals.get("__name__"))
    return module.startswith(CACHES)


def ranks_of(scheduler: Scheduler) -> Ranks:
    """The ranks that do what this one does. They meet the first time that they are asked to do
    something else than to compute prompts.
    """
    ranks: Ranks | None = scheduler.__dict__.get(RANKS)
    if ranks is None:
        group = getattr(scheduler, "dp_tp_group", None)
        ranks = Ranks.apart([] if group is None else group.ranks)
        scheduler.__dict__[RANKS] = ranks
    return ranks
