"""`POST /hybrid_cache/explain` and `GET /hybrid_cache/resumable`: from HTTP to the schedulers and
back (hooks/scheduling.py).
"""

from __future__ import annotations

import secrets
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_hybrid.core.extensions import extension
from sglang_hybrid.explain.changing_text import line_of
from sglang_hybrid.explain.messages import (
    ExplainReq,
    ExplainReqOutput,
    ResumableReq,
    ResumableReqOutput,
)
from sglang_hybrid.explain.prompt_route import router as prompt_router
from sglang_hybrid.explain.ranks import ask_ranks, check_prompt, has_our_cache
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import Ui
from sglang_hybrid.serving.http_tenants import put_tenant
from sglang_hybrid.serving.requests.bodies import BodyKind, read_json
from sglang_hybrid.serving.stored_keys import stored_under

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

router = APIRouter()
router.routes.extend(prompt_router.routes)

if HybridConfig.from_environment().hybrid_ui is not Ui.OFF:
    router.routes.extend(extension("page.route").router.routes)
else:

    @router.get("/hybrid_cache/", include_in_schema=False)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def no_page() -> JSONResponse:
        why = "this server shows no page; start it with --hybrid-ui lengths or text."
        return _refuse(HTTPStatus.NOT_FOUND, why)


BYTES_PER_TOKEN = 16
"""A token id in JSON takes fewer, its comma and blanks included."""

BYTES_BESIDE_TOKENS = 64 << 10
"""Bytes of a body beside tokens: keys, salt and request id."""


class Question(msgspec.Struct):
    """A prompt as token ids, or the id of a recent request; with the extra key, salt and adapter
    (its name, or a model's with it, as chats name them) that it is sent with, since nothing is told
    of other tenants.
    """

    input_ids: list[int] | None = None
    request_id: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_path: str | None = None
    model: str | None = None


QUESTION = BodyKind("question", '{"input_ids": [1, 2, 3]} or {"request_id": "..."}')

_, DEFINITIONS = msgspec.json.schema_components([Question])


@router.post(
    "/hybrid_cache/explain",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": DEFINITIONS["Question"]}},
        }
    },
)
@auth_level(AuthLevel.ADMIN_OPTIONAL)  # it tells what others sent
async def explain(request: Request) -> JSONResponse:
    """An `MissReport` (explain/miss_report.py). With several data-parallel ranks it is that of the
    rank that knows the request, or that would hit most of the prompt.

    A prompt that is too long or not of this model's tokens ends here: neither this process nor a
    scheduler spends time on it.
    """
    from sglang.srt.entrypoints.http_server import get_global_state

    manager = get_global_state().tokenizer_manager
    if not has_our_cache(manager):
        return _refuse(
            HTTPStatus.NOT_FOUND,
            "this server does not run sglang_hybrid's cache (--radix-cache-backend hybrid).",
        )
    try:
        question = await _read(request, manager)
    except ValueError as error:
        return _refuse(HTTPStatus.BAD_REQUEST, str(error))
    adapter, named = None, question.lora_path
    if question.model is not None:
        named = request.app.state.openai_serving_chat._resolve_lora_path(question.model, named)
    if named is not None:
        loaded = manager.lora_registry.get_all_adapters().get(named)
        if loaded is None:
            return _refuse(HTTPStatus.NOT_FOUND, f"no adapter {named!r} is loaded.")
        adapter = loaded.lora_id
    asked = ExplainReq(
        input_ids=question.input_ids,
        request_id=question.request_id,
        extra_key=stored_under(question.extra_key, adapter),
        cache_salt=question.cache_salt,
    )
    answers: list[ExplainReqOutput] = await ask_ranks(manager, asked, ExplainReqOutput)
    reports = [_with_line(answer, manager) for answer in answers if answer.report is not None]
    if not reports:
        return _refuse(HTTPStatus.NOT_FOUND, answers[0].error or "no answer.")
    return JSONResponse(max(reports, key=lambda report: (report["hit"], report["kv"])))


def _with_line(answer: ExplainReqOutput, manager: TokenizerManager) -> dict[str, Any]:
    """A report that names the line of a text that changes with each request, where there is a
    tokenizer.
    """
    report: dict[str, Any] = answer.report or {}
    if answer.before is not None and manager.tokenizer is not None:
        report["unstored"]["line"] = line_of(manager.tokenizer.decode(answer.before))
    return report


@router.get("/hybrid_cache/resumable")
@auth_level(AuthLevel.ADMIN_OPTIONAL)  # it tells what others sent
async def resumable(cursor: str | None = None, status: bool = False) -> JSONResponse:
    """The points where prompts can be resumed, of each data-parallel rank: a page of it, the next
    one where a `cursor` is given, or without the events (`?status=1`). docs/replicas.md has the
    format.
    """
    from sglang.srt.entrypoints.http_server import get_global_state

    manager = get_global_state().tokenizer_manager
    if not has_our_cache(manager) or not manager.server_args.kv_events_config:
        return _refuse(
            HTTPStatus.NOT_FOUND,
            "this server tells nobody where prompts can be resumed; start it with "
            """--kv-events-config '{"publisher": "zmq", "endpoint": "tcp://*:5557"}'.""",
        )
    begin = cursor is None and not status
    snapshot = secrets.token_hex(8) if begin else cursor
    asked = ResumableReq(cursor=snapshot, begin=begin)
    answers: list[ResumableReqOutput] = await ask_ranks(manager, asked, ResumableReqOutput)
    return JSONResponse({"ranks": [_page(answer, snapshot) for answer in answers]})


def _page(answer: ResumableReqOutput, snapshot: str | None) -> dict[str, Any]:
    names = ("epoch", "seq", "block_size", "events")
    state = ("prefill_tokens_per_second", "waiting", "room", "loads", "error")
    told = {name: getattr(answer, name) for name in (*names, *state)}
    return {**told, "cursor": snapshot if answer.more else None}


async def _read(request: Request, manager: TokenizerManager) -> Question:
    """The question in a request's body; raises ValueError."""
    longest = manager.context_len
    most = BYTES_BESIDE_TOKENS + BYTES_PER_TOKEN * longest
    question = await read_json(
        request,
        Question,
        most,
        f"a prompt of {longest:,} tokens, this server's longest, takes",
        QUESTION,
    )
    put_tenant(question, request)
    ids = question.input_ids
    if (ids is None) == (question.request_id is None):
        raise ValueError(f"give either input_ids or request_id: {QUESTION.example}.")
    if ids is not None:
        check_prompt(manager, ids)
    return question


def _refuse(status: HTTPStatus, why: str) -> JSONResponse:
    return JSONResponse({"error": why}, status)
