"""Says what another SGLang release would break.

    python scripts/port.py 0.5.22
    python scripts/port.py sglang-0.5.22-cp311-cp311-manylinux_2_34_x86_64.whl
    python scripts/port.py FOLDER

Of each piece of SGLang that this package needs, one word says what became of it since the installed
release, with the change beside it:

* same: it is as it was, but for comments and layout.
* moved: it is the same in another place. Lines of a patch that moved within their file are found
  there; whatever else moved has to be named anew.
* changed: it is there, and is another one.
* gone: it is nowhere.

The pieces are hunks of patches, hooked functions, functions that this package overrides, binds or
calls (what counts is their parameters) and classes that it imports (their fields), and all other
names that it imports. Everything is read with `ast`; nothing of the release is imported. A version
is downloaded with pip. Exit status 1 if there is something to do.
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
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from difflib import SequenceMatcher, unified_diff
from functools import cache
from importlib.util import find_spec
from itertools import groupby, islice, zip_longest
from pathlib import Path
from typing import Any

import whatthepatch

from sglang_hybrid import SGLANG_VERSION
from sglang_hybrid.core.named_files import MOST_TEXT, FileError, open_named, read_text
from sglang_hybrid.core.programs import Parser, program
from sglang_hybrid.core.sentences import quote
from sglang_hybrid.extensions.cpu.ops.bindings import BINDINGS
from sglang_hybrid.hooks.patching import change_lines, hunk_begin
from sglang_hybrid.hooks.sources import Sources, digest, file_digest, statements
from sglang_hybrid.hooks.table import HOOKS

ROOT = Path(__file__).parents[1]
WIDTH = 70  # columns of each of two texts beside each other


class Release(Sources):
    """The files of one SGLang release: a folder that has `sglang/`, or a wheel."""

    def __init__(self, place: Path) -> None:
        super().__init__(self.text)
        self._place = place
        self._read_before: dict[str, str] = {}
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

    def paths(self) -> list[str]:
        """Paths of all modules."""
        if self._wheel is not None:
            return [path for path in self._wheel.namelist() if path.endswith(".py")]
        found = (self._place / "sglang").rglob("*.py")
        return sorted(str(path.relative_to(self._place)) for path in found)

    def elsewhere(self, name: str, module: str) -> list[str]:
        """Other modules that define a function, class or value of this name; of a method, a class
        with its class's name that has it.
        """
        top = re.escape(name.partition(".")[0])
        begins = re.compile(rf"^(?:(?:async )?def|class) {top}\b|^{top}\b[^=\n]*= ", re.MULTILINE)
        found = []
        for path in self.paths():
            other = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            is_there = other != module and begins.search(self._texts(path)) is not None
            if is_there and ("." not in name or self.find(other, name) is not None):
                found.append(other)
        return found

    def _texts(self, path: str) -> str:
        if path not in self._read_before:
            self._read_before[path] = self.text(path) or ""
        return self._read_before[path]

    def has(self, module: str, name: str) -> bool:
        """True if `from module import name` would find something."""
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
class Finding:
    """The fate of one piece: a word, the piece, and lines that show the change.

    is_found: whether this package finds it as it is.
    """

    word: str
    piece: str
    detail: list[str] = field(default_factory=list)
    is_found: bool = False

    def lines(self) -> Iterator[str]:
        yield f"{self.word:<8} {self.piece}"
        yield from self.detail


def same(piece: str) -> Finding:
    return Finding("same", piece, is_found=True)


Hunk = Sequence[Any]
"""Changes of whatthepatch, those of one hunk."""


def hunks(patch: str) -> dict[str, list[Hunk]]:
    """The hunks of a unified diff by the file that they change."""
    found: dict[str, list[Hunk]] = {}
    for diff in whatthepatch.parse_patch(patch):
        here = found.setdefault(diff.header.new_path.removeprefix("b/"), [])
        here += [list(group) for _, group in groupby(diff.changes or (), lambda one: one.hunk)]
    return found


def nearest(lines: list[str], before: list[str], begin: int) -> tuple[int, list[str]]:
    """The lines of a file that are most like `before`, and where they begin."""
    size = len(before)
    wanted = {line.strip() for line in before if line.strip()}
    scores = [
        sum(line.strip() in wanted for line in lines[at : at + size]) for at in range(len(lines))
    ]
    best = max(scores, default=0)
    places = [at for at, score in enumerate(scores) if score == best]
    at = max(
        places,
        key=lambda at: (
            SequenceMatcher(None, before, lines[at : at + size]).ratio(),
            -abs(at - begin),
        ),
        default=0,
    )
    return at, lines[at : at + size]


def beside(expected: list[str], found: list[str]) -> Iterator[str]:
    """Two texts in columns; `|` between lines that differ."""
    for one, other in zip_longest(expected, found, fillvalue=""):
        mark = " " if one == other else "|"
        yield f"    {one[:WIDTH]:<{WIDTH}} {mark} {other[:WIDTH]}".rstrip()


def check_patches(folder: Path, release: Release) -> list[Finding]:
    """The fate of each hunk, those of a patch in a row."""
    found: list[Finding] = []
    files: dict[str, list[str] | None] = {}
    for patch in sorted(folder.glob("*.patch")):
        for path, parts in hunks(patch.read_text()).items():
            if path not in files:
                text = release.text(path)
                files[path] = None if text is None else text.split("\n")
            lines = files[path]
            piece = f"{patch.name}: {path}"
            if lines is None:
                found.append(_without_file(piece, path, parts, release))
            else:
                found += _check_hunks(piece, lines, parts)
    return found


def _check_hunks(piece: str, lines: list[str], parts: list[Hunk]) -> Iterator[Finding]:
    """The fate of the hunks `parts` of one file, whose `lines` get those that are found."""
    shift = grown = 0  # by how many lines the file differs from the known one, and by our changes
    for number, hunk in enumerate(parts, start=1):
        begin = hunk_begin(hunk)
        before = [change.line for change in hunk if change.old is not None]
        after = [change.line for change in hunk if change.new is not None]
        what = f"{piece}, hunk {number} of {len(parts)}"
        place = change_lines(lines, hunk, 0, begin + shift)
        if place is None:
            at, there = nearest(lines, before, begin + shift)
            where = f"; expected from line {begin + 1}, nearest is line {at + 1}"
            yield Finding("changed", what + where, list(beside(before, there)))
        else:
            shift = place.begin - begin
            where = f"{what}, to line {place.begin + 1}"
            yield same(what) if shift == grown else Finding("moved", where, is_found=True)
            lines[place.begin : place.end] = place.lines
            shift += len(after) - len(before)
        grown += len(after) - len(before)


def _without_file(piece: str, path: str, parts: list[Hunk], release: Release) -> Finding:
    """The finding for a file that is gone: its lines are in another of this name, or nowhere."""
    name = path.rpartition("/")[2]
    for other in release.paths():
        if other.rpartition("/")[2] == name and other != path:
            lines = (release.text(other) or "").split("\n")
            if all(change_lines(lines, hunk, 0, hunk_begin(hunk)) for hunk in parts):
                return Finding("moved", f"{piece}, to {other}")
    return Finding("gone", piece)


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


def check_hooks(targets: Iterable[str], old: Release, new: Release) -> list[Finding]:
    """The fate of each function that hooks are on."""
    return [_check_hook(target, old, new) for target in sorted(set(targets))]


def _check_hook(target: str, old: Release, new: Release) -> Finding:
    module, _, name = target.partition(":")
    before, after = old.source(target), new.source(target)
    if before is None:
        return Finding("gone", f"{target}, before already")
    if after is not None and digest(before) == digest(after):
        return same(target)
    if after is not None:
        return Finding("changed", target, list(difference(before, after)))
    others = new.elsewhere(name, module)
    sources = {other: new.source(f"{other}:{name}") or "" for other in others}
    for other, source in sources.items():
        if digest(source) == digest(before):
            return Finding("moved", f"{target}, to {other}")
    for other, source in sources.items():
        return Finding("changed", f"{target}, in {other}", list(difference(before, source)))
    return Finding("gone", target)


def difference(before: str, after: str) -> Iterator[str]:
    """The changes of a definition, as lines of a diff."""
    lines = unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2)
    return (f"    {line}" for line in islice(lines, 2, None))


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
        yield f"SHA256 ({path}) = {file_digest(text)}"


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


def shape(release: Release, module: str, name: str) -> str | None:
    """The interface for a caller: the parameters of a function, or the fields and the parameters of
    a class, without annotations; None if it is not defined there.
    """
    found = release.find(module, name)
    if found is None:
        return None
    where, node = found
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return _parameters(node)
    if not isinstance(node, ast.ClassDef):
        return None
    made = release.find(where, f"{node.name}.__init__")
    parts = [_parameters(made[1])] if made and isinstance(made[1], ast.FunctionDef) else []
    parts += [
        ast.unparse(part.target) + ("" if part.value is None else f" = {ast.unparse(part.value)}")
        for part in node.body
        if isinstance(part, ast.AnnAssign)
    ]
    return ", ".join(parts)


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = deepcopy(node.args)
    for part in ast.walk(arguments):
        if isinstance(part, ast.arg):
            part.annotation = None
    return f"({ast.unparse(arguments)})"


def check_names(names: Iterable[tuple[str, str]], old: Release, new: Release) -> Iterator[Finding]:
    """The fate of names of SGLang, by their shape; what the old release lacks is ours."""
    for module, name in sorted(set(names)):
        piece = f"{module}: {name}"
        before = shape(old, module, name)
        if before is None and ("." in name or not old.has(module, name)):
            continue
        after = shape(new, module, name)
        is_there = after is not None or ("." not in name and new.has(module, name))
        if is_there and before == after:
            yield same(piece)
        elif is_there:
            detail = [f"    was {before}", f"    is  {after}"]
            if max(map(len, detail)) > 2 * WIDTH:
                parts = (str(one).replace(", ", ",\n") for one in (before, after))
                detail = list(difference(*parts))
            yield Finding("changed", piece, detail)
        else:
            others = new.elsewhere(name, module)
            alike = [other for other in others if shape(new, other, name) == before]
            if alike:
                yield Finding("moved", f"{piece}, to {' or '.join(alike[:3])}")
            elif others:
                detail = [f"    was {before}", f"    is  {shape(new, others[0], name)}"]
                yield Finding("changed", f"{piece}, in {others[0]}", detail)
            else:
                yield Finding("gone", piece)


def find_release(what: str, folder: Path) -> Release:
    """A version, a wheel or a folder. Raises ValueError if it cannot be had."""
    place = Path(what)
    if place.exists():
        return Release(place)
    if not re.fullmatch(r"\d[\w.]*", what):
        raise ValueError(f"{quote(what)} is neither a version nor a wheel or folder that is there.")
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
        bound = {(binding.module, binding.attribute) for binding in BINDINGS}
        parts = {
            "Hunks of patches": check_patches(options.patches, new),
            "Hooked functions": check_hooks(targets, old, new),
            "What we override or bind": list(check_names(overrides(package) | bound, old, new)),
            "What we import": list(check_names(imports(package), old, new)),
        }
    for title, found in parts.items():
        counts = Counter(finding.word for finding in found)
        said = ", ".join(f"{counts[word]} {word}" for word in ("same", "moved", "changed", "gone"))
        print(f"# {title}: {said}")
        for finding in found:
            if finding.word != "same":
                print(*finding.lines(), sep="\n")
        print()
    return int(not all(finding.is_found for found in parts.values() for finding in found))


if __name__ == "__main__":
    sys.exit(main())
