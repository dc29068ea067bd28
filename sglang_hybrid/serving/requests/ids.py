"""Ids of requests (`rid`) and of SGLang's sessions (`/open_session`, `session_params`) belong to a
tenant.

A scheduler knows a request or a session by an id. The HTTP server sends it the client's id with the
names of its payer and its tenant behind it, so that equal ids of two tenants are two, and a foreign
id is one that does not exist. Nor is one tenant's id the beginning of another's: a scheduler aborts
all requests whose ids begin with the one that it is told. An `sglang.Engine` has one user: its ids
stay as they are.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Container
from typing import TYPE_CHECKING, Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from starlette.requests import HTTPConnection

from sglang_hybrid.core.sentences import quote
from sglang_hybrid.serving.names import check_name
from sglang_hybrid.serving.tenants import FIELDS, Tenant, tenant, tenant_names

if TYPE_CHECKING:
    import fastapi
    from sglang.srt.managers.io_struct import CloseSessionReqInput, OpenSessionReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

MOST_SESSIONS = 1_024
"""Open sessions of one payer (`core/records/shares.py`)."""

MOST_SESSIONS_OF_ALL = 1 << 14
"""Open sessions of all payers: a client may name any number of them, and a scheduler looks at each
session to count those of one.
"""

NOBODY = "-"
"""The name of no payer and of no tenant."""

_OWNER = re.compile(rf"#(?P<payer>[0-9a-f]{{16}}|{NOBODY})\.([0-9a-f]{{16}}|{NOBODY})\Z")


async def open_session(
    manager: TokenizerManager, asked: OpenSessionReqInput, http: fastapi.Request
) -> str:
    """Open a session for the tenant that asks; returns the id that the client knows it by. Raises
    ValueError if the scheduler does not open it.
    """
    from sglang_hybrid.serving.http_tenants import current_tenant

    check_name("session_id", asked.session_id)
    refuse_health_check(asked.rid)
    known_as = asked.session_id or uuid.uuid4().hex
    asked.session_id = scheduler_id(known_as, current_tenant())
    if await manager.open_session(asked, http) is None:
        raise ValueError(
            f"the session {known_as[:80]!r} cannot be opened: one of this id is open, or the "
            f"{MOST_SESSIONS:,} sessions that a tenant may have, or the {MOST_SESSIONS_OF_ALL:,} "
            "of all tenants, are. Close it or others, or open sessions with a timeout."
        )
    return known_as


def session_to_close(asked: CloseSessionReqInput) -> CloseSessionReqInput:
    """The request to close a session, which names that of the tenant that asks. Raises
    ValueError.
    """
    from sglang_hybrid.serving.http_tenants import current_tenant

    refuse_health_check(asked.rid)
    asked.session_id = scheduler_id(asked.session_id, current_tenant())
    return asked


def refuse_health_check(rid: object) -> None:
    """Raise ValueError for an id, or one of several, that begins as a health check's: a busy
    scheduler drops what has such an id without an answer.
    """
    for one in rid if isinstance(rid, list) else [rid]:
        if isinstance(one, str) and one.startswith(HEALTH_CHECK_RID_PREFIX):
            raise ValueError(
                f"rid is {quote(one)}; names that begin with {HEALTH_CHECK_RID_PREFIX} are "
                "the server's own."
            )


def put_owner(request: Any, http: object) -> None:
    """Let a prompt from HTTP continue its own tenant's sessions only. request: GenerateReqInput or
    EmbeddingReqInput with its tenant. http: what it came with. Raises ValueError.
    """
    params, of_cache = (getattr(request, name, None) for name in ("session_params", "session_id"))
    if not isinstance(http, HTTPConnection) or (not params and of_cache is None):
        return
    key, salt = getattr(request, "extra_key", None), getattr(request, "cache_salt", None)
    if isinstance(key, list) or isinstance(salt, list):
        raise ValueError("extra_key or cache_salt is a list; a session has one tenant.")
    own = tenant(key, salt)
    check_name("session_id", of_cache)
    if isinstance(of_cache, str):
        request.session_id = scheduler_id(of_cache, own)
    if isinstance(params, dict):  # rid: that of the session's request which is continued
        names = [name for name in ("id", "rid") if isinstance(params.get(name), str)]
        for name in names:
            check_name(f"session_params.{name}", params[name])
        owned = {name: scheduler_id(params[name], own) for name in names}
        request.session_params = params | owned


def own_ids(request: Any, http: object) -> None:
    """Let a scheduler know a prompt from HTTP, or each one of a batch, by an id of its tenant's.
    request: GenerateReqInput or EmbeddingReqInput that SGLang has normalized.
    """
    if not isinstance(http, HTTPConnection):
        return
    if isinstance(request.rid, str):
        if not request.rid.startswith(HEALTH_CHECK_RID_PREFIX):  # the server's own
            own = tenant(getattr(request, "extra_key", None), getattr(request, "cache_salt", None))
            request.rid = scheduler_id(request.rid, own)
        return
    none = [None] * len(request.rid)
    keys, salts = (getattr(request, name, None) or none for name in FIELDS)
    owners = map(tenant, keys, salts)
    request.rid = [scheduler_id(*each) for each in zip(request.rid, owners, strict=True)]


def scheduler_id(known_as: str, owner: Tenant) -> str:
    """The id by which a scheduler knows `owner`'s session or request. Given such an id, that id."""
    names = tenant_names()
    payer = names.name(tenant(None if owner is None else owner.payer, None))
    behind = f"#{payer or NOBODY}.{names.name(owner) or NOBODY}"
    return known_as if known_as.endswith(behind) else known_as + behind


def shown_id(scheduler_id: str) -> str:
    """The id that a client knows a session or a request by."""
    return _OWNER.sub("", scheduler_id)


def owner_part(scheduler_id: str) -> str:
    """The part of an id behind the one that a client knows; "" in an id of an engine's."""
    found = _OWNER.search(scheduler_id)
    return "" if found is None else found[0]


def refuse_used_ids(known: Container[str], rid: str | list[str]) -> None:
    """Raise ValueError if one of the ids of a body's prompts is among `known`."""
    for one in [rid] if isinstance(rid, str) else rid:
        if one in known:
            raise ValueError(
                f"Duplicate request ID detected: {shown_id(one)[:80]!r} is that of a request which "
                "has not ended; give another rid, or none."
            )


def has_too_many(sessions: Collection[str], session_id: str) -> bool:
    """True if the payer that a session would belong to has as many as it may, or all payers have;
    an engine's user may have any number.
    """
    own = _OWNER.search(session_id)
    if own is None:
        return False
    if len(sessions) >= MOST_SESSIONS_OF_ALL:
        return True
    owners = (_OWNER.search(other) for other in sessions)
    held = [owner for owner in owners if owner is not None and owner["payer"] == own["payer"]]
    return len(held) >= MOST_SESSIONS
