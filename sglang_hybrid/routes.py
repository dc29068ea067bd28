"""The routes of a FastAPI application, those of included routers among them (patch 0014)."""

from collections.abc import Iterable
from typing import Any

import fastapi.routing


def all_routes(routes: Iterable[Any]) -> Iterable[Any]:
    """Every route with its own `endpoint`, `path` and `matches`.

    Newer releases of FastAPI keep an included router as one entry, which has none of these; older
    ones add its routes to the application's.
    """
    contexts = getattr(fastapi.routing, "iter_route_contexts", None)
    return routes if contexts is None else contexts(routes)
