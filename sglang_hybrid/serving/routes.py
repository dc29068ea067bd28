"""What the check of keys must know: all routes of an application, and the key that a request has
(patch 0014).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import fastapi.routing


def all_routes(routes: Iterable[Any]) -> Iterable[Any]:
    """Every route with its own `endpoint`, `path` and `matches`.

    Newer releases of FastAPI keep an included router as one entry, which has none of these; older
    ones add its routes to the application's.
    """
    contexts = getattr(fastapi.routing, "iter_route_contexts", None)
    return routes if contexts is None else contexts(routes)


def authorization(headers: Mapping[str, str]) -> str | None:
    """A request's header Authorization, or what it would be for the key in `x-api-key`, where
    Anthropic's clients put it.
    """
    given, key = headers.get("Authorization"), headers.get("x-api-key")
    return f"Bearer {key}" if given is None and key is not None else given
