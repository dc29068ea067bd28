"""Schemas on a real server: what is registered, what a prompt hits, what is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from transformers import AutoTokenizer

from sglang_hybrid.extensions.cpu.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.extensions.schemas.declared.modular import Layout, modular
from sglang_hybrid.extensions.schemas.declared.resolve import read_prompt, resolve
from sglang_hybrid.extensions.schemas.declared.schema import read_schema
from sglang_hybrid.extensions.schemas.declared.tokens import PromptTokenizer
from tests.extensions.schemas import schemas
from tests.server.client import TOLERANCE, flush, hybrid_cache, logprobs
from tests.server.composed_reference import composed_logprobs
from tests.server.test_modular import composed_in_the_end

SAMPLING = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


def register(url: str, pml: str, **tenant: str) -> requests.Response:
    return requests.post(url + "/v1/prompt_schemas", json={"pml": pml, **tenant}, timeout=60)


def send(url: str, **fields: Any) -> requests.Response:
    body = {
        "sampling_params": SAMPLING,
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_prompt_token_ids": True,
        **fields,
    }
    return requests.post(url + "/generate", json=body, timeout=300)


def schema(url: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = requests.get(f"{url}/v1/prompt_schemas/{name}", timeout=60).json()
    return found


def prewarm(url: str, name: str, timeout: int = 300, **body: Any) -> requests.Response:
    where = f"{url}/v1/prompt_schemas/{name}/prewarm"
    return requests.post(where, json=body, timeout=timeout)


def prompt(name: str, imports: str, question: str = "Begin.") -> str:
    return f'<prompt schema="{name}">{imports}<user>{question}</user></prompt>'


def pupil(*names: str) -> str:
    return prompt("education", "".join(f"<{name}/>" for name in names))


@pytest.fixture
def registered(url: str) -> Iterator[str]:
    """The server with all schemas of a test, which it forgets afterwards."""
    for text in schemas.all_schemas().values():
        register(url, text).raise_for_status()
    yield url
    for name in schemas.all_schemas():
        requests.delete(f"{url}/v1/prompt_schemas/{name}", timeout=60).raise_for_status()


def test_a_second_selection_hits_at_the_last_module_in_common(registered: str) -> None:
    names = ["high", "novice", "yesterday", "seeing", "essay", "curious"]
    first = send(registered, pml=pupil(*names)).json()
    told = first["meta_info"]["prompt"]
    ends = {end["module"]: end["position"] for end in told["ends"]}
    assert first["meta_info"]["hybrid_cache"]["declared"]["kept"] == told["declared"]
    for shared in (5, 3, 1):
        others = [*names[:shared], *("doing", "quiz", "playful")[max(0, shared - 3) :]]
        answer = send(registered, pml=pupil(*others)).json()
        assert answer["meta_info"]["cached_tokens"] == ends[names[shared - 1]]
        flush(registered)
        cold = send(registered, input_ids=answer["prompt_token_ids"]).json()
        assert answer["output_ids"] == cold["output_ids"]
        assert logprobs(answer) == pytest.approx(logprobs(cold), abs=TOLERANCE)
        send(registered, pml=pupil(*names)).raise_for_status()


def test_imports_out_of_order_are_the_same_prompt_with_a_warning(registered: str) -> None:
    files = "<map.py/><unit.py/>"
    ordered = send(registered, pml=prompt("code-generation-game", "<unit.py/><map.py/>")).json()
    mixed = send(registered, pml=prompt("code-generation-game", files)).json()
    assert mixed["prompt_token_ids"] == ordered["prompt_token_ids"]
    assert mixed["meta_info"]["cached_tokens"] == len(ordered["prompt_token_ids"]) - 1
    (warning,) = mixed["meta_info"]["prompt"]["warnings"]
    assert warning.startswith("Module 'unit.py' was imported out of order")
    assert ordered["meta_info"]["prompt"]["warnings"] == []


def test_a_stream_says_it_too(registered: str) -> None:
    answer = send(registered, pml=pupil("high"), stream=True)
    events = [line for line in answer.text.split("\n") if line.startswith("data: {")]
    assert events and all('"schema":"education"' in event for event in events)


def test_a_schema_tells_its_modules_and_their_use(registered: str) -> None:
    before = schema(registered, "education")
    answer = send(registered, pml=pupil("high", "novice")).json()
    after = schema(registered, "education")
    assert after["requests"] == before["requests"] + 1
    tokens = answer["meta_info"]["prompt_tokens"]
    assert after["prompt_tokens"] == before["prompt_tokens"] + tokens
    (role,) = after["parts"]
    modules = {module["module"]: module for module in role["parts"][1]["union"]}
    assert modules["high"]["imports"] >= 1 and modules["high"]["parts"][0]["tokens"] > 5
    every = requests.get(registered + "/v1/prompt_schemas", timeout=60).json()
    assert [one["name"] for one in every] == sorted(schemas.all_schemas())
    (mine,) = (one for one in every if one["name"] == "education")
    assert mine == {name: after[name] for name in after if name not in ("parts", "residency")}


def test_a_schema_is_linted_where_it_is(registered: str) -> None:
    url = registered + "/v1/prompt_schemas/travel/lint"
    findings = requests.post(url, timeout=60).json()
    assert [one["rule"] for one in findings if "duration" in one["sentence"]] == ["early-parameter"]
    assert requests.post(url, params={"extra_key": "a"}, timeout=60).status_code == 404


def test_tenants_do_not_see_each_others_schemas(registered: str) -> None:
    register(registered, '<schema name="mine">text</schema>', extra_key="a").raise_for_status()
    mine, path = '<prompt schema="mine">Go.</prompt>', registered + "/v1/prompt_schemas/mine"
    assert send(registered, pml=mine, extra_key="a").status_code == 200
    assert send(registered, pml=mine).status_code == 400
    assert requests.get(path, timeout=60).status_code == 404
    assert requests.get(path, params={"extra_key": "a"}, timeout=60).status_code == 200
    assert requests.delete(path, timeout=60).status_code == 404
    assert requests.delete(path, params={"extra_key": "a"}, timeout=60).status_code == 200
    assert send(registered, pml=mine, extra_key="a").status_code == 400


REFUSED = {
    "not well-formed": ('<schema name="s">\n<module name="a">x</modul></schema>', 2, "well-formed"),
    "a file": ('<schema name="s"><module name="a" src="../../etc/passwd"/></schema>', 1, "src is"),
    "ten megabytes": ("<schema name='s'>" + "<module name='m'>" * (10 << 20 >> 4), None, "at most"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_with_a_schema_has_its_line(url: str, what: str) -> None:
    markup, line, sentence = REFUSED[what]
    response = register(url, markup)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error.get("line") == line and (line is None or error["column"] > 0)
    assert sentence in error["message"] and "root:" not in response.text


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"pml": 1}', b'{"pml": "", "more": 1}', b"\xff"])
def test_a_body_that_is_no_schema_is_refused(url: str, body: bytes) -> None:
    assert requests.post(url + "/v1/prompt_schemas", data=body, timeout=60).status_code == 400


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"pml": '<prompt schema="none"/>'}, "there is no schema 'none'"),
        ({"pml": "<prompt"}, "line 1, column "),
        ({"pml": prompt("education", "<high/><middle/>")}, "exclude each other"),
        ({"pml": pupil("high"), "input_ids": [1]}, "the request has pml and input_ids"),
        ({"pml": pupil("high"), "text": ["x", "y"]}, "text is a list"),
        (
            {"pml": prompt("travel", '<travel-plan duration="a b c d e f g h"/>')},
            "the value of parameter 'duration' has 8 tokens; it may have 5 at most",
        ),
    ],
)
def test_a_prompt_that_cannot_be_made_is_refused(
    registered: str, fields: dict[str, Any], sentence: str
) -> None:
    response = send(registered, **fields)
    assert response.status_code == 400
    assert sentence in response.json()["error"]["message"]


def test_text_stands_behind_the_modules_as_it_is(registered: str) -> None:
    """Line breaks and indentation stay, and every further text hits at the modules' end."""
    pml = '<prompt schema="education"><high/><novice/></prompt>'
    first = send(registered, pml=pml, text="\n    indented\n\n").json()
    assert first["meta_info"]["prompt"]["ends"][-1]["module"] == "novice"
    longer = send(registered, pml=pml, text="\n    indented\n\nand more").json()
    alone = send(registered, text="\n    indented\n\n").json()["prompt_token_ids"]
    assert first["prompt_token_ids"][-len(alone) :] == alone
    end = first["meta_info"]["prompt"]["declared"][-1]
    assert longer["meta_info"]["cached_tokens"] >= end > 0


def chat(url: str, schema: Any, question: str = "Begin.", **fields: Any) -> requests.Response:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": question}],
        "prompt_schema": schema,
        "max_tokens": 4,
        "temperature": 0,
        **fields,
    }
    return requests.post(url + "/v1/chat/completions", json=body, timeout=300)


def test_a_chat_begins_with_modules_and_answers_as_without_a_cache(registered: str) -> None:
    names = ["high", "novice", "yesterday"]
    pml = pupil(*names).replace("<user>Begin.</user>", "")
    told = send(registered, pml=pupil(*names)).json()["meta_info"]["prompt"]
    warm = chat(registered, pml, return_meta_info=True, return_prompt_token_ids=True).json()
    (choice,) = warm["choices"]
    assert warm["sglext"]["prompt"]["ends"] == told["ends"]
    assert choice["meta_info"]["cached_tokens"] >= told["declared"][-1]
    other = chat(registered, {"name": "education", "imports": names}, "Go on.").json()
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == told["declared"][-1]
    flush(registered)
    cold = send(registered, input_ids=choice["prompt_token_ids"]).json()
    assert cold["text"] == choice["message"]["content"]


def test_the_official_client_sends_a_schema(registered: str) -> None:
    client = openai.OpenAI(base_url=registered + "/v1", api_key="none", max_retries=0)
    asked = {"name": "code-generation-game", "imports": ["map.py", "unit.py"]}
    for stream in (False, True):
        answer: Any = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Begin."}],
            max_tokens=4,
            n=2,
            stream=stream,
            extra_body={"prompt_schema": asked},
        )
        events = list(answer) if stream else [answer]
        (told,) = [event.sglext["prompt"] for event in events if getattr(event, "sglext", None)]
        assert told["schema"] == "code-generation-game"
        assert told["warnings"][0].startswith("Module 'unit.py' was imported out of order")


def test_marked_parts_of_a_chat_are_declared_behind_the_modules(registered: str) -> None:
    asked = {"name": "education", "imports": ["high"]}
    story = " ".join(f"On day {day} the keeper counted {day} lanterns." for day in range(20))
    part = {"type": "text", "text": story, "prompt_cache_breakpoint": {"mode": "explicit"}}
    parts: Any = [{"role": "user", "content": [part, {"type": "text", "text": "\nHow many?"}]}]
    flush(registered)
    first = chat(registered, asked, messages=parts, return_meta_info=True).json()
    meta = first["choices"][0]["meta_info"]
    end, mark = meta["prompt"]["declared"][-1], meta["hybrid_cache"]["declared"]["kept"][-1]
    assert first["usage"]["prompt_tokens_details"]["cache_write_tokens"] == mark
    assert mark > end + 100
    parts[0]["content"][1]["text"] = " When?"
    second = chat(registered, asked, messages=parts).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == mark


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"schema": {"name": "none"}}, "there is no schema 'none'"),
        ({"schema": {"name": "education", "imports": ["a"]}}, "has no module 'a' here"),
        ({"schema": {"name": "education", "more": 1}}, "prompt_schema"),
        ({"schema": {"name": "education", "mode": "fuzzy"}}, "prompt_schema"),
        ({"schema": "<prompt"}, "line 1, column "),
        ({"schema": {"name": "education"}, "cache_salt": "another"}, "there is no schema"),
    ],
)
def test_a_chat_that_cannot_begin_so_is_refused(
    registered: str, fields: dict[str, Any], sentence: str
) -> None:
    response = chat(registered, **fields)
    assert response.status_code == 400
    assert sentence in response.json()["message"]


def test_nesting_without_end_is_refused(registered: str) -> None:
    imports = '{"name": "a", "imports": [' * 100_000 + "]}" * 100_000
    body = '{"model": "default", "messages": [{"role": "user", "content": "a"}], "prompt_schema": '
    body += '{"name": "education", "imports": [' + imports + "]}}"
    url = registered + "/v1/chat/completions"
    headers = {"Content-Type": "application/json"}
    assert requests.post(url, data=body, headers=headers, timeout=60).status_code in (400, 422)
    assert chat(registered, {"name": "education", "imports": ["high"]}).status_code == 200


def test_the_openapi_schema_knows_the_field(url: str) -> None:
    openapi = requests.get(url + "/openapi.json", timeout=60).json()["components"]["schemas"]
    field = openapi["ChatCompletionRequest"]["properties"]["prompt_schema"]
    kinds = {kind.get("type") or kind["$ref"].rsplit("/")[-1] for kind in field["anyOf"]}
    assert kinds == {"string", "PromptSchema", "null"}
    assert openapi["PromptSchema"]["required"] == ["name"]


def test_prewarming_holds_what_is_worth_most(registered: str) -> None:
    """The first request then hits exactly at the end of the last module that was prepared."""
    flush(registered)
    info = hybrid_cache(registered)
    budget = (6 * info["state_bytes"] + 400 * info["kv_bytes_per_token"]) / (1 << 20)
    popular = ("high", "novice", "yesterday", "seeing", "essay", "curious")
    for _ in range(20):
        send(registered, pml=pupil(*popular)).raise_for_status()
    flush(registered)
    told = prewarm(registered, "education", budget_mb=budget)
    assert told.status_code == 200, told.text
    plan = told.json()
    assert plan["prefixes"] > 0 and plan["expected_saved_tokens"] > 0
    assert plan["bytes"] <= budget * (1 << 20)
    first = send(registered, pml=pupil(*popular)).json()["meta_info"]
    ends = {end["module"]: end["position"] for end in first["prompt"]["ends"]}
    assert first["cached_tokens"] in ends.values()
    assert first["cached_tokens"] >= ends["yesterday"]


def test_without_a_budget_a_prewarming_takes_what_pins_may_take(registered: str) -> None:
    """A request without a body does so, too: the whole schema fits."""
    flush(registered)
    path = f"{registered}/v1/prompt_schemas/code-generation-game/prewarm"
    answer = requests.post(path, timeout=60)
    assert answer.status_code == 200, answer.text
    told, pins = answer.json(), hybrid_cache(registered)["pins"]
    assert told["prefixes"] > 1 and told["bytes"] <= pins["bytes_of_a_tenant"]
    assert pins["pins"] == 0, "none was asked for"


@pytest.mark.parametrize("path", ["/v1/prompt_schemas", "/hybrid_cache/explain"])
def test_an_incomplete_body_is_answered_with_a_whole_one(registered: str, path: str) -> None:
    """It is one that the route takes."""
    refused = requests.post(registered + path, json={}, timeout=60)
    assert refused.status_code == 400
    error = refused.json()["error"]
    sentence = error if isinstance(error, str) else error["message"]
    example, _ = json.JSONDecoder().raw_decode(sentence[sentence.index("{") :])
    assert requests.post(registered + path, json=example, timeout=60).status_code == 200


def test_what_is_prewarmed_may_be_pinned(registered: str) -> None:
    game, budget = "code-generation-game", 40 * hybrid_cache(registered)["state_bytes"] / (1 << 20)
    pinned = prewarm(registered, game, budget_mb=budget, ttl=3_000, tokens_per_second=1e6)
    told = pinned.json()
    assert hybrid_cache(registered)["pins"]["pins"] == told["prefixes"] > 1
    found = schema(registered, game)["residency"]
    held = [one for one in found["prefixes"] if one["state"] == "device"]
    assert len(held) == told["prefixes"] and all(one["kv"] == "device" for one in held)
    assert not found["more"] and len(found["prefixes"]) == 2**5
    flush(registered)
    found = schema(registered, game)["residency"]
    assert {(one["kv"], one["state"]) for one in found["prefixes"]} == {("nowhere", "nowhere")}


def test_a_prewarming_ends_when_its_client_goes(registered: str) -> None:
    """While it waits for its turn on a busy server: nothing is computed when that is idle again."""
    flush(registered)
    budget = 20 * hybrid_cache(registered)["state_bytes"] / (1 << 20)
    long = {**SAMPLING, "max_new_tokens": 4_000}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(send, registered, text="Tell all.", rid="long", sampling_params=long)
        with pytest.raises(requests.Timeout):
            prewarm(registered, "education", timeout=1, budget_mb=budget)
        assert not other.done(), "the other request was to keep the server busy"
        requests.post(registered + "/abort_request", json={"rid": "long"}, timeout=60)
        assert other.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
    time.sleep(2)
    assert send(registered, pml=pupil("high")).json()["meta_info"]["cached_tokens"] == 0


def hints(*actions: dict[str, Any]) -> dict[str, Any]:
    named = [{"action_id": "a", "action_version": "1", **action} for action in actions]
    return {"protocol_version": "1", "message_id": "m", "actions": named}


def test_hints_import_modules_and_prepare_a_prompt(registered: str) -> None:
    """A prompt that is prepared by `hybrid.prewarm` answers from the cache; one that imports by
    `hybrid.import` is the one that markup says.
    """
    imports = ["unit.py", "map.py"]
    asked = {"name": "code-generation-game", "imports": imports}
    action = {"action_type": "hybrid.import", "payload": asked}
    warm = {"action_type": "hybrid.prewarm"}
    prepared = send(registered, kv_hints=hints(action, warm)).json()
    assert prepared["meta_info"]["completion_tokens"] == 0
    told = prepared["meta_info"]["prompt"]
    answer = send(registered, kv_hints=hints(action), text=" Begin.").json()
    assert answer["meta_info"]["cached_tokens"] == told["ends"][-1]["position"]
    pml = '<prompt schema="code-generation-game"><unit.py/><map.py/></prompt>'
    same = send(registered, pml=pml, text=" Begin.").json()
    assert same["prompt_token_ids"] == answer["prompt_token_ids"]
    assert same["output_ids"] == answer["output_ids"]
    for action in (
        {"action_type": "hybrid.import", "payload": {"name": "none"}},
        {"action_type": "hybrid.import", "payload": {**asked, "imports": ["none"]}},
        {"action_type": "hybrid.prewarm", "payload": {"tokens_per_second": 0}},
        {"action_type": "hybrid.segments", "payload": {"segments": [[0, 1]], "position": 1}},
        {"action_type": "hybrid.segments", "payload": {"segments": [], "position": 1}},
        {"action_type": "hybrid.segments", "payload": {"segments": [{"start": 0, "end": 2**63}]}},
    ):
        refused = send(registered, kv_hints=hints(action), text="Begin.")
        assert refused.status_code == 400, refused.text


@pytest.mark.parametrize(
    ("name", "body", "status"),
    [
        ("none", {"budget_mb": 1}, 404),
        ("education", {"budget_mb": 0}, 400),
        ("education", {"budget_mb": "a"}, 400),
        ("education", {"budget_mb": 1, "tokens_per_second": 0}, 400),
        ("education", {"budget_mb": 1, "ttl": 0}, 400),
        ("education", {"budget_mb": 1, "ttl": 9, "priority": "most"}, 400),
    ],
)
def test_what_cannot_be_prewarmed_is_refused(
    registered: str, name: str, body: dict[str, Any], status: int
) -> None:
    assert prewarm(registered, name, **body).status_code == status


def test_modules_of_a_recurrent_model_are_composed(
    registered: str, model_directory: Callable[[str], Path]
) -> None:
    """First the prompt is an exact one; once its modules are there, it is the model's answer where
    each module was read alone. Nothing of that is in exact prompts.
    """
    flush(registered)
    model = model_directory(DEFAULT_ARCHITECTURE)
    asked = prompt("code-generation-game", "<unit.py/><map.py/>")
    pml = asked.replace("<prompt ", '<prompt mode="modular" ')
    exact, whole = send(registered, pml=asked).json(), send(registered, pml=pml).json()
    assert whole["meta_info"]["prompt"]["exact"] is True
    assert whole["output_ids"] == exact["output_ids"]
    assert whole["meta_info"]["hybrid_cache"]["missing_segments"]
    apart = composed_in_the_end(registered, pml)
    assert apart["meta_info"]["prompt"]["exact"] is False
    tokenizer = PromptTokenizer(AutoTokenizer.from_pretrained(model))
    schema = read_schema(schemas.all_schemas()["code-generation-game"])
    expected = modular(Layout(schema, tokenizer), resolve(schema, read_prompt(pml)))
    reference = composed_logprobs(model, expected, apart["output_ids"])
    assert logprobs(apart) == pytest.approx(reference, abs=TOLERANCE)
    again = send(registered, pml=asked).json()
    assert logprobs(again) == pytest.approx(logprobs(exact), abs=TOLERANCE)
    assert logprobs(again) != pytest.approx(logprobs(apart)[: len(logprobs(again))], abs=TOLERANCE)
