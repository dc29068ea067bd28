"""Runs the commands of tables in docs/benchmarks.md again and replaces the tables.

    python scripts/bench.py docs              # all but those that take long
    python scripts/bench.py docs rounds ab    # these
    python scripts/bench.py docs --list

In the page a table stands between two comments, of which the first carries its command:

    <!-- bench rounds: rounds --tokens 1024 16384 -->
    ...
    <!-- end rounds -->

Everything between them is replaced by what the command prints. `<!-- bench NAME (long): ... -->`
marks what takes more than some minutes: it runs only where it is named. Where a command fails, its
table stays as it is.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.report import MADE, ROOT, BenchFailed

_SECTION = re.compile(
    r"^<!-- bench (?P<name>[\w-]+)(?P<long> \(long\))?: (?P<command>.+?) -->\n"
    r"(?P<body>.*?)^<!-- end (?P=name) -->$",
    re.MULTILINE | re.DOTALL,
)
_OPENED = re.compile(r"^<!-- bench ([\w-]+)", re.MULTILINE)


@dataclass(frozen=True)
class Section:
    """A table of the page: its name, the arguments of scripts/bench.py, and its text."""

    name: str
    long: bool
    arguments: tuple[str, ...]
    body: str


def sections(page: str) -> list[Section]:
    """All of a page. Raises BenchFailed where a table has no end, or two have one name."""
    found = [
        Section(m["name"], m["long"] is not None, tuple(shlex.split(m["command"])), m["body"])
        for m in _SECTION.finditer(page)
    ]
    names = [section.name for section in found]
    opened = _OPENED.findall(page)
    if names != opened:
        open_ended = ", ".join(name for name in opened if name not in names)
        raise BenchFailed(f"no `<!-- end NAME -->` is found for: {open_ended}")
    if len(set(names)) < len(names):
        twice = ", ".join(sorted({name for name in names if names.count(name) > 1}))
        raise BenchFailed(f"more than one table has the name: {twice}")
    return found


def with_table(page: str, name: str, body: str) -> str:
    """The page with another text between the comments of one table."""

    def replace(match: re.Match[str]) -> str:
        if match["name"] != name:
            return match[0]
        start, end = match.span("body")
        before, after = match[0][: start - match.start()], match[0][end - match.start() :]
        return f"{before}\n{body.strip()}\n\n{after}"

    return _SECTION.sub(replace, page)


def chosen(found: Sequence[Section], names: Sequence[str]) -> list[Section]:
    """Those that are named, or all that do not take long. Raises BenchFailed for a wrong name."""
    known = [section.name for section in found]
    wrong = [name for name in names if name not in known]
    if wrong:
        raise BenchFailed(f"no table is named {', '.join(wrong)}; there are {', '.join(known)}")
    return [one for one in found if one.name in names or not (names or one.long)]


def regenerate(
    path: Path, names: Sequence[str], execute: Callable[[Sequence[str]], str]
) -> Iterator[str]:
    """Replace tables one after another; what `execute` prints for a table's arguments is its text.

    Yields the name of each before it runs. The page is read anew for each, so that it may be edited
    meanwhile.
    """
    for section in chosen(sections(path.read_text()), names):
        yield section.name
        body = execute(section.arguments)
        path.write_text(with_table(path.read_text(), section.name, body))


def execute(arguments: Sequence[str]) -> str:
    """What scripts/bench.py prints. Raises BenchFailed if it fails."""
    command = [sys.executable, str(ROOT / "scripts" / "bench.py"), *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise BenchFailed(f"`{shlex.join(arguments)}` ended with status {done.returncode}")
    return done.stdout


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="tables")
    parser.add_argument("--list", action="store_true", help="names and commands; nothing runs")


def run(options: argparse.Namespace) -> None:
    path = ROOT / MADE
    if options.list:
        for section in sections(path.read_text()):
            command = shlex.join(["python", "scripts/bench.py", *section.arguments])
            print(f"{section.name:22}{'(long) ' if section.long else '       '}{command}")
        return
    for name in regenerate(path, options.names, execute):
        print(f"{name} ...", file=sys.stderr, flush=True)
