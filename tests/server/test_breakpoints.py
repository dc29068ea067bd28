"""Marked blocks through the official clients, on a real server: exact tokens, true counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import requests
from transformers import PreTrainedTokenizerFast

from sglang_hybrid.extensions.cpu.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import flush, hybrid_cache, until

TEMPLATE = Path(__file__).parents[1] / "extensions" / "schemas" / "chat.jinja"
MARKED = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}

RULES = " ".join(f"Rule {n} is kept by keeper {n * 7 % 31}." for n in range(40))
STORY = " ".join(f"On day {n} the keeper counted {n * 3} lanterns." for n in range(40))
TOOLS = [
    {
        "name": name,
        "description": f"Looks up {name} in the archive.",
        "input_schema": {"type": "object", "properties": {"word": {"type": "string"}}},
    }
    for name in ("rooms", "keepers", "lanterns")
]


@pytest.fixture(scope="module")
def other_server(
    model_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A server whose chat template shows tools, with a story that was computed at its start; it
    reports no cached tokens unless asked.
    """
    model = model_directory(DEFAULT_ARCHITECTURE)
    warm = tmp_path_factory.mktemp("warm") / "prompts.jsonl"
    lines = [{"text": STORY}, {"text": ""}, {"schema": "<schema name='last'>text</schema>"}]
    warm.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--model-path", str(model), "--chat-template", str(TEMPLATE)]
    with ServerProcess([*flags, "--hybrid-prewarm", str(warm)]) as running:
        yield running.url


@pytest.fixture(params=["default_server", pytest.param("other_server", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def tokens(model_directory: Callable[[str], Path]) -> Callable[[str], int]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_directory(DEFAULT_ARCHITECTURE))
    return lambda text: len(tokenizer.encode(text))


@pytest.fixture
def claude(server: str) -> anthropic.Anthropic:
    flush(server)
    return anthropic.Anthropic(base_url=server, api_key="none", max_retries=0)


def text(words: str, mark: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": words, **({"cache_control": mark} if mark else {})}


def ask(client: anthropic.Anthropic, question: str, **more: Any) -> anthropic.types.Usage:
    content = more.pop("content", [text(question)])
    messages = more.pop("messages", [{"role": "user", "content": content}])
    return client.messages.create(
        model="default", max_tokens=4, temperature=0, messages=messages, **more
    ).usage


def counts(usage: anthropic.types.Usage) -> tuple[int, int, int]:
    """Read, written, and computed for this request alone."""
    return (
        usage.cache_read_input_tokens or 0,
        usage.cache_creation_input_tokens or 0,
        usage.input_tokens,
    )


@pytest.mark.slow
def test_a_file_of_prompts_is_computed_at_the_start(
    other_server: str, tokens: Callable[[str], int]
) -> None:
    """A line that is refused, as the empty text, does not keep the others from it."""
    until(lambda: requests.get(other_server + "/v1/prompt_schemas", timeout=60).json())
    body = {"text": STORY + " And then?", "sampling_params": {"max_new_tokens": 1}}
    meta = requests.post(other_server + "/generate", json=body, timeout=60).json()["meta_info"]
    assert tokens(STORY) - 1 <= meta["cached_tokens"] <= tokens(STORY)


@pytest.mark.parametrize("server", ["default_server"], indirect=True)
def test_a_line_that_changes_at_the_top_takes_no_hits(
    claude: anthropic.Anthropic, tokens: Callable[[str], int]
) -> None:
    """Claude Code's defaults: a line with a checksum before the rules, and thinking. Nothing is
    marked, so that only a server that reports cached tokens unasked can say what was hit.
    """
    read = []
    for turn in range(3):
        header = text(f"x-anthropic-billing-header: cc_version=2.1; cch={turn:05x};")
        usage = ask(
            claude,
            f"Question {turn}",
            system=[header, text(RULES)],
            thinking={"type": "enabled", "budget_tokens": 1024},
        )
        read.append(counts(usage)[0])
    assert read[0] == 0 and min(read[1:]) >= tokens("<|im_start|>system\n" + RULES)


def test_the_second_request_hits_exactly_the_marked_system_prompt(
    claude: anthropic.Anthropic, tokens: Callable[[str], int]
) -> None:
    marked = tokens("<|im_start|>system\n" + RULES)
    system = [text(RULES, MARKED)]
    first = ask(claude, "Who keeps rule 3?", system=system)
    assert counts(first)[:2] == (0, marked)
    assert first.cache_creation is not None
    assert first.cache_creation.ephemeral_5m_input_tokens == marked
    second = ask(claude, "Name the keeper of rule 5.", system=system)
    assert counts(second)[:2] == (marked, 0)
    for usage, question in ((first, "Who keeps rule 3?"), (second, "Name the keeper of rule 5.")):
        counted = claude.messages.count_tokens(
            model="default",
            system=system,
            messages=[{"role": "user", "content": question}],
        )
        assert sum(counts(usage)) == counted.input_tokens


def test_a_marked_block_is_kept_for_its_lifetime(server: str, claude: anthropic.Anthropic) -> None:
    """It is in the counts of all tenants, and the explanation of what resumes from it says so."""
    ask(claude, "Who keeps rule 3?", system=[text(RULES, HOUR)])
    assert hybrid_cache(server)["pins"]["pins"] == 1
    body = {"text": "<|im_start|>system\n" + RULES + "<|im_end|>\n", "rid": "why"}
    sampling = {"sampling_params": {"max_new_tokens": 0}}
    requests.post(server + "/generate", json={**body, **sampling}, timeout=60).raise_for_status()
    why = requests.post(server + "/hybrid_cache/explain", json={"request_id": "why"}, timeout=60)
    checkpoint = why.json()["checkpoint"]
    assert checkpoint["kind"] == "declared" and 0 < checkpoint["pinned_for"] <= 3_600


def test_each_kind_of_block_ends_at_its_own_token(
    claude: anthropic.Anthropic, tokens: Callable[[str], int]
) -> None:
    """Tools and system for an hour, a document and the last block for five minutes."""
    tools = [*TOOLS[:2], {**TOOLS[2], "cache_control": HOUR}]
    content = [text(STORY, MARKED), text("\nHow many lanterns on day 7?", MARKED)]
    request = {"tools": tools, "system": [text(RULES, HOUR)]}
    usage = ask(claude, "", content=content, **request)
    read, written, _ = counts(usage)
    assert read == 0 and usage.cache_creation is not None
    assert usage.cache_creation.ephemeral_5m_input_tokens > tokens(STORY)
    assert tokens(RULES) < usage.cache_creation.ephemeral_1h_input_tokens < written
    # The same tools, the same system, the same document: each is found where it ends.
    other_question = ask(claude, "", content=[content[0], text("\nWhen?")], **request)
    other_document = ask(claude, "Something else.", **request)
    other_system = ask(claude, "Something else.", tools=tools, system="Be brief.")
    hits = [counts(each)[0] for each in (other_question, other_document, other_system)]
    assert counts(other_question)[1] == 0
    assert hits[0] - hits[1] >= tokens(STORY)
    assert hits[1] == usage.cache_creation.ephemeral_1h_input_tokens
    system = "<|im_end|>\n<|im_start|>system\n" + RULES
    assert hits[1] - hits[2] in (tokens(system), tokens("</tools>" + system))
    assert hits[2] > 0


def test_a_tool_call_and_its_result_are_marked_in_a_growing_conversation(
    claude: anthropic.Anthropic,
) -> None:
    messages: list[Any] = [{"role": "user", "content": "How many lanterns?"}]
    reached = 0
    for turn in range(4):
        call = {"type": "tool_use", "id": f"call{turn}", "name": "lanterns", "input": {"day": turn}}
        result = {
            "type": "tool_result",
            "tool_use_id": call["id"],
            "content": [text(STORY[turn * 100 : turn * 100 + 400])],
        }
        messages += [
            {"role": "assistant", "content": [{**call, "cache_control": MARKED}]},
            {"role": "user", "content": [{**result, "cache_control": MARKED}]},
        ]
        usage = ask(claude, "", messages=messages, tools=TOOLS, system=RULES)
        read, written, _ = counts(usage)
        assert read >= reached  # the end of that prompt, a few tokens on, was kept too
        assert written > 100
        reached = read + written
        for message in messages[1:]:
            message["content"][0].pop("cache_control", None)


def test_the_last_block_is_marked_by_the_request(
    claude: anthropic.Anthropic, tokens: Callable[[str], int]
) -> None:
    marked = tokens("<|im_start|>user\n" + STORY)
    story = [{"role": "user", "content": STORY}]
    first = ask(claude, "", messages=story, extra_body={"cache_control": MARKED})
    assert counts(first)[1] == marked
    longer = [{"role": "user", "content": STORY + " And then?"}]
    second = ask(claude, "", messages=longer, extra_body={"cache_control": HOUR})
    assert counts(second)[0] == marked
    assert second.cache_creation is not None
    assert second.cache_creation.ephemeral_1h_input_tokens == counts(second)[1] > 0


def test_a_stream_counts_alike(claude: anthropic.Anthropic, tokens: Callable[[str], int]) -> None:
    marked = tokens("<|im_start|>system\n" + RULES)
    for read, written in ((0, marked), (marked, 0)):
        with claude.messages.stream(
            model="default",
            max_tokens=4,
            system=[text(RULES, MARKED)],
            messages=[{"role": "user", "content": f"Question {read}?"}],
        ) as stream:
            started = next(event for event in stream if event.type == "message_start")
            usage = stream.get_final_message().usage
        assert counts(usage)[:2] == counts(started.message.usage)[:2] == (read, written)


@pytest.mark.parametrize(
    ("marks", "sentence"),
    [
        ([MARKED] * 5, "A maximum of 4 blocks with cache_control may be provided. Found 5."),
        ([MARKED, HOUR], "a ttl='1h' cache_control block must not come after a ttl='5m'"),
        ([{"type": "ephemeral", "ttl": "2h"}], "cache_control.ttl"),
        ([{"type": "for ever"}], "cache_control.type"),
    ],
)
def test_wrong_marks_get_the_documented_error(
    claude: anthropic.Anthropic, marks: list[Any], sentence: str
) -> None:
    content = [text(f"Block {n}.", mark) for n, mark in enumerate(marks)]
    with pytest.raises(anthropic.BadRequestError) as error:
        ask(claude, "", content=content)
    body: Any = error.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert sentence in body["error"]["message"]


def test_an_empty_block_cannot_be_marked(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as error:
        ask(claude, "", content=[text("", MARKED), text("Who?")])
    assert "messages.0.content.0: cache_control cannot be set for empty text" in str(error.value)


@pytest.fixture
def gpt(server: str) -> openai.OpenAI:
    flush(server)
    return openai.OpenAI(base_url=server + "/v1", api_key="none", max_retries=0)


def chat_details(gpt: openai.OpenAI, parts: list[Any], *, stream: bool) -> Any:
    """The usage's details of a chat completion."""
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer: Any = gpt.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": parts}],
        max_tokens=4,
        stream=stream,
        extra_body={
            "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
            "prompt_cache_key": "archive",
            **options,
        },
    )
    usage = [chunk.usage for chunk in answer if chunk.usage][-1] if stream else answer.usage
    return usage.prompt_tokens_details


def response_details(gpt: openai.OpenAI, parts: list[Any], *, stream: bool) -> Any:
    """The usage's details of a response."""
    answer: Any = gpt.responses.create(
        model="default",
        input=[{"role": "user", "content": [{**part, "type": "input_text"} for part in parts]}],
        max_output_tokens=4,
        stream=stream,
    )
    response = list(answer)[-1].response if stream else answer
    return response.usage.input_tokens_details


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("details_of", [chat_details, response_details])
def test_openai_parts_are_marked(
    gpt: openai.OpenAI,
    tokens: Callable[[str], int],
    details_of: Callable[..., Any],
    stream: bool,
) -> None:
    marked = tokens("<|im_start|>user\n" + STORY[:-1])  # its full stop may become an ellipsis
    found = []
    for question in ("\nHow many?", " When was that?"):
        part = {**text(STORY), "prompt_cache_breakpoint": {"mode": "explicit"}}
        details = details_of(gpt, [part, text(question)], stream=stream)
        found.append((details.cached_tokens, details.cache_write_tokens))
    assert found == [(0, marked), (marked, 0)]


def test_openai_breakpoints_have_one_mode(gpt: openai.OpenAI) -> None:
    part: Any = {**text(STORY), "prompt_cache_breakpoint": {"mode": "fuzzy"}}
    with pytest.raises(openai.BadRequestError):
        gpt.chat.completions.create(
            model="default", messages=[{"role": "user", "content": [part]}], max_tokens=4
        )


def test_diagnostics_name_what_changed(claude: anthropic.Anthropic) -> None:
    """Model, tools, system and messages; a header that changes with each request is shown."""

    def answered(previous: str | None, **fields: Any) -> Any:
        asked: dict[str, Any] = {
            "model": "default",
            "system": "x-request-line: 7f3a\n" + RULES,
            "tools": TOOLS,
            "messages": [{"role": "user", "content": "Who keeps rule 3?"}],
            **fields,
        }
        return claude.beta.messages.create(
            max_tokens=4,
            diagnostics={"previous_message_id": previous},
            betas=["cache-diagnosis-2026-04-07"],
            **asked,
        )

    first = answered(None)
    assert first.diagnostics is None
    turn = [
        {"role": "user", "content": "Who keeps rule 3?"},
        {"role": "assistant", "content": "Keeper 21."},
        {"role": "user", "content": "And rule 4?"},
    ]
    assert answered(first.id, messages=turn).diagnostics is None
    drifted = answered(first.id, system="x-request-line: 91bc\n" + RULES)
    reason = drifted.diagnostics.cache_miss_reason
    assert reason.type == "system_changed"
    assert reason.cache_missed_input_tokens > 0.9 * first.usage.input_tokens - 400
    shown = drifted.diagnostics.model_extra["hybrid"]
    assert shown["path"] == "system.0"
    assert "7f3a" in shown["before"] and "91bc" in shown["now"]
    other = [{"role": "user", "content": "Who keeps rule 4?"}]
    for changed, fields in {
        "tools": {"tools": TOOLS[::-1]},
        "messages": {"messages": other},
        "model": {"model": "another-name"},
    }.items():
        found = answered(first.id, **fields).diagnostics.cache_miss_reason
        assert found.type == f"{changed}_changed"
    unknown = answered("msg_of_somebody_else").diagnostics.cache_miss_reason
    assert unknown.type == "previous_message_not_found"
    with claude.beta.messages.stream(
        model="default",
        max_tokens=4,
        system=RULES,
        messages=other,
        diagnostics={"previous_message_id": first.id},
    ) as stream:
        events = [event.message for event in stream if event.type == "message_start"]
    assert events[0].diagnostics.cache_miss_reason.type == "tools_changed"


def test_responses_are_compared_with_an_earlier_one(gpt: openai.OpenAI) -> None:
    def answered(previous: str | None, salt: str | None = None, **fields: Any) -> Any:
        asked: dict[str, Any] = {"instructions": RULES, "input": "Who keeps rule 3?", **fields}
        body: dict[str, Any] = {"cache_salt": salt}
        if previous is not None:
            body["prompt_cache_options"] = {"comparison_response_id": previous}
        return gpt.responses.create(model="default", max_output_tokens=4, extra_body=body, **asked)

    first = answered(None)
    assert first.prompt_cache_diagnostics is None
    assert answered(first.id).prompt_cache_diagnostics == {"type": "cache_hit"}
    changed = answered(first.id, input="Who keeps rule 4?").prompt_cache_diagnostics
    assert (changed["type"], changed["reason"]) == ("cache_miss", "input_changed")
    assert changed["comparison_reusable_tokens"] == first.usage.input_tokens
    assert 0 < changed["cache_missed_tokens"] < 40
    assert changed["hybrid"]["now"].endswith("rule 4?")
    tools = [{"type": "function", "name": "rooms", "parameters": {"type": "object"}}]
    tooled = answered(first.id, tools=tools).prompt_cache_diagnostics
    assert tooled["reason"] == "tools_changed"
    missing = {"type": "comparison_response_not_found"}
    assert answered("resp_none").prompt_cache_diagnostics == missing
    assert answered(first.id, salt="another tenant's").prompt_cache_diagnostics == missing
