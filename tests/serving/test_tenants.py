"""The tenant of a request, by its body, its form or its query; its sessions, and what it stored."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

import sglang_hybrid
from sglang_hybrid.hooks.serving import keep_owner, refuse_used_ids
from sglang_hybrid.serving import http_tenants
from sglang_hybrid.serving.http_tenants import (
    PerTenant,
    current_tenant,
    own_headers,
    put_tenant,
    refuse_tenants,
    serve_for,
    tenant_fields,
)
from sglang_hybrid.serving.requests import ids
from sglang_hybrid.serving.requests.checks import normalize
from sglang_hybrid.serving.requests.ids import (
    MOST_SESSIONS,
    has_too_many,
    open_session,
    put_owner,
    scheduler_id,
    session_to_close,
    shown_id,
)
from sglang_hybrid.serving.routes import KeyHeader
from sglang_hybrid.serving.stored_keys import apart_from_adapters
from sglang_hybrid.serving.tenants import TenantNames, tenant, tenant_of, tenant_of_prompt

Sent = dict[str, str] | list[tuple[str, str]]


def http(
    body: Any = None, query: str = "", form: Any = None, headers: Sent | None = None, path: str = ""
) -> Request:
    """A request whose body an endpoint has read."""
    sent = headers.items() if isinstance(headers, dict) else headers or ()
    raw = [(name.lower().encode(), value.encode()) for name, value in sent]
    scope = {"type": "http", "path": path, "query_string": query.encode(), "headers": raw}
    request = Request(scope)
    if body is not None:
        request._json = body
    if form is not None:
        request._form = form
    return request


def prompt(**fields: Any) -> GenerateReqInput:
    return GenerateReqInput(text="x", **fields)


def tuples_with_a_salt(code: str) -> list[ast.Tuple]:
    """Tuples of a key and a salt, but for two values that are given to two names at once."""
    nodes = list(ast.walk(ast.parse(code)))
    unpacked = [
        node.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
    ]
    return [
        node
        for node in nodes
        if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load) and node not in unpacked
        if any(
            "cache_salt" in (getattr(one, "attr", ""), getattr(one, "id", "")) for one in node.elts
        )
    ]


def test_nothing_else_makes_a_tenant() -> None:
    """A tuple with a salt in it is a name of a tenant; one file makes them."""
    package = Path(sglang_hybrid.__file__).parent
    assert tuples_with_a_salt("seen[(req.extra_key, req.cache_salt)] = 1")
    assert not tuples_with_a_salt("key, salt = req.extra_key, req.cache_salt")
    for path in package.rglob("*.py"):
        assert not tuples_with_a_salt(path.read_text()), path.name


def test_an_empty_key_or_salt_is_none() -> None:
    assert tenant("", "") is None
    assert tenant("", "s") == tenant(None, "s") == (None, "s")
    assert tenant("k", "") == tenant("k", None) == ("k", None)
    assert tenant_of(SimpleNamespace(extra_key="", cache_salt="")) is None  # type: ignore[arg-type]
    assert TenantNames().name(tenant("", None)) == TenantNames().name(tenant(None, None)) == ""


def test_a_key_with_an_adapter_is_no_other_key() -> None:
    """Joined, "x" with "y" is "xy"; and a key may look like another one with a hash behind it."""
    names = [("x", "y"), ("xy", None), (None, "xy"), ("", "xy"), ("xy", ""), (None, None)]
    found = [
        tenant_of_prompt(SimpleNamespace(extra_key=key, lora_path=adapter, cache_salt=None))
        for key, adapter in names
    ]
    assert found[2] == found[3]
    assert len(set(found)) == len(names) - 1
    assert found[0] is not None and found[0][0] is not None
    like = SimpleNamespace(extra_key=found[0][0], lora_path=None, cache_salt=None)
    assert tenant_of_prompt(like) == (apart_from_adapters(found[0][0]), None) != found[0]


@pytest.mark.parametrize(
    "request_",
    [
        http({"extra_key": "k", "cache_salt": "s"}),
        http(query="extra_key=k&cache_salt=s"),
        http({"cache_salt": "s"}, query="extra_key=k"),
        http({"extra_key": "k", "cache_salt": "s"}, query="cache_salt=s"),
        http(form={"extra_key": "k", "cache_salt": "s"}),
        http({"cache_salt": "s"}, headers={"X-Hybrid-Tenant": "k"}),
        http({"cache_salt": "s"}, headers={"X-Request-Id-Hybrid-Tenant": "k"}),
        http({"extra_key": "k", "cache_salt": "s"}, headers={"x-hybrid-tenant": "k"}),
    ],
)
def test_a_request_says_its_tenant(request_: Request) -> None:
    made = prompt()
    put_tenant(made, request_)
    assert (made.extra_key, made.cache_salt) == ("k", "s")
    serve_for(request_)
    assert current_tenant() == ("k", "s")


@pytest.mark.parametrize(
    "request_",
    [
        http(),
        http({}),
        http([1]),
        http({"extra_key": None}),
        http({"extra_key": ""}, query="cache_salt="),
        http(headers={"X-Hybrid-Tenant": "", "Authorization": "Bearer k"}),
        None,
    ],
)
def test_who_says_nothing_is_nobody(request_: Request | None) -> None:
    made = prompt(extra_key="")
    put_tenant(made, request_)
    assert (made.extra_key, made.cache_salt) == (None, None)


def test_two_values_are_refused() -> None:
    with pytest.raises(ValueError, match="two values of cache_salt"):
        tenant_fields(http({"cache_salt": "s"}, query="cache_salt=t"))
    with pytest.raises(ValueError, match="two values of cache_salt"):
        tenant_fields(http(query="cache_salt=s&cache_salt=t"))
    with pytest.raises(ValueError, match="two values of cache_salt"):
        put_tenant(prompt(cache_salt="t"), http({"cache_salt": "s"}))


@pytest.mark.parametrize(
    "request_",
    [
        http({"extra_key": "k"}, headers={"X-Hybrid-Tenant": "l"}),
        http(query="extra_key=k", headers={"X-Request-Id-Hybrid-Tenant": "l"}),
        http(headers={"X-Hybrid-Tenant": "k", "X-Request-Id-Hybrid-Tenant": "l"}),
        http(headers=[("X-Hybrid-Tenant", "of the client"), ("X-Hybrid-Tenant", "of a gateway")]),
    ],
)
def test_a_header_that_something_else_contradicts_is_refused(request_: Request) -> None:
    with pytest.raises(ValueError, match="two values of extra_key "):
        put_tenant(prompt(), request_)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that sets `--hybrid-tenants`, on a server with the keys `own` and `admin`."""

    def give(words: str) -> None:
        monkeypatch.setattr(http_tenants, "_sources", words.split(",").copy)

    monkeypatch.setattr(http_tenants, "server_keys", lambda: [b"own", b"admin"])
    return give


def with_key(key: str, body: Any = None, **more: Any) -> Request:
    return http(body, headers={"Authorization": f"Bearer {key}", **more})


def put(request: Request, **fields: Any) -> Any:
    made = prompt(**fields)
    put_tenant(made, request)
    return made


def test_a_key_is_a_part_of_its_clients_tenant(sources: Callable[[str], None]) -> None:
    """Clients with different keys are apart whatever else they say; fields divide further."""
    assert put(with_key("sk-a")).extra_key is None
    sources("api-key")
    said = [None, {"extra_key": "k"}, {"extra_key": "l"}, {"extra_key": "k", "cache_salt": "s"}]
    found = {
        (made.extra_key, made.cache_salt)
        for key in ("sk-a", "sk-b", "")
        for made in (put(with_key(key, body)) for body in said)
    }
    assert len(found) == 12
    assert not any("sk-" in str(each) for each in found)
    serve_for(with_key("sk-a", {"extra_key": "k"}))
    assert current_tenant() == (put(with_key("sk-a", {"extra_key": "k"})).extra_key, None)
    by_header = with_key("sk-a", **{"X-Hybrid-Tenant": "k"})
    assert put(by_header).extra_key == put(with_key("sk-a", {"extra_key": "k"})).extra_key


def test_a_key_becomes_a_part_once(sources: Callable[[str], None]) -> None:
    """An endpoint makes a request of a request, and a batch has one key for each prompt."""
    sources("api-key")
    request = with_key("sk-a", {"extra_key": ["k", "l"]})
    made = GenerateReqInput(text=["x", "y"], extra_key=["k", "l"])
    put_tenant(made, request)
    once = made.extra_key
    assert once == [put(with_key("sk-a", {"extra_key": key})).extra_key for key in "kl"]
    put_tenant(made, request)
    assert made.extra_key == once
    hidden = put(with_key("sk-a"), extra_key="k")  # in a body that only the endpoint can read
    assert [hidden.extra_key] == once[:1]


def test_another_clients_key_cannot_be_named(sources: Callable[[str], None]) -> None:
    sources("api-key")
    theirs = put(with_key("sk-a")).extra_key
    own = "begin with api-key/ are the server's own"
    for request in (with_key("sk-b"), http()):
        with pytest.raises(ValueError, match=own):
            put(request, extra_key=theirs)
    by_header = http(headers={"X-Hybrid-Tenant": theirs})
    for request in (with_key("sk-b", {"extra_key": theirs}), by_header):
        with pytest.raises(ValueError, match=own):
            put(request)
    serve_for(http({"extra_key": theirs}))
    with pytest.raises(ValueError, match="begin with api-key/ are the server's own"):
        current_tenant()
    assert put(with_key("sk-a"), extra_key=theirs).extra_key == theirs
    assert put(with_key("sk-a", {"extra_key": theirs})).extra_key == theirs


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"Authorization": "bearer sk-a"}, "sk-a"),
        ({"x-api-key": "sk-a"}, "sk-a"),
        ({"Authorization": "Bearer own", "x-api-key": "sk-a"}, "sk-a"),
        ({"Authorization": "Bearer admin", "x-api-key": "sk-a"}, "sk-a"),
        ({"Authorization": "Bearer sk-a", "x-api-key": "sk-b"}, "sk-a"),
        ({"Authorization": "Bearer own", "x-api-key": "admin"}, None),
        ({"Authorization": "Bearer own"}, None),
        ({}, None),
    ],
)
def test_the_servers_own_keys_are_nobodys(
    sources: Callable[[str], None], headers: dict[str, str], key: str | None
) -> None:
    sources("api-key")
    expected = None if key is None else put(with_key(key)).extra_key
    assert put(http(headers=headers)).extra_key == expected


def test_a_key_keeps_its_name_with_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_RECORD_KEY", "x")
    name = TenantNames().of_api_key("sk-a")
    assert name == TenantNames().of_api_key("sk-a") != TenantNames(b"y").of_api_key("sk-a")


def test_a_request_without_a_tenant_is_refused_where_one_is_required(
    sources: Callable[[str], None],
) -> None:
    nobodys = [http(), http({"extra_key": "", "cache_salt": None}), with_key("sk-a")]
    for request in nobodys:
        put(request)
    sources("required")
    for request in nobodys:
        with pytest.raises(ValueError, match=r"names no tenant.*header X-Hybrid-Tenant\.$"):
            put(request)
    with pytest.raises(ValueError, match="names no tenant"):
        put_tenant(GenerateReqInput(text=["x", "y"], cache_salt=["a", ""]), http())
    put(http(path="/health_generate"))
    below = http(path="/api/health_generate")  # with --fastapi-root-path /api
    below.scope["root_path"] = "/api"
    put(below)
    put(http({"cache_salt": "s"}))
    put(http(headers=own_headers()))
    put_tenant(prompt(), None)  # of an engine
    sources("api-key,required")
    put(with_key("sk-a"))
    with pytest.raises(ValueError, match=r"names no tenant.*or an API key\.$"):
        put(with_key("own"))


def test_what_the_server_asks_itself_has_its_tenant(sources: Callable[[str], None]) -> None:
    """Prompts that a client's request makes it compute, for a part of that client's tree."""
    sources("api-key,required")
    for key in ("module/0/+k", put(with_key("sk-a")).extra_key):
        own: Any = prompt(extra_key=key)
        own.expanded = object()
        put_tenant(own, with_key("sk-a", {"extra_key": "k"}))
        assert own.extra_key == key


@pytest.mark.parametrize("value", [5, 0, True, {"a": "b"}, ["a", 1]])
def test_what_is_no_text_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"cache_salt(\[1\])? is .*; it must be a text"):
        tenant_fields(http({"cache_salt": value}))


def test_a_long_name_is_refused() -> None:
    tenant_fields(http({"cache_salt": "a" * 1_024}))
    with pytest.raises(ValueError, match=r"cache_salt has 1,025 characters; it may have 1,024"):
        tenant_fields(http({"cache_salt": "a" * 1_025}))
    with pytest.raises(ValueError, match=r"extra_key is .*, which is no Unicode text"):
        put_tenant(GenerateReqInput(text="x", extra_key="\ud800"), http())


def test_a_batch_has_one_for_each_prompt() -> None:
    body = {"cache_salt": ["a", "b"]}
    made = GenerateReqInput(text=["x", "y"], cache_salt=["a", "b"])
    put_tenant(made, http(body))
    assert made.cache_salt == ["a", "b"]
    spread = GenerateReqInput(text=["x", "y"], cache_salt=["a", "a"])
    put_tenant(spread, http({"cache_salt": "a"}))
    assert spread.cache_salt == ["a", "a"]
    serve_for(http(body))
    with pytest.raises(ValueError, match="cache_salt is a list; this request has one tenant"):
        current_tenant()


def test_what_has_no_place_for_a_tenant_is_refused() -> None:
    put_tenant(EmbeddingReqInput(text="x"), http({"input": "x", "cache_salt": ""}))
    with pytest.raises(ValueError, match="has cache_salt, and this endpoint keeps the prompts"):
        put_tenant(EmbeddingReqInput(text="x"), http({"input": "x", "cache_salt": "s"}))


def test_an_instance_names_no_tenant_of_its_own() -> None:
    refuse_tenants([{"text": "x"}, {"text": "y", "cache_salt": ""}])
    with pytest.raises(ValueError, match="an instance has cache_salt"):
        refuse_tenants([{"text": "x"}, {"text": "y", "cache_salt": "s"}])


def test_a_tenants_dictionary_is_its_own() -> None:
    stored: PerTenant[int] = PerTenant()
    serve_for(http({"cache_salt": "a"}))
    stored["resp_1"] = 1
    serve_for(http(query="cache_salt=b"))
    assert stored.get("resp_1") is None
    assert (len(stored), list(stored), "resp_1" in stored) == (0, [], False)
    with pytest.raises(KeyError):
        del stored["resp_1"]
    assert stored.pop("resp_1", None) is None
    stored["resp_1"] = 2
    serve_for(http(query="cache_salt=a"))
    assert (len(stored), list(stored), stored["resp_1"]) == (1, ["resp_1"], 1)
    assert stored.pop("resp_1") == 1
    assert len(stored) == 0
    serve_for(http({"cache_salt": "b"}))
    assert stored["resp_1"] == 2


def test_requests_that_are_served_at_once_do_not_mix() -> None:
    stored: PerTenant[str] = PerTenant()

    async def serve(salt: str) -> None:
        serve_for(http({"cache_salt": salt}))
        stored["id"] = salt
        await asyncio.sleep(0)
        later = asyncio.create_task(asyncio.sleep(0, stored["id"]))
        assert (stored["id"], await later) == (salt, salt)

    async def both() -> None:
        await asyncio.gather(*(asyncio.create_task(serve(salt)) for salt in "abc"))

    asyncio.run(both())


class Manager:
    """A stand-in that opens sessions: an id that is open is not opened again."""

    def __init__(self) -> None:
        self.sessions: list[str] = []

    async def open_session(self, asked: Any, http: Any) -> str | None:
        if asked.session_id in self.sessions or has_too_many(self.sessions, asked.session_id):
            return None
        self.sessions.append(asked.session_id)
        return str(asked.session_id)


def opened(manager: Manager, salt: str, session_id: str | None = "s", key: str = "") -> str:
    request = serve_for(http({"cache_salt": salt, "extra_key": key}))
    asked: Any = SimpleNamespace(session_id=session_id, rid=None)
    return asyncio.run(open_session(manager, asked, request))  # type: ignore[arg-type]


def test_sessions_of_equal_ids_are_two_for_two_tenants() -> None:
    manager = Manager()
    assert opened(manager, "a") == opened(manager, "b") == opened(manager, "") == "s"
    assert len(set(manager.sessions)) == 3
    with pytest.raises(ValueError, match="'s' cannot be opened: one of this id is open"):
        opened(manager, "a")
    assert len(opened(manager, "a", None)) == 32


def test_a_session_asked_for_as_health_checks_are_is_refused() -> None:
    """A busy scheduler drops them: the client would wait for ever, or the session stay open."""
    manager = Manager()
    asked: Any = SimpleNamespace(session_id="s", rid="HEALTH_CHECK_1")
    with pytest.raises(ValueError, match="rid is 'HEALTH_CHECK_1'; names that begin with"):
        asyncio.run(open_session(manager, asked, http()))  # type: ignore[arg-type]
    assert manager.sessions == []
    with pytest.raises(ValueError, match="rid is 'HEALTH_CHECK_1'; names that begin with"):
        session_to_close(asked)
    asked.rid = "r"
    serve_for(http({"cache_salt": "a"}))
    assert session_to_close(asked).session_id == scheduler_id("s", tenant(None, "a"))


@pytest.mark.parametrize("key", ["", "of a gateway"])
def test_a_payer_has_a_bounded_number_of_sessions(key: str) -> None:
    """Whatever salts it names."""
    manager = Manager()
    for number in range(MOST_SESSIONS):
        opened(manager, f"salt {number % 3}", str(number), key)
    for salt in ("salt 1", "a new one", ""):
        with pytest.raises(ValueError, match="1,024 sessions that a tenant may have"):
            opened(manager, salt, "one more", key)
    opened(manager, "salt 1", "one more", "another key")
    assert not has_too_many(manager.sessions, "an engine's own")


def test_all_payers_have_a_bounded_number_of_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "MOST_SESSIONS_OF_ALL", 3)
    manager = Manager()
    for key in "abc":
        opened(manager, "", "s", key)
    with pytest.raises(ValueError, match="or the 3 of all tenants, are"):
        opened(manager, "", "s", "d")
    assert not has_too_many(manager.sessions, "an engine's own")


def test_a_prompt_continues_its_own_tenants_session_only() -> None:
    manager = Manager()
    opened(manager, "a")
    names = {}
    for salt in ("a", "b", None):
        made = prompt(session_params={"id": "s", "rid": "r"}, cache_salt=salt)
        put_owner(made, http())
        assert made.session_params is not None
        assert made.session_params["rid"] == scheduler_id("r", tenant(None, salt))
        names[salt] = made.session_params["id"]
        put_owner(made, http())
        assert made.session_params["id"] == names[salt]
        assert shown_id(names[salt]) == "s"
    assert [salt for salt, name in names.items() if name in manager.sessions] == ["a"]
    of_cache = prompt(session_id="s", cache_salt="b")
    put_owner(of_cache, http())
    assert of_cache.session_id == names["b"]
    foreign = prompt(session_params={"id": names["a"]}, cache_salt="b")
    put_owner(foreign, http())
    assert foreign.session_params is not None and foreign.session_params["id"] != names["a"]


def test_a_prompt_that_is_embedded_is_in_no_session() -> None:
    put_owner(EmbeddingReqInput(text="x"), http())


def test_a_session_of_an_engine_keeps_its_id() -> None:
    made = prompt(session_params={"id": "s", "rid": "r"}, cache_salt="a")
    put_owner(made, None)
    assert made.session_params == {"id": "s", "rid": "r"}


def test_a_batch_of_several_tenants_is_in_no_session() -> None:
    made = GenerateReqInput(text=["x", "y"], session_params={"id": "s"}, cache_salt=["a", "b"])
    with pytest.raises(ValueError, match="a session has one tenant"):
        put_owner(made, http())


def rid_of(rid: Any, whose: Any = None, text: Any = "x") -> Any:
    """The id, or ids of a batch, by which a scheduler knows a request that came over HTTP."""
    made = GenerateReqInput(text=text, rid=rid, cache_salt=whose)
    normalize(made, http())
    parts = made.rid if made.is_single else [made[item].rid for item in range(len(made.rid))]
    assert parts == made.rid
    return parts


def test_requests_of_equal_ids_are_two_for_two_tenants() -> None:
    ids = [rid_of("r", whose) for whose in ("a", "b", None)]
    assert len(set(ids)) == 3 and {shown_id(rid) for rid in ids} == {"r"}
    assert rid_of(["r", "q"], ["a", "b"], ["x", "y"]) == [ids[0], rid_of("q", "b")]
    assert rid_of("r", "a", ["x", "y"]) == [rid_of("r_0", "a"), rid_of("r_1", "a")]
    assert len(shown_id(rid_of(None))) == 32 and len(shown_id(rid_of(None, "a"))) == 32


def test_no_id_is_the_beginning_of_another_one() -> None:
    """A scheduler aborts what begins so."""
    ids = [rid_of(rid, whose) for whose in ("a", None) for rid in ("", "r", "rr", None)]
    assert [(rid, other) for rid, other in permutations(ids, 2) if other.startswith(rid)] == []


def test_the_servers_own_requests_keep_their_ids() -> None:
    made = prompt(rid="HEALTH_CHECK_1")
    health = http()
    health.scope["route"] = SimpleNamespace(path="/health_generate")
    normalize(made, health)
    assert made.rid == "HEALTH_CHECK_1"
    made = prompt(rid="r", cache_salt="a")
    normalize(made, None)
    assert made.rid == "r"
    embedded = EmbeddingReqInput(text=["x", "y"], rid=["r", "q"])
    normalize(embedded, http())
    assert embedded.rid == [rid_of("r"), rid_of("q")]


def test_an_id_that_is_made_anew_keeps_its_tenant() -> None:
    own, engines = (SimpleNamespace(rid=rid) for rid in (rid_of("r", "a"), "r"))

    def regenerate(request: Any) -> str:
        request.rid = "new"
        return "new"

    assert keep_owner(regenerate, own) == own.rid == rid_of("new", "a")
    assert keep_owner(regenerate, engines) == engines.rid == "new"


def test_an_id_is_refused_as_its_client_knows_it() -> None:
    manager = SimpleNamespace(rid_to_state={rid_of("r\n", "a")})
    refuse_used_ids(manager, SimpleNamespace(rid=rid_of("r\n", "b")))
    for rid in (rid_of("r\n", "a"), [rid_of("q", "a"), rid_of("r\n", "a")]):
        with pytest.raises(ValueError, match=r"Duplicate request ID detected: 'r\\n' is that of"):
            refuse_used_ids(manager, SimpleNamespace(rid=rid))


def test_names_of_sessions_do_not_tell_the_salt() -> None:
    assert "secret" not in scheduler_id("s", tenant("secret key", "secret salt"))


def test_anthropics_clients_send_their_key_elsewhere() -> None:
    def authorization(*sent: tuple[bytes, bytes]) -> str | None:
        """The header that the check of keys sees."""
        found: list[str | None] = []

        async def check(scope: Scope, *_: object) -> None:
            found.append(Headers(scope=scope).get("Authorization"))

        scope = {"type": "http", "headers": list(sent)}
        header = KeyHeader(check, is_page=lambda _: False)
        asyncio.run(header(scope, None, None))  # type: ignore[arg-type]
        return found[0]

    key, bearer = (b"x-api-key", b"sk"), (b"authorization", b"Bearer other")
    assert authorization() is None
    assert authorization(key) == "Bearer sk"
    assert authorization(bearer, key) == "Bearer other"
