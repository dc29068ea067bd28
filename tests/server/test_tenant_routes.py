"""Two tenants on every route, and on every feature that keeps something: nothing of one is told to
the other. Which routes there are is in tests/tenant_routes.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import requests

from sglang_hybrid.serving.server_process import ServerProcess
from tests import tenant_routes
from tests.server.client import greedy, hybrid_cache, random_prompt, until

IN_QUERY = ("/v1/decisions",)
"""Routes whose bodies may hold no other fields than their own."""


def words(seed: object, count: int = 120) -> str:
    source = random.Random(str(seed))
    return " ".join(f"word{source.randrange(10**6)}" for _ in range(count))


Headers = dict[str, str]


def post(
    url: str, path: str, body: dict[str, Any], headers: Headers | None = None, **query: str
) -> requests.Response:
    return requests.post(url + path, json=body, params=query, headers=headers, timeout=60)


def hits(
    url: str, path: str, body: dict[str, Any], headers: Headers | None = None, **query: str
) -> int:
    """Prompt tokens that a request did not have to compute."""
    before: int = hybrid_cache(url)["hit_tokens"]
    answer = post(url, path, body, headers, **query)
    assert answer.status_code == 200, answer.text
    return int(hybrid_cache(url)["hit_tokens"]) - before


@pytest.mark.parametrize("path", sorted(tenant_routes.PROMPTS))
def test_prompts_of_a_route_are_apart(url: str, path: str) -> None:
    """A field of the body keeps them apart, also if the protocol lacks it, and one of the query."""
    for where, field in (("body", "cache_salt"), ("query", "extra_key")):
        if where == "body" and path in IN_QUERY:
            continue
        made = tenant_routes.PROMPTS[path](words((path, where)))
        bodies = [made, *({**made, field: whose} for whose in "ab")]
        queries: list[dict[str, str]] = [{}, {}, {}]
        if where == "query":
            bodies, queries = [made] * 3, [{}, {field: "a"}, {field: "b"}]
        first = [
            hits(url, path, body, **query) for body, query in zip(bodies, queries, strict=True)
        ]
        again = [
            hits(url, path, body, **query) for body, query in zip(bodies, queries, strict=True)
        ]
        assert max(first) < 40, where  # what a template begins with, at most
        assert min(again) > 300, where


@pytest.mark.parametrize("path", ["/v1/messages", "/api/generate", "/api/chat", "/generate"])
@pytest.mark.parametrize("whose", [5, {"a": "b"}])
def test_a_tenant_that_is_no_text_is_refused(url: str, path: str, whose: Any) -> None:
    body = {**tenant_routes.PROMPTS[path]("Hello."), "cache_salt": whose}
    answer = post(url, path, body)
    assert answer.status_code == 400
    assert "cache_salt" in answer.text


def test_the_id_of_a_request_is_its_tenants_own(url: str) -> None:
    """Two tenants use one at a time, and each ends its own request with it."""

    def begun(whose: str) -> Iterator[dict[str, Any]]:
        body = greedy(random_prompt(20, seed=74), 4_000, rid="r", cache_salt=whose, stream=True)
        answer = requests.post(url + "/generate", json=body, stream=True, timeout=60)
        events = (line[6:] for line in answer.iter_lines() if line.startswith(b"data: {"))
        yield from map(json.loads, events)

    def abort(**named: str) -> None:
        assert post(url, "/abort_request", {"rid": "r", **named}).status_code == 200

    running = {whose: begun(whose) for whose in "ab"}
    assert {next(events)["meta_info"]["id"] for events in running.values()} == {"r"}
    again = post(url, "/generate", greedy([300], 1, rid="r", cache_salt="a"))
    assert again.status_code == 400 and "Duplicate request ID detected: 'r'" in again.text
    abort()
    abort(cache_salt="c")
    abort(rid="", cache_salt="a")
    ended = {}
    for whose, events in running.items():
        assert next(events)["meta_info"]["finish_reason"] is None
        abort(cache_salt=whose)
        *_, last = events
        ended[whose] = last["meta_info"]["finish_reason"]["type"]
        assert last["meta_info"]["id"] == "r"
    assert ended == {"a": "abort", "b": "abort"}


@pytest.mark.parametrize("rid", [None, ["p", "q"]])
def test_an_answer_tells_the_id_that_its_client_knows(url: str, rid: list[str] | None) -> None:
    """Each answer to one prompt has it, and each prompt of a batch, also in a stream."""
    several = post(url, "/generate", greedy([300], 1, {"n": 2}, cache_salt="a")).json()
    ids = {one["meta_info"]["id"] for one in several}
    assert len(ids) == 2 and {len(one) for one in ids} == {32}
    body = greedy([[300], [301]], 2, rid=rid, cache_salt=["a", "b"], stream=True)
    lines = post(url, "/generate", body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert {event["index"] for event in events} == {0, 1}
    if rid is not None:
        assert {rid[event["index"]] == event["meta_info"]["id"] for event in events} == {True}


def test_instances_of_a_body_name_no_tenant(url: str) -> None:
    body = {"instances": [{"text": "x", "cache_salt": "a"}], "parameters": {}}
    answer = post(url, "/vertex_generate", body)
    assert answer.status_code == 400
    assert "an instance has cache_salt; give it in parameters" in answer.text


def test_a_session_belongs_to_the_tenant_that_opened_it(url: str) -> None:
    prompt = random_prompt(300, seed=71)

    def turn(ids: list[int], rid: str | None, salt: str | None) -> requests.Response:
        body = {
            "input_ids": ids,
            "session_params": {"id": "shared", "rid": rid},
            "cache_salt": salt,
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
        }
        return post(url, "/generate", body)

    def session(what: str, salt: str | None) -> requests.Response:
        body = {"session_id": "shared", "capacity_of_str_len": 100_000, "cache_salt": salt}
        return post(url, f"/{what}_session", body)

    assert session("open", "a").json() == "shared"
    first = turn(prompt, None, "a").json()["meta_info"]
    for other in ("b", None):
        foreign = turn([301], first["id"], other)
        assert foreign.status_code == 400
        assert "session id shared does not exist" in foreign.text
        session("close", other)
    assert session("open", "a").status_code == 400  # it is still there
    assert session("open", "b").json() == "shared"
    unknown = turn([301], first["id"], "b")
    assert unknown.status_code == 400
    assert "Invalid request session id" in unknown.text
    assert session("close", "b").status_code == 200
    assert turn([301], first["id"], "a").json()["meta_info"]["prompt_tokens"] == 305
    assert session("close", "a").status_code == 200
    assert "session id shared does not exist" in turn([301], first["id"], "a").text


def respond(url: str, salt: str | None, **fields: Any) -> requests.Response:
    body = {"model": "default", "max_output_tokens": 4, "cache_salt": salt, **fields}
    return post(url, "/v1/responses", body)


def stored(url: str, response_id: str, salt: str | None, *, cancel: bool = False) -> Any:
    query = {} if salt is None else {"cache_salt": salt}
    path = f"{url}/v1/responses/{response_id}"
    if cancel:
        return requests.post(path + "/cancel", params=query, timeout=60)
    return requests.get(path, params=query, timeout=60)


def test_a_stored_response_is_its_tenants(url: str) -> None:
    """Read, continued, cancelled, compared, and stored again under an id that a client chose."""
    name = f"resp_{uuid4().hex}"
    secret = words("secret")
    mine = respond(url, "a", input=secret, request_id=name)
    assert mine.json()["id"] == name
    assert stored(url, name, "a").json()["id"] == name
    for other in ("b", None):
        assert stored(url, name, other).status_code == 404
        assert stored(url, name, other, cancel=True).status_code == 404
        continued = respond(url, other, input="And then?", previous_response_id=name)
        assert continued.status_code == 404
        options = {"comparison_response_id": name}
        compared = respond(url, other, input=secret + "!", prompt_cache_options=options)
        missing = {"type": "comparison_response_not_found"}
        assert compared.json()["prompt_cache_diagnostics"] == missing
        overwritten = respond(url, other, input="Hello.", request_id=name)
        assert overwritten.status_code == 200
    assert stored(url, name, "a").json() == mine.json()
    assert stored(url, name, "b").json()["usage"] != mine.json()["usage"]
    continued = respond(url, "a", input="And then?", previous_response_id=name)
    used = continued.json()["usage"]["input_tokens"]
    assert used > mine.json()["usage"]["input_tokens"]
    compared = respond(
        url, "a", input=secret[:-6], prompt_cache_options={"comparison_response_id": name}
    )
    assert secret[-20:] in compared.json()["prompt_cache_diagnostics"]["hybrid"]["before"]


@pytest.mark.parametrize("how", ["stream", "background"])
def test_what_is_stored_later_is_its_tenants_too(url: str, how: str) -> None:
    name = f"resp_{uuid4().hex}"
    started = respond(url, "a", input="Hello.", request_id=name, **{how: True})
    assert started.status_code == 200
    until(lambda: stored(url, name, "a").json().get("status") == "incomplete")  # of its 4 tokens
    assert stored(url, name, "b").status_code == 404
    assert stored(url, name, None, cancel=True).status_code == 404
    assert stored(url, name, "a", cancel=True).json()["status"] == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_is_compared_with_its_tenants_own(url: str, stream: bool) -> None:
    def message(previous: str | None, salt: str | None) -> str:
        body = {
            **tenant_routes.PROMPTS["/v1/messages"](f"for {salt}: {uuid4()}"),
            "diagnostics": {"previous_message_id": previous},
            "cache_salt": salt,
            "stream": stream,
        }
        return post(url, "/v1/messages", body).text

    first = message(None, "a")
    name = first[first.index("msg_") :].partition('"')[0]
    for other in ("b", None):
        assert "previous_message_not_found" in message(name, other)
        assert "for a" not in message(name, other)
    assert "messages_changed" in message(name, "a")


def test_an_empty_key_is_none_everywhere(url: str) -> None:
    prompt = random_prompt(200, seed=72)
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
    post(url, "/generate", {**body, "extra_key": "", "rid": "of nobody"})
    report = post(url, "/hybrid_cache/explain", {"request_id": "of nobody"}).json()
    assert report["prompt"] == 200
    asked = {"input_ids": prompt, "extra_key": "", "cache_salt": ""}
    assert post(url, "/hybrid_cache/explain", asked).json()["hit"] == 199
    pml = '<schema name="empty-key"><module name="m">Text.</module></schema>'
    post(url, "/v1/prompt_schemas", {"pml": pml, "extra_key": ""})
    names = [one["name"] for one in requests.get(url + "/v1/prompt_schemas", timeout=60).json()]
    assert "empty-key" in names
    deleted = requests.delete(url + "/v1/prompt_schemas/empty-key?extra_key=", timeout=60)
    assert deleted.status_code == 200


def test_what_is_kept_may_have_its_tenant_in_the_query(url: str) -> None:
    pml = '<schema name="by-query"><module name="m">Text.</module></schema>'
    prompt = random_prompt(200, seed=73)
    sampling = {"max_new_tokens": 1}
    assert post(url, "/v1/prompt_schemas", {"pml": pml}, cache_salt="q").status_code == 200
    post(url, "/generate", {"input_ids": prompt, "sampling_params": sampling}, cache_salt="q")
    asked = {"input_ids": prompt}
    for query, status, hit in (({}, 404, 0), ({"cache_salt": "q"}, 200, 199)):
        assert post(url, "/hybrid_cache/explain", asked, **query).json()["hit"] == hit
        deleted = requests.delete(url + "/v1/prompt_schemas/by-query", params=query, timeout=60)
        assert deleted.status_code == status
    session = {"capacity_of_str_len": 1_000, "session_id": "by query"}
    assert post(url, "/open_session", session, cache_salt="q").status_code == 200
    assert post(url, "/open_session", {**session, "cache_salt": "q"}).status_code == 400
    assert post(url, "/close_session", {"session_id": "by query"}, cache_salt="q").ok
    assert post(url, "/open_session", {**session, "cache_salt": "q"}).status_code == 200
    assert post(url, "/close_session", {"session_id": "by query"}, cache_salt="q").ok


def forwarded(whose: str) -> Headers:
    """A tenant as SGLang's router forwards it."""
    return {"X-Request-Id-Hybrid-Tenant": whose}


def test_a_header_that_routers_forward_is_a_tenant(url: str) -> None:
    """It is an extra key, on routes with a body and without."""
    chat = "/v1/chat/completions"
    body = tenant_routes.PROMPTS[chat](words("header"))
    assert [hits(url, chat, body, forwarded(whose)) > 300 for whose in "aab"] == [0, 1, 0]
    assert hits(url, chat, {**body, "extra_key": "a"}) > 300
    contradicted = post(url, chat, {**body, "extra_key": "b"}, forwarded("a"))
    assert contradicted.status_code == 400
    assert "two values of extra_key" in contradicted.text
    pml = '<schema name="by-header"><module name="m">Text.</module></schema>'
    assert post(url, "/v1/prompt_schemas", {"pml": pml}, forwarded("a")).status_code == 200
    for whose, status in (("b", 404), ("a", 200)):
        where = url + "/v1/prompt_schemas/by-header"
        deleted = requests.delete(where, headers=forwarded(whose), timeout=60)
        assert deleted.status_code == status


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_that_requires_a_tenant_and_makes_one_of_keys() -> None:
    def key(whose: str) -> Headers:
        return {"Authorization": f"Bearer sk-of-{whose}"}

    more = ["--enable-cache-report", "--enable-response-store", "--log-requests"]
    with ServerProcess(["--hybrid-tenants", "api-key,required", *more]) as server:
        url = server.url
        for path, make in tenant_routes.PROMPTS.items():
            nobodys = post(url, path, make("Hello."))
            assert (nobodys.status_code, path) == (400, path)
            assert "names no tenant, and this server requires one" in nobodys.text, path
            for say in (forwarded, key):
                body = make(words((path, say.__name__)))
                first = [hits(url, path, body, say(whose)) for whose in "ab"]
                again = [hits(url, path, body, say(whose)) for whose in "ab"]
                assert max(first) < 40, path
                assert min(again) > 300, path
        name = f"resp_{uuid4().hex}"
        body = {"model": "default", "max_output_tokens": 4, "input": "x", "request_id": name}
        assert post(url, "/v1/responses", body, key("a")).status_code == 200
        for headers, status in ((key("a"), 200), (key("b"), 404), ({}, 404)):
            found = requests.get(f"{url}/v1/responses/{name}", headers=headers, timeout=60)
            assert found.status_code == status
        prompt = random_prompt(200, seed=74)
        explain = {"input_ids": prompt}
        greedy = {**explain, "sampling_params": {"max_new_tokens": 1}}
        assert post(url, "/generate", greedy, key("a")).status_code == 200
        for whose, hit in (("a", 199), ("b", 0)):
            told = post(url, "/hybrid_cache/explain", explain, key(whose))
            assert told.json()["hit"] == hit
        assert "sk-of-" not in server.log.read_text(errors="replace")


@pytest.mark.slow
def test_an_embedding_server_refuses_a_tenant() -> None:
    """It keeps the prompts of all its clients in one tree."""
    with ServerProcess(["--hybrid-default-model", "transformer", "--is-embedding"]) as server:
        for path, body in {
            "/v1/embeddings": {"model": "default", "input": "Hello."},
            "/encode": {"text": "Hello."},
            "/v1/classify": {"model": "default", "input": "Hello."},
        }.items():
            assert "keeps the prompts of all its" not in post(server.url, path, body).text
            refused = post(server.url, path, {**body, "cache_salt": "a"})
            assert refused.status_code == 400
            assert "keeps the prompts of all its clients together" in refused.text
