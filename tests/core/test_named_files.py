"""Files that a user names: whatever they are, they are read within a bound, or refused at once."""

from __future__ import annotations

import gzip
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.core import named_files
from sglang_hybrid.core.named_files import (
    FileError,
    decode_as,
    decode_json,
    named_lines,
    open_named,
    read_bytes,
    read_json,
    read_text,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file"


def test_a_file_is_read(file: Path) -> None:
    file.write_text('{"a": [1, Infinity]}')
    assert read_text(file) == '{"a": [1, Infinity]}'
    assert read_json(file, dict[str, Any], "table") == {"a": [1, float("inf")]}


def test_what_is_no_file_is_refused_without_waiting(file: Path) -> None:
    os.mkfifo(file)
    with pytest.raises(FileError, match="file is a pipe, not a regular file"):
        open_named(file)
    file.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(file))
        with pytest.raises(FileError, match=r"file cannot be read \(No such device or address\)"):
            open_named(file)
    for path, kind in (("/dev/zero", "a device"), (str(file.parent), "a folder")):
        with pytest.raises(FileError, match=f"{path} is {kind}, not a regular file"):
            open_named(Path(path))
    for path in (file.parent / "none", Path("a\0b")):
        with pytest.raises(FileError, match="cannot be read"):
            open_named(path)


def test_a_pipe_of_the_shell_is_read() -> None:
    code = "import sys; from pathlib import Path; from sglang_hybrid.core.named_files import *; "
    code += "print(read_text(Path('/dev/stdin')))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input="said", capture_output=True, text=True, check=True)
    assert done.stdout == "said\n"


def test_no_more_is_read_than_the_bound(file: Path) -> None:
    file.write_bytes(b"x" * 100)
    assert len(read_bytes(file, 100)) == 100
    with pytest.raises(FileError, match="more than 99 bytes"):
        read_bytes(file, 99)
    os.truncate(file, 1 << 40)
    with pytest.raises(FileError, match="too large"):
        read_bytes(file)


def test_a_line_has_a_bound(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_files, "MOST_BYTES", 10)
    file.write_bytes(b"123456789\n" * 50)
    assert len([*named_lines(file)]) == 50
    file.write_bytes(b"123456789\n1234567890\n")
    with pytest.raises(FileError, match="a line of more than 10 bytes"):
        [*named_lines(file)]


@pytest.mark.parametrize("line", [b"a" * 50_000, b"a\n" * 25_000])
def test_what_an_archive_unpacks_to_has_a_bound(
    tmp_path: Path, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bomb.gz"
    file.write_bytes(gzip.compress(line))
    assert b"".join(named_lines(file)) == line
    monkeypatch.setattr(named_files, "SMALL", 0)
    with pytest.raises(FileError, match="unpacks to more than 100 times its size"):
        [*named_lines(file)]


def test_text_and_json_that_are_none(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_bytes(b"ab\xff")
    with pytest.raises(FileError, match=r"no text in UTF-8 \(byte 2\)"):
        read_text(file)
    file.write_text("[" * 100_000)
    with pytest.raises(FileError, match=r"is no table \(it is nested too deep\)"):
        read_json(file, object, "table")
    file.write_text("[1]")
    with pytest.raises(FileError, match=r"is no table .*Expected `object`, got `array`"):
        read_json(file, dict[str, Any], "table")
    monkeypatch.setattr(named_files, "MOST_VALUES", 4)
    for decode in (lambda: decode_json("[1,1,1,1,1,1]"), lambda: decode_as(b"[1,1,1,1,1,1]", list)):
        with pytest.raises(ValueError, match="more than 4 values"):
            decode()
    with pytest.raises(ValueError, match="nested too deep"):
        decode_as(b"[" * 100_000, object)
