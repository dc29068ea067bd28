"""`GET /hybrid_cache/`: the page, its files, its stream of changes, and its questions."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Coroutine
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from sglang.srt.utils.auth import AuthLevel, auth_level
from starlette.routing import Match

from sglang_hybrid import serving
from sglang_hybrid.explain.miss_report import MissReport
from sglang_hybrid.explain.ranks import ask_ranks, check_prompt, has_our_cache
from sglang_hybrid.explain.render import render
from sglang_hybrid.extensions.page.messages import (
    AskReq,
    AskReqOutput,
    NodeReq,
    NodeReqOutput,
    WhatIfReq,
    WhatIfReqOutput,
)
from sglang_hybrid.extensions.page.watch import MOST_WATCHERS, TooManyWatchers, Watch
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import Ui
from sglang_hybrid.serving.http_tenants import put_tenant
from sglang_hybrid.serving.requests.bodies import BodyKind, read_json
from sglang_hybrid.serving.requests.errors import Refused
from sglang_hybrid.serving.requests.fields import INT64
from sglang_hybrid.serving.stored_keys import stored_under

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from starlette.types import Scope

FILES = pathlib.Path(__file__).parent / "static"
STYLE = "style.css"
"""The style that the page shares with the report of a replay (serving/style.css)."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""The page loads what this server sends and nothing else, and nobody may frame it."""


class _Route(APIRoute):
    """A route of the page: closed without --hybrid-ui."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                _check()
                response = await handle(request)
            except ValueError as error:
                status = getattr(error, "status_code", HTTPStatus.BAD_REQUEST)
                return JSONResponse({"error": str(error)}, status)
            response.headers.update(HEADERS)
            return response

        return handled


router = APIRouter(prefix="/hybrid_cache", route_class=_Route, include_in_schema=False)


def is_of_page(scope: Scope) -> bool:
    """True for a request for a route of the page, which may have a password (KeyHeader)."""
    return any(route.matches(scope)[0] is not Match.NONE for route in router.routes)


def _check() -> None:
    if shown() is Ui.OFF or not has_our_cache(_manager()):
        why = "this server shows no page; start it with --hybrid-ui lengths or text."
        raise Refused(why, HTTPStatus.NOT_FOUND)


def shown() -> Ui:
    """The parts of prompts that the page shows."""
    return HybridConfig.from_environment().hybrid_ui


def _manager() -> TokenizerManager:
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager


@lru_cache(maxsize=1)
def _watch(manager: TokenizerManager) -> Watch:
    return Watch(manager)


@lru_cache(maxsize=1)
def _filter_access_log() -> None:
    """Leave requests that a page sends by itself out of the access log: they would fill it."""
    quiet = tuple(f"{router.prefix}/{name}" for name in ("static", "nodes", "changes", "what_if"))

    def is_written(record: logging.LogRecord) -> bool:
        args = record.args
        path = str(args[2]) if isinstance(args, tuple) and len(args) > 2 else ""
        return not path.startswith(quiet)

    logging.getLogger("uvicorn.access").addFilter(is_written)


@router.get("/")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def page() -> Response:
    _filter_access_log()
    return FileResponse(FILES / "index.html")


@router.get("/static/{name:path}")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def static(name: str) -> Response:
    if name == STYLE:
        return FileResponse(pathlib.Path(serving.__file__).with_name(STYLE))
    file = FILES / name
    if file not in FILES.rglob("*") or not file.is_file():
        raise Refused("there is no such file.", HTTPStatus.NOT_FOUND)
    return FileResponse(file)


@router.get("/changes")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def changes() -> Response:
    """The content of the cache and its changes, as server-sent events."""
    try:
        stream = await _watch(_manager()).stream()
    except TooManyWatchers:
        why = f"{MOST_WATCHERS} pages are open already; close one."
        raise Refused(why, HTTPStatus.SERVICE_UNAVAILABLE) from None
    return StreamingResponse(stream, media_type="text/event-stream")


@router.get("/nodes/{rank}/{node}")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def about(rank: int, node: Annotated[int, Path(ge=0, lt=INT64)]) -> Response:
    """All that is known of a node of one rank's tree."""
    manager = _manager()
    asked = NodeReq(node=node, text=shown() is Ui.TEXT)
    answers: list[NodeReqOutput] = await ask_ranks(manager, asked, NodeReqOutput)
    found = answers[rank] if 0 <= rank < len(answers) else NodeReqOutput()
    if found.node is None:  # no status of its own, which a browser would write into its console
        return JSONResponse({"gone": "This node is no longer in the tree."})
    return JSONResponse({**found.node, "text": _text(manager, found.tokens)})


class PageQuestion(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt as text, messages or token ids, with the extra key and salt that it is sent with; or
    a recent request of the tenant that the page calls `tenant`.
    """

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    input_ids: list[int] | None = None
    request_id: str | None = None
    tenant: str = ""
    extra_key: str | None = None
    cache_salt: str | None = None


QUESTION = BodyKind("question", '{"text": "Once upon a time"}')
MOST_BODY = 16 << 20


@router.post("/ask")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def ask(request: Request) -> Response:
    """The report on a prompt or a request, in words, with its path in the tree."""
    manager = _manager()
    question = await read_json(request, PageQuestion, MOST_BODY, "it may have", QUESTION)
    ids = question.input_ids
    if question.request_id is None:  # a request is found by the page's name of its tenant
        put_tenant(question, request)
        ids = await _tokens(request, question) if ids is None else ids
        check_prompt(manager, ids)
    asked = AskReq(
        input_ids=ids,
        request_id=question.request_id,
        tenant=question.tenant,
        extra_key=stored_under(question.extra_key, None),
        cache_salt=question.cache_salt,
        text=shown() is Ui.TEXT,
    )
    answers: list[AskReqOutput] = await ask_ranks(manager, asked, AskReqOutput)
    found = [(rank, answer) for rank, answer in enumerate(answers) if answer.report is not None]
    if not found:
        raise Refused(answers[0].error or "no answer.", HTTPStatus.NOT_FOUND)
    rank, best = max(found, key=lambda pair: pair[1].report["hit"])  # type: ignore[index]
    report = msgspec.convert(best.report, MissReport)
    hit = report.hit
    return JSONResponse(
        {
            "rank": rank,
            "report": best.report,
            "words": list(render(report)),
            "path": best.path,
            "tokens": best.tokens,
            "hit_text": _text(manager, best.tokens[max(0, hit - 24) : hit]),
            "then_text": _text(manager, best.tokens[hit : hit + 24]),
        }
    )


class Difference(msgspec.Struct, forbid_unknown_fields=True):
    """Token ids of two prompts."""

    first: list[int]
    second: list[int]


@router.post("/differ")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def differ(request: Request) -> Response:
    """The first token at which two prompts differ, with the text around it."""
    kind = BodyKind("pair", '{"first": [1, 2], "second": [1, 3]}')
    pair = await read_json(request, Difference, MOST_BODY, "it may have", kind)
    manager = _manager()
    for field, ids in (("first", pair.first), ("second", pair.second)):
        check_prompt(manager, ids, field)
    limit = min(len(pair.first), len(pair.second))
    unequal = (at for at in range(limit) if pair.first[at] != pair.second[at])
    at = next(unequal, limit)
    around = {"same": pair.first[max(0, at - 16) : at]}
    around |= {"first": pair.first[at : at + 16], "second": pair.second[at : at + 16]}
    return JSONResponse({"at": at, **{name: _text(manager, ids) for name, ids in around.items()}})


@router.post("/what_if")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def what_if(request: Request) -> Response:
    """Begin the replay of recent requests (`?begin=1`), and say how far it is."""
    asked = WhatIfReq(begin=request.query_params.get("begin") == "1")
    answers: list[WhatIfReqOutput] = await ask_ranks(_manager(), asked, WhatIfReqOutput)
    fields = ("state", "rows", "told")
    return JSONResponse([{name: getattr(answer, name) for name in fields} for answer in answers])


async def _tokens(request: Request, question: PageQuestion) -> list[int]:
    """The tokens of a text or of messages, as this server's routes make them."""
    from sglang.srt.entrypoints.openai.protocol import TokenizeRequest

    if question.text is None and question.messages is None:
        raise ValueError(f"ask about text, messages, input_ids or request_id: {QUESTION.example}.")
    said = {"prompt": question.text, "messages": question.messages}
    body = TokenizeRequest(**{name: value for name, value in said.items() if value is not None})
    answer = await request.app.state.openai_serving_tokenize.handle_request(body, request)
    tokens = getattr(answer, "tokens", None)
    if tokens is None:
        raise ValueError("the server could not tokenize this.")
    return list(tokens)


def _text(manager: TokenizerManager, tokens: list[int]) -> str:
    """The text of `tokens`, without those that stand for images; "" where no text is shown."""
    if not tokens or manager.tokenizer is None or shown() is not Ui.TEXT:
        return ""
    words = [token for token in tokens if token < manager.model_config.vocab_size]
    return str(manager.tokenizer.decode(words))
