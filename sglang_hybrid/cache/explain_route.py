"""`POST /hybrid_cache/explain`: from HTTP to the schedulers and back (patch 0012)."""

from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.auth import AuthLevel, auth_level
from sglang.utils import TypeBasedDispatcher

from sglang_hybrid.cache.explain_messages import ExplainReq, ExplainReqOutput
from sglang_hybrid.config import BACKEND
from sglang_hybrid.tenants import stored_under

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

router = APIRouter()

Token = Annotated[int, Field(ge=0, lt=1 << 31)]


class Question(BaseModel):
    """A prompt as token ids, or the id of a recent request; with the extra key, salt and adapter
    (its name) that it is sent with, since nothing is told of other tenants.
    """

    input_ids: list[Token] | None = None
    request_id: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_path: str | None = None


@router.post("/hybrid_cache/explain")
@auth_level(AuthLevel.ADMIN_OPTIONAL)  # it tells what others sent
async def explain(question: Question) -> JSONResponse:
    """An `Account` (telemetry/account.py). With several data-parallel ranks it is that of the rank
    that knows the request, or that would hit most of the prompt.
    """
    from sglang.srt.entrypoints.http_server import get_global_state

    manager = get_global_state().tokenizer_manager
    if resolving_view(manager.server_args).radix_cache_backend != BACKEND:
        return _refuse(
            404, "this server does not run sglang_hybrid's cache (--radix-cache-backend hybrid)."
        )
    if (question.input_ids is None) == (question.request_id is None):
        return _refuse(400, "give either input_ids or request_id.")
    adapter = None
    if question.lora_path is not None:
        loaded = manager.lora_registry.get_all_adapters().get(question.lora_path)
        if loaded is None:
            return _refuse(404, f"no adapter {question.lora_path!r} is loaded.")
        adapter = loaded.lora_id
    manager.auto_create_handle_loop()
    answers: list[ExplainReqOutput] = await _communicator(manager)(
        ExplainReq(
            input_ids=question.input_ids,
            request_id=question.request_id,
            extra_key=stored_under(question.extra_key, adapter),
            cache_salt=question.cache_salt,
        )
    )
    accounts = [answer.account for answer in answers if answer.account is not None]
    if not accounts:
        return _refuse(404, answers[0].error or "no answer.")
    return JSONResponse(max(accounts, key=lambda account: (account["hit"], account["kv"])))


@lru_cache(maxsize=1)
def _communicator(manager: "TokenizerManager") -> FanOutCommunicator:
    """What carries questions to all data-parallel ranks, one at a time, and gathers the answers;
    as SGLang makes its own (tokenizer_control_mixin.py, init_communicators).
    """
    communicator = FanOutCommunicator(manager._dispatch_to_scheduler, get_parallel().num_dp_ranks)
    manager._result_dispatcher += TypeBasedDispatcher(
        [(ExplainReqOutput, communicator.handle_recv)]
    )
    return communicator


def _refuse(status: int, why: str) -> JSONResponse:
    return JSONResponse({"error": why}, status)
