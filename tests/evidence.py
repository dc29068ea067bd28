"""A run of the slow tests that leaves out the listed ones, and ends with a table of what it showed.

`scripts/test_slow.sh` loads this plugin (`-p tests.evidence`). `left_out.toml` lists what a run of
an hour leaves out, with reasons; `--everything` runs that, too. `--evidence FILE` writes the table
as a page of docs/results. `--record FILE` notes each result there; a later run with it goes on
where that one was ended: what passed or was skipped does not run again, and is in the table.
"""

from __future__ import annotations

import ast
import os
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scripts.bench.report import commit, machine

LIST = Path("tests", "left_out.toml")
"""Below the repository's root."""
ABOUT = """# evidence: what the slow tests showed

`scripts/test_slow.sh --evidence docs/results/evidence.md` runs them, and writes this
page. A row is a file of tests; its property is the first sentence of that file. Left out: not run
within the hour, for the reasons of `tests/left_out.toml`. Skipped: what the machine lacks. Two
processes share the tests, so the run took about half of the sum of the seconds.
"""


class LeftOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of slow tests of which only some run in the hour. file: below the repository's root;
    but: parts of names of cases that do run, as do tests without cases; none: nothing of it runs.
    reason: a sentence.
    """

    file: str
    reason: str
    but: tuple[str, ...] = ()

    def has(self, node: str) -> bool:
        """True if the test with this node id is left out."""
        file, _, name = node.partition("::")
        if file != self.file or (self.but and "[" not in name):
            return False
        return not any(part in name for part in self.but)


def read_left_out(path: Path) -> list[LeftOut]:
    rows: list[LeftOut] = msgspec.convert(
        tomllib.loads(path.read_text())["left_out"], list[LeftOut]
    )
    return rows


def stale(rows: Iterable[LeftOut], nodes: Sequence[str], root: Path) -> list[str]:
    """What fits no test: files that are gone, and parts of names that no collected test of their
    file has. nodes: ids of collected tests.
    """
    lost = []
    for row in rows:
        names = [node.partition("::")[2] for node in nodes if node.startswith(f"{row.file}::")]
        lost += [] if (root / row.file).is_file() else [row.file]
        lost += [
            f"{row.file}: {part}"
            for part in row.but
            if not any(part in n for n in names or row.but)
        ]
    return lost


def property_of(file: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    about = ast.get_docstring(ast.parse(file.read_text())) or ""
    first = " ".join(about.split("\n\n")[0].split())
    return first.partition(". ")[0].rstrip(".").replace("|", "/")


EVIDENCE = pytest.StashKey["Evidence"]()


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step of a test that has run. node: its id; when: setup, call or teardown; outcome: passed,
    failed or skipped; seconds: of that step; seeds: of its random cases; commit: of the repository.
    """

    node: str
    when: str
    outcome: str
    seconds: float
    seeds: tuple[str, ...] = ()
    commit: str = ""

    @property
    def counts(self) -> bool:
        """True if its outcome is one of the test."""
        return self.when == "call" or self.outcome != "passed"


def whole_lines(file: Path) -> bytes:
    """The content of `file`, if it is there, but for a last line that does not end: its run was
    ended while it wrote.
    """
    content = file.read_bytes() if file.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def read_record(file: Path) -> list[Result]:
    """The results of the tests in `file`, if it is there, that need not run again: none of their
    steps failed, and the last one has run.
    """
    steps = defaultdict(list)
    for one in msgspec.json.Decoder(Result).decode_lines(whole_lines(file)):
        steps[one.node].append(one)
        if one.when == "setup":  # of another run
            steps[one.node][:-1] = []
    whole = (
        each
        for each in steps.values()
        if each[-1].when == "teardown" and all(one.outcome != "failed" for one in each)
    )
    return [one for each in whole for one in each]


@dataclass
class _Row:
    outcomes: Counter[str] = field(default_factory=Counter)
    seeds: set[str] = field(default_factory=set)
    seconds: float = 0.0


class Evidence:
    """Counts what the tests of each file showed, in the process that prints the results."""

    def __init__(self, record: Path | None, *, writes: bool) -> None:
        self._rows: dict[str, _Row] = {}
        self._left_out: Counter[str] = Counter()
        self.stale: set[str] = set()
        self.commits: Counter[str] = Counter()
        self._record = record if writes else None
        self._commit = commit()
        before = [] if record is None else read_record(record)
        if self._record is not None and self._record.exists():
            os.truncate(self._record, len(whole_lines(self._record)))
        self.done = {result.node for result in before}
        for result in before:
            self._count(result)

    def leave_out(self, files: Mapping[str, int], lost: Iterable[str]) -> None:
        """So many tests of each file do not run, and the list names what is not there. Each process
        that runs tests says so.
        """
        self._left_out |= Counter(files)
        self.stale.update(lost)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = Result(
            *(report.nodeid, str(report.when), report.outcome, report.duration),
            tuple(str(value) for name, value in report.user_properties if name == "seed"),
            self._commit,
        )
        self._count(result)
        if self._record is not None:
            with self._record.open("ab") as file:
                file.write(msgspec.json.encode(result) + b"\n")

    def _count(self, result: Result) -> None:
        row = self._rows.setdefault(_file(result.node), _Row())
        row.seconds += result.seconds
        row.seeds.update(result.seeds)
        if result.counts:
            row.outcomes[result.outcome] += 1
            self.commits[result.commit] += 1

    def table(self, root: Path) -> list[str]:
        """Lines of Markdown, one file each and their sum."""
        lines = ["| property | file | passed | failed | skipped | left out | seeds | seconds |"]
        lines.append("|---|---|---:|---:|---:|---:|---|---:|")
        total = _Row()
        for file in sorted({*self._rows, *self._left_out}):
            row = self._rows.get(file, _Row())
            total.outcomes += row.outcomes
            total.seconds += row.seconds
            about = property_of(root / file)
            lines.append(
                _line(about, f"`{file.removeprefix('tests/')}`", row, self._left_out[file])
            )
        lines.append(_line("all", "", total, self._left_out.total()))
        return lines


def _file(node: str) -> str:
    return node.partition("::")[0]


def _line(about: str, file: str, row: _Row, left_out: int) -> str:
    counts = (row.outcomes[each] for each in ("passed", "failed", "skipped"))
    cells = [about, file, *counts, left_out, ", ".join(sorted(row.seeds)), f"{row.seconds:,.0f}"]
    return f"| {' | '.join(map(str, cells))} |"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("evidence")
    group.addoption("--everything", action="store_true", help="run what left_out.toml leaves out")
    group.addoption("--evidence", type=Path, metavar="FILE", help="write the table as a page")
    group.addoption("--record", type=Path, metavar="FILE", help="go on where this record ends")


def pytest_configure(config: pytest.Config) -> None:
    record = config.getoption("record")
    is_worker = hasattr(config, "workerinput")
    config.stash[EVIDENCE] = evidence = Evidence(record, writes=not is_worker)
    config.pluginmanager.register(evidence)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    evidence = config.stash[EVIDENCE]
    _deselect(config, items, {item for item in items if item.nodeid in evidence.done})
    if config.getoption("everything"):
        return
    rows = read_left_out(config.rootpath / LIST)
    nodes = [*(item.nodeid for item in items), *evidence.done]
    out = {item for item in items if any(row.has(item.nodeid) for row in rows)}
    slow = Counter(_file(item.nodeid) for item in out if item.get_closest_marker("slow"))
    lost = stale(rows, nodes, config.rootpath)
    evidence.leave_out(slow, lost)
    if (sent := getattr(config, "workeroutput", None)) is not None:
        sent["left_out"] = (dict(slow), lost)
    _deselect(config, items, out)


def _deselect(config: pytest.Config, items: list[pytest.Item], out: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=list(out))
    items[:] = [item for item in items if item not in out]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """xdist: a process that ran tests has ended."""
    sent = getattr(node, "workeroutput", {}).get("left_out", ({}, []))
    node.config.stash[EVIDENCE].leave_out(*sent)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A list that names what is not there is a failure."""
    if session.config.stash[EVIDENCE].stale and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    lines = config.stash[EVIDENCE].table(config.rootpath)
    terminalreporter.section("evidence")
    terminalreporter.write_line("\n".join(lines))
    for lost in sorted(config.stash[EVIDENCE].stale):
        terminalreporter.write_line(f"{LIST} names what is not there: {lost}", red=True)
    if (page := config.getoption("evidence")) is not None:
        commits = config.stash[EVIDENCE].commits
        of_each = [f"{name} ({count:,} tests)" for name, count in commits.items()]
        stamp = f"Machine: {machine()}. Date: {date.today()}. Commit: {', '.join(of_each)}."
        if (seed := config.getoption("hypothesis_seed", None)) is not None:
            stamp += f" Seed of hypothesis: {seed}."
        page.write_text("\n".join([ABOUT, stamp, "", *lines, ""]))
