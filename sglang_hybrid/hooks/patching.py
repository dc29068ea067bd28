"""Apply patches/ to SGLang's modules in memory, while they are imported.

site-packages stays untouched: an import hook reads the source, applies the unified diff and
compiles the result. Each part of a diff has its line numbers in the file that it was cut from
(sha256); in another file its lines are looked for, and comments and blank lines do not count.
Tracebacks and `inspect` show the patched source under the original path plus a note.

A patch file starts with a sentence that says what and why, then one line for each file it changes,
below one that says which need (`needs.py`) it is changed for,

    Needed for CACHE:
    SHA256 (sglang/srt/example.py) = <hash of the file in the released wheel>

then the diff with `a/` and `b/` prefixes. Patches are applied in the order of their numbers; one
that changes a file a second time is cut against the result of those before it.
"""

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import re
import sys
import types
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path

import whatthepatch

from sglang_hybrid import SGLANG_VERSION
from sglang_hybrid.core.extensions import has_guard
from sglang_hybrid.hooks import install as hooks
from sglang_hybrid.hooks.needs import Misfit, Need
from sglang_hybrid.hooks.sources import installed_version, parse_hashes

NOTE = " (patched by sglang_hybrid)"


_COMMENT = re.compile(r"^\s*#.*$|\s+#[^'\"]*$|\s+$")
_NEED = re.compile(r"^Needed for (?P<name>\w+):$")


class PatchError(ImportError):
    """A patch cannot be applied: SGLang's file is not the one that it was cut from.

    need: what the patch is needed for.
    """

    def __init__(self, message: str, need: Need = Need.CACHE) -> None:
        super().__init__(message)
        self.need = need


@dataclass(frozen=True)
class FileDiff:
    """The change of one file by one patch, `name`, and its purpose."""

    name: str
    needed_for: Need
    diff: "whatthepatch.patch.diffobj"


@dataclass(frozen=True)
class FilePatch:
    """All changes to one file of `SGLANG_VERSION`: its hash and the diffs, in order."""

    path: str
    sha256: str
    diffs: list[FileDiff] = field(default_factory=list)

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def missing(self, need: Need) -> PatchError:
        """The error that the installed SGLang has no such file."""
        return PatchError(
            f"{self.path}, needed for {need.what}, is not in the installed sglang "
            f"{installed_version()}; reinstall sglang=={SGLANG_VERSION}.",
            need,
        )

    def is_known(self, text: bytes) -> bool:
        """True if a file is the one that the patches were cut from."""
        return hashlib.sha256(text).hexdigest() == self.sha256

    def apply(self, released: bytes, left_out: Collection[Need] = ()) -> str:
        """The patched source. In a file that is not the one we know, each part of the patches is
        looked for where its lines are, comments and blank lines aside; `PatchError` if they are not
        there.

        left_out: needs whose changes are not made.
        """
        is_known = self.is_known(released)
        lines = released.decode().split("\n")
        absent: set[str] = set()
        for one in self.diffs:
            if one.needed_for in left_out:
                is_known = False  # the next ones are cut against the result of this one
                absent |= {change.line for change in one.diff.changes if change.old is None}
            elif is_known:
                try:
                    lines = list(whatthepatch.apply_diff(one.diff, lines))
                except whatthepatch.exceptions.WhatThePatchException as error:
                    raise PatchError(
                        f"patch {one.name} does not apply to {self.path}: {error}", one.needed_for
                    ) from None
            else:
                lines = self._apply_where_found(one, lines, absent)
        return "\n".join(lines)

    def misfits(self, released: bytes | None, left_out: Collection[Need]) -> Iterator[Misfit]:
        """Changes that do not fit a file without those that are left out. None: there is none."""
        left_out = set(left_out)
        while released is not None:
            try:
                self.apply(released, left_out)
                return
            except PatchError as error:
                yield Misfit(error.need, self.path, str(error))
                left_out.add(error.need)
        for one in self.diffs:
            yield Misfit(one.needed_for, self.path, str(self.missing(one.needed_for)))

    def _apply_where_found(
        self, one: FileDiff, lines: list[str], absent: Collection[str]
    ) -> list[str]:
        """The lines changed by `one`, which does not expect those of `absent` around it that are
        not there.
        """
        absent = {*absent} - {*lines}
        made: list[str] = []
        at = shift = 0
        for _, changes in groupby(one.diff.changes, lambda change: change.hunk):
            hunk = list(changes)
            first = hunk_begin(hunk)
            place = change_lines(lines, hunk, at, first + shift, absent)
            if place is None:
                line = next(change.line for change in hunk if change.old is not None)
                raise self._misfit(one, line, first + 1, bool(absent))
            made += lines[at : place.begin] + place.lines
            at, shift = place.end, place.begin - first
        return made + lines[at:]

    def _misfit(self, one: FileDiff, line: str, number: int, is_left_out: bool) -> PatchError:
        what = one.needed_for.what
        why = (
            f"{self.path}, needed for {what}, is changed by {one.name} where another change is "
            "left out."
            if is_left_out
            else f"{self.path} of the installed sglang {installed_version()}, needed for {what}, "
            f"is not the file of sglang {SGLANG_VERSION} that {one.name} was cut from: it has no "
            f"such lines as {line.strip()!r} near line {number}; reinstall "
            f"sglang=={SGLANG_VERSION}."
        )
        return PatchError(why, one.needed_for)


@dataclass(frozen=True)
class Place:
    """The place of a hunk's lines in a file (`begin` to `end`), and the new lines."""

    begin: int
    end: int
    lines: list[str]


def hunk_begin(hunk: Sequence["whatthepatch.patch.Change"]) -> int:
    """The index of the first line that a hunk expects, in the file that it was cut from."""
    number: int = next(change.old for change in hunk if change.old is not None)
    return number - 1


def change_lines(
    lines: list[str],
    hunk: Sequence["whatthepatch.patch.Change"],
    begin: int,
    expected: int,
    absent: Collection[str] = (),
) -> Place | None:
    """One hunk of a diff, made where its lines are in `lines[begin:]`, nearest to `expected`; None
    if they are nowhere. Where they are not all there as they are, comments and blank lines do not
    count, nor do those of `absent` around what is changed.
    """
    before = [change.line for change in hunk if change.old is not None]
    first = _nearest(lines, before, begin, expected)
    if first is not None:
        after = [change.line for change in hunk if change.new is not None]
        return Place(first, first + len(before), after)
    code = [(at, text) for at in range(begin, len(lines)) if (text := _code(lines[at]))]
    there = {
        change.old: _code(change.line)
        for change in hunk
        if change.old is not None and (change.new is None or change.line not in absent)
    }
    wanted = list(filter(None, there.values()))
    near = bisect_left(code, (expected,))
    index = _nearest([text for _, text in code], wanted, 0, near) if wanted else None
    if index is None:
        return None
    first = at = code[index][0]
    made: list[str] = []
    following = iter(code[index:])
    for change in hunk:
        if change.old is None:
            made.append(change.line)
        elif there.get(change.old):
            end, _ = next(following)
            made += lines[at:end] if change.new is None else lines[at : end + 1]
            at = end + 1
    return Place(first, at, made)


def _nearest(lines: list[str], wanted: list[str], begin: int, expected: int) -> int | None:
    """The index in `lines[begin:]` of the lines `wanted` nearest to `expected`; None if nowhere."""
    size = len(wanted)
    begins = (at for at in range(begin, len(lines)) if lines[at] == wanted[0])
    places = (at for at in begins if lines[at : at + size] == wanted)
    return min(places, key=lambda at: abs(at - expected), default=None)


def _code(line: str) -> str:
    """A line without a comment behind it, "" for a comment or a blank line."""
    return _COMMENT.sub("", line)


def load_patches() -> dict[str, FilePatch]:
    """All patches, by path of the file changed."""
    room = files("sglang_hybrid") / "patches" / f"sglang-{SGLANG_VERSION}"
    return parse_patches(
        {
            item.name: item.read_text(encoding="utf-8")
            for item in room.iterdir()
            if item.name.endswith(".patch")
        }
    )


def parse_patches(texts: dict[str, str]) -> dict[str, FilePatch]:
    """Group patch files (name -> text) by the file they change, in the order of their names."""
    patched: dict[str, FilePatch] = {}
    for name in sorted(texts):
        known, needs = parse_hashes(texts[name]), _parse_needs(name, texts[name])
        for diff in whatthepatch.parse_patch(texts[name]):
            if diff.header is None or not diff.changes:
                continue
            path = diff.header.new_path.removeprefix("b/")
            if path not in known:
                raise PatchError(f"patch {name} changes {path} but has no SHA256 line for it.")
            entry = patched.setdefault(path, FilePatch(path, known[path]))
            if entry.sha256 != known[path]:
                raise PatchError(f"patch {name} names another SHA256 for {path} than those before.")
            entry.diffs.append(FileDiff(name, needs[path], diff))
    return patched


def _parse_needs(name: str, text: str) -> dict[str, Need]:
    """The needs of each file of a patch: lines `Needed for NAME:` are above its hash."""
    needs: dict[str, Need] = {}
    need = Need.CACHE
    for line in text.splitlines():
        if found := _NEED.match(line):
            if found["name"] not in Need.__members__:
                raise PatchError(f"patch {name} is needed for {found['name']}, which is no need.")
            need = Need[found["name"]]
        needs.update(dict.fromkeys(parse_hashes(line), need))
    return needs


class _PatchedLoader(importlib.machinery.SourceFileLoader):
    """Loads one module from its patched source; bytecode caches of the original are not used."""

    def __init__(
        self, fullname: str, path: str, patch: FilePatch, left_out: Collection[Need]
    ) -> None:
        super().__init__(fullname, path)
        self._patch, self._left_out = patch, left_out

    def get_source(self, fullname: str) -> str:
        return self._patch.apply(Path(self.path).read_bytes(), self._left_out)

    def get_code(self, fullname: str) -> types.CodeType:
        source = self.get_source(fullname)
        filename = self.path + NOTE
        linecache.cache[filename] = (
            len(source),
            None,
            source.splitlines(keepends=True),
            filename,
        )
        code: types.CodeType = compile(source, filename, "exec", dont_inherit=True)
        return code


class PatchFinder(importlib.abc.MetaPathFinder):
    """Finds the patched modules before Python's own finders do, and leaves all others to them.

    left_out: needs whose changes are not made.
    """

    def __init__(self, patches: dict[str, FilePatch], left_out: Collection[Need] = ()) -> None:
        self.by_module = {patch.module: patch for patch in patches.values()}
        self._left_out = left_out

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        patch = self.by_module.get(fullname)
        if patch is None or all(one.needed_for in self._left_out for one in patch.diffs):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            raise patch.missing(patch.diffs[0].needed_for)
        spec.loader = _PatchedLoader(fullname, spec.origin, patch, self._left_out)
        return spec


def install() -> None:
    """Have patches and hooks (`sglang_hybrid/hooks/`) applied to the modules that this process will
    import; a second call does nothing.

    The finder of patched modules stands right in front of Python's own finder of files: whatever
    waits for a module to be imported (hooks and the CPU platform's bindings, through wrapt) must
    come first, whenever it was installed. Changes for a model, a flag or a convenience that do not
    fit are left out (`lacking`), and so are those that are not wanted (`unwanted`).
    Raises `PatchError` if a module that needs a patch or a hook has been imported already.
    """
    if any(isinstance(finder, PatchFinder) for finder in sys.meta_path):
        return
    left_out = {need for need in lacking() if not need.is_always} | unwanted()
    finder = PatchFinder(load_patches(), left_out)
    late = sorted((finder.by_module.keys() | hooks.by_module().keys()) & sys.modules.keys())
    if late:
        raise PatchError(
            f"{', '.join(late)} was imported before sglang_hybrid could change it; start with "
            "`python -m sglang_hybrid.launch_server`, or import sglang_hybrid.hooks.patching and "
            "call install() before anything of sglang.srt."
        )
    sys.meta_path.insert(sys.meta_path.index(importlib.machinery.PathFinder), finder)
    hooks.on_import(left_out)


def verify() -> None:
    """Raise `PatchError` for a piece of SGLang that is not there, or is another one, if no start
    can be without what it is needed for.
    """
    if _root() is None:
        raise PatchError(f"sglang is not installed; install sglang=={SGLANG_VERSION}.")
    for need, misfit in lacking().items():
        if need.is_always:
            raise PatchError(misfit.why, need)


@cache
def lacking() -> Mapping[Need, Misfit]:
    """Needs of which a piece does not fit the files that would be imported, and that piece."""
    root = _root()
    return {} if root is None else lacking_in(root)


def unwanted() -> set[Need]:
    """Needs whose changes are not made though they fit: the guard's where it is off."""
    return set() if has_guard() else {need for need in Need if need.value.of_guard}


def lacking_in(root: Path) -> dict[Need, Misfit]:
    """The result of `lacking` for files, which are not imported. root: the folder with `sglang/`.

    A change that is cut against one that is left out is left out, too.
    """
    patches = load_patches().values()
    paths = {patch.path: root / patch.path for patch in patches}
    texts = {path: file.read_bytes() if file.is_file() else None for path, file in paths.items()}
    found: dict[Need, Misfit] = {}
    left_out = unwanted()
    for misfit in hooks.misfits(root):
        if misfit.need not in left_out:
            found.setdefault(misfit.need, misfit)
    before = -1
    while len(found) > before:
        before = len(found)
        for patch in patches:
            text = texts[patch.path]
            touched = any(one.needed_for in found.keys() | left_out for one in patch.diffs)
            if touched or text is None or not patch.is_known(text):
                for misfit in patch.misfits(text, found.keys() | left_out):
                    if misfit.need not in left_out:
                        found.setdefault(misfit.need, misfit)
    return found


def _root() -> Path | None:
    """The folder that `sglang/` would be imported from; None without one.

    It is elsewhere than the package's metadata where SGLang is an editable install, as it is in its
    own container images.
    """
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]).parent
