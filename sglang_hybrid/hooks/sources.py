"""Sources of SGLang's functions: in a process that has loaded them, and in files that none has.

A hook belongs to a function with a certain source. Its SHA-256 is that of its syntax tree, from the
first decorator to the last statement (`digest`), so that comments and layout do not count.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import inspect
import linecache
import re
from collections.abc import Callable, Iterator
from importlib.resources import files

from sglang_hybrid import SGLANG_VERSION

HASH_LINE = re.compile(r"^SHA256 \((?P<name>[^)]+)\) = (?P<hash>[0-9a-f]{64})$", re.MULTILINE)


def parse_hashes(text: str) -> dict[str, str]:
    """The hashes in lines `SHA256 (name) = hash` of a text, by name."""
    return {m["name"]: m["hash"] for m in HASH_LINE.finditer(text)}


def load_hashes() -> dict[str, str]:
    """Hashes of `SGLANG_VERSION`: of each hooked function, by the hook's target, and of the files
    that were read for them, by their paths.
    """
    file = files("sglang_hybrid") / "hooks" / f"sglang-{SGLANG_VERSION}.sha256"
    return parse_hashes(file.read_text(encoding="utf-8"))


def installed_version() -> str:
    """The version of SGLang that is installed, "(no version)" without one."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "(no version)"


class UnsupportedSGLang(RuntimeError):
    """The installed SGLang is not the release that this package extends."""


def check_sglang_version() -> None:
    """Raise `UnsupportedSGLang` unless `SGLANG_VERSION` is installed, or a post-release of it: that
    has the same sources but for what it mends, and `patching.verify` looks at those.
    """
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedSGLang(
            f"sglang is not installed; install sglang=={SGLANG_VERSION} "
            "(scripts/quickstart.sh does, on a machine with or without a GPU)."
        ) from None
    if found.partition(".post")[0] != SGLANG_VERSION:
        raise UnsupportedSGLang(
            f"sglang {found} is installed, but this release of sglang_hybrid extends "
            f"{SGLANG_VERSION} only; install sglang=={SGLANG_VERSION}."
        )


def digest(source: str) -> str:
    """The SHA-256 of a definition's syntax tree, in hexadecimal: the same in every version of
    Python, and whatever its indentation, comments and line breaks are.
    """
    indented = source[:1].isspace()
    tree = ast.parse(f"if True:\n{source}" if indented else source).body[0]
    return hashlib.sha256(
        _written(tree.body[0] if isinstance(tree, ast.If) else tree).encode()
    ).hexdigest()


def file_digest(text: str) -> str:
    """The SHA-256 of a file's text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def _written(node: object) -> str:
    """A syntax tree as text. Fields without a value are left out: versions of Python differ in
    which there are.
    """
    if isinstance(node, list):
        return f"[{','.join(map(_written, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
    inner = ",".join(f"{name}={_written(value)}" for name, value in fields if name != "kind")
    return f"{type(node).__name__}({inner})"


def definition(lines: list[str], first: int) -> str:
    """The definition that begins in `lines[first]`, without comments and empty lines behind it.

    lines: of a file, each with its end.
    """
    block = inspect.getblock(lines[first:])
    while block and (not block[-1].strip() or block[-1].lstrip().startswith("#")):
        block.pop()
    return "".join(block)


def loaded_source(found: object) -> str | None:
    """The source of a function or class of this process; None for anything else."""
    found = inspect.unwrap(found) if callable(found) else found
    if inspect.isclass(found):
        lines, first = inspect.findsource(found)
        return definition(lines, first)
    code = getattr(found, "__code__", None)
    if code is None:
        return None
    return definition(linecache.getlines(code.co_filename), code.co_firstlineno - 1)


def paths_of(module: str) -> tuple[str, str]:
    """The paths that the file of a module may have."""
    place = module.replace(".", "/")
    return f"{place}.py", f"{place}/__init__.py"


class Sources:
    """The modules of a package in files, none of which is imported.

    Args:
        read: the text of a file by its path (`sglang/srt/server_args.py`), None if there is none.
    """

    def __init__(self, read: Callable[[str], str | None]) -> None:
        self._read = read
        self._modules: dict[str, tuple[str, ast.Module] | None] = {}
        self.files: dict[str, str] = {}  # texts of the modules read so far, by path

    def source(self, target: str) -> str | None:
        """The source of `module:name` or `module:Class.name`, wherever it is defined; None if it is
        not there.
        """
        module, _, name = target.partition(":")
        found = self.find(module, name)
        if found is None:
            return None
        where, node = found
        loaded = self._load(where)
        assert loaded is not None
        decorators = getattr(node, "decorator_list", [])
        first = min(part.lineno for part in (node, *decorators))
        return definition(loaded[0].splitlines(keepends=True), first - 1)

    def module(self, name: str) -> ast.Module | None:
        """A module, parsed; None if there is none."""
        loaded = self._load(name)
        return None if loaded is None else loaded[1]

    def find(self, module: str, dotted: str) -> tuple[str, ast.stmt] | None:
        """The definition of `dotted`, a function, a class or `Class.method`, in `module`, and the
        module that it is in; imports and base classes are followed.
        """
        name, _, member = dotted.partition(".")
        for node in statements(self.module(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if node.name == name:
                    return self._member(module, node, member) if member else (module, node)
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(node.module, f"{alias.name}.{member}".rstrip("."))
                    if alias.name == "*" and (found := self.find(node.module, dotted)):
                        return found
        return None

    def _member(self, module: str, node: ast.stmt, member: str) -> tuple[str, ast.stmt] | None:
        if not isinstance(node, ast.ClassDef):
            return None
        for part in node.body:
            if getattr(part, "name", None) == member:
                return module, part
        for base in node.bases:
            found = self.find(module, f"{ast.unparse(base)}.{member}")
            if found is not None:
                return found
        return None

    def _load(self, name: str) -> tuple[str, ast.Module] | None:
        if name not in self._modules:
            self._modules[name] = None
            for path in paths_of(name):
                text = self._read(path)
                if text is not None:
                    self.files[path] = text
                    self._modules[name] = text, ast.parse(text)
                    break
        return self._modules[name]


def statements(tree: ast.Module | None) -> Iterator[ast.stmt]:
    """Statements of a module, those under `if` and `try` too."""
    todo = list(tree.body) if tree is not None else []
    while todo:
        node = todo.pop(0)
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
                todo += getattr(node, part, [])
