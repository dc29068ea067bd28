"""`scripts/port.py` on a made-up package: what applies, what fails, what has another signature."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from scripts.port import (
    Release,
    check_hooks,
    check_patches,
    compare,
    hashes,
    hook_hashes,
    imports,
    installed,
    main,
    overrides,
    place_of,
)
from sglang_hybrid import SGLANG_VERSION
from sglang_hybrid.hooks.patching import load_patches
from sglang_hybrid.hooks.sources import load_hashes, parse_hashes
from sglang_hybrid.hooks.table import HOOKS
from tests.documented import ROOT

OLD = (
    "import os\n\n\ndef first(a, b):\n    return a\n\n\ndef second(a: int) -> int:\n    return a\n"
)
PATCH = """What and why.
diff --git a/sglang/one.py b/sglang/one.py
--- a/sglang/one.py
+++ b/sglang/one.py
@@ -4,2 +4,2 @@
 def first(a, b):
-    return a
+    return b
@@ -8,2 +8,3 @@
 def second(a: int) -> int:
+    a += 1
     return a
"""


def release(folder: Path, one: str, two: str = "") -> Release:
    (folder / "sglang").mkdir(parents=True)
    (folder / "sglang" / "__init__.py").write_text("")
    (folder / "sglang" / "one.py").write_text(one)
    (folder / "sglang" / "two.py").write_text(two)
    return Release(folder)


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    folder = tmp_path / "patches"
    folder.mkdir()
    (folder / "0001-both.patch").write_text(PATCH)
    return folder


def test_a_patch_applies_to_what_it_was_cut_from(tmp_path: Path, patches: Path) -> None:
    assert check_patches(patches, release(tmp_path / "old", OLD)) == (
        ["0001-both.patch: applies"],
        0,
    )


def test_lines_may_have_moved(tmp_path: Path, patches: Path) -> None:
    report, failed = check_patches(patches, release(tmp_path / "new", "import re\n" + OLD))
    assert (report, failed) == (["0001-both.patch: applies, 2 hunks at other lines"], 0)


def test_the_nearest_of_two_places_counts() -> None:
    lines = ["a", "b", "c", "a", "b"]
    found = [place_of(["a", "b"], lines, near) for near in (0, 1, 2, 3, 9)]
    assert found == [0, 0, 3, 3, 3]
    assert place_of(["b", "a"], lines, 0) is None
    assert place_of(["a"] * 6, lines, 0) is None


def test_a_hunk_that_fails_is_shown_beside_what_is_there(tmp_path: Path, patches: Path) -> None:
    new = release(tmp_path / "new", OLD.replace("second(a: int)", "second(a: float)"))
    report, failed = check_patches(patches, new)
    assert failed == 1
    assert report[:2] == [
        "0001-both.patch: FAILS",
        "  sglang/one.py, hunk 2 of 2: expected from line 8; nearest is line 8",
    ]
    expected, found = report[2].split(" | ")
    assert expected.strip() == "def second(a: int) -> int:"
    assert found == "def second(a: float) -> int:"
    assert [part.strip() for part in report[3].strip().split("  ") if part] == ["return a"] * 2


def test_a_file_that_is_gone_fails(tmp_path: Path, patches: Path) -> None:
    wheel = tmp_path / "sglang.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("sglang/two.py", "")
    report, failed = check_patches(patches, Release(wheel))
    assert (report[1:], failed) == (["  sglang/one.py is not there"], 1)


def test_hooked_functions_that_are_gone_or_changed_fail(tmp_path: Path) -> None:
    old = release(tmp_path / "old", OLD)
    targets = [f"sglang.one:{name}" for name in ("second", "first")]
    lines = list(hook_hashes(targets, old))
    known = parse_hashes("\n".join(lines))
    assert list(known) == [*sorted(targets), "sglang/one.py"]
    moved = release(tmp_path / "moved", "import re\n" + OLD)
    assert check_hooks(targets, known, moved) == ([f"{one}: holds" for one in sorted(targets)], 0)
    new = release(tmp_path / "new", OLD.replace("return a", "return b", 1))
    assert check_hooks([*targets, "sglang.one:third"], known, new) == (
        [
            "sglang.one:first: FAILS, it has another source",
            "sglang.one:second: holds",
            "sglang.one:third: FAILS, it is not there",
        ],
        2,
    )


def test_the_hashes_of_hooks_are_those_that_the_script_makes() -> None:
    found = hook_hashes([hook.target for hook in HOOKS], installed())
    assert parse_hashes("\n".join(found)) == load_hashes()


def test_signatures_are_compared_through_bases_and_imports(tmp_path: Path) -> None:
    base = "class Base:\n    def evict(self, node{}): ...\n\ndef scan(x: int{}): ...\n"
    leaf = "from sglang.one import Base, scan\n\nclass Leaf(Base):\n    pass\n"
    old = release(tmp_path / "old", base.format("", ""), leaf)
    new = release(tmp_path / "new", base.format(", actions", " = 1"), leaf)
    package = tmp_path / "ours"
    package.mkdir()
    (package / "cache.py").write_text(
        "from sglang.two import Leaf\n\nclass Mine(Leaf):\n    def own(self): ...\n\n"
        "class Further(Mine):\n    def evict(self, node): ...\n"
    )
    ours = overrides(package)
    assert ours == {("sglang.two", "Leaf.own"), ("sglang.two", "Leaf.evict")}
    ours.add(("sglang.two", "scan"))
    assert list(compare(ours, old, new)) == [
        "sglang.two: Leaf.evict",
        "    was (self, node)",
        "    is  (self, node, actions)",
        "sglang.two: scan",
        "    was (x)",
        "    is  (x=1)",
    ]
    assert list(compare(ours, old, old)) == []


def test_names_that_are_gone(tmp_path: Path) -> None:
    new = release(tmp_path / "new", "if True:\n    first = 1\n")
    assert new.has("sglang.one", "first") and new.has("sglang", "one")
    assert not new.has("sglang.one", "second") and not new.has("sglang.three", "first")


def test_the_installed_release_is_the_one_that_the_package_was_made_for() -> None:
    release = installed()
    report, failed = check_patches(ROOT / "patches" / f"sglang-{SGLANG_VERSION}", release)
    assert not failed and all(line.endswith(": applies") for line in report)
    lines = list(hashes(ROOT / "patches" / f"sglang-{SGLANG_VERSION}", release))
    assert lines == [
        f"SHA256 ({path}) = {patch.sha256}" for path, patch in sorted(load_patches().items())
    ]
    known = imports(ROOT / "sglang_hybrid")
    assert len(known) > 50 and all(release.has(*name) for name in known)


def wheel(path: Path, text: str) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("sglang/srt/managers/scheduler.py", text)  # it has hooked functions
    return path


def test_what_is_no_release_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text.whl").write_text("no archive")
    torn = wheel(tmp_path / "torn.whl", "x = 1\n" * 10_000)
    torn.write_bytes(torn.read_bytes()[:60] + b"\0" * 20 + torn.read_bytes()[80:])
    places = {
        tmp_path / "pipe": "is a pipe",
        Path("/dev/zero"): "is a device",
        tmp_path / "text.whl": "is neither a wheel nor a folder",
        torn: "cannot be read",
        wheel(tmp_path / "bomb.whl", "#" * (65 << 20)): "it is too large to be read",
        wheel(tmp_path / "other.whl", "def f(:"): "has a file that is not Python",
        Path("no such\x1b"): r"'no such\x1b' is neither a version",
    }
    for place, said in places.items():
        assert main([str(place), "--hook-hashes"]) == 1
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
