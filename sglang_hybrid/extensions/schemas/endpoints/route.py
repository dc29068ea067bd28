"""`/v1/prompt_schemas`, and `pml` in `/generate` (patch 0040)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_hybrid.core.extensions import guard
from sglang_hybrid.core.records.pin import Priority
from sglang_hybrid.core.returns.hints import IMPORT
from sglang_hybrid.explain.prompt_route import is_prompt_query
from sglang_hybrid.extensions.schemas.declared.registry import NoSchema, Registry
from sglang_hybrid.extensions.schemas.declared.resolve import read_prompt
from sglang_hybrid.extensions.schemas.declared.xml import MOST_BYTES, MarkupError
from sglang_hybrid.extensions.schemas.endpoints import apart
from sglang_hybrid.extensions.schemas.endpoints import prewarm as prewarming
from sglang_hybrid.extensions.schemas.endpoints.actions import imported_prompt
from sglang_hybrid.extensions.schemas.endpoints.residency import residency
from sglang_hybrid.extensions.schemas.endpoints.server_registry import registry_of
from sglang_hybrid.extensions.schemas.endpoints.spans import ask_spans
from sglang_hybrid.extensions.schemas.linter.lint import lint
from sglang_hybrid.serving.http_tenants import put_tenant
from sglang_hybrid.serving.requests import payloads
from sglang_hybrid.serving.requests.bodies import BodyKind, read_json
from sglang_hybrid.serving.requests.fields import check_single
from sglang_hybrid.serving.requests.long_requests import (
    LONG,
    in_side_thread,
    in_thread,
    in_thread_if_long,
)
from sglang_hybrid.serving.routes import SCHEMAS_PATH
from sglang_hybrid.serving.tenants import Tenant, tenant

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


class _Route(APIRoute):
    """Answers a ValueError with its sentence: status 404 if there is no such schema, else 400."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except ValueError as error:
                lacks = isinstance(error, NoSchema)
                told: dict[str, Any] = {"message": str(error)}
                if isinstance(error, MarkupError):
                    told |= {"line": error.line, "column": error.column}
                status = HTTPStatus.NOT_FOUND if lacks else HTTPStatus.BAD_REQUEST
                return JSONResponse({"error": told}, status)

        return handled


router = APIRouter(prefix=SCHEMAS_PATH, route_class=_Route)

MOST_MEGABYTES = 1 << 20

MOST_BODY = 2 * MOST_BYTES
"""Bytes of a request: JSON may write a character as six."""


class NewSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A schema as markup, with the extra key and salt of the requests that will use it."""

    pml: str
    extra_key: str | None = None
    cache_salt: str | None = None


class Prewarm(msgspec.Struct, forbid_unknown_fields=True):
    """The memory that prefixes of a schema may take, and the owner of their requests. budget_mb:
    None for what pins of one tenant may take. mode: `modular` for all modules, each apart, whatever
    they take. tokens_per_second: the rate at which prefixes are computed even while other requests
    run. ttl: seconds for which they are pinned, with `priority`.
    """

    budget_mb: float | None = None
    tokens_per_second: float | None = None
    ttl: float | None = None
    priority: str = Priority.LOW.value
    mode: Literal["exact", "modular"] = "exact"
    extra_key: str | None = None
    cache_salt: str | None = None


class Whose(msgspec.Struct):
    """The fields of a body that needs nothing else: the extra key and salt of a schema."""

    extra_key: str | None = None
    cache_salt: str | None = None


MOST_OF_WHOSE = 64 << 10
WHOSE = BodyKind("tenant", '{"extra_key": "a", "cache_salt": "b"}, or nothing')


async def _tenant(
    request: Request, extra_key: str | None = None, cache_salt: str | None = None
) -> Tenant:
    """The tenant that a request names which needs no body: in its query, a header, or a body."""
    said = await read_json(request, Whose, MOST_OF_WHOSE, "that of a tenant may have", WHOSE)
    put_tenant(said, request)
    return tenant(said.extra_key, said.cache_salt)


Own = Annotated[Tenant, Depends(_tenant)]

SCHEMA = BodyKind(
    "schema", "{\"pml\": \"<schema name='rules'><module name='tone'>Be brief.</module></schema>\"}"
)
PREWARM = BodyKind("request to pre-warm", '{"budget_mb": 100}, or nothing')

_, DEFINITIONS = msgspec.json.schema_components([NewSchema, Prewarm])


def _body(kind: str) -> dict[str, Any]:
    content = {"application/json": {"schema": DEFINITIONS[kind]}}
    return {"requestBody": {"content": content, "required": True}}


@router.post("", openapi_extra=_body("NewSchema"))
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def register(request: Request) -> JSONResponse:
    """Keep a schema, in place of an earlier one of its name."""
    registry = _registry()
    new = await read_json(request, NewSchema, MOST_BODY, "that of a schema may have", SCHEMA)
    put_tenant(new, request)
    registered = registry.register(tenant(new.extra_key, new.cache_salt), new.pml)
    return JSONResponse(await in_thread_if_long(registered.as_dict))


@router.get("")
@auth_level(AuthLevel.NORMAL)
async def all_schemas(own: Own) -> JSONResponse:
    """All schemas of a tenant: their sizes and counts."""
    return JSONResponse([one.summary() for one in _registry().of(own)])


@router.get("/{name}")
@auth_level(AuthLevel.NORMAL)
async def one_schema(name: str, own: Own) -> JSONResponse:
    """A schema: its modules, their tokens, how often each was imported, and where its prefixes are
    stored.
    """
    registry = _registry()
    found = registry.get(own, name)
    told = await in_side_thread(found.as_dict)
    places = await residency(_manager(), registry, own, found)
    return JSONResponse({**told, "residency": places})


@router.delete("/{name}")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def delete(name: str, own: Own) -> JSONResponse:
    """Forget a schema."""
    _registry().delete(own, name)
    return JSONResponse({"deleted": name})


@router.post("/{name}/prewarm", openapi_extra=_body("Prewarm"))
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def prewarm(name: str, request: Request) -> JSONResponse:
    """Compute the prefixes of a schema that are worth most within a budget of memory, each while
    no other request runs; the answer comes when all are done. Nothing more is computed once the
    client has gone.
    """
    registry, manager = _registry(), _manager()
    asked = await read_json(request, Prewarm, MOST_BODY, "that of a pre-warming may have", PREWARM)
    put_tenant(asked, request)
    own = tenant(asked.extra_key, asked.cache_salt)
    registered = registry.get(own, name)
    if asked.mode == "modular":
        layout = await in_side_thread(registry.layout, registered)
        return JSONResponse(await apart.compute_all(manager, own, layout, request))
    rate, pinned = _checked(asked)
    sizes = await _sizes(manager)
    if not sizes:
        raise ValueError("this server does not run sglang_hybrid's cache.")
    plan = await in_side_thread(
        prewarming.plan_for,
        registered,
        _budget(asked, sizes),
        sizes["state_bytes"],
        sizes["kv_bytes_per_token"],
    )
    prompts = await in_side_thread(prewarming.prompts_for, registry, registered, plan.nodes)
    await prewarming.prefill(manager, own, prompts, rate, pinned, request)
    return JSONResponse(
        {
            "prefixes": len(plan.nodes),
            "prompts": len(prompts),
            "bytes": plan.cost,
            "expected_saved_tokens": plan.saved,
        }
    )


def _budget(asked: Prewarm, sizes: Mapping[str, Any]) -> int:
    """Bytes that the prefixes may take: those asked for, or all that one tenant may pin. Raises
    ValueError if that is nothing.
    """
    if asked.budget_mb is not None:
        return int(asked.budget_mb * (1 << 20))
    pins = sizes["pins"] or {"bytes_of_a_tenant": 0}
    if not pins["bytes_of_a_tenant"]:
        raise ValueError(
            "this server lets nothing be pinned (--hybrid-pin-share 0, or an eviction without a "
            'tree of records), so give a budget: {"budget_mb": 100}.'
        )
    return int(pins["bytes_of_a_tenant"])


def _checked(asked: Prewarm) -> tuple[float | None, tuple[float, Priority] | None]:
    """Tokens per second, and lifetime (seconds) and priority of pins. Raises ValueError."""
    budget, rate = asked.budget_mb, asked.tokens_per_second
    if budget is not None and not 0 < budget <= MOST_MEGABYTES:
        raise ValueError(
            f"budget_mb is {budget}; it must be above 0 and at most {MOST_MEGABYTES:,}."
        )
    if rate is not None and not 0 < rate <= payloads.MOST_RATE:
        raise ValueError(
            f"tokens_per_second is {rate}; it must be above 0 and at most {payloads.MOST_RATE:,}."
        )
    if asked.ttl is None:
        return rate, None
    priority = payloads.read_priority("priority", asked.priority)
    return rate, (payloads.read_lifetime("ttl", asked.ttl), priority)


@router.post("/{name}/lint")
@auth_level(AuthLevel.NORMAL)
async def lint_schema(name: str, own: Own) -> JSONResponse:
    """The findings about a schema that keep its prompts from being cached, by what was imported so
    far.
    """
    registry = _registry()
    found = registry.get(own, name)
    sizes = await _sizes(_manager())
    kv = sizes.get("kv_bytes_per_token") or 0
    findings = await in_side_thread(
        lint,
        found.schema,
        found.length,
        state_tokens=sizes["state_bytes"] // kv if kv else 0,
        counts=dict(found.imports),
        requests=found.requests,
    )
    return JSONResponse([asdict(finding) for finding in findings])


async def expand(manager: TokenizerManager, request: GenerateReqInput) -> None:
    """Put the tokens of what a request imports, by `pml` or by `hybrid.import`, and of `text`
    behind that, into it, or its spans (`hybrid.segments`). Raises ValueError.
    """
    if await ask_spans(manager, request):
        return
    pml = getattr(request, "pml", None)
    by = "pml" if pml is not None else IMPORT
    imported = imported_prompt(request)
    if pml is not None and imported is not None:
        raise ValueError(f"the request has pml and {IMPORT}; give one of them.")
    asked = imported if pml is None else pml
    if asked is None:
        return
    for name in ("input_ids", "input_embeds"):
        if getattr(request, name) is not None:
            raise ValueError(f"the request has {by} and {name}; give one of them.")
    check_single(request, ("text", "extra_key", "cache_salt"), by)
    own = tenant(request.extra_key, request.cache_salt)
    text, whole = request.text or "", apart.why_whole(manager)
    if (texts := guard("texts")) is not None:
        texts.check_text(manager, text)
    registry = registry_of(manager)
    prompt = read_prompt(asked) if isinstance(asked, str) else asked
    run = in_thread if registry.size(own, prompt.schema) > LONG else in_thread_if_long
    counts = not is_prompt_query()
    expanded = await run(registry.expand, own, prompt, text=text, whole=whole, counts=counts)
    request.input_ids = expanded.tokenized.ids
    apart.ask(manager, request, expanded)
    request.text = request.pml = None


def _registry() -> Registry:
    return registry_of(_manager())


def _manager() -> Any:
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager


async def _sizes(manager: Any) -> dict[str, Any]:
    """Bytes of states and of KV, and what else the cache tells; empty without our cache."""
    return (await manager.get_internal_state())[0].get("hybrid_cache") or {}
