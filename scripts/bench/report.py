"""Reports of results: Markdown tables below machine, date, commit and command."""

from __future__ import annotations

import platform
import shlex
import subprocess
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import psutil

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
"""The pages that the benchmarks make."""


class BenchFailed(RuntimeError):
    """A measurement could not be finished; the message says why."""


class Table:
    """A Markdown table. Its head is printed at once, each row when it is known.

    Args:
        heads: titles of the columns.
        text: number of leading columns that hold text; the others are aligned right.
    """

    def __init__(self, *heads: str, text: int = 1) -> None:
        self._columns = len(heads)
        self._print(heads)
        print("|" + "---|" * text + "---:|" * (len(heads) - text), flush=True)

    def row(self, *cells: object) -> None:
        """Raises ValueError for another number of cells than there are columns."""
        if len(cells) != self._columns:
            raise ValueError(f"{len(cells)} cells in a table of {self._columns} columns: {cells}")
        self._print(cells)

    def _print(self, cells: Sequence[object]) -> None:
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def times_of(value: float, base: float) -> str:
    """`value` as a multiple of `base`."""
    return f"{value / base:.2f}x" if base else "-"


def seconds_of(work: Callable[[], object], clock: Callable[[], float] = perf_counter) -> float:
    """The seconds that `work` takes by `clock`."""
    begin = clock()
    work()
    return clock() - begin


def stamp(arguments: Sequence[str]) -> str:
    """Machine, date, commit and command of a run of scripts/bench.py with these arguments."""
    command = shlex.join(["python", "scripts/bench.py", *arguments])
    return (
        f"Machine: {machine()}. Date: {date.today()}. Commit: {commit()}.\nCommand: `{command}`.\n"
    )


def versions() -> str:
    """The versions of Python and torch."""
    return f"Python {platform.python_version()}, torch {version('torch')}"


def machine() -> str:
    """The CPU's name, its cores and the memory."""
    cores, memory = psutil.cpu_count(), psutil.virtual_memory().total / 2**30
    name = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return f"{name}, {cores} cores, {memory:.0f} GiB"


def commit() -> str:
    """The commit that is checked out, and whether files beside `RESULTS` differ from it."""
    try:
        name = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "--", ".", f":(exclude){RESULTS.relative_to(ROOT)}")
    except (OSError, subprocess.CalledProcessError):
        return "unknown (no git checkout)"
    return f"{name}, with changes" if changed else name


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
