#!/usr/bin/env python3
"""The benchmarks, and the tables of docs/benchmarks.md that they make.

    python scripts/bench.py rounds --tokens 1024 16384
    python scripts/bench.py docs rounds

A subcommand measures and prints Markdown below machine, date, commit and command. `docs` runs the
commands of tables in docs/benchmarks.md and replaces the tables.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import requests

from scripts.bench.report import ROOT, BenchFailed, stamp
from sglang_hybrid.serving.server_process import ServerFailed

COMMANDS = (
    *("docs", "kernels"),
    *("cache", "rounds", "schedule-round", "victim", "admission"),
    *("policies", "answers", "pools", "tuner", "replay", "tiers-replay"),
    *("tiers-ladder", "tier-codecs"),
    *("prewarm", "pins", "schedule-replay", "prefetch"),
    *("server", "split", "contexts", "native", "peak", "roofline", "profile", "peer"),
    *("ab", "phases", "one-memory", "moves", "tiers", "tier-steps"),
    *("agent", "codecs", "modular", "schedule", "prewarm-server", "loads", "beside"),
)
"""In the order of `--help`: kernels; the cache in one process; replays; a server; servers."""


def module_of(command: str) -> ModuleType:
    return importlib.import_module(f"scripts.bench.{command.replace('-', '_')}")


def build_parser(named: str) -> argparse.ArgumentParser:
    """The parser; only of the subcommand `named` the module is imported and the options known."""
    parser = argparse.ArgumentParser(
        prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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


def main(arguments: Sequence[str]) -> int:
    options = build_parser(arguments[0] if arguments else "").parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.command != "docs":
        print(stamp(arguments), flush=True)
    try:
        return module_of(options.command).run(options) or 0
    except (BenchFailed, ServerFailed, requests.RequestException) as error:
        print(f"bench.py {options.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
