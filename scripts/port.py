"""Says what another SGLang release would break.

    python scripts/port.py 0.5.22
    python scripts/port.py sglang-0.5.22-cp311-cp311-manylinux_2_34_x86_64.whl
    python scripts/port.py FOLDER

Four lists: which patches apply, and of a hunk that does not, what it expects beside what is there;
which hooked functions are missing or have another source; which functions that this package
overrides or binds have another signature; which names that it imports are gone. Everything is read
with `ast`; nothing of the release is imported. A version is downloaded with pip. Exit status 1 if
something would break.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from importlib.util import find_spec
from itertools import groupby, zip_longest
from pathlib import Path

import whatthepatch

from sglang_hybrid import SGLANG_VERSION
from sglang_hybrid.core.named_files import MOST_TEXT, FileError, open_named, read_text
from sglang_hybrid.core.programs import Parser, program
from sglang_hybrid.core.sentences import shown
from sglang_hybrid.extensions.cpu.ops.bindings import BINDINGS
from sglang_hybrid.hooks.sources import Sources, digest, load_hashes, statements
from sglang_hybrid.hooks.table import HOOKS

ROOT = Path(__file__).parents[1]
WIDTH = 70  # columns of each of two texts beside each other


class Release(Sources):
    """The files of one SGLang release: a folder that has `sglang/`, or a wheel."""

    def __init__(self, place: Path) -> None:
        super().__init__(self.text)
        self._place = place
        try:
            self._wheel = None if place.is_dir() else zipfile.ZipFile(open_named(place))
        except zipfile.BadZipFile as error:
            raise FileError(f"{place} is neither a wheel nor a folder ({error})") from error

    def text(self, path: str) -> str | None:
        """A file by its path in the wheel; None if there is none."""
        if self._wheel is None:
            there = self._place / path
            return read_text(there) if there.exists() else None
        if path not in self._wheel.NameToInfo:
            return None
        try:
            if self._wheel.getinfo(path).file_size > MOST_TEXT:
                raise ValueError("it is too large to be read")
            return self._wheel.read(path).decode()
        except (ValueError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
            raise FileError(f"{path} of {self._place} cannot be read ({error})") from error

    def has(self, module: str, name: str) -> bool:
        """Whether `from module import name` would find something."""
        tree = self.module(module)
        if self.module(f"{module}.{name}") is not None:
            return True
        return tree is not None and (name in _defined(tree) or _stars(tree))


@cache
def _defined(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in statements(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        else:
            names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return names


def _stars(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in statements(tree)
    )


# Patches.


@dataclass
class Hunk:
    """One hunk: the line at which it begins, and its lines before and after."""

    start: int
    before: list[str]
    after: list[str]


def hunks(patch: str) -> dict[str, list[Hunk]]:
    """The hunks of a unified diff by the file that they change."""
    found: dict[str, list[Hunk]] = {}
    for diff in whatthepatch.parse_patch(patch):
        here = found.setdefault(diff.header.new_path.removeprefix("b/"), [])
        for _, group in groupby(diff.changes or (), key=lambda change: change.hunk):
            changes = list(group)
            before = [change for change in changes if change.old is not None]
            after = [change.line for change in changes if change.new is not None]
            here.append(Hunk(before[0].old - 1, [change.line for change in before], after))
    return found


def place_of(wanted: Sequence[str], lines: Sequence[str], near: int) -> int | None:
    """The index in `lines` nearest to `near` where all of `wanted` stand; None if they do not."""
    size = len(wanted)

    def stand(at: int) -> bool:
        return lines[at] == wanted[0] and list(lines[at : at + size]) == list(wanted)

    places = range(len(lines) - size + 1)
    if near in places and stand(near):
        return near
    return min(filter(stand, places), key=lambda at: abs(at - near), default=None)


def try_hunk(lines: list[str], hunk: Hunk, moved: int) -> int | None:
    """Apply `hunk` to `lines` where its text is, nearest to where it should be. Returns by how many
    lines that is elsewhere; None if the text is nowhere.
    """
    at = place_of(hunk.before, lines, hunk.start + moved)
    if at is None:
        return None
    lines[at : at + len(hunk.before)] = hunk.after
    return at - hunk.start


def nearest(lines: list[str], hunk: Hunk) -> tuple[int, list[str]]:
    """What is most like the text of `hunk` in a file, and where it begins."""
    size = len(hunk.before)
    wanted = {line.strip() for line in hunk.before if line.strip()}
    scores = [
        sum(line.strip() in wanted for line in lines[at : at + size]) for at in range(len(lines))
    ]
    best = max(scores, default=0)
    places = [at for at, score in enumerate(scores) if score == best]
    at = max(
        places,
        key=lambda at: (
            SequenceMatcher(None, hunk.before, lines[at : at + size]).ratio(),
            -abs(at - hunk.start),
        ),
        default=0,
    )
    return at, lines[at : at + size]


def beside(expected: list[str], found: list[str]) -> Iterator[str]:
    """Two texts in columns; `|` between lines that differ."""
    for one, other in zip_longest(expected, found, fillvalue=""):
        mark = " " if one == other else "|"
        yield f"    {one[:WIDTH]:<{WIDTH}} {mark} {other[:WIDTH]}".rstrip()


def check_patches(folder: Path, release: Release) -> tuple[list[str], int]:
    """A line per patch, and of what fails both texts; and how many patches fail."""
    report: list[str] = []
    failed = 0
    files: dict[str, list[str] | None] = {}
    for patch in sorted(folder.glob("*.patch")):
        problems: list[str] = []
        moved = 0
        for path, parts in hunks(patch.read_text()).items():
            if path not in files:
                text = release.text(path)
                files[path] = None if text is None else text.split("\n")
            lines = files[path]
            if lines is None:
                problems.append(f"  {path} is not there")
                continue
            shift = 0
            for number, hunk in enumerate(parts, start=1):
                found = try_hunk(lines, hunk, shift)
                if found is None:
                    at, there = nearest(lines, hunk)
                    problems.append(
                        f"  {path}, hunk {number} of {len(parts)}: expected from line "
                        f"{hunk.start + 1}; nearest is line {at + 1}"
                    )
                    problems += beside(hunk.before, there)
                else:
                    grown = sum(len(h.after) - len(h.before) for h in parts[: number - 1])
                    shift = found
                    moved += found != grown
        where = f", {moved} hunks at other lines" if moved else ""
        report.append(f"{patch.name}: {'FAILS' if problems else 'applies' + where}")
        report += problems
        failed += bool(problems)
    return report, failed


def hashes(folder: Path, release: Release) -> Iterator[str]:
    """A line with the sha256 of each file that patches change, as
    `sglang_hybrid.hooks.patching` reads them.
    """
    changed = {path for patch in folder.glob("*.patch") for path in hunks(patch.read_text())}
    for path in sorted(changed):
        text = release.text(path)
        if text is not None:
            yield f"SHA256 ({path}) = {hashlib.sha256(text.encode()).hexdigest()}"


# Hooks.


def check_hooks(
    targets: Iterable[str], sha256: Mapping[str, str], release: Release
) -> tuple[list[str], int]:
    """A line per function that hooks are on, and how many fail: those that are not there, or whose
    source is not the one of which `sha256` has the hash.
    """
    report = []
    for target in sorted(set(targets)):
        source = release.source(target)
        if source is None:
            report.append(f"{target}: FAILS, it is not there")
        elif digest(source) != sha256.get(target):
            report.append(f"{target}: FAILS, it has another source")
        else:
            report.append(f"{target}: holds")
    return report, sum("FAILS" in line for line in report)


def hook_hashes(targets: Iterable[str], release: Release) -> Iterator[str]:
    """A line with the sha256 of each hooked function, and then of each file that was read for them,
    as `sglang_hybrid.hooks` reads them.
    """
    files = Sources(release.text)
    for target in sorted(set(targets)):
        source = files.source(target)
        if source is not None:
            yield f"SHA256 ({target}) = {digest(source)}"
    for path, text in sorted(files.files.items()):
        yield f"SHA256 ({path}) = {digest(text)}"


# Names.


def imports(package: Path) -> set[tuple[str, str]]:
    """(module, name) of all that `package` imports from SGLang."""
    return {
        (node.module, alias.name)
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang"
        for alias in node.names
        if node.module
    }


def overrides(package: Path) -> set[tuple[str, str]]:
    """(module, Class.method) of SGLang for each method of our subclasses of its classes."""
    found: set[tuple[str, str]] = set()
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        origin = {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        for node in classes.values():
            base: ast.ClassDef | None = node
            while base is not None and base.bases:
                name = ast.unparse(base.bases[0])
                module, original = origin.get(name, ("", name))
                if module.startswith("sglang."):
                    found |= {
                        (module, f"{original}.{part.name}")
                        for part in node.body
                        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))
                    }
                base = classes.get(name)
    return found


def signature(found: tuple[str, ast.stmt] | None) -> str | None:
    """The parameters of a function, annotations left out; None for anything else."""
    node = None if found is None else found[1]
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    arguments = deepcopy(node.args)
    for part in ast.walk(arguments):
        if isinstance(part, ast.arg):
            part.annotation = None
    return f"({ast.unparse(arguments)})"


def compare(ours: set[tuple[str, str]], old: Release, new: Release) -> Iterator[str]:
    """What became of the functions `ours` between two releases; what the old one lacks is ours."""
    for module, name in sorted(ours):
        before, after = (signature(one.find(module, name)) for one in (old, new))
        if before is None or before == after:
            continue
        yield f"{module}: {name}"
        yield f"    was {before}"
        yield f"    is  {after or 'not there'}"


def find_release(what: str, folder: Path) -> Release:
    """A version, a wheel or a folder. Raises ValueError if it cannot be had."""
    place = Path(what)
    if place.exists():
        return Release(place)
    if not re.fullmatch(r"\d[\w.]*", what):
        raise ValueError(f"{shown(what)} is neither a version nor a wheel or folder that is there.")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder)]
    done = subprocess.run([*pip, f"sglang=={what}"], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ValueError(f"pip cannot download sglang {what}: {done.stderr.strip()[-300:]}")
    return Release(wheels[0])


def installed() -> Release:
    """The release that the patches are cut from."""
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        raise ValueError("sglang is not installed here; it is what the release is compared with.")
    return Release(Path(spec.origin).parents[1])


@program
def main(arguments: Sequence[str]) -> int:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("release", help="a version, a wheel or a folder that has sglang/")
    parser.add_argument(
        "--patches", type=Path, default=ROOT / "patches" / f"sglang-{SGLANG_VERSION}"
    )
    parser.add_argument(
        "--hashes",
        action="store_true",
        help="print the SHA256 lines of patched files, and nothing else",
    )
    parser.add_argument(
        "--hook-hashes",
        action="store_true",
        help="print the file of hashes of hooked functions, and nothing else",
    )
    options = parser.parse_args(arguments)
    try:
        return report_on(options)
    except SyntaxError as error:
        raise ValueError(f"{options.release} has a file that is not Python ({error})") from error


def report_on(options: argparse.Namespace) -> int:
    """Print what the options ask for; returns the exit status."""
    package = ROOT / "sglang_hybrid"
    with tempfile.TemporaryDirectory() as folder:
        old, new = installed(), find_release(options.release, Path(folder))
        if options.hashes:
            print(*hashes(options.patches, new), sep="\n")
            return 0
        targets = [hook.target for hook in HOOKS]
        if options.hook_hashes:
            print(*hook_hashes(targets, new), sep="\n")
            return 0
        report, failed = check_patches(options.patches, new)
        print(f"# Patches: {failed} fail", *report, sep="\n")
        held, lost = check_hooks(targets, load_hashes(), new)
        print(f"\n# Hooks: {lost} fail", *held, sep="\n")
        bound = {(binding.module, binding.attribute) for binding in BINDINGS}
        changed = list(compare(overrides(package) | bound, old, new))
        print(f"\n# Signatures of what we override or bind: {len(changed) // 3} changed")
        print(*changed, sep="\n")
        gone = [f"{m}: {n}" for m, n in sorted(imports(package)) if not new.has(m, n)]
        print(f"\n# Names that we import: {len(gone)} gone", *gone, sep="\n")
    return int(bool(failed or lost or changed or gone))


if __name__ == "__main__":
    sys.exit(main())
