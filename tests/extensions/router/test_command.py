"""The router takes the servers' key as they do, and hands on the file's name, not the key."""

from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.extensions.router import fleet
from sglang_hybrid.extensions.router import program as command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("the key\n")
    return path


@pytest.mark.parametrize("flag", ["--admin-api-key", "--admin-key"])
def test_a_router_reads_the_key(flag: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(fleet, "route", lambda *all_of_it: given.extend(all_of_it))
    command.main(["route", "http://a:30000", flag, f"@{file}"])
    assert given == [["http://a:30000"], "127.0.0.1:30000", "the key", None]


def test_servers_are_started_with_the_name_of_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(fleet, "run", lambda *all_of_it: given.extend(all_of_it))
    command.main(["serve", "--admin-api-key", f"@{file}", "--tp-size", "2"])
    flags = ["--tp-size", "2", "--admin-api-key", f"@{file}"]
    assert given == [2, flags, "127.0.0.1:30000", "the key", None]


def test_a_key_that_cannot_be_read_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["watch", "http://a:30000", "--admin-api-key", "@/none"]) == 1
    said = "error: --admin-api-key: the key's file: /none cannot be read (No such file"
    assert capsys.readouterr().err.startswith(said)
