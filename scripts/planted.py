"""Plants defects in a copy of the package, one at a time, and says which the quick tests notice.

    python scripts/planted.py                    # all of scripts/planted.toml
    python scripts/planted.py late-state         # those of these names
    python scripts/planted.py --wide             # with all quick tests that need no server

A defect is *caught* if a test fails that passes without it, and *lives* if all pass. The checkout
is never changed. Exit status 1 if a defect lives, 2 if nothing can be said.

The table of defects is written by hand. Tools that make mutants (mutmut, cosmic-ray) change an
operator, a constant or an argument at every place: thousands of mutants, a start of pytest for
each, most of them in decisions, which are tested anyway. Defects that tests missed here were wiring
between tested parts: a call left out, the wrong one of two similar objects handed on, a tenant that
is not passed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "scripts" / "planted.toml"
PACKAGE = "sglang_hybrid"
QUICK = "not slow and not server"
LEFT_OUT = ("tests/server", "tests/docker", "tests/scripts/test_planted.py")
"""Tests that need a server or a container, and the one that looks at the table."""

BESIDE = "shared"
"""The folder next to the checkout that has the traces, if it is there."""

PASSED, FAILED, INTERRUPTED = 0, 1, 2
"""Exit statuses of pytest; it is interrupted where a test module cannot be imported."""


class PlantingFailed(ValueError):
    """A defect that cannot be planted or tested; the sentence says why and what to do."""


@dataclass(frozen=True)
class Defect:
    """One change that should not pass. file: below `sglang_hybrid/`. before: text that is there
    once; after: what stands there instead. tests: paths for pytest. reported: it lived when defects
    were planted by hand, before this table was made.
    """

    name: str
    what: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    reported: bool = False

    def planted_in(self, text: str) -> str:
        """`text` of the file with the defect. Raises `PlantingFailed`."""
        found = text.count(self.before)
        if found != 1:
            raise PlantingFailed(
                f"the defect {self.name!r} replaces text that is {found} times in {self.file}; "
                f"bring it up to date in {TABLE.relative_to(ROOT)}: {self.before.strip()!r}."
            )
        return text.replace(self.before, self.after)


class Verdict(Enum):
    """The verdict of the tests on a defect."""

    CAUGHT = "caught"
    LIVES = "lives"
    UNDECIDED = "undecided"  # the time was over


@dataclass(frozen=True)
class Run:
    """The end of the tests: pytest's exit status, None if the time was over; the first failure."""

    status: int | None
    failure: str
    seconds: float


def read_defects(path: Path = TABLE) -> list[Defect]:
    """The table. Tests that a defect does not name are those of its room."""
    content: dict[str, Any] = tomllib.loads(path.read_text())
    rooms: dict[str, list[str]] = content["tests"]
    return [
        Defect(**{**row, "tests": tuple(row.get("tests") or rooms[_room(row["file"])])})
        for row in content["defect"]
    ]


def _room(file: str) -> str:
    """The folder right below the package, or below `extensions/`, that a file is in."""
    parts = file.split("/")
    return "/".join(parts[:2]) if parts[0] == "extensions" else parts[0]


@contextmanager
def checkout() -> Iterator[Path]:
    """A copy of the checkout without what git and tools keep in it. What tests read beside the
    checkout, the traces, is beside the copy.
    """
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder) / "checkout"
        hidden = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=hidden)
        (Path(folder) / BESIDE).symlink_to(ROOT.parent / BESIDE)
        yield copy


def run_tests(copy: Path, tests: Sequence[str], seconds: float) -> Run:
    """Run `tests` of a copy until the first one fails. Raises `PlantingFailed` if pytest cannot."""
    left_out = [f"--ignore={path}" for path in LEFT_OUT]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", QUICK, "-p", "no:cacheprovider"]
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [*command, "--hypothesis-seed=0", *left_out, *tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "OMP_WAIT_POLICY": "PASSIVE"},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return Run(None, "", seconds)
    if done.returncode not in (PASSED, FAILED, INTERRUPTED):
        raise PlantingFailed(f"pytest cannot run {' '.join(tests)}: {done.stdout[-1_000:]}")
    lines = done.stdout.splitlines()
    words = (line.partition(" ") for line in lines)
    found = (rest.split(" - ")[0] for word, _, rest in words if word in ("FAILED", "ERROR"))
    return Run(done.returncode, next(found, ""), time.monotonic() - begin)


def judge(copy: Path, defect: Defect, tests: Sequence[str], seconds: float) -> tuple[Verdict, Run]:
    """Plant `defect` in a copy, run `tests`, and take it out again. Raises `PlantingFailed` if the
    test that fails does so without the defect, too.
    """
    path = copy / PACKAGE / defect.file
    text = path.read_text()
    path.write_text(defect.planted_in(text))
    try:
        run = run_tests(copy, tests, seconds)
    finally:
        path.write_text(text)
    if run.status is None:
        return Verdict.UNDECIDED, run
    if run.status == PASSED:
        return Verdict.LIVES, run
    if run_tests(copy, [run.failure], seconds).status != PASSED:
        raise PlantingFailed(f"{run.failure} fails without the defect {defect.name!r}, too.")
    return Verdict.CAUGHT, run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="of defects; all without them")
    parser.add_argument("--wide", action="store_true", help="run all quick tests for each")
    parser.add_argument("--seconds", type=float, default=900.0, help="for one run of the tests")
    flags = parser.parse_args(arguments)
    try:
        return _plant_all(_named(read_defects(), flags.names), flags.wide, flags.seconds)
    except PlantingFailed as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def _named(defects: list[Defect], names: Sequence[str]) -> list[Defect]:
    unknown = {*names} - {defect.name for defect in defects}
    if unknown:
        raise PlantingFailed(f"no defect of the table is called {min(unknown)!r}.")
    return [defect for defect in defects if not names or defect.name in names]


def _plant_all(defects: list[Defect], wide: bool, seconds: float) -> int:
    verdicts: dict[Defect, Verdict] = {}
    with checkout() as copy:
        for defect in defects:
            defect.planted_in((copy / PACKAGE / defect.file).read_text())
        print("| defect | what it is | verdict | seconds | first failure |")
        print("|---|---|---|---:|---|")
        for defect in defects:
            tests = ("tests",) if wide else defect.tests
            verdict, run = judge(copy, defect, tests, seconds)
            verdicts[defect] = verdict
            cells = (defect.name, f"`{defect.file}`: {defect.what}", verdict.value)
            print(f"| {' | '.join(cells)} | {run.seconds:.0f} | {run.failure} |", flush=True)
    print()
    for what, some in (
        ("of the reported ones", [defect for defect in defects if defect.reported]),
        ("of the others", [defect for defect in defects if not defect.reported]),
    ):
        caught = sum(verdicts[defect] is Verdict.CAUGHT for defect in some)
        if some:
            print(f"{caught} of {len(some)} caught {what}")
    return int(any(verdict is not Verdict.CAUGHT for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
