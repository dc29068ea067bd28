"""What the program prints is text of the server's and of clients': a terminal takes no orders."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import requests

from sglang_hybrid.explain import __main__ as command


def test_ids_of_clients_are_printed_as_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["explain", "--request-id", "r"])
    monkeypatch.setattr(command, "explain", lambda _: None)
    monkeypatch.setattr(command, "render", lambda _: ["request \x1b[2Jr\n, found:", "KV"])
    assert command.main() == 0
    assert capsys.readouterr().out == "request \\x1b[2Jr\n    , found:\nKV\n"


def test_a_key_may_lie_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("sk\n")
    sent: list[object] = []

    def post(*_: object, headers: dict[str, str], **__: object) -> None:
        sent.append(headers)
        raise requests.ConnectionError

    monkeypatch.setattr(requests, "post", post)
    for given in (f"@{file}", "@/none"):
        monkeypatch.setattr(sys, "argv", ["explain", "--request-id", "r", "--api-key", given])
        assert command.main() == 1
    assert sent == [{"Authorization": "Bearer sk"}]
