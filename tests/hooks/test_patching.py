"""The patches apply to the installed SGLang, and to nothing else."""

import hashlib
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_hybrid.hooks import patching
from sglang_hybrid.hooks.install import by_module
from sglang_hybrid.hooks.needs import Need
from sglang_hybrid.hooks.patching import PatchError, PatchFinder, parse_patches
from sglang_hybrid.hooks.sources import Sources
from sglang_hybrid.hooks.table import HOOKS

CACHES = "sglang/srt/model_executor/forward_batch_info.py"
SOURCE = "import os\n\nVALUE = 1\n\n\ndef value() -> int:\n    return VALUE\n"


def diff(sha256: str, old: str = "VALUE = 1", new: str = "VALUE = 2") -> str:
    return (
        "Change the value.\n\nNeeded for SPEEDS:\n"
        f"SHA256 (toy/module.py) = {sha256}\n\n"
        "diff --git a/toy/module.py b/toy/module.py\n"
        "--- a/toy/module.py\n+++ b/toy/module.py\n"
        f"@@ -1,5 +1,5 @@\n import os\n \n-{old}\n+{new}\n \n \n"
    )


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "toy"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "module.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    for name in ("toy", "toy.module"):
        sys.modules.pop(name, None)


def patched(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    finder = PatchFinder(parse_patches({"0001-toy.patch": text}))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])


def released_hash() -> str:
    return hashlib.sha256(SOURCE.encode()).hexdigest()


def test_a_module_is_patched_while_it_is_imported(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched(monkeypatch, diff(released_hash()))
    module = importlib.import_module("toy.module")
    assert module.value() == 2
    assert (toy / "module.py").read_text() == SOURCE
    assert module.value.__code__.co_filename.endswith("module.py" + patching.NOTE)


def test_two_patches_to_one_file_are_applied_in_order() -> None:
    texts = {
        "0002.patch": diff(released_hash(), "VALUE = 2", "VALUE = 3"),
        "0001.patch": diff(released_hash()),
    }
    (patch,) = parse_patches(texts).values()
    assert "VALUE = 3" in patch.apply(SOURCE.encode())


def test_a_file_that_lacks_the_lines_is_refused(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, diff("0" * 64, "VALUE = 7"))
    with pytest.raises(
        PatchError, match=r"toy/module.py of .*, needed for measured .* 0001-toy.patch .*reinstall"
    ):
        importlib.import_module("toy.module")


def test_lines_are_looked_for_in_another_file() -> None:
    (patch,) = parse_patches({"0001.patch": diff("0" * 64)}).values()
    other = f"# Another one.\n\n{SOURCE}\nVALUE = 1\n"
    assert patch.apply(other.encode()) == other.replace("VALUE = 1", "VALUE = 2", 1)


def test_comments_and_blank_lines_among_the_lines_do_not_count() -> None:
    text = diff("0" * 64).replace("-VALUE = 1", "-VALUE = 1  # one\n-# it").replace("1,5", "1,6")
    (patch,) = parse_patches({"0001.patch": text}).values()
    other = SOURCE.replace("\n\nVALUE = 1", "  # for it\n# Why.\nVALUE = 1 # two\n# and more\n")
    made = patch.apply(other.encode())
    assert made == other.replace("VALUE = 1 # two", "VALUE = 2")


def test_a_change_is_made_where_those_before_it_are_left_out() -> None:
    first = diff(released_hash()).replace("+VALUE = 2", " VALUE = 1\n+MORE = 1")
    first = first.replace("-VALUE = 1\n", "").replace("1,5 +1,5", "1,5 +1,6")
    second = (
        f"Needed for CACHE:\nSHA256 (toy/module.py) = {released_hash()}\n"
        "diff --git a/toy/module.py b/toy/module.py\n--- a/toy/module.py\n+++ b/toy/module.py\n"
        "@@ -3,3 +3,4 @@\n VALUE = 1\n MORE = 1\n+LAST = 1\n \n"
    )
    (patch,) = parse_patches({"1.patch": first, "2.patch": second}).values()
    both, last = "VALUE = 1\nMORE = 1\nLAST = 1", "VALUE = 1\nLAST = 1"
    assert both in patch.apply(SOURCE.encode())
    assert last in patch.apply(SOURCE.encode(), {Need.SPEEDS})
    (patch,) = parse_patches(
        {"1.patch": first, "2.patch": second.replace(" MORE = 1\n+", "-MORE = 1\n+")}
    ).values()
    (misfit,) = patch.misfits(SOURCE.encode(), {Need.SPEEDS})
    assert misfit.need is Need.CACHE and "where another change is left out" in misfit.why


@pytest.mark.parametrize("path", patching.load_patches())
def test_a_comment_in_a_file_of_sglang_changes_nothing(path: str) -> None:
    """Comments are added before the file's text and after it."""
    released = Path(str(importlib.metadata.distribution("sglang").locate_file(path))).read_bytes()
    patch = patching.load_patches()[path]
    made = patch.apply(released)
    assert patch.apply(b"# One.\n# Two.\n" + released + b"# Three.\n") == (
        f"# One.\n# Two.\n{made}# Three.\n"
    )


def test_a_diff_that_does_not_fit_is_refused() -> None:
    (patch,) = parse_patches({"0001.patch": diff(released_hash(), "VALUE = 7")}).values()
    with pytest.raises(PatchError, match=r"0001.patch does not apply to toy/module.py"):
        patch.apply(SOURCE.encode())


def test_a_patch_without_a_hash_is_refused() -> None:
    text = diff(released_hash()).replace("SHA256", "sha")
    with pytest.raises(PatchError, match="no SHA256 line"):
        parse_patches({"0001.patch": text})


def test_a_need_that_is_none_is_refused() -> None:
    with pytest.raises(PatchError, match="is needed for SPEED, which is no need"):
        parse_patches({"0001.patch": diff(released_hash()).replace("SPEEDS", "SPEED")})


def test_the_shipped_patches_fit_the_installed_sglang() -> None:
    patching.verify()
    assert patching.load_patches()


IMPORT = re.compile(r"\s*from (sglang_hybrid[\w.]*) import (\w+(?: as \w+)?(?:, \w+(?: as \w+)?)*)")


def test_what_the_shipped_patches_import_of_ours_is_there() -> None:
    """Most of it is imported inside functions, which only requests would run."""
    lines = [
        change.line
        for patch in patching.load_patches().values()
        for one in patch.diffs
        for change in one.diff.changes
        if change.new is not None and "from sglang_hybrid" in change.line
    ]
    found = list(filter(None, map(IMPORT.fullmatch, lines)))
    assert len(found) == len(lines) > 50
    for module, names in (each.groups() for each in found):
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name.split(" ")[0]), (module, name)


def test_the_files_are_looked_for_where_python_would_import_them(tmp_path: Path) -> None:
    """An editable install of SGLang has its metadata in one place and its files in another."""
    installed = Path(importlib.metadata.distribution("sglang").locate_file(""))
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    paths = list(patching.load_patches())
    read: set[str] = set()

    def text(path: str) -> str | None:
        if not (installed / path).is_file():
            return None
        read.add(path)
        return (installed / path).read_text()

    sources = Sources(text)
    assert all(sources.source(hook.target) for hook in HOOKS)
    for path in {*paths, *read}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((installed / path).read_bytes())

    def verify() -> subprocess.CompletedProcess[str]:
        code = "from sglang_hybrid.hooks import patching; patching.verify()"
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    assert verify().returncode == 0
    for text in ("another = 1", "no Python"):
        (tmp_path / CACHES).write_text(text)
        assert "forward_batch_info:ForwardBatch.init_new, needed for the cache" in verify().stderr


@pytest.mark.parametrize(
    "name", [next(iter(patching.load_patches().values())).module, next(iter(by_module()))]
)
def test_too_late_is_said(name: str) -> None:
    code = (
        "import sys, types\n"
        "from sglang_hybrid.hooks import patching\n"
        f"name = {name!r}\n"
        "sys.modules[name] = types.ModuleType(name)\n"
        "patching.install()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "was imported before sglang_hybrid could change it" in done.stderr
