"""`scripts/bench.py`: what it prints above a table, and how it makes the pages of docs/results."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from scripts.bench import policies, report, traces
from scripts.bench.figure import MEMORIES, Pair, draw, read_pairs, read_rates
from scripts.bench.report import RESULTS, BenchFailed, Table, stamp
from scripts.bench.results import (
    CONTENTS,
    Page,
    chosen,
    contents,
    execute,
    make_again,
    pages,
    read_page,
    write_table,
)
from scripts.bench.traces import find, preset_of
from sglang_hybrid.extensions.lab.simulation.system_names import ORACLES
from tests.documented import ROOT

ONE = """# one: the cost of one

Words of 2026-01-01.

<!-- bench one: rounds --repeat 5 -->

Date: 2026-11-22.

| a | b |
|---|---:|
| old | 1 |

<!-- end one -->

More words.
"""
TWO = """# two: servers in turn

<!-- bench two (long): ab TRACE --sglang '--x 2' -->
<!-- end two -->
"""
QUICK = ["rounds", "--waiting", "2", "--tokens", "64", "--repeat", "1"]
HAND = "# three: by hand\n\n<!-- by hand: of two runs -->\n\n| c |\n|---|\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"one": ONE, "two": TWO, "three": HAND}.items():
        (tmp_path / f"{name}.md").write_text(text)
    return tmp_path


def test_a_page_has_a_title_a_date_and_a_command(folder: Path) -> None:
    one, three, two = pages(folder)
    repeats = ("rounds", "--repeat", "5")
    assert one == Page("one", "the cost of one", "2026-11-22", False, repeats)
    assert (two.long, two.arguments[-1]) == (True, "--x 2")
    assert (three.title, three.arguments) == ("by hand", ())


def test_what_takes_long_runs_only_where_it_is_named(folder: Path) -> None:
    found, ran = pages(folder), list[Page]()
    make_again(found, [], ran.append)
    assert [page.name for page in ran] == ["one"]
    make_again(found, ["two"], ran.append)
    assert [page.name for page in ran] == ["one", "two"]


def test_a_table_is_replaced_and_the_words_around_it_stay(folder: Path) -> None:
    for _ in range(2):
        write_table("one", ["rounds", "--repeat", "9"], "\n\nMade on 2026-11-24.\n\n", folder)
        old = ONE[ONE.index("<!-- bench") : ONE.index("<!-- end")]
        new = "<!-- bench one: rounds --repeat 9 -->\n\nMade on 2026-11-24.\n\n"
        assert (folder / "one.md").read_text() == ONE.replace(old, new)
    assert read_page(folder / "one.md").date == "2026-11-24"
    write_table("two", ["ab", "TRACE"], "Made.", folder)
    assert "<!-- bench two (long): ab TRACE -->\n\nMade." in (folder / "two.md").read_text()


def test_a_page_that_is_not_there_is_made(folder: Path) -> None:
    write_table("four", ["rounds", "--waiting", "20"], "Made on 2026-11-24.", folder)
    text = (folder / "four.md").read_text()
    assert text.startswith("# four: ")
    assert read_page(folder / "four.md").arguments == ("rounds", "--waiting", "20")
    assert "| [four](four.md) |" in (folder / CONTENTS).read_text()


def test_a_table_that_is_made_by_hand_is_not_overwritten(folder: Path) -> None:
    with pytest.raises(BenchFailed, match=r"no command makes the table of three\.md"):
        write_table("three", ["rounds"], "Made.", folder)
    assert (folder / "three.md").read_text() == HAND


@pytest.mark.parametrize(
    "text",
    [
        ONE.replace("<!-- end one -->", ""),
        ONE.replace("bench one", "bench other").replace("end one", "end other"),
        ONE + "<!-- bench one: rounds -->\n<!-- end one -->\n",
    ],
)
def test_a_page_with_wrong_comments_is_refused(folder: Path, text: str) -> None:
    (folder / "one.md").write_text(text)
    with pytest.raises(BenchFailed, match=r"one\.md needs one table, between `<!-- bench one"):
        pages(folder)


def test_an_unknown_name_is_refused_with_those_there_are(folder: Path) -> None:
    with pytest.raises(BenchFailed, match="no command makes four; there are one, two"):
        chosen(pages(folder), ["four"])


def test_every_table_of_results_is_made_by_a_command_or_says_why_not() -> None:
    for path in RESULTS.glob("*.md"):
        made = re.sub(r"<!-- bench .*?<!-- end [\w-]+ -->", "", path.read_text(), flags=re.DOTALL)
        rest = re.sub(r"<!-- by hand: .+ -->\n\n(\|.*\n)+", "", made)
        assert path.name == CONTENTS or re.findall(r"^\|.*", rest, re.MULTILINE) == [], path


def test_results_have_a_date_and_are_listed() -> None:
    found = pages()
    assert [page.name for page in found if not page.date] == []
    assert (RESULTS / CONTENTS).read_text() == contents(found)


def test_the_page_of_conclusions_names_results_that_are_there() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    named = set(re.findall(r"\(results/([\w-]+)\.md\)", text))
    assert named == {"README"} | {page.name for page in pages()}
    assert len(text.splitlines()) <= 250


@pytest.mark.slow
def test_the_commands_of_results_are_accepted() -> None:
    program = (
        "import runpy\n"
        "from scripts.bench.report import ROOT\n"
        "from scripts.bench.results import pages\n"
        "bench = runpy.run_path(str(ROOT / 'scripts' / 'bench.py'))\n"
        "for page in pages():\n"
        "    if page.arguments:\n"
        "        parser = bench['build_parser'](page.arguments[0])\n"
        "        print(parser.parse_args(['--write', page.name, *page.arguments]).command)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    commands = {page.arguments[0] for page in pages() if page.arguments}
    assert set(done.stdout.split()) == commands


def test_the_figure_shows_the_numbers_of_its_page(tmp_path: Path) -> None:
    pairs = read_pairs((RESULTS / "ab.md").read_text())
    assert pairs[0] == Pair("bbh_fewshot", sglang=43.1, ours=74.4, tokens=0.45, time=0.71)
    assert [pair.time for pair in pairs] == sorted(pair.time for pair in pairs)
    memories = read_rates((RESULTS / "one-memory.md").read_text(), list(MEMORIES), -1)
    draw(pairs, memories, tmp_path / "worth.svg")
    shown = (ROOT / "docs" / "worth.svg").read_text()
    numbers = re.findall(r">([\d.]+)</text>", (tmp_path / "worth.svg").read_text())
    assert {"74.4", "0.71", "81.1", "72.6"} <= {*numbers}
    with pytest.raises(BenchFailed, match="no row 'three'"):
        read_rates("| one | 1% |", ["three"], 1)
    assert numbers == re.findall(r">([\d.]+)</text>", shown)


def test_a_page_without_its_sums_is_refused() -> None:
    text = (RESULTS / "ab.md").read_text().replace("| ours, default | all |", "| - |")
    with pytest.raises(BenchFailed, match="no sums of taubench_airline"):
        read_pairs(text)


@pytest.mark.slow
def test_a_command_that_is_run_prints_machine_date_commit_and_command(tmp_path: Path) -> None:
    command = ["scripts/bench.py", *QUICK]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    above, _, table = done.stdout.partition("\n\n")
    assert re.match(r"Machine: .+, \d+ cores, \d+ GiB\. Date: \d{4}-\d\d-\d\d\. Commit: ", above)
    assert above.endswith(f"Command: `python scripts/bench.py {' '.join(QUICK)}`.")
    assert "| cache | allocator | tokens | first |" in table
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


def test_a_run_is_written_into_its_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = runpy.run_path(str(ROOT / "scripts" / "bench.py"))
    written: list[tuple[str, list[str], str]] = []
    monkeypatch.setitem(
        bench["main"].__globals__, "write_table", lambda *found: written.append(found)
    )
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    monkeypatch.setattr("logging.disable", lambda level: None)
    command = QUICK
    assert bench["main"](["--write", "x", *command]) == 0
    assert written == [("x", command, capsys.readouterr().out)]
    assert f"Command: `python scripts/bench.py {' '.join(QUICK)}`." in written[0][2]


def test_a_failing_command_of_a_page_is_an_error() -> None:
    page = Page("nothing", "", "", False, ("results", "--sizes", "x"))
    with pytest.raises(BenchFailed, match="results --sizes x` ended with status 2"):
        execute(page)
    assert not (RESULTS / "nothing.md").exists()


def test_conversations_of_agents_are_measured_in_tokens_and_flops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A conversation of three turns that resumes all it has: later tokens are dearer."""
    turns = [
        {"t": 10 * n, "in": 6_400 * (n + 1), "out": 1, "hash_ids": list(range(100 * (n + 1)))}
        for n in range(3)
    ]
    folder = tmp_path / traces.AGENTS
    folder.mkdir()
    (folder / "trace_1.json").write_text(json.dumps({"block_size": 64, "requests": turns}))
    with tarfile.open(tmp_path / f"{traces.AGENTS}.tar.gz", "w:gz") as archive:
        archive.add(folder, traces.AGENTS)
    monkeypatch.setattr(traces, "AGENT_SIZES", (5,))
    monkeypatch.setattr(traces, "WORKFLOW_SIZES", (4,))
    monkeypatch.setattr(traces, "WORKFLOWS", 2)
    policies.policies(traces=tmp_path, agents=policies.HYBRIDS, workers=1)
    cells = [line.split("|") for line in capsys.readouterr().out.splitlines()]
    tables = [row for row in cells if row[1:] and row[1].strip() in policies.HYBRIDS]
    assert len(tables) == 12, "of conversations and of workflows, in tokens and in FLOPs"
    rows = [[float(cell) for cell in row[2:6]] for row in tables]
    in_tokens, in_flops = rows[:3], rows[3:6]
    below = [cells for cells in cells if [cell.strip() for cell in cells[1:2]] == ["5"]]
    hicache, lmcache, *ours = (float(cell) for cell in below[0][2:6])
    assert [hicache, *ours] == [pytest.approx(in_tokens[0][1])] * 3
    assert lmcache == pytest.approx(in_tokens[0][1], abs=1), "whole blocks"
    upper, who = tables[0][-3].split()
    assert float(upper) == pytest.approx(in_tokens[0][1]) and who in ORACLES
    assert [row[0] for row in in_tokens] == [5, 5, 5]
    for tokens, flops in zip(in_tokens, in_flops, strict=True):
        assert tokens[1] == pytest.approx(100 * 19_198 / 38_400, abs=0.2) and flops[1] < tokens[1]


def test_agents_without_their_trace_are_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match=r"agentx_dev.tar.gz is not in"):
        traces.read_agents(tmp_path)
