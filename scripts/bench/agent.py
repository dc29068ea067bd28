"""Hit rates of coding agents' conversations through /v1/messages, beside SGLang's own cache.

Two conversations with the same tools and the same system prompt, one after the other. Each turn
adds a call of a tool, its result and a question of the user's. Four blocks are marked, as agents do
it: the last tool, the system prompt, and the last block of the last two messages of the user.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import requests

from scripts.bench.report import ROOT, Table, positive
from sglang_hybrid.models import build_tiny_model
from sglang_hybrid.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.server_process import ServerProcess

TEMPLATE = ROOT / "tests" / "prompts" / "chat.jinja"
MARK = {"cache_control": {"type": "ephemeral"}}
SYSTEMS = {
    "sglang_hybrid": "sglang_hybrid.launch_server",
    "SGLang's own cache": "sglang.launch_server",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=positive, default=6)


def run(options: argparse.Namespace) -> None:
    shares = {name: _conversations(module, options) for name, module in SYSTEMS.items()}
    table = Table("conversation", "turn", *SYSTEMS, text=2)
    for at in range(2 * options.turns):
        row = [f"{100 * shares[name][at]:.1f} %" for name in SYSTEMS]
        table.row(at // options.turns + 1, at % options.turns + 1, *row)


def _conversations(module: str, options: argparse.Namespace) -> list[float]:
    flags = ["--model-path", str(_model()), "--chat-template", str(TEMPLATE)]
    with ServerProcess([*flags, "--enable-cache-report"], module=module, timeout=600) as running:
        return [
            share
            for number in range(2)
            for share in _conversation(running.url, number, options.turns)
        ]


def _conversation(url: str, number: int, turns: int) -> list[float]:
    source = random.Random(number)
    tools = [
        {
            "name": name,
            "description": _words(random.Random(name), 60),
            "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
        }
        for name in ("read", "write", "search", "run")
    ]
    tools[-1] |= MARK
    system = [{"type": "text", "text": _words(random.Random(0), 700), **MARK}]
    messages: list[dict[str, Any]] = [_message(_text(source, 60))]
    shares = []
    for turn in range(turns):
        asked = _marked(messages)
        body = {"model": "default", "max_tokens": 16, "temperature": 0, "system": system}
        answer = requests.post(
            url + "/v1/messages", json={**body, "tools": tools, "messages": asked}, timeout=300
        )
        answer.raise_for_status()
        usage = answer.json()["usage"]
        read = usage.get("cache_read_input_tokens") or 0
        written = usage.get("cache_creation_input_tokens") or 0
        shares.append(read / (usage["input_tokens"] + read + written))
        call = {"type": "tool_use", "id": f"call{turn}", "name": "read", "input": {"path": "a"}}
        result = {"type": "tool_result", "tool_use_id": f"call{turn}"}
        messages += [
            {"role": "assistant", "content": [call]},
            _message({**result, "content": [_text(source, 250)]}, _text(source, 30)),
        ]
    return shares


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
    path = Path(tempfile.gettempdir()) / "bench-agent-model"
    return path if path.exists() else build_tiny_model(DEFAULT_ARCHITECTURE, path)
