"""A coding agent's conversations through /v1/messages."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Any

from scripts.bench.commands import Count
from scripts.bench.report import ROOT, Table
from scripts.bench.servers import LAUNCHERS, SCRATCH, post
from sglang_hybrid.extensions.cpu.models import build_tiny_model
from sglang_hybrid.extensions.cpu.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.serving.server_process import ServerProcess

TEMPLATE = ROOT / "tests" / "prompts" / "chat.jinja"
MARK = {"cache_control": {"type": "ephemeral"}}
SYSTEMS = {"sglang_hybrid": LAUNCHERS["ours"], "SGLang's own cache": LAUNCHERS["SGLang"]}


def agent(
    turns: Count = 6,
    drift: Annotated[bool, "a line that changes, and its name"] = False,
) -> None:
    """Hit rates of coding agents' conversations through /v1/messages, beside SGLang's own cache.

    Two conversations with the same tools and the same system prompt, one after the other. Each turn
    adds a call of a tool, its result and a question of the user's. Four blocks are marked, as
    agents do it: the last tool, the system prompt, and the last block of the last two messages of
    the user.

    With --drift, one conversation whose client writes a line that changes with each request at the
    top of the system prompt, and what the answers' diagnostics say of it.
    """
    if drift:
        _run_drift(turns)
        return
    answers = {name: _conversations(module, turns) for name, module in SYSTEMS.items()}
    table = Table("conversation", "turn", *SYSTEMS, text=2)
    for at in range(2 * turns):
        row = [_share(answers[name][at]) for name in SYSTEMS]
        table.row(at // turns + 1, at % turns + 1, *row)


def _run_drift(turns: int) -> None:
    answers = {}
    for name, module in SYSTEMS.items():
        with _server(module) as running:
            answers[name] = _conversation(running.url, 0, turns, drift=True)
    table = Table("turn", "what the diagnosis names", *SYSTEMS, text=2)
    for turn in range(turns):
        row = [_share(answers[name][turn]) for name in SYSTEMS]
        table.row(turn + 1, _named(answers["sglang_hybrid"][turn]), *row)


def _conversations(module: str, turns: int) -> list[dict[str, Any]]:
    with _server(module) as running:
        return [
            answer for number in range(2) for answer in _conversation(running.url, number, turns)
        ]


def _server(module: str) -> ServerProcess:
    flags = ["--model-path", str(_model()), "--chat-template", str(TEMPLATE)]
    return ServerProcess([*flags, "--enable-cache-report"], module=module, timeout=600)


def _conversation(url: str, number: int, turns: int, drift: bool = False) -> list[dict[str, Any]]:
    """The answers to one conversation."""
    source = random.Random(number)
    tools: list[dict[str, Any]] = [
        {
            "name": name,
            "description": _words(random.Random(name), 60),
            "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
        }
        for name in ("read", "write", "search", "run")
    ]
    tools[-1] |= MARK
    rules = _words(random.Random(0), 700)
    messages: list[dict[str, Any]] = [_message(_text(source, 60))]
    answers: list[dict[str, Any]] = []
    for turn in range(turns):
        head = f"x-request-line: {random.Random(turn).randbytes(8).hex()}\n" if drift else ""
        body: dict[str, Any] = {
            "model": "default",
            "max_tokens": 16,
            "temperature": 0,
            "tools": tools,
            "system": [{"type": "text", "text": head + rules, **MARK}],
            "messages": _marked(messages),
        }
        if drift:
            before = answers[-1]["id"] if answers else None
            body["diagnostics"] = {"previous_message_id": before}
        answers.append(post(url, "/v1/messages", body))
        call = {"type": "tool_use", "id": f"call{turn}", "name": "read", "input": {"path": "a"}}
        result = {"type": "tool_result", "tool_use_id": f"call{turn}"}
        messages += [
            {"role": "assistant", "content": [call]},
            _message({**result, "content": [_text(source, 250)]}, _text(source, 30)),
        ]
    return answers


def _share(answer: dict[str, Any]) -> str:
    """Of a prompt that came from the cache."""
    usage = answer["usage"]
    read = usage.get("cache_read_input_tokens") or 0
    written = usage.get("cache_creation_input_tokens") or 0
    return f"{100 * read / (usage['input_tokens'] + read + written):.1f} %"


def _named(answer: dict[str, Any]) -> str:
    found = answer.get("diagnostics")
    if not found:
        return "nothing"
    reason, report = found["cache_miss_reason"], found["hybrid"]
    texts = [report[each].partition("\n")[0][-24:] for each in ("before", "now")]
    return (
        f"`{reason['type']}`, {reason['cache_missed_input_tokens']:,} tokens missed, at "
        f"`{report['path']}`: `{texts[0]}`, then `{texts[1]}`"
    )


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Marks on the last blocks of the last two messages of the user."""
    asked = [{**message, "content": [*message["content"]]} for message in messages]
    for message in [each for each in asked if each["role"] == "user"][-2:]:
        message["content"][-1] = {**message["content"][-1], **MARK}
    return asked


def _message(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def _text(source: random.Random, words: int) -> dict[str, Any]:
    return {"type": "text", "text": _words(source, words)}


def _words(source: random.Random, count: int) -> str:
    words = ("the", "keeper", "counts", "lanterns", "in", "a", "room", "of", "archive", "quiet")
    return " ".join(source.choice(words) for _ in range(count)) + "."


def _model() -> Path:
    path = SCRATCH / "bench-agent-model"
    return path if path.exists() else build_tiny_model(DEFAULT_ARCHITECTURE, path)
