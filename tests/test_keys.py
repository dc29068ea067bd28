"""The key that opens each route, for every route that we add and every one that names its level."""

from typing import NamedTuple

import pytest

from sglang_hybrid.explain.prompt_route import PREFIX, ROUTES
from tests import tenant_routes
from tests.entered import entered

EVERYBODY = {"none", "api", "admin", "wrong", "x-api", "x-admin", "x-wrong"}
EVERYBODY |= {"basic api", "basic admin"}
OPEN_TO = {
    # level of a route: {setup of keys: what lets a request in}
    "normal": {
        "no keys": EVERYBODY,
        "api key": {"api", "x-api"},
        "admin key": EVERYBODY,
        "both keys": {"api", "x-api"},
    },
    "admin_optional": {
        "no keys": EVERYBODY,
        "api key": {"api", "x-api"},
        "admin key": {"admin", "x-admin"},
        "both keys": {"admin", "x-admin"},
    },
    "admin_force": {
        "no keys": set(),
        "api key": set(),
        "admin key": {"admin", "x-admin"},
        "both keys": {"admin", "x-admin"},
    },
}


class Route(NamedTuple):
    path: str
    method: str
    level: str | None
    is_sglangs: bool
    lets_in: dict[str, dict[str, bool]]


@pytest.fixture(scope="module")
def routes() -> list[Route]:
    return [Route(*row) for row in entered()["routes"]]


@pytest.fixture(scope="module")
def ours(routes: list[Route]) -> list[Route]:
    return [route for route in routes if not route.is_sglangs]


def test_every_route_that_we_add_names_its_level(ours: list[Route]) -> None:
    assert "/hybrid_cache/explain" in {route.path for route in ours}
    assert [route.path for route in ours if route.level is None] == []


def test_a_route_is_open_to_the_keys_of_its_level(routes: list[Route], ours: list[Route]) -> None:
    """SGLang's routes of included routers too: FastAPI hides them as it hid ours. A password is a
    key on the routes of the page only: a browser sends it whichever page makes a request.
    """
    named = [route for route in routes if route.level is not None]
    assert {"/flush_cache", "/scale_elastic_ep"} <= {route.path for route in named}
    assert set(route.path for route in ours) <= {route.path for route in named}
    for route in named:
        assert route.level is not None
        for setup, keys in OPEN_TO[route.level].items():
            if route.path in tenant_routes.PAGE:
                keys = keys | {f"basic {key}" for key in keys & {"api", "admin"}}
            let_in = {key for key, came_in in route.lets_in[setup].items() if came_in}
            assert let_in == keys, f"{route.method} {route.path} ({route.level}) with {setup}"


def test_every_route_is_known_to_treat_tenants_in_some_way(routes: list[Route]) -> None:
    assert {route.path for route in routes} == tenant_routes.KNOWN


def test_no_route_below_hybrid_cache_answers_a_foreign_page(ours: list[Route]) -> None:
    """The key does not matter, nor which router has the route."""
    answers = entered()["foreign"]
    asked = {(method, path) for method, path, *_ in answers}
    below = {(route.method, route.path) for route in ours if route.path.startswith("/hybrid_cache")}
    assert len(below) >= 10 and below < asked
    told = {"admin", "x-admin"}
    for method, path, key, what, status, cors in answers:
        refused = {403} if key in told or method == "OPTIONS" else {401, 403}
        assert status in refused and not cors, f"{method} {path} {key} {what}: {status} {cors}"


def test_a_start_tells_no_keys() -> None:
    line, command = entered()["logged"]
    assert "'admin_api_key': '(hidden)'" in line and "--admin-api-key (hidden)" in command
    assert "told" not in line + command


def test_only_operators_routes_want_the_admin_key(routes: list[Route]) -> None:
    level = {route.path: route.level for route in routes}
    operators = tenant_routes.OPERATORS | tenant_routes.PAGE
    assert {path for path in operators if level[path] is None} == set()


def test_a_prompt_is_told_to_the_keys_that_may_send_it(routes: list[Route]) -> None:
    """The route that tells it calls these behind its own check of keys."""
    told = [route for route in routes if route.path.startswith(PREFIX)]
    sent = [route for route in routes if route.path in ROUTES and route.method == "POST"]
    assert {route.path for route in sent} == ROUTES
    assert [route.lets_in for route in sent] == [told[0].lets_in] * len(sent)
