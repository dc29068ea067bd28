"""SGLang's files beside the installed ones, some of them changed."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from sglang_hybrid.hooks.hook import Hook
from sglang_hybrid.hooks.needs import Need
from sglang_hybrid.hooks.patching import FileDiff, FilePatch, load_patches
from sglang_hybrid.hooks.sources import Sources, paths_of
from sglang_hybrid.hooks.table import HOOKS


def installed() -> Path:
    """The folder that has `sglang/`."""
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.origin is not None
    return Path(found.origin).parents[1]


def read(path: str) -> str | None:
    """The text of an installed file."""
    file = installed() / path
    return file.read_text() if file.is_file() else None


def copy_changed(folder: Path, texts: Mapping[str, str], *, only: set[str] | None = None) -> Path:
    """Links to SGLang's files in `folder`, but for those in `texts`, which have these. only: the
    files that are wanted; None: all.
    """
    if only is None:
        shutil.copytree(installed() / "sglang", folder / "sglang", copy_function=os.symlink)
    for path in sorted({*(only or ()), *texts}):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).unlink(missing_ok=True)
        if path in texts:
            (folder / path).write_text(texts[path])
        else:
            (folder / path).symlink_to(installed() / path)
    (folder / "sglang").mkdir(exist_ok=True)
    return folder


def commented(text: str) -> str:
    """A module with comments in front of it, behind it, and behind many of its lines."""
    lines = []
    for line in text.split("\n"):
        if line.lstrip().startswith(("def ", "class ", "async def ", "from sglang", "self.")):
            is_whole = line.endswith((")", ":", "]")) and '"' not in line and "#" not in line
            lines.append(line + "  # Changed." if is_whole else line)
        else:
            lines.append(line)
    return "\n".join(["# Changed.", *lines, "# Changed.", ""])


def with_another_body(hook: Hook, texts: Mapping[str, str]) -> tuple[str, str]:
    """The file of a hooked function, by its path, with a statement more in that function. texts: of
    files that were changed before.
    """
    sources = Sources(lambda path: texts.get(path) or read(path))
    found = sources.find(hook.module, hook.name)
    assert found is not None
    module, node = found
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    path = next(path for path in paths_of(module) if path in sources.files)
    lines = sources.files[path].splitlines(keepends=True)
    first = node.body[0]
    lines.insert(first.lineno - 1, " " * first.col_offset + "_changed = 1\n")
    return path, "".join(lines)


def with_another_hunk(patch: FilePatch, need: Need, text: str, *, runs: bool = True) -> str:
    """A file's text with another line where only one of the changes for `need` expects it; as it
    was where there is no such line. runs: whether the file must do the same as before.
    """
    lines = text.split("\n")
    others = {line for one in patch.diffs if one.needed_for is not need for line in _before(one)}
    mine = {line for one in patch.diffs if one.needed_for is need for line in _before(one)}
    for at, line in enumerate(lines):
        is_code = line.strip(" )]}") and "#" not in line
        if is_code and line in mine - others and lines.count(line) == 1:
            if not runs:
                return "\n".join([*lines[:at], line + " changed", *lines[at + 1 :]])
            name = line.split()[0].rstrip(",.:(")
            for other in (line + "; pass", line.replace(name, f"({name})", 1)):
                changed = "\n".join([*lines[:at], other, *lines[at + 1 :]])
                if not other.endswith(",; pass") and _is_python(changed):
                    return changed
    return text


def _before(one: FileDiff) -> set[str]:
    """Lines that a change expects."""
    return {change.line for change in one.diff.changes if change.old is not None}


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def everything_changed(spared: set[Need]) -> dict[str, str]:
    """Files of SGLang by their paths, changed so that no need but those of `spared` has all of its
    pieces.
    """
    texts: dict[str, str] = {}
    for patch in load_patches().values():
        text = read(patch.path)
        assert text is not None
        for need in {one.needed_for for one in patch.diffs} - spared:
            text = with_another_hunk(patch, need, text)
        texts[patch.path] = text
    for hook in HOOKS:
        if hook.needed_for not in spared:
            path, text = with_another_body(hook, texts)
            texts[path] = text
    return {path: text for path, text in texts.items() if text != read(path)}
