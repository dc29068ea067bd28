"""`scripts/port.py` on a made-up package: what applies, what fails, what has another signature."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from scripts.port import (
    Finding,
    Release,
    check_hooks,
    check_names,
    check_patches,
    hashes,
    hook_hashes,
    imports,
    installed,
    main,
    overrides,
)
from sglang_hybrid import SGLANG_VERSION
from sglang_hybrid.hooks.patching import load_patches
from sglang_hybrid.hooks.sources import load_hashes, parse_hashes
from sglang_hybrid.hooks.table import HOOKS
from tests.documented import ROOT
from tests.hooks.changed import copy_changed, read

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


def told(findings: Iterable[Finding]) -> list[str]:
    return [line for finding in findings for line in finding.lines()]


def test_a_patch_applies_to_what_it_was_cut_from(tmp_path: Path, patches: Path) -> None:
    found = check_patches(patches, release(tmp_path / "old", OLD))
    assert told(found) == [
        "same     0001-both.patch: sglang/one.py, hunk 1 of 2",
        "same     0001-both.patch: sglang/one.py, hunk 2 of 2",
    ]
    assert all(finding.is_found for finding in found)


def test_lines_may_have_moved(tmp_path: Path, patches: Path) -> None:
    found = check_patches(patches, release(tmp_path / "new", "import re\n" + OLD))
    assert told(found) == [
        "moved    0001-both.patch: sglang/one.py, hunk 1 of 2, to line 5",
        "moved    0001-both.patch: sglang/one.py, hunk 2 of 2, to line 9",
    ]
    assert all(finding.is_found for finding in found)


def test_a_hunk_that_fails_is_shown_beside_what_is_there(tmp_path: Path, patches: Path) -> None:
    new = release(tmp_path / "new", OLD.replace("second(a: int)", "second(a: float)"))
    first, second = check_patches(patches, new)
    assert first.word == "same" and not second.is_found
    where = "hunk 2 of 2; expected from line 8, nearest is line 8"
    assert told([second])[0] == f"changed  0001-both.patch: sglang/one.py, {where}"
    expected, found = second.detail[0].split(" | ")
    assert expected.strip() == "def second(a: int) -> int:"
    assert found == "def second(a: float) -> int:"
    assert [part.strip() for part in second.detail[1].strip().split("  ") if part] == [
        "return a"
    ] * 2


def test_a_file_that_is_gone_or_moved(tmp_path: Path, patches: Path) -> None:
    wheel = tmp_path / "sglang.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("sglang/two.py", "")
    (found,) = check_patches(patches, Release(wheel))
    assert told([found]) == ["gone     0001-both.patch: sglang/one.py"] and not found.is_found
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("sglang/deeper/one.py", "import re\n" + OLD)
    (found,) = check_patches(patches, Release(wheel))
    assert told([found]) == ["moved    0001-both.patch: sglang/one.py, to sglang/deeper/one.py"]
    assert not found.is_found


def test_hooked_functions_that_are_gone_moved_or_changed(tmp_path: Path) -> None:
    old = release(tmp_path / "old", OLD)
    targets = [f"sglang.one:{name}" for name in ("second", "first")]
    known = parse_hashes("\n".join(hook_hashes(targets, old)))
    assert list(known) == [*sorted(targets), "sglang/one.py"]
    moved = release(tmp_path / "moved", "import re  # why\n" + OLD.replace("a\n", "a  # it\n"))
    assert told(check_hooks(targets, old, moved)) == [f"same     {one}" for one in sorted(targets)]
    first, second = OLD.split("\n\n\ndef second")
    new = release(tmp_path / "new", first.replace("(a, b)", "(a, c)"), "def second" + second)
    assert told(check_hooks([*targets, "sglang.one:third"], old, new)) == [
        "changed  sglang.one:first",
        "    @@ -1,2 +1,2 @@",
        "    -def first(a, b):",
        "    +def first(a, c):",
        "         return a",
        "moved    sglang.one:second, to sglang.two",
        "gone     sglang.one:third, before already",
    ]
    none = release(tmp_path / "none", "", "def second(a):\n    return b\n")
    assert [line[:40] for line in told(check_hooks(targets, old, none))][:2] == [
        "gone     sglang.one:first",
        "changed  sglang.one:second, in sglang.tw",
    ]


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
    assert told(check_names(ours, old, new)) == [
        "changed  sglang.two: Leaf.evict",
        "    was (self, node)",
        "    is  (self, node, actions)",
        "changed  sglang.two: scan",
        "    was (x)",
        "    is  (x=1)",
    ]
    assert all(finding.word == "same" for finding in check_names(ours, old, old))


def test_what_became_of_imported_names(tmp_path: Path) -> None:
    names = [("sglang.one", name) for name in ("Params", "made", "LIMIT", "gone", "Old.method")]
    made = "def made(x):\n    return x\n\n"
    fields = "class Params:\n    size: int\n    page: int = 1\n\n"
    rest = "LIMIT: int = 3\n\ndef gone():\n    pass\n\nclass Old:\n    def method(self, a): ...\n"
    old = release(tmp_path / "old", fields + made + rest)
    new = release(
        tmp_path / "new",
        fields.replace("size: int", "size: float\n    rank: int"),
        made + "LIMIT = 4\n\nclass Old:\n    def method(self, b): ...\n",
    )
    assert told(check_names(names, old, new)) == [
        "moved    sglang.one: LIMIT, to sglang.two",
        "changed  sglang.one: Old.method, in sglang.two",
        "    was (self, a)",
        "    is  (self, b)",
        "changed  sglang.one: Params",
        "    was size, page = 1",
        "    is  size, rank, page = 1",
        "gone     sglang.one: gone",
        "moved    sglang.one: made, to sglang.two",
    ]


def test_names_that_are_gone(tmp_path: Path) -> None:
    new = release(tmp_path / "new", "if True:\n    first = 1\n")
    assert new.has("sglang.one", "first") and new.has("sglang", "one")
    assert not new.has("sglang.one", "second") and not new.has("sglang.three", "first")


def test_the_installed_release_is_the_one_that_the_package_was_made_for() -> None:
    release = installed()
    found = check_patches(ROOT / "patches" / f"sglang-{SGLANG_VERSION}", release)
    assert found and all(finding.word == "same" for finding in found)
    lines = list(hashes(ROOT / "patches" / f"sglang-{SGLANG_VERSION}", release))
    assert lines == [
        f"SHA256 ({path}) = {patch.sha256}" for path, patch in sorted(load_patches().items())
    ]
    known = imports(ROOT / "sglang_hybrid")
    assert len(known) > 50 and all(release.has(*name) for name in known)


def changed(path: str, old: str, new: str) -> tuple[str, str]:
    """An installed file, by its path, with another text once."""
    text = str(read(path))
    assert text.count(old) == 1
    return path, text.replace(old, new)


@pytest.mark.slow
def test_it_tells_what_a_script_did_to_the_release(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Renamed parameters, a moved function, a moved file, an added field, comments."""
    policy, penalties = "sglang/srt/managers/schedule_policy.py", "sglang/srt/sampling/penaltylib"
    zaya, base = "sglang/srt/models/zaya.py", "sglang/srt/mem_cache/base_prefix_cache.py"
    logits = "sglang/srt/layers/logits_processor.py"
    text = str(read(policy))
    body = re.search(r"    def _compute_prefix_matches\(.*?(?=\n    def )", text, re.DOTALL)
    assert body is not None
    texts = dict(
        [
            (policy, text.replace("waiting_queue", "queue")),
            (zaya, ""),
            (zaya.replace("models", "models/zyphra"), str(read(zaya))),
            changed(base, "class InsertParams:\n", "class InsertParams:\n    added: int = 0\n"),
            (logits, "# A comment.\n" + str(read(logits))),
            changed(
                f"{penalties}/orchestrator.py",
                "class BatchedPenalizerOrchestrator:",
                "class BatchedPenalizers:",
            ),
        ]
    )
    (copy_changed(tmp_path, texts) / zaya).unlink()
    assert main([str(tmp_path)]) == 1
    told = capsys.readouterr().out
    parts = f"\n{told}".split("\n# ")
    assert parts[1].startswith("Hunks of patches: ") and "0 changed, 0 gone" in parts[1]
    assert f"moved    0007-exact-states-in-a-prefill.patch: {zaya}, to " in parts[1]
    same = len({hook.target for hook in HOOKS}) - 2
    assert parts[2].startswith(f"Hooked functions: {same} same, 0 moved, 1 changed, 1 gone")
    target = "sglang.srt.managers.schedule_policy:SchedulePolicy._compute_prefix_matches"
    assert f"changed  {target}\n" in parts[2] and "    +        self, queue:" in parts[2]
    assert "gone     sglang.srt.sampling.penaltylib.orchestrator:Batched" in parts[2]
    assert "sglang.srt.mem_cache.base_prefix_cache: InsertParams\n" in parts[4]
    assert "logits_processor" not in told


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
