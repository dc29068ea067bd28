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
import ast
import contextlib
import importlib
import io
import logging
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import requests

from scripts.bench.report import ROOT, BenchFailed, stamp
from scripts.bench.results import write_table
from sglang_hybrid.serving.server_process import ServerFailed

COMMANDS = (
    *("results", "figure", "kernels"),
    *("cache", "rounds", "schedule-round", "victim", "admission"),
    *("policies", "answers", "pools", "tuner", "replay", "tiers-replay"),
    *("tiers-ladder", "tier-codecs"),
    *("prewarm", "pins", "schedule-replay", "prefetch"),
    *("server", "split", "contexts", "native", "peak", "roofline", "profile", "peer"),
    *("ab", "phases", "one-memory", "moves", "tiers", "tier-steps"),
    *("agent", "codecs", "modular", "schedule", "prewarm-server", "loads", "beside"),
)
"""As `--help` lists them: pages, kernels, the cache in one process, replays, a server, servers."""


def module_of(command: str) -> ModuleType:
    return importlib.import_module(f"scripts.bench.{command.replace('-', '_')}")


def build_parser(named: str) -> argparse.ArgumentParser:
    """The parser; only of the subcommand `named` the module is imported and the options known."""
    parser = argparse.ArgumentParser(
        prog="bench.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--write", metavar="NAME", help="write docs/results/NAME.md, too")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")
    for command in COMMANDS:
        path = ROOT / "scripts" / "bench" / f"{command.replace('-', '_')}.py"
        about = ast.get_docstring(ast.parse(path.read_text())) or ""
        one = parsers.add_parser(
            command,
            help=about.split("\n\n")[0].replace("%", "%%"),
            description=about.replace("%", "%%"),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if command == named:
            module_of(command).arguments(one)
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
    options = build_parser(given[0] if given else "").parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers are stopped then, too
    sys.argv[1:] = given  # a benchmark that runs itself in another process must not write
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    printed = Both(sys.stdout)
    try:
        with contextlib.redirect_stdout(printed):
            if options.command != "results":
                print(stamp(given), flush=True)
            status = int(module_of(options.command).run(options) or 0)
        if wanted and not status:
            write_table(wanted, given, printed.kept.getvalue())
    except (BenchFailed, ServerFailed, requests.RequestException) as error:
        print(f"bench.py {options.command}: {error}", file=sys.stderr)
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
