"""The tenant of a request: who may share what was computed, learnt, stored or noted.

A tenant is an `extra_key`, a `cache_salt` and an adapter. An empty key or salt is none. Requests
with none of the three are one tenant together. Whatever keeps something of a request keeps it under
the name that `tenant` gives, and nothing else makes such a name:

    a prompt in a scheduler     `tenant_of(req)`
    a prompt before that        `tenant_of_prompt(request)`
    any HTTP request            `current_tenant()`

An HTTP request says its tenant in the fields `extra_key` and `cache_salt` of its body (JSON or a
form) or in query parameters of these names, on every route: `put_tenant` refuses what a route could
not honour.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from fastapi import Request
    from sglang.srt.managers.schedule_batch import Req

Value = TypeVar("Value")
Http = TypeVar("Http", bound="Request")

Tenant: TypeAlias = tuple[str | None, str | None] | None
"""Extra key, with an adapter's id at its end, and cache salt; None where there is neither."""

FIELDS = ("extra_key", "cache_salt")
"""What a request says of its tenant, beside its adapter."""

LIKE_AN_ADAPTER = re.compile(r"[0-9a-f]{32}\.*\Z")
KEY_VARIABLE = "SGLANG_HYBRID_RECORD_KEY"
NAME_BYTES = 8

_served: ContextVar[Request | None] = ContextVar("served", default=None)


def tenant(extra_key: str | None, cache_salt: str | None) -> Tenant:
    """The tenant of requests with this extra key and salt; an empty one is none."""
    if not extra_key and not cache_salt:
        return None
    return (extra_key or None, cache_salt or None)


def tenant_of(req: Req) -> Tenant:
    """The tenant of a request in a scheduler."""
    return tenant(req.extra_key, req.cache_salt)


def tenant_of_prompt(request: Any) -> Tenant:
    """The tenant of a prompt that is not in a scheduler yet: SGLang's GenerateReqInput, not of a
    batch. An adapter counts by its name.
    """
    name = request.lora_path
    adapter = None if name is None else blake2b(str(name).encode(), digest_size=16).hexdigest()
    return tenant(stored_under(request.extra_key, adapter), request.cache_salt)


def current_tenant() -> Tenant:
    """The tenant of the HTTP request that is served now, whatever its adapter. Raises ValueError if
    it names several, as a batch may.
    """
    http = _served.get()
    said = {} if http is None else tenant_fields(http)
    for name, value in said.items():
        if isinstance(value, list):
            raise ValueError(f"{name} is a list; this request has one tenant.")
    return tenant(*(said.get(name) for name in FIELDS))  # type: ignore[arg-type]


def serve_for(http: Http) -> Http:
    """Let `current_tenant` know the HTTP request that this task serves; returns it."""
    _served.set(http)
    return http


def tenant_fields(http: Request) -> dict[str, str | list[str]]:
    """What an HTTP request says of its tenant: of `FIELDS`, those that it names. Its body must have
    been read, as FastAPI does before it calls an endpoint. Raises ValueError.
    """
    sources = [getattr(http, place, None) for place in ("query_params", "_form", "_json")]
    said: dict[str, str | list[str]] = {}
    for name in FIELDS:
        for value in (value for source in sources for value in _values(source, name)):
            texts = value if isinstance(value, list) else [value]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"{name} is {str(value)[:80]}; it must be a text.")
            if said.setdefault(name, value) != value:
                raise ValueError(f"the request has two values of {name}; give one.")
    return said


def _values(source: Any, name: str) -> list[Any]:
    """All that a body, a form or a query has under a name, but for what is empty."""
    if hasattr(source, "getlist"):
        values = source.getlist(name)
    else:
        values = [source.get(name)] if isinstance(source, Mapping) else []
    return [value for value in values if value or isinstance(value, int | float)]


def put_tenant(request: Any, http: Request | None) -> None:
    """Put what `http` says of its tenant into `request`, which an endpoint made of it; an empty key
    or salt becomes none. Raises ValueError where `request` has no place for it.
    """
    said = {} if http is None else tenant_fields(http)
    for name in FIELDS:
        wanted = said.get(name)
        if not hasattr(request, name):
            if wanted is not None:
                raise ValueError(
                    f"the request has {name}, and this endpoint keeps the prompts of all its "
                    "clients together; leave it out, or use a server for each tenant."
                )
            continue
        own: Any = getattr(request, name) or wanted
        if wanted is not None and own not in (wanted, [wanted] * len(own)):  # of a batch
            raise ValueError(f"the request has two values of {name}; give one.")
        setattr(request, name, own)


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


def apart_from_adapters(extra_key: str) -> str:
    """The extra key under which a request without an adapter is stored (hooks/scheduling.py).

    SGLang appends an adapter's id, 32 hexadecimal digits, to the extra key. A request without an
    adapter whose extra key ends like an id would share the adapter's part of the tree; it gets a
    dot at its end instead, and so does one that ends in an id and dots, so that no two become one.
    """
    return f"{extra_key}." if LIKE_AN_ADAPTER.search(extra_key) else extra_key


def stored_under(extra_key: str | None, adapter: str | None) -> str | None:
    """The extra key under which SGLang stores a request with `extra_key` and the id of a LoRA
    `adapter`, or none.
    """
    if adapter is not None:
        return (extra_key or "") + adapter
    return None if extra_key is None else apart_from_adapters(extra_key)


class TenantNames:
    """Names of tenants for files: a hash with a secret key, from which no salt can be guessed.

    The key is that given, else the variable SGLANG_HYBRID_RECORD_KEY, or random: then a tenant has
    another name after the next start.
    """

    def __init__(self, key: bytes | None = None) -> None:
        if key is None:
            key = (os.environ.get(KEY_VARIABLE) or secrets.token_hex(16)).encode()
        self._key = blake2b(key).digest()

    def name(self, tenant: Tenant) -> str:
        """The name of a tenant: 16 hex digits; "" of requests with neither key nor salt."""
        if tenant is None:
            return ""
        extra_key, salt = (b"-" if part is None else b"+" + part.encode() for part in tenant)
        content = len(extra_key).to_bytes(8, "little") + extra_key + salt
        return blake2b(content, key=self._key, digest_size=NAME_BYTES).hexdigest()
