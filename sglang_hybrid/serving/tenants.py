"""The tenant of a request: who may share what was computed, learnt, stored or noted.

A tenant is an `extra_key`, a `cache_salt` and an adapter. An empty key or salt is none. Requests
with none of the three are one tenant together. Every record of a request is kept under the name
that `tenant` gives, and nothing else makes such a name:

    a prompt in a scheduler     `tenant_of(req)`
    a prompt on its way there   `tenant_of_sent(prompt)`
    a prompt before that        `tenant_of_prompt(request)`
    any HTTP request            `http_tenants.current_tenant()`
"""

from __future__ import annotations

import os
import secrets
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from sglang_hybrid.core.records.tenant_names import KEY_VARIABLE, hashed, secret_key
from sglang_hybrid.serving.stored_keys import payer, stored_under

if TYPE_CHECKING:
    from fastapi import Request
    from sglang.srt.managers.schedule_batch import Req

Value = TypeVar("Value")
Http = TypeVar("Http", bound="Request")


class NamedTenant(NamedTuple):
    """A tenant by the extra key under which its requests are stored, and their cache salt."""

    extra_key: str | None
    cache_salt: str | None

    @property
    def payer(self) -> str | None:
        """The payer of what this tenant holds (`core/records/shares.py`)."""
        return payer(self.extra_key)


Tenant: TypeAlias = NamedTenant | None
"""The tenant of a request; None if it has neither a key nor a salt."""

FIELDS = ("extra_key", "cache_salt")
"""The fields in which a request names its tenant, beside its adapter."""

EXTRA_KEY = FIELDS[0]


def tenant(extra_key: str | None, cache_salt: str | None) -> Tenant:
    """The tenant of requests with this extra key and salt; an empty one is none."""
    if not extra_key and not cache_salt:
        return None
    return NamedTenant(extra_key or None, cache_salt or None)


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


def tenant_of_sent(prompt: Any) -> Tenant:
    """The tenant of a tokenized request, as it is sent to a scheduler."""
    extra_key = stored_under(getattr(prompt, "extra_key", None), prompt.lora_id)
    return tenant(extra_key, getattr(prompt, "cache_salt", None))


class TenantNames:
    """Names of tenants for files: a hash with a secret key, from which no salt can be guessed.

    The key is that given, else the variable SGLANG_HYBRID_RECORD_KEY, or random: then a tenant has
    another name after the next start.
    """

    def __init__(self, key: bytes | None = None) -> None:
        if key is None:
            key = (os.environ.get(KEY_VARIABLE) or secrets.token_hex(16)).encode()
        self._key = secret_key(key)

    def name(self, tenant: Tenant) -> str:
        """The name of a tenant: 16 hex digits; "" of requests with neither key nor salt."""
        if tenant is None:
            return ""
        return hashed(*tenant, self._key)

    def of_api_key(self, key: str) -> str:
        """The name of clients with an API key: 32 hex digits."""
        return blake2b(key.encode(), key=self._key, digest_size=16, person=b"api key").hexdigest()


@lru_cache(maxsize=1)
def tenant_names() -> TenantNames:
    """Names with the key of this server."""
    return TenantNames()
