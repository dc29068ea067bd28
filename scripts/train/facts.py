"""The facts that the model learns: the first sentence of a name's docstring in Python's library."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
import warnings
from dataclasses import dataclass
from types import ModuleType

LEFT_OUT = {
    "__main__", "antigravity", "idlelib", "lib2to3", "nis", "nt", "posix", "posixpath", "ntpath",
    "test", "this", "tkinter", "turtledemo",
}  # fmt: skip
"""Modules that do something when they are imported, are copies of others, or are about to go."""

SUBMODULES = (
    "os.path", "collections.abc", "concurrent.futures", "email.message", "http.client",
    "http.server", "importlib.metadata", "importlib.resources", "json.decoder", "json.encoder",
    "logging.config", "logging.handlers", "multiprocessing.pool", "unittest.mock", "urllib.error",
    "urllib.parse", "urllib.request", "wsgiref.simple_server", "xml.dom.minidom",
    "xml.etree.ElementTree", "xml.sax",
)  # fmt: skip
"""Modules within modules whose names people use whole."""

_MARKUP = re.compile(r"[<>{}|=`\\*_\[\]]|->|\(.*,")
_SIGNATURES = re.compile(r"([\w.]+\(.*\)( *-+>.*)?\n?)+$")
_ADDRESS = re.compile(r" ?<https?://[^>]*>")


@dataclass(frozen=True)
class Fact:
    """`says` is one sentence about `name`, which is a `kind` ("module", "class", "function")."""

    name: str
    kind: str
    says: str


def collect() -> list[Fact]:
    """One fact for each documented public name of the standard library, in the order of names.

    Of names with the same sentence and the same last part (a class and the one that inherits from
    it) only the shortest is kept.
    """
    found: dict[str, Fact] = {}
    for name in [*SUBMODULES, *sorted(sys.stdlib_module_names - LEFT_OUT)]:
        if not name.startswith("_"):
            with contextlib.suppress(ImportError):
                _read(name, _imported(name), found)
    shortest: dict[tuple[str, str], Fact] = {}
    for fact in sorted(found.values(), key=lambda fact: (len(fact.name), fact.name)):
        shortest.setdefault((fact.name.rpartition(".")[2], fact.says), fact)
    return sorted(shortest.values(), key=lambda fact: fact.name)


def first_sentence(text: str | None) -> str | None:
    """The first sentence of a docstring, if it reads as one: no markup, no list.

    A first paragraph of signatures, backquotes and addresses in <> are left out; a single
    line without a full stop gets one.
    """
    if not isinstance(text, str):
        return None
    paragraphs = _ADDRESS.sub("", inspect.cleandoc(text).replace("`", "")).split("\n\n")
    paragraph = paragraphs[_SIGNATURES.match(paragraphs[0]) is not None :][:1]
    if not paragraph:
        return None
    line = " ".join(paragraph[0].split())
    match = re.match(r".+?[.!](?=\s|$)", line)
    sentence = match.group() if match else line + "."
    if not match and "\n" in paragraph[0]:
        return None
    fits = sentence.isascii() and 3 <= len(sentence.split()) <= 24 and len(sentence) <= 150
    whole = sentence.count("(") == sentence.count(")") and not sentence.endswith((":.", "a.k.a."))
    readable = sentence[0].isupper() and not _MARKUP.search(sentence)
    return sentence if fits and whole and readable else None


def _imported(name: str) -> ModuleType:
    with (
        warnings.catch_warnings(),
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def _read(name: str, module: ModuleType, found: dict[str, Fact]) -> None:
    _add(found, name, "module", module)
    names = getattr(module, "__all__", None) or vars(module)
    for member in (name for name in names if not name.startswith("_")):
        value = getattr(module, member, None)
        if not callable(value):
            continue
        full = member if name == "builtins" else f"{name}.{member}"
        if not inspect.isclass(value):
            _add(found, full, "function", value)
            continue
        if value.__doc__ != getattr(value.__base__, "__doc__", None):
            _add(found, full, "class", value)
        for method, function in vars(value).items():
            if not method.startswith("_") and callable(function):
                _add(found, f"{full}.{method}", "function", function)


def _add(found: dict[str, Fact], name: str, kind: str, value: object) -> None:
    sentence = first_sentence(getattr(value, "__doc__", None))
    if sentence is not None:
        found.setdefault(name, Fact(name, kind, sentence))
