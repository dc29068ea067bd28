"""Options that are read once, and the end of a program after a mistake."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sglang_hybrid.core.named_files import FileError
from sglang_hybrid.core.options import host, integer, number, port, read_by, server_url
from sglang_hybrid.core.programs import FAILED, Parser, UsageError, program
from tests.hostile import NUMBERS


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UsageError("give one"), 2, "error: give one\n"),
        (FileError("x\x1b[1m is a pipe"), 1, "error: x\\x1b[1m is a pipe\n"),
        (FileNotFoundError(2, "No such file", "a\nb"), 1, "error: a\\nb: No such file\n"),
        (OSError("a worker died"), 1, "error: a worker died\n"),
        (RecursionError(), 1, "error: what it was given is nested too deep\n"),
        (MemoryError(), 1, "error: there is not enough memory for what it was given\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_program_ends_in_one_sentence(
    error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @program
    def main(arguments: Sequence[str]) -> int:
        raise error

    assert main([]) == status
    assert capsys.readouterr().err == said


def test_a_mistake_of_ours_is_none_of_the_user() -> None:
    @program
    def main(arguments: Sequence[str]) -> int:
        raise KeyError(arguments[0])

    with pytest.raises(KeyError):
        main(["x"])


def test_a_program_whose_output_nobody_reads_any_more_ends_in_silence() -> None:
    """The program writes to a pipe such as `head`, which ends after some lines."""
    code = (
        "from sglang_hybrid.core.programs import program\n"
        "from sglang_hybrid.core.sentences import print_line\n"
        "@program\n"
        "def main(_):\n"
        "    while True:\n"
        "        print_line('x' * 1_000)\n"
        "raise SystemExit(main([]))\n"
    )
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "x" * 1_000 + "\n"
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (FAILED, "")


def test_a_wrong_command_line_is_a_usage_error() -> None:
    parser = Parser()
    parser.add_argument("--limit", type=integer(1, 10))
    assert parser.parse_args(["--limit", "10"]).limit == 10
    with pytest.raises(UsageError, match=r"^--limit: '11' is not a whole number from 1 to 10;"):
        parser.parse_args(["--limit", "11"])
    with pytest.raises(UsageError, match="unrecognized arguments: --x"):
        parser.parse_args(["--x"])


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (integer(-1, 5), "-1", -1),
        (number(0, 1), "1e-3", 0.001),
        (port, "0", 0),
        (server_url, "https://[::1]:30000/", "https://[::1]:30000"),
        (server_url, "http://host", "http://host"),
        (host, "::1", "::1"),
        (read_by(int), "3", 3),
    ],
)
def test_what_an_option_takes(read: Callable[[str], Any], text: str, value: object) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "texts"),
    [
        (integer(1, 1_000), NUMBERS),
        (number(0.5, 9), NUMBERS),
        (port, ("65536", "-1", "http")),
        (
            server_url,
            ("", "host:1", "file:///etc/passwd", "http://", "http://a:b", "http://a:99999"),
        ),
        (server_url, ("http://a\n", "http://\u202ea", "http://[::1", "http://a:0")),
        (host, ("", "a b", "a/b", "\x1b")),
        (read_by(int), ("many",)),
    ],
)
def test_what_an_option_does_not_take(read: Callable[[str], Any], texts: Sequence[str]) -> None:
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError) as raised:
            read(text)
        assert len(str(raised.value)) < 200
