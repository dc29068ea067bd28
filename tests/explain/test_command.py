"""`python -m sglang_hybrid.explain` and servers that answer anything."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import requests

from sglang_hybrid.explain.__main__ import Connection, main
from sglang_hybrid.explain.miss_report import CacheSnapshot, MissReport
from sglang_hybrid.serving import answers
from tests.hostile import CONTROL, Ended

Answer = Callable[[str], tuple[int, bytes]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ended]]:
    """Runs the command on a server that answers what it is told to, by the path of a request."""
    answered: list[Answer] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, content = answered[-1](self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    def run(answer: Answer, *arguments: str) -> Ended:
        answered.append(answer)
        url = f"http://127.0.0.1:{server.server_address[1]}"
        status = main(["--url", url, *(arguments or ("--input-ids", "1,2"))])
        return Ended(status, *capsys.readouterr())

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield run
        server.shutdown()


def report(**changes: Any) -> bytes:
    cache = CacheSnapshot(CONTROL, "all", True, False, 1, 16, None, 4, 100, None, False)
    made = MissReport(2, 1, 1, 0, None, [], None, [(1, CONTROL)], cache)
    return json.dumps({**msgspec.to_builtins(made), **changes}).encode()


@pytest.mark.parametrize(
    ("status", "content", "said"),
    [
        (200, b"[" * 100_000, "runs another version of sglang_hybrid"),
        (200, b"\xff\0", "runs another version of sglang_hybrid"),
        (200, b"{}" * 10_000, "runs another version of sglang_hybrid"),
        (200, b"", "runs another version of sglang_hybrid"),
        (200, report(usable=CONTROL), "runs another version of sglang_hybrid"),
        (
            400,
            json.dumps({"error": {"message": CONTROL}}).encode(),
            r"error: \x1b[31mred\x07\n/etc",
        ),
        (500, json.dumps({"message": "x" * 10**6}).encode(), "error: xxx"),
        (500, b"<html>", "/hybrid_cache/explain answered 500"),
        (401, b"", "wants its API key"),
        (404, b"", "was it started with sglang_hybrid.launch_server?"),
    ],
)
def test_whatever_a_server_answers_it_is_one_sentence(
    ask: Callable[..., Ended], status: int, content: bytes, said: str
) -> None:
    ended = ask(lambda path: (status, content))
    ended.check()
    assert ended.status == 1 and said in ended.err and len(ended.err) < 700


def test_an_answer_has_a_bound(ask: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(lambda path: (200, report())).status == 0
    monkeypatch.setattr(answers, "MOST_BYTES", 100)
    assert ask(lambda path: (200, report())).status == 1


def test_a_report_steers_no_terminal(ask: Callable[..., Ended]) -> None:
    for more in ((), ("--json",)):
        ended = ask(lambda path: (200, report()), "--input-ids", "1,2", *more)
        ended.check()
        assert ended.status == 0 and "red" in ended.out


def test_numbers_that_contradict_each_other_are_told_all_the_same(
    ask: Callable[..., Ended],
) -> None:
    missed = {"position": 1, "gain": 10**30, "reason": "no_slot", "when": 1e308}
    cache = {**json.loads(report())["cache"], "state_slots": None}
    ended = ask(lambda path: (200, report(deeper=[missed], cache=cache)))
    ended.check()
    assert ended.status == 0


@pytest.mark.parametrize("tokens", [b"{}", b"[]", b'{"tokens": "many"}', b'{"tokens": [1.5]}'])
def test_tokens_that_are_none(ask: Callable[..., Ended], tokens: bytes, tmp_path: Path) -> None:
    ended = ask(lambda path: (200, tokens), "--prompt", "x")
    ended.check()
    assert "answered no tokens" in ended.err


def test_a_body_says_whose_it_is_unless_a_flag_does(
    ask: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "chat.json"
    chat = {"messages": [], "cache_salt": "a", "extra_key": "b", "user": "c", "model": "m:d"}
    prompt = {"messages": [], "continue_final_message": True}
    file.write_text(json.dumps(chat | prompt))
    sent: list[Any] = []

    def post(self: Connection, path: str, body: dict[str, Any]) -> Any:
        sent.append(body)
        return {"tokens": [1, 2]} if path == "/tokenize" else json.loads(report())

    monkeypatch.setattr(Connection, "post", post)
    for given in ("mine", ""):
        asked = ["--messages", str(file), "--extra-key", given]
        ask(lambda path: (500, b""), *asked).check()
        whose = {"extra_key": given, "cache_salt": "a", "lora_path": None, "model": "m:d"}
        assert sent == [prompt, {**whose, "input_ids": [1, 2]}]
        sent.clear()


def test_a_key_may_lie_in_a_file(
    ask: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text("sk\n")
    sent: list[object] = []

    def post(*_: object, headers: dict[str, str], **__: object) -> None:
        sent.append(headers)
        raise requests.ConnectionError

    monkeypatch.setattr(requests, "post", post)
    for given in (f"@{file}", "@/none"):
        ended = ask(lambda path: (200, report()), "--request-id", "r", "--api-key", given)
        ended.check()
        assert ended.status in (1, 2)
    assert sent == [{"Authorization": "Bearer sk"}]
