"""`/v1/prompt_schemas`, and `pml` in `/generate` (patch 0040)."""

from __future__ import annotations

import math
from dataclasses import asdict
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_hybrid.core.records.pin import Priority
from sglang_hybrid.core.returns import hints
from sglang_hybrid.prompts.endpoints import apart
from sglang_hybrid.prompts.endpoints import prewarm as prewarming
from sglang_hybrid.prompts.endpoints.actions import imported_prompt
from sglang_hybrid.prompts.endpoints.residency import residency
from sglang_hybrid.prompts.endpoints.server_registry import registry_of
from sglang_hybrid.prompts.linter.lint import lint
from sglang_hybrid.prompts.schemas.registry import Registered, Registry
from sglang_hybrid.prompts.schemas.resolve import read_prompt
from sglang_hybrid.prompts.schemas.xml import MOST_BYTES, MarkupError
from sglang_hybrid.serving.requests.bodies import read_json
from sglang_hybrid.serving.requests.long_requests import LONG, in_thread, in_thread_if_long
from sglang_hybrid.serving.requests.texts import check_text
from sglang_hybrid.serving.tenants import Tenant, put_tenant, tenant

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

router = APIRouter(prefix="/v1/prompt_schemas")

MOST_MEGABYTES = 1 << 20

MOST_BODY = 2 * MOST_BYTES
"""Bytes of a request: JSON may write a character as six."""


class NewSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A schema as markup, with the extra key and salt of the requests that will use it."""

    pml: str
    extra_key: str | None = None
    cache_salt: str | None = None


class Prewarm(msgspec.Struct, forbid_unknown_fields=True):
    """How much memory prefixes of a schema may take, and for whose requests. mode: `modular` for
    all modules, each apart, whatever they take. tokens_per_second: the rate at which prefixes are
    computed even while other requests run. ttl: seconds for which they are pinned, with `priority`.
    """

    budget_mb: float | None = None
    tokens_per_second: float | None = None
    ttl: float | None = None
    priority: str = Priority.LOW.value
    mode: Literal["exact", "modular"] = "exact"
    extra_key: str | None = None
    cache_salt: str | None = None


_, DEFINITIONS = msgspec.json.schema_components([NewSchema, Prewarm])


def _body(kind: str) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": DEFINITIONS[kind]}}, "required": True}


BODY, PREWARM_BODY = _body("NewSchema"), _body("Prewarm")


@router.post("", openapi_extra={"requestBody": BODY})
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def register(request: Request) -> JSONResponse:
    """Keep a schema, in place of an earlier one of its name."""
    try:
        registry = _registry()
        new = await read_json(request, NewSchema, MOST_BODY, "that of a schema may have", "schema")
        put_tenant(new, request)
        registered = registry.register(tenant(new.extra_key, new.cache_salt), new.pml)
        return JSONResponse(await in_thread_if_long(registered.as_dict, registry.tokenizer))
    except ValueError as error:
        return _refused(str(error), error)


@router.get("")
@auth_level(AuthLevel.NORMAL)
async def all_schemas(extra_key: str | None = None, cache_salt: str | None = None) -> JSONResponse:
    """All schemas of a tenant: their sizes and counts."""
    own = tenant(extra_key, cache_salt)
    return JSONResponse([one.summary() for one in _registry().of(own)])


@router.get("/{name}")
@auth_level(AuthLevel.NORMAL)
async def one_schema(
    name: str, extra_key: str | None = None, cache_salt: str | None = None
) -> JSONResponse:
    """A schema: its modules, their tokens, how often each was imported."""
    own = tenant(extra_key, cache_salt)
    try:
        found = _registry().get(own, name)
    except KeyError as error:
        return _refused(error.args[0], status=HTTPStatus.NOT_FOUND)
    return JSONResponse(await _told(own, found))


async def _told(own: Tenant, registered: Registered) -> dict[str, Any]:
    """A schema, and where its prefixes are stored."""
    registry = _registry()
    told = await in_thread(registered.as_dict, registry.tokenizer)
    return {**told, "residency": await residency(_manager(), registry, own, registered)}


@router.delete("/{name}")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def delete(
    name: str, extra_key: str | None = None, cache_salt: str | None = None
) -> JSONResponse:
    """Forget a schema."""
    try:
        _registry().delete(tenant(extra_key, cache_salt), name)
    except KeyError as error:
        return _refused(error.args[0], status=HTTPStatus.NOT_FOUND)
    return JSONResponse({"deleted": name})


@router.post("/{name}/prewarm", openapi_extra={"requestBody": PREWARM_BODY})
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def prewarm(name: str, request: Request) -> JSONResponse:
    """Compute the prefixes of a schema that are worth most within a budget of memory, each while
    no other request runs; the answer comes when all are done. Nothing more is computed once the
    client has gone.
    """
    try:
        registry, manager = _registry(), _manager()
        asked = await read_json(
            request, Prewarm, MOST_BODY, "that of a pre-warming may have", "request to pre-warm"
        )
        put_tenant(asked, request)
        own = tenant(asked.extra_key, asked.cache_salt)
        registered = registry.get(own, name)
        if asked.mode == "modular":
            layout = await in_thread(registry.layout, registered)
            return JSONResponse(await apart.compute_all(manager, own, layout, request))
        if asked.budget_mb is None or not 0 < asked.budget_mb <= MOST_MEGABYTES:
            raise ValueError(
                f"budget_mb is {asked.budget_mb}; it must be above 0 and at most "
                f"{MOST_MEGABYTES:,}."
            )
        if asked.tokens_per_second is not None and not 0 < asked.tokens_per_second < math.inf:
            raise ValueError(f"tokens_per_second is {asked.tokens_per_second}; it must be above 0.")
        pinned = None
        if asked.ttl is not None:
            priority = hints.read_priority("priority", asked.priority)
            pinned = hints.read_lifetime("ttl", asked.ttl), priority
        sizes = (await manager.get_internal_state())[0].get("hybrid_cache")
        if not sizes:
            raise ValueError("this server does not run sglang_hybrid's cache.")
        plan = await in_thread(
            prewarming.plan_for,
            registry,
            registered,
            int(asked.budget_mb * (1 << 20)),
            sizes["state_bytes"],
            sizes["kv_bytes_per_token"],
        )
        prompts = await in_thread(prewarming.prompts_for, registry, registered, plan.nodes)
        rate = asked.tokens_per_second
        await prewarming.prefill(manager, own, prompts, rate, pinned, request)
    except KeyError as error:
        return _refused(error.args[0], status=HTTPStatus.NOT_FOUND)
    except ValueError as error:
        return _refused(str(error), error)
    return JSONResponse(
        {
            "prefixes": len(plan.nodes),
            "prompts": len(prompts),
            "bytes": plan.cost,
            "expected_saved_tokens": plan.saved,
        }
    )


@router.post("/{name}/lint")
@auth_level(AuthLevel.NORMAL)
async def lint_schema(
    name: str, extra_key: str | None = None, cache_salt: str | None = None
) -> JSONResponse:
    """What keeps prompts of a schema from being cached, by what was imported so far."""
    try:
        registry, manager = _registry(), _manager()
        found = registry.get(tenant(extra_key, cache_salt), name)
    except KeyError as error:
        return _refused(error.args[0], status=HTTPStatus.NOT_FOUND)
    sizes = (await manager.get_internal_state())[0].get("hybrid_cache") or {}
    kv = sizes.get("kv_bytes_per_token") or 0
    findings = await in_thread(
        lint,
        found.schema,
        found.length(registry.tokenizer),
        state_tokens=sizes["state_bytes"] // kv if kv else 0,
        counts=dict(found.imports),
        requests=found.requests,
    )
    return JSONResponse([asdict(finding) for finding in findings])


async def expand(manager: TokenizerManager, request: GenerateReqInput) -> None:
    """Put the tokens of what a request imports, by `pml` or by `hybrid.import`, and of `text`
    behind that, into it. Raises ValueError.
    """
    pml = getattr(request, "pml", None)
    by = "pml" if pml is not None else hints.IMPORT
    if pml is not None and getattr(request, "kv_hints", None) is not None:
        raise ValueError("the request has pml and kv_hints; give one of them.")
    asked = imported_prompt(request) if pml is None else pml
    if asked is None:
        return
    for name in ("input_ids", "input_embeds"):
        if getattr(request, name) is not None:
            raise ValueError(f"the request has {by} and {name}; give one of them.")
    for name in ("text", "extra_key", "cache_salt"):
        if isinstance(getattr(request, name), list):
            raise ValueError(f"{name} is a list; a request with {by} has one prompt.")
    own = tenant(request.extra_key, request.cache_salt)
    text, whole = request.text or "", apart.why_whole(manager)
    check_text(manager, text)
    registry = registry_of(manager)
    prompt = read_prompt(asked) if isinstance(asked, str) else asked
    run = in_thread if registry.size(own, prompt.schema) > LONG else in_thread_if_long
    expanded = await run(registry.expand, own, prompt, text=text, whole=whole)
    request.input_ids = expanded.tokenized.ids
    apart.ask(manager, request, expanded)
    request.text = request.pml = None


def _registry() -> Registry:
    return registry_of(_manager())


def _manager() -> Any:
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager


def _refused(
    why: str, error: Any = None, status: HTTPStatus = HTTPStatus.BAD_REQUEST
) -> JSONResponse:
    place = {"line": error.line, "column": error.column} if isinstance(error, MarkupError) else {}
    return JSONResponse({"error": {"message": why, **place}}, status)
