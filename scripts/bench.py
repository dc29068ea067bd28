#!/usr/bin/env python3
"""The benchmarks, and the pages of docs/results that they make.

    python scripts/bench.py rounds --tokens 1024 16384
    python scripts/bench.py --write rounds rounds --tokens 1024 16384
    python scripts/bench.py results rounds

A subcommand measures and prints Markdown below machine, date, commit and command; with `--write
NAME` it also writes docs/results/NAME.md. `results` makes such pages again, each by its command.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import requests

from scripts.bench.commands import COMMANDS, about, add_options, call, function_of
from scripts.bench.report import BenchFailed, stamp
from scripts.bench.results import write_table
from sglang_hybrid.serving.server_process import ServerFailed


def build_parser(named: str) -> argparse.ArgumentParser:
    """The parser. Only the module of the subcommand `named` is imported, for its options."""
    parser = argparse.ArgumentParser(
        prog="bench.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--write", metavar="NAME", help="write docs/results/NAME.md, too")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")
    for command in COMMANDS:
        text = about(command).replace("%", "%%")
        one = parsers.add_parser(
            command,
            help=text.split("\n\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if command == named:
            add_options(one, function_of(command))
    return parser


class Both(io.TextIOBase):
    """Text that goes on to a stream, and is kept."""

    def __init__(self, stream: TextIO) -> None:
        self.kept = io.StringIO()
        self._stream = stream

    def write(self, text: str) -> int:
        self.kept.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


def main(arguments: Sequence[str]) -> int:
    """Run a subcommand. Returns the exit status: 1 where it could not be finished, 130 where it was
    interrupted.
    """
    given, wanted = split_write(arguments)
    options = vars(build_parser(given[0] if given else "").parse_args(arguments))
    command = options.pop("command")
    del options["write"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers are stopped then, too
    sys.argv[1:] = given  # a benchmark that runs itself in another process must not write
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    printed = Both(sys.stdout)
    try:
        with contextlib.redirect_stdout(printed):
            if command != "results":
                print(stamp(given), flush=True)
            status = call(function_of(command), options)
        if wanted and not status:
            write_table(wanted, given, printed.kept.getvalue())
    except (BenchFailed, ServerFailed, requests.RequestException) as error:
        print(f"bench.py {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def split_write(arguments: Sequence[str]) -> tuple[list[str], str]:
    """A command line without `--write NAME` before its subcommand; and NAME, or an empty text."""
    if len(arguments) > 1 and arguments[0] == "--write":
        return list(arguments[2:]), arguments[1]
    return list(arguments), ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
