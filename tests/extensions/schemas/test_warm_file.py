"""Files of prompts to compute at start-up: what is read, sent and said of mistakes."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.extensions.schemas.endpoints.warm_file import prewarm, read_lines

SCHEMA = '<schema name="rules">text</schema>'
LINES: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user", "content": "Hello\u2028there"}],  # no end of a line in JSON
        "max_completion_tokens": 50,
        "extra_key": "a",
    },
    {"text": "refused"},
    {"pml": '<prompt schema="rules"/>', "sampling_params": {"temperature": 0}},
    {"schema": SCHEMA, "budget_mb": 5, "extra_key": "a"},
]


@pytest.fixture
def seen() -> list[tuple[str, str | None, Any]]:
    return []


@pytest.fixture
def server(seen: list[tuple[str, str | None, Any]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, self.headers["Authorization"], body))
            self.send_response(400 if body.get("text") == "refused" else 200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{listening.server_port}"
    listening.shutdown()
    thread.join()
    listening.server_close()


def test_each_line_becomes_requests_that_generate_nothing(
    tmp_path: Path, server: str, seen: list[tuple[str, str | None, Any]]
) -> None:
    file = tmp_path / "warm.jsonl"
    lines = [json.dumps(line, ensure_ascii=False) for line in LINES]
    file.write_text("\n\n".join(lines) + "\n", "utf-8")
    assert prewarm(file, server, "secret") == 3
    assert [path for path, _, _ in seen] == [
        "/v1/chat/completions",
        "/generate",
        "/generate",
        "/v1/prompt_schemas",
        "/v1/prompt_schemas/rules/prewarm",
    ]
    assert {key for _, key, _ in seen} == {"Bearer secret"}
    chat, _, prompt, schema, budget = (body for _, _, body in seen)
    assert (chat["max_tokens"], chat["max_completion_tokens"], chat["extra_key"]) == (0, None, "a")
    assert prompt["sampling_params"] == {"temperature": 0, "max_new_tokens": 0}
    assert schema == {"pml": SCHEMA, "extra_key": "a"}
    assert budget == {"budget_mb": 5, "extra_key": "a"}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 2: no JSON"),
        ("[" * 100_000, "line 2: no JSON: it is nested too deep"),
        ('{"text": "x", "sampling_params": [1]}', "line 2: sampling_params is no object"),
        ("[]", "line 2: an object with messages"),
        ('{"prompt": "x"}', "line 2: an object with messages"),
        ('{"schema": "<schema", "budget_mb": 1}', "line 2: line 1, column"),
    ],
)
def test_a_mistake_names_file_and_line(tmp_path: Path, line: str, sentence: str) -> None:
    file = tmp_path / "warm.jsonl"
    file.write_text('{"text": "x"}\n' + line)
    with pytest.raises(ValueError) as error:
        read_lines(file)
    assert f"{file}, {sentence}" in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.jsonl cannot be read"):
        read_lines(tmp_path / "none.jsonl")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a pipe, not a regular file"):
        read_lines(tmp_path / "pipe")
