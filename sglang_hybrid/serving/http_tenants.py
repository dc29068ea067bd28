"""The tenant of an HTTP request (tenants.py).

It says that in the fields `extra_key` and `cache_salt` of its body (JSON or a form), in query
parameters of these names, or in the header `X-Hybrid-Tenant`, which is an extra key, on every
route: `put_tenant` refuses what a route could not honour. With `--hybrid-tenants api-key` the
client's API key is a part of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

from starlette._utils import get_route_path

from sglang_hybrid.serving import headers
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import API_KEY, REQUIRED
from sglang_hybrid.serving.names import check_name
from sglang_hybrid.serving.stored_keys import OF_KEY, check_key
from sglang_hybrid.serving.tenants import EXTRA_KEY, FIELDS, Tenant, tenant, tenant_names

if TYPE_CHECKING:
    from fastapi import Request

Value = TypeVar("Value")
Http = TypeVar("Http", bound="Request")

ADAPTER_FIELDS = ("model", "lora_path")
"""The fields of a body that may name an adapter."""

HEADER = "Tenant"
"""The header of ours (headers.py) that says an extra key."""

_served: ContextVar[Request | None] = ContextVar("served", default=None)


def current_tenant() -> Tenant:
    """The tenant of the HTTP request that is served now, whatever its adapter. Raises ValueError if
    it names several, as a batch may.
    """
    http = _served.get()
    return None if http is None else tenant_of_http(http)


def tenant_of_http(http: Request) -> Tenant:
    """The tenant of an HTTP request but for its adapter. Raises ValueError if it names several."""
    said = tenant_fields(http)
    for name, value in said.items():
        if isinstance(value, list):
            raise ValueError(f"{name} is a list; this request has one tenant.")
    extra_key, salt = (said.get(name) for name in FIELDS)
    key = _key_part(http)
    return tenant(_with_key(_without_key(extra_key, key), key), salt)  # type: ignore[arg-type]


def http_owner() -> bytes | None:
    """Names the tenant of the HTTP request that is served now, by its adapter too, for what a
    process keeps of texts: 32 bytes. None where no HTTP request is served, or one of several
    tenants.
    """
    http = _served.get()
    if http is None:
        return None
    body = getattr(http, "_json", None)
    named = [body.get(name) for name in ADAPTER_FIELDS] if isinstance(body, Mapping) else []
    if any(not isinstance(name, str | None) for name in named):
        return None
    try:
        who = repr((tenant_of_http(http), named))
    except ValueError:
        return None
    return blake2b(who.encode(errors="surrogatepass"), digest_size=32).digest()


def serve_for(http: Http) -> Http:
    """Let `current_tenant` know the HTTP request that this task serves; returns it."""
    _served.set(http)
    return http


def tenant_fields(http: Request) -> dict[str, str | list[str]]:
    """The tenant that an HTTP request names: of `FIELDS`, those that it gives. Its body must have
    been read, as FastAPI does before it calls an endpoint. Raises ValueError.
    """
    sources = [getattr(http, place, None) for place in ("query_params", "_form", "_json")]
    said: dict[str, str | list[str]] = {}
    for name in FIELDS:
        given = [value for source in sources for value in _values(source, name)]
        if name == EXTRA_KEY:
            given += filter(None, headers.values(getattr(http, "headers", {}), HEADER))
        for value in given:
            check_name(name, value)
            if said.setdefault(name, value) != value:
                raise ValueError(_two_values(name))
    return said


def _two_values(name: str) -> str:
    header = " (the header X-Hybrid-Tenant is one, too)" if name == EXTRA_KEY else ""
    return f"the request has two values of {name}{header}; give one."


def _values(source: Any, name: str) -> list[Any]:
    """All that a body, a form or a query has under a name, but for what is empty."""
    if hasattr(source, "getlist"):
        values = source.getlist(name)
    else:
        values = [source.get(name)] if isinstance(source, Mapping) else []
    return [value for value in values if value or isinstance(value, int | float)]


def put_tenant(request: Any, http: Request | None) -> None:
    """Put what `http` says of its tenant into `request`, which an endpoint made of it; an empty key
    or salt becomes none. Raises ValueError where `request` has no place for it, and for a request
    without a tenant under `--hybrid-tenants required`.
    """
    if http is None or getattr(request, "expanded", None) is not None:
        for name in FIELDS:  # of an engine, or of the server itself, which has said its tenant
            if hasattr(request, name):
                setattr(request, name, getattr(request, name) or None)
        return
    said, key = tenant_fields(http), _key_part(http)
    for name in FIELDS:
        wanted: Any = said.get(name)
        if name == EXTRA_KEY:
            wanted = _without_key(wanted, key)
        if not hasattr(request, name):
            if wanted is not None or (key and name == EXTRA_KEY):
                what = "an API key" if wanted is None else name
                raise ValueError(
                    f"the request has {what}, and this endpoint keeps the prompts of all its "
                    "clients together; leave it out, or use a server for each tenant."
                )
            continue
        own: Any = getattr(request, name)
        check_name(name, own)
        if name == EXTRA_KEY:
            own = _without_key(own, key)
        own = own or wanted
        if wanted is not None and own not in (wanted, [wanted] * len(own)):  # of a batch
            raise ValueError(_two_values(name))
        setattr(request, name, _with_key(own, key) if name == EXTRA_KEY else own)
    _check_named(request, http)


def _check_named(request: Any, http: Request) -> None:
    """Raise ValueError if a request has no tenant on a server that requires one; health checks need
    none.
    """
    said = [getattr(request, name, None) for name in FIELDS]
    named = any(all(value) if isinstance(value, list) else value for value in said)
    if named or REQUIRED not in _sources():
        return
    if get_route_path({"path": "", **getattr(http, "scope", {})}).startswith("/health"):
        return
    key = ", or an API key" if API_KEY in _sources() else ""
    raise ValueError(
        "the request names no tenant, and this server requires one; give extra_key or cache_salt "
        f"in its body or its query, or the header X-Hybrid-Tenant{key}."
    )


def own_headers() -> dict[str, str]:
    """Headers of the request that a starting server sends to itself: where a tenant is required, it
    is one of its own (patch 0067).
    """
    return {f"X-Hybrid-{HEADER}": secrets.token_hex(8)} if REQUIRED in _sources() else {}


@lru_cache(maxsize=1)
def _sources() -> list[str]:
    """The words of `--hybrid-tenants`, which every request asks for."""
    return HybridConfig.from_environment().hybrid_tenants.split(",")


def _key_part(http: Request) -> str:
    """The part of a client's extra key that comes from its API key, "" of one without a key, and
    where keys make no tenants.
    """
    key = _api_key(getattr(http, "headers", {})) if API_KEY in _sources() else ""
    return f"{OF_KEY}{tenant_names().of_api_key(key)}/" if key else ""


def _api_key(sent: Mapping[str, str]) -> str:
    """The API key of a client: of `Authorization`, or of `x-api-key` where there is none or it is
    the server's own; "" without one.
    """
    scheme, _, token = sent.get("authorization", "").partition(" ")
    first = token if scheme.lower() == "bearer" else scheme + token
    for key in (first, sent.get("x-api-key", "")):
        if key and not any(secrets.compare_digest(key.encode(), own) for own in server_keys()):
            return key
    return ""


def server_keys() -> list[bytes]:
    """The keys that this server was started with; they open routes and belong to no tenant."""
    from sglang.srt.runtime_context import get_serving

    serving = get_serving()
    return [key.encode() for key in (serving.api_key, serving.admin_api_key) if key]


def _with_key(extra_key: Any, key: str) -> Any:
    """An extra key, or a list of them, with the part `key` before it."""
    if not key:
        return extra_key
    if isinstance(extra_key, list):
        return [_with_key(each, key) for each in extra_key]
    return key + (extra_key or "")


def _without_key(extra_key: Any, key: str) -> Any:
    """An extra key, or a list of them, as the client gave it. Raises ValueError for one that looks
    as if another client's API key had made it.
    """
    if isinstance(extra_key, list):
        return [_without_key(each, key) for each in extra_key]
    check_key(extra_key)
    if isinstance(extra_key, str) and API_KEY in _sources():
        if key and extra_key.startswith(key):
            return extra_key.removeprefix(key) or None
        if extra_key.startswith(OF_KEY):
            raise ValueError(
                f"extra_key is {extra_key[:80]!r}; names that begin with {OF_KEY} are the server's "
                "own."
            )
    return extra_key


def refuse_tenants(instances: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError if one of the prompts of a body names a tenant of its own."""
    for name in FIELDS:
        if any(instance.get(name) for instance in instances):
            raise ValueError(f"an instance has {name}; give it in parameters, for all of them.")


class PerTenant(MutableMapping[str, Value]):
    """A dictionary for each tenant. Every operation acts on the dictionary of the tenant whose HTTP
    request is served now (`current_tenant`).
    """

    def __init__(self) -> None:
        self._values: dict[Tenant, dict[str, Value]] = {}

    def __getitem__(self, key: str) -> Value:
        return self._values.get(current_tenant(), {})[key]

    def __setitem__(self, key: str, value: Value) -> None:
        self._values.setdefault(current_tenant(), {})[key] = value

    def __delitem__(self, key: str) -> None:
        own = current_tenant()
        del self._values.get(own, {})[key]
        if not self._values[own]:
            del self._values[own]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values.get(current_tenant(), {}))

    def __len__(self) -> int:
        return len(self._values.get(current_tenant(), {}))
