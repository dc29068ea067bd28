"""The embedded models as a server without --model-path serves them: answers, tools, and calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests

from scripts.train.chats import below
from sglang_hybrid.serving.server_process import ServerProcess
from tests.extensions.cpu.models.test_trained import DOCUMENT, SAYS

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock", "parameters": {**WEATHER, "title": "Time"}}},
]


def ask(url: str, **more: Any) -> requests.Response:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Is it warm in Rome?"}],
        "tools": TOOLS,
        "temperature": 0,
        "max_tokens": 100,
        "parallel_tool_calls": False,
        **more,
    }
    answer = requests.post(url + "/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def checked(call: dict[str, Any], name: str | None) -> None:
    """Asserts that a call names one of the tools, or this one, and fits its schema."""
    assert call["name"] in ((name,) if name else ("weather", "clock"))
    arguments = json.loads(call["arguments"])
    assert arguments.keys() == {"city", "warm"}
    assert arguments["city"] in ("Paris", "Rome") and isinstance(arguments["warm"], bool)


@pytest.mark.parametrize("name", [None, "weather", "clock"])
def test_a_demanded_call_comes_back_as_a_call(url: str, name: str | None) -> None:
    named = {"type": "function", "function": {"name": name}}
    choice = named if name else "required"
    plain = ask(url, tool_choice=choice).json()["choices"][0]
    (call,) = plain["message"]["tool_calls"]
    checked(call["function"], name)
    assert plain["finish_reason"] == "tool_calls" and not plain["message"]["content"]
    lines = ask(url, tool_choice=choice, stream=True).text.splitlines()
    parts = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    functions = [
        each["function"] for part in parts for each in part["delta"].get("tool_calls") or ()
    ]
    joined = {
        key: "".join(function.get(key) or "" for function in functions)
        for key in ("name", "arguments")
    }
    assert joined["name"] == call["function"]["name"]
    assert json.loads(joined["arguments"]) == json.loads(call["function"]["arguments"])
    assert parts[-1]["finish_reason"] == "tool_calls"


def test_tools_calls_and_results_are_in_the_prompt_and_hit(url: str) -> None:
    def tokens(body: dict[str, Any]) -> tuple[int, int]:
        usage = ask(url, max_tokens=1, **body).json()["usage"]
        return usage["prompt_tokens"], (usage["prompt_tokens_details"] or {})["cached_tokens"]

    question = {"role": "user", "content": "Is it warm in Rome?"}
    function = {"name": "weather", "arguments": json.dumps({"city": "Rome", "warm": True})}
    call = {"id": "a", "type": "function", "function": function}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "It is."}
    bare, _ = tokens({"messages": [question], "tools": None})
    first, _ = tokens({"messages": [question]})
    assert first > bare + 50
    longer, cached = tokens({"messages": [question, called, result]})
    assert longer > first + 20
    assert cached >= first - 5  # to where the assistant's message begins


@pytest.mark.slow
def test_the_default_answers_from_a_cached_state_too() -> None:
    """The text is sent twice; the second answer begins at the state that the first one left."""
    with ServerProcess(["--enable-cache-report"]) as server:
        for question, says in SAYS.items():
            body = {"text": below(DOCUMENT, question), "sampling_params": {"temperature": 0}}
            chat = {"model": "default", "messages": [{"role": "user", "content": question}]}
            for again in (False, True):
                answer = requests.post(server.url + "/generate", json=body, timeout=60).json()
                assert answer["text"].strip() == says
                assert answer["meta_info"]["finish_reason"]["type"] == "stop"
                prompt = answer["meta_info"]["prompt_tokens"]
                assert not again or answer["meta_info"]["cached_tokens"] == prompt - 1
                said = requests.post(server.url + "/v1/chat/completions", json=chat, timeout=60)
                assert said.json()["choices"][0]["message"]["content"] == says
