"""Apply patches/ to SGLang's modules in memory, while they are imported.

site-packages stays untouched: an import hook reads the source, applies the unified diff and
compiles the result. Each part of a diff has its line numbers in the file that it was cut from
(sha256); in another file its lines are looked for. Tracebacks and `inspect` show the patched source
under the original path plus a note.

A patch file starts with a sentence that says what and why, then one line for each file it changes,

    SHA256 (sglang/srt/example.py) = <hash of the file in the released wheel>

then the diff with `a/` and `b/` prefixes. Patches are applied in the order of their numbers; one
that changes a file a second time is cut against the result of those before it.
"""

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import groupby
from pathlib import Path

import whatthepatch

from sglang_hybrid import SGLANG_VERSION
from sglang_hybrid.hooks import install as hooks
from sglang_hybrid.hooks.sources import installed_version, parse_hashes

NOTE = " (patched by sglang_hybrid)"


class PatchError(ImportError):
    """A patch cannot be applied: SGLang's file is not the one that it was cut from."""


@dataclass(frozen=True)
class FilePatch:
    """All changes to one file of `SGLANG_VERSION`: its hash and the diffs, in order."""

    path: str
    sha256: str
    diffs: list[tuple[str, "whatthepatch.patch.diffobj"]] = field(default_factory=list)

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def missing(self) -> PatchError:
        """The error that the installed SGLang has no such file."""
        return PatchError(
            f"{self.path}, which sglang_hybrid patches, is not in the installed sglang "
            f"{installed_version()}; reinstall sglang=={SGLANG_VERSION}."
        )

    def apply(self, released: bytes) -> str:
        """The patched source. In a file that is not the one we know, each part of the patches is
        looked for where its lines are; `PatchError` if they are not there.
        """
        is_known = hashlib.sha256(released).hexdigest() == self.sha256
        lines = released.decode().split("\n")
        for name, diff in self.diffs:
            if is_known:
                try:
                    lines = list(whatthepatch.apply_diff(diff, lines))
                except whatthepatch.exceptions.WhatThePatchException as error:
                    raise PatchError(
                        f"patch {name} does not apply to {self.path}: {error}"
                    ) from None
            else:
                lines = self._apply_where_found(name, diff, lines)
        return "\n".join(lines)

    def _apply_where_found(
        self, name: str, diff: "whatthepatch.patch.diffobj", lines: list[str]
    ) -> list[str]:
        made: list[str] = []
        at = shift = 0
        for _, changes in groupby(diff.changes, lambda change: change.hunk):
            hunk = list(changes)
            before = [change.line for change in hunk if change.old is not None]
            first = next(change.old for change in hunk if change.old is not None) - 1
            place = _nearest(lines, before, at, first + shift)
            if place is None:
                raise PatchError(
                    f"{self.path} of the installed sglang {installed_version()} is not the file of "
                    f"sglang {SGLANG_VERSION} that {name} was cut from: it has no such lines as "
                    f"{before[0].strip()!r} near line {first + 1}; reinstall "
                    f"sglang=={SGLANG_VERSION}."
                )
            made += lines[at:place]
            made += [change.line for change in hunk if change.new is not None]
            at, shift = place + len(before), place - first
        return made + lines[at:]


def _nearest(lines: list[str], wanted: list[str], begin: int, expected: int) -> int | None:
    """Where the lines `wanted` are in `lines[begin:]`, nearest to `expected`; None if nowhere."""
    last = len(lines) - len(wanted)
    places = sorted(range(begin, last + 1), key=lambda place: abs(place - expected))
    return next((at for at in places if lines[at : at + len(wanted)] == wanted), None)


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
        known = parse_hashes(texts[name])
        for diff in whatthepatch.parse_patch(texts[name]):
            if diff.header is None or not diff.changes:
                continue
            path = diff.header.new_path.removeprefix("b/")
            if path not in known:
                raise PatchError(f"patch {name} changes {path} but has no SHA256 line for it.")
            entry = patched.setdefault(path, FilePatch(path, known[path]))
            if entry.sha256 != known[path]:
                raise PatchError(f"patch {name} names another SHA256 for {path} than those before.")
            entry.diffs.append((name, diff))
    return patched


class _PatchedLoader(importlib.machinery.SourceFileLoader):
    """Loads one module from its patched source; bytecode caches of the original are not used."""

    def __init__(self, fullname: str, path: str, patch: FilePatch) -> None:
        super().__init__(fullname, path)
        self._patch = patch

    def get_source(self, fullname: str) -> str:
        return self._patch.apply(Path(self.path).read_bytes())

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
    """Finds the patched modules before Python's own finders do, and leaves all others to them."""

    def __init__(self, patches: dict[str, FilePatch]) -> None:
        self.by_module = {patch.module: patch for patch in patches.values()}

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        patch = self.by_module.get(fullname)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            raise patch.missing()
        spec.loader = _PatchedLoader(fullname, spec.origin, patch)
        return spec


def install() -> None:
    """Have patches and hooks (`sglang_hybrid/hooks/`) applied to the modules that this process will
    import; a second call does nothing.

    The finder of patched modules stands right in front of Python's own finder of files: whatever
    waits for a module to be imported (hooks and the CPU platform's bindings, through wrapt) must
    come first, whenever it was installed.
    Raises `PatchError` if a module that needs a patch or a hook has been imported already.
    """
    if any(isinstance(finder, PatchFinder) for finder in sys.meta_path):
        return
    finder = PatchFinder(load_patches())
    late = sorted((finder.by_module.keys() | hooks.by_module().keys()) & sys.modules.keys())
    if late:
        raise PatchError(
            f"{', '.join(late)} was imported before sglang_hybrid could change it; start with "
            "`python -m sglang_hybrid.launch_server`, or import sglang_hybrid.hooks.patching and "
            "call install() before anything of sglang.srt."
        )
    sys.meta_path.insert(sys.meta_path.index(importlib.machinery.PathFinder), finder)
    hooks.on_import()


def verify() -> None:
    """Apply every patch to the files that would be imported, without that, and look for the targets
    of all hooks in them; raises `PatchError` or `hooks.hook.HookError`.

    Those lie elsewhere than the package's metadata where SGLang is an editable install, as it is in
    its own container images.
    """
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        raise PatchError(f"sglang is not installed; install sglang=={SGLANG_VERSION}.")
    root = Path(found.submodule_search_locations[0]).parent
    for patch in load_patches().values():
        try:
            released = (root / patch.path).read_bytes()
        except OSError:
            raise patch.missing() from None
        patch.apply(released)
    hooks.verify(root)
