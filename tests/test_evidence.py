"""Tests that a run of the slow tests leaves out, and the table that it ends with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.evidence import (
    LIST,
    Evidence,
    LeftOut,
    Result,
    property_of,
    read_left_out,
    read_record,
    stale,
)

ROOT = Path(__file__).parents[1]
ROWS = [LeftOut("test_a.py", "They take long.", but=("lru",)), LeftOut("test_b.py", "Longer.")]
TESTS = {
    "test_a.py": '''"""A thing | holds: always. Not said."""
import pytest
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "marconi", "reuse"])
def test_it(policy, record_property):
    record_property("seed", 7)
    assert policy != "reuse"
@pytest.mark.slow
def test_lru_skipped():
    pytest.skip("no GPU")
''',
    "test_b.py": "import pytest\n@pytest.mark.slow\ndef test_b(): pass\n",
}


def test_only_named_tests_of_a_file_run() -> None:
    cases = ["test_a.py::test_it[lru]", "test_a.py::test_it[marconi]", "test_a.py::test_alone"]
    nodes = [*cases, "test_b.py::test_b"]
    out = [node for node in nodes if any(row.has(node) for row in ROWS)]
    assert out == [cases[1], "test_b.py::test_b"]


def test_a_row_that_fits_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").touch()
    assert stale(ROWS, ["test_a.py::test_it[marconi]"], tmp_path) == ["test_a.py: lru", "test_b.py"]
    assert stale(ROWS[:1], ["test_other.py::test_it[x]"], tmp_path) == []


def test_the_list_names_files_and_gives_reasons() -> None:
    rows = read_left_out(ROOT / LIST)
    assert stale(rows, [], ROOT) == []
    assert all(len(row.reason.split()) > 3 and row.reason.endswith(".") for row in rows)
    assert len({row.file for row in rows}) == len(rows)


def test_a_property_is_the_first_sentence(tmp_path: Path) -> None:
    file = tmp_path / "test_a.py"
    file.write_text(TESTS["test_a.py"])
    assert property_of(file) == "A thing / holds: always"


def test_a_run_goes_on_where_one_was_ended_while_it_wrote(tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    steps = [
        Result(node, when, "passed", 1.0)
        for node in ("test_a.py::test_a", "test_b.py::test_b")
        for when in ("setup", "call", "teardown")
    ]
    lines = [msgspec.json.encode(step) + b"\n" for step in steps]
    whole, torn = b"".join(lines[:5]), lines[5][:20]
    file.write_bytes(whole + torn)
    assert read_record(file) == steps[:3]
    assert Evidence(file, writes=False).done == {steps[0].node}
    assert file.read_bytes() == whole + torn, "another process may be writing it"
    assert Evidence(file, writes=True).done == {steps[0].node}
    assert file.read_bytes() == whole
    file.write_bytes(whole + torn + lines[0])
    with pytest.raises(msgspec.DecodeError):
        read_record(file)


def test_the_table(tmp_path: Path) -> None:
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    (tmp_path / LIST).parent.mkdir()
    (tmp_path / LIST).write_text(
        '[[left_out]]\nfile = "test_a.py"\nbut = ["lru", "reuse", "gone"]\nreason = "Long."\n'
    )

    def run(processes: str) -> str:
        plugin = ["-p", "tests.evidence", "--evidence", "page.md", "--record", "record.jsonl"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", processes, "-m", "slow", *plugin],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stdout

    said = run("-n2")
    first, second, total = (tmp_path / "page.md").read_text().splitlines()[-3:]
    assert first.startswith("| A thing / holds: always | `test_a.py` | 1 | 1 | 1 | 1 | 7 |")
    assert second.startswith("|  | `test_b.py` | 1 | 0 | 0 | 0 |  |")
    assert total.startswith("| all |  | 2 | 1 | 1 | 1 |  |")
    assert first in said
    assert f"{LIST} names what is not there: test_a.py: gone\n" in said
    assert "1 failed" in run("-n0")  # what has passed, or was skipped, does not run again
    again = (tmp_path / "page.md").read_text().splitlines()[-1]
    assert again.rpartition(" | ")[0] == total.rpartition(" | ")[0]
