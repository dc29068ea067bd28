"""`POST /hybrid_cache/prompt/ROUTE`: tokens and tenant of what a request to ROUTE would send to a
scheduler. Nothing is sent: a router asks this before it chooses a server
(extensions/router/picker.py).
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_hybrid.serving.requests.cache_fields import fields_of
from sglang_hybrid.serving.stored_keys import stored_under
from sglang_hybrid.serving.tenants import tenant, tenant_names

if TYPE_CHECKING:
    from starlette.types import Message

router = APIRouter()

PREFIX = "/hybrid_cache/prompt"

ROUTES = frozenset(
    (
        "/api/chat",
        "/api/generate",
        "/generate",
        "/invocations",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
    )
)
"""The routes that send prompts to be answered."""

_asked: ContextVar[_PromptQuery | None] = ContextVar("asked", default=None)


class _PromptQuery:
    """The prompt that is asked for. found: it, once it is known."""

    def __init__(self) -> None:
        self.found: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()


def is_prompt_query() -> bool:
    """True if the request that this task serves is not to reach a scheduler."""
    return _asked.get() is not None


async def answer_prompt_query(prompts: Any) -> None:
    """Note a tokenized prompt, the first of a batch, for who asked for it. Raises CancelledError,
    as where a client has gone: SGLang then forgets the request.
    """
    asked = _asked.get()
    assert asked is not None
    if not asked.found.done():
        prompt = prompts[0] if isinstance(prompts, list) else prompts
        told = {"input_ids": list(prompt.input_ids), "tenant": _name(prompt)}
        if prompt.return_logprob and prompt.logprob_start_len >= 0:
            told["reusable"] = min(prompt.logprob_start_len, len(prompt.input_ids))
        asked.found.set_result(told)
    await asked.closed.wait()
    raise asyncio.CancelledError


def _name(prompt: Any) -> str:
    """The name in events of the tenant under which a scheduler stores a tokenized prompt."""
    from sglang_hybrid.storage.codecs.exactness import storage_key

    key = stored_under(getattr(prompt, "extra_key", None), prompt.lora_id)
    key = storage_key(key, fields_of(prompt))
    return tenant_names().name(tenant(key, getattr(prompt, "cache_salt", None)))


@router.post(PREFIX + "/{route:path}")
@auth_level(AuthLevel.NORMAL)  # that of ROUTES, whose own check of keys is passed over
async def prompt(route: str, request: Request) -> Response:
    """`{"input_ids": [...], "tenant": NAME}` for a body that ROUTE takes; NAME is `tenant_name`'s.
    With `reusable`, the most tokens that can be hit, if it asks for log probabilities of them.

    Of a batch it is the first prompt. A body that ROUTE refuses gets ROUTE's status and answer.
    """
    path = f"/{route}"
    if path not in ROUTES:
        routes = ", ".join(sorted(ROUTES))
        error = {"message": f"{path} sends no prompt to be answered; these do: {routes}."}
        return JSONResponse({"error": error}, HTTPStatus.NOT_FOUND)
    asked = _PromptQuery()
    _asked.set(asked)
    serving = asyncio.create_task(_serve(request, path))
    try:
        await asyncio.wait((serving, asked.found), return_when=asyncio.FIRST_COMPLETED)
        if asked.found.done():
            told = orjson.dumps(asked.found.result())
            return Response(told, media_type="application/json")
        return serving.result()
    finally:
        asked.closed.set()
        serving.cancel()
        await asyncio.wait((serving,))


async def _serve(request: Request, path: str) -> Response:
    """The answer of the application's own route at another path to `request`."""
    scope = {key: value for key, value in request.scope.items() if key not in _OF_THE_ROUTE}
    scope |= {"path": path, "raw_path": path.encode(), "state": dict(scope.get("state", {}))}
    answer = Response()
    body = bytearray()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status_code = message["status"]
            answer.raw_headers = message.get("headers", [])
        elif message["type"] == "http.response.body":
            body.extend(message.get("body", b""))

    # Without the middleware, through which the request has come already.
    await request.app.router(scope, request.receive, send)
    answer.body = bytes(body)
    return answer


_OF_THE_ROUTE = ("route", "endpoint", "path_params")
