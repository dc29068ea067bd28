"""Sessions of SGLang (`/open_session`, `session_params`) belong to the tenant that opened them.

A scheduler knows a session by an id. The HTTP server sends it the client's id with the names of its
payer and its tenant behind it, so that equal ids of two tenants are two sessions, and a foreign id
is one that does not exist. An `sglang.Engine` has one user: its ids stay as they are.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from starlette.requests import HTTPConnection

from sglang_hybrid.serving.tenants import Tenant, current_tenant, tenant, tenant_names

if TYPE_CHECKING:
    import fastapi
    from sglang.srt.managers.io_struct import OpenSessionReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

MOST_SESSIONS = 1_024
"""Open sessions of one payer (`core/records/shares.py`)."""

_OWNER = re.compile(r"#(?P<payer>([0-9a-f]{16})?/)([0-9a-f]{16})?\Z")


async def open_session(
    manager: TokenizerManager, asked: OpenSessionReqInput, http: fastapi.Request
) -> str:
    """Open a session for the tenant that asks; returns the id that the client knows it by. Raises
    ValueError if the scheduler does not open it.
    """
    known_as = asked.session_id or uuid.uuid4().hex
    asked.session_id = scheduler_id(known_as, current_tenant())
    if await manager.open_session(asked, http) is None:
        raise ValueError(
            f"the session {known_as[:80]!r} cannot be opened: one of this id is open, or the "
            f"{MOST_SESSIONS:,} sessions that a tenant may have are. Close it or others, or open "
            "sessions with a timeout."
        )
    return known_as


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
    if isinstance(of_cache, str):
        request.session_id = scheduler_id(of_cache, own)
    if isinstance(params, dict) and isinstance(params.get("id"), str):
        request.session_params = {**params, "id": scheduler_id(params["id"], own)}


def scheduler_id(session_id: str, owner: Tenant) -> str:
    """The id by which a scheduler knows `owner`'s session. Given such an id, that id."""
    names = tenant_names()
    payer = names.name(tenant(None if owner is None else owner.payer, None))
    behind = f"#{payer}/{names.name(owner)}"
    return session_id if session_id.endswith(behind) else session_id + behind


def shown_id(session_id: str) -> str:
    """The id that a client knows a session by."""
    return _OWNER.sub("", session_id)


def has_too_many(sessions: Iterable[str], session_id: str) -> bool:
    """Whether the payer that a session would belong to has as many as it may; an engine's user may
    have any number.
    """
    own = _OWNER.search(session_id)
    if own is None:
        return False
    owners = (_OWNER.search(other) for other in sessions)
    held = [owner for owner in owners if owner is not None and owner["payer"] == own["payer"]]
    return len(held) >= MOST_SESSIONS
