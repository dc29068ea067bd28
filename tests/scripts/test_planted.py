"""The table of defects to plant fits the package, and a defect that is planted is noticed."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import planted
from scripts.planted import PACKAGE, ROOT, Defect, PlantingFailed, Verdict

DEFECTS = planted.read_defects()
FILE = "def half(n):\n    return n // 2\n"
TESTS = "from sglang_hybrid.room.file import half\n\ndef test_half():\n    assert half(5) == 2\n"


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_every_defect_can_be_planted(defect: Defect) -> None:
    text = (ROOT / PACKAGE / defect.file).read_text()
    changed = defect.planted_in(text)
    assert changed != text
    if defect.file.endswith(".py"):  # else it is a patch
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    assert all((ROOT / path).exists() for path in defect.tests)


def test_names_are_unique() -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS)


@pytest.mark.parametrize("before", ["k // 2", "n"])
def test_a_defect_whose_text_is_not_there_once_is_refused(before: str) -> None:
    defect = Defect("halves", "", "room/file.py", before, "", ())
    with pytest.raises(PlantingFailed, match=r"'halves' replaces text that is \d times in room/"):
        defect.planted_in(FILE)


def checkout(folder: Path) -> Path:
    """A checkout with one file and one test of it."""
    for path, text in (
        (f"{PACKAGE}/__init__.py", ""),
        (f"{PACKAGE}/room/__init__.py", ""),
        (f"{PACKAGE}/room/file.py", FILE),
        ("tests/test_half.py", TESTS),
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


@pytest.mark.slow
def test_what_a_test_notices_is_caught_and_the_rest_lives(tmp_path: Path) -> None:
    copy = checkout(tmp_path)
    defect = Defect("rounds up", "", "room/file.py", "n // 2", "-(-n // 2)", ())
    verdict, run = planted.judge(copy, defect, ["tests"], 60)
    assert (verdict, run.failure) == (Verdict.CAUGHT, "tests/test_half.py::test_half")
    verdict, _ = planted.judge(copy, replace(defect, after="int(n / 2)"), ["tests"], 60)
    assert verdict is Verdict.LIVES
    endless = replace(defect, before="return n // 2", after="while True: pass")
    verdict, _ = planted.judge(copy, endless, ["tests"], 5)
    assert verdict is Verdict.UNDECIDED
    assert (copy / PACKAGE / "room/file.py").read_text() == FILE


def test_a_copy_has_the_package_and_what_lies_beside_it() -> None:
    with planted.checkout() as copy:
        for path in (PACKAGE, "tests", f"{PACKAGE}/kernels/attention.py"):
            assert (copy / path).exists()
        assert not (copy / ".git").exists()
        assert (copy.parent / "shared").exists() == (ROOT.parent / "shared").exists()


@pytest.mark.slow
def test_what_fails_anyway_is_no_catch(tmp_path: Path) -> None:
    copy = checkout(tmp_path)
    (copy / "tests/test_half.py").write_text(TESTS.replace("== 2", "== 3"))
    defect = Defect("rounds up", "", "room/file.py", "n // 2", "n / 2", ())
    with pytest.raises(PlantingFailed, match=r"test_half.py::test_half fails without the defect"):
        planted.judge(copy, defect, ["tests"], 60)
    with pytest.raises(PlantingFailed, match="pytest cannot run tests/nowhere"):
        planted.run_tests(copy, ["tests/nowhere"], 60)


def test_an_unknown_name_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert planted.main(["nonsense"]) == 2
    assert "no defect of the table is called 'nonsense'" in capsys.readouterr().err
