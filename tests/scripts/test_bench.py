"""`scripts/bench.py`: what it prints above a table, and how it replaces the tables of a page."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.bench import docs, report
from scripts.bench.docs import regenerate, sections
from scripts.bench.report import BenchFailed, Table, stamp
from scripts.bench.traces import find, preset_of
from tests.documented import ROOT

PAGE = """Words.

<!-- bench one: cache --repeats 5 -->

| a | b |
|---|---:|
| old | 1 |

<!-- end one -->

More words.

<!-- bench two (long): ab TRACE --sglang '--x 2' -->

| c |
|---|

<!-- end two -->
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def printed(arguments: Sequence[str]) -> str:
    return f"\n\nMade by {' '.join(arguments)}\n"


def test_a_section_has_a_name_a_command_and_its_table() -> None:
    one, two = sections(PAGE)
    assert (one.name, one.long, one.arguments) == ("one", False, ("cache", "--repeats", "5"))
    assert (two.name, two.long, two.arguments[-1]) == ("two", True, "--x 2")
    assert "| old | 1 |" in one.body


def test_what_takes_long_runs_only_where_it_is_named(page: Path) -> None:
    assert list(regenerate(page, [], printed)) == ["one"]
    old = "| a | b |\n|---|---:|\n| old | 1 |"
    assert page.read_text() == PAGE.replace(old, "Made by cache --repeats 5")
    assert list(regenerate(page, ["two"], printed)) == ["two"]
    assert "Made by ab TRACE --sglang --x 2\n\n<!-- end two -->\n" in page.read_text()
    assert page.read_text().startswith("Words.\n") and "\nMore words.\n" in page.read_text()


def test_a_table_can_be_made_again_and_again(page: Path) -> None:
    list(regenerate(page, [], printed))
    once = page.read_text()
    list(regenerate(page, [], printed))
    assert page.read_text() == once


def test_a_command_that_fails_leaves_its_table(page: Path) -> None:
    def fail(arguments: Sequence[str]) -> str:
        raise BenchFailed("no memory")

    with pytest.raises(BenchFailed, match="no memory"):
        list(regenerate(page, [], fail))
    assert page.read_text() == PAGE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PAGE.replace("<!-- end one -->", ""), "end NAME -->` is found for: one"),
        (PAGE.replace("bench two", "bench one").replace("end two", "end one"), "has the name: one"),
    ],
)
def test_a_page_with_wrong_comments_is_refused(text: str, said: str) -> None:
    with pytest.raises(BenchFailed, match=said):
        sections(text)


def test_an_unknown_name_is_refused_with_those_there_are(page: Path) -> None:
    with pytest.raises(BenchFailed, match="no table is named three; there are one, two"):
        list(regenerate(page, ["three"], printed))


def test_every_table_of_the_page_is_made_by_a_command_or_says_why_not() -> None:
    text = (ROOT / report.MADE).read_text()
    rest = text
    for section in sections(text):
        rest = rest.replace(section.body, "")
    rest = re.sub(r"<!-- by hand: .+ -->\n\n(\|.*\n)+", "", rest)
    assert re.findall(r"^\|.*", rest, re.MULTILINE) == []


@pytest.mark.slow
def test_the_commands_of_the_page_are_accepted() -> None:
    program = (
        "import runpy, sys\n"
        "from scripts.bench.docs import sections\n"
        "from scripts.bench.report import MADE, ROOT\n"
        "bench = runpy.run_path(str(ROOT / 'scripts' / 'bench.py'))\n"
        "for section in sections((ROOT / MADE).read_text()):\n"
        "    options = bench['build_parser'](section.arguments[0]).parse_args(section.arguments)\n"
        "    print(options.command)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    commands = {section.arguments[0] for section in sections((ROOT / report.MADE).read_text())}
    assert set(done.stdout.split()) == commands


def test_a_command_that_is_run_prints_machine_date_commit_and_command(tmp_path: Path) -> None:
    command = ["scripts/bench.py", "victim", "--sizes", "20", "--rounds", "5"]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    above, _, table = done.stdout.partition("\n\n")
    assert re.match(r"Machine: .+, \d+ cores, \d+ GiB\. Date: \d{4}-\d\d-\d\d\. Commit: ", above)
    assert above.endswith("Command: `python scripts/bench.py victim --sizes 20 --rounds 5`.")
    assert "| policy | candidates | victim P50 |" in table
    assert str(ROOT) not in done.stdout


def test_the_commit_is_named_with_its_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"rev-parse": "0123456789", "status": " M core/returns/reuse.py"}
    monkeypatch.setattr(report, "_git", lambda verb, *rest: said[verb])
    assert "Commit: 0123456789, with changes." in stamp(["rounds"])
    said["status"] = ""
    assert "Commit: 0123456789.\n" in stamp(["rounds"])


def test_a_table_prints_rows_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("policy", "rule", "hit", text=2)
    table.row("lru", "paper", 1.5)
    assert (
        capsys.readouterr().out
        == "| policy | rule | hit |\n|---|---|---:|\n| lru | paper | 1.5 |\n"
    )
    with pytest.raises(ValueError, match="2 cells in a table of 3 columns"):
        table.row("lru", 1)


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "some_trace.jsonl.gz").touch()
    assert find("some_trace", tmp_path) == tmp_path / "some_trace.jsonl.gz"
    assert preset_of({"some": 1}, find("some_trace", tmp_path)) == 1
    with pytest.raises(BenchFailed, match=r"no preset is for some_trace.*; there are other"):
        preset_of({"other": 1}, find("some_trace", tmp_path))
    with pytest.raises(BenchFailed, match="absent is neither a file nor one of the traces in "):
        find("absent", tmp_path)


def test_a_failing_command_of_a_table_is_an_error() -> None:
    with pytest.raises(BenchFailed, match="`victim --sizes x` ended with status 2"):
        docs.execute(["victim", "--sizes", "x"])
