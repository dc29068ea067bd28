"""Schemas: texts of a prompt as modules, of which each prompt imports some.

The language is that of Prompt Cache (Gim et al., arXiv 2311.04934, section 3.2), read strictly:
modules, unions of exclusive modules, parameters, roles. A selection of modules always has the order
of the schema, so that equal selections are equal token sequences.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from sglang_hybrid.core.named_files import read_text
from sglang_hybrid.core.sentences import quote
from sglang_hybrid.extensions.schemas.declared.xml import MOST_BYTES, Element, parse

LONGEST_NAME = 128
"""Characters of the name of a schema, a module or a parameter."""

NAME = re.compile(rf"[a-zA-Z_][a-zA-Z0-9_.-]{{0,{LONGEST_NAME - 1}}}\Z")
ROLES = ("system", "user", "assistant")
RESERVED = ("schema", "module", "union", "parameter", "prompt", *ROLES)
LONGEST_PARAMETER = 100_000
LENGTH = re.compile(r"[0-9]{1,6}\Z")


@dataclass(frozen=True)
class Text:
    """Text that is part of every prompt that has its parent."""

    text: str


@dataclass(frozen=True)
class Parameter:
    """A place for a value of at most `length` tokens. default: of a prompt that gives none."""

    name: str
    length: int
    default: str | None
    line: int


@dataclass(frozen=True)
class Module:
    """A part that a prompt may import. line: in the schema's file."""

    name: str
    parts: tuple[Part, ...]
    line: int


@dataclass(frozen=True)
class Union:
    """Modules of which a prompt imports one at most."""

    modules: tuple[Module, ...]


@dataclass(frozen=True)
class Role:
    """Parts within one message of a chat."""

    role: str
    parts: tuple[Part, ...]


Part: TypeAlias = Text | Parameter | Module | Union | Role


@dataclass(frozen=True)
class Schema:
    """All that prompts may import."""

    name: str
    parts: tuple[Part, ...]

    def modules(self) -> Iterator[Module]:
        """All modules, in their order, parents first."""
        return _modules(self.parts)


def read_schema(text: str, folder: Path | None = None) -> Schema:
    """The schema in `text`. Raises MarkupError, with line and column.

    folder: where `src` of a module may name files, itself or below; without it none are read.
    """
    root = parse(text)
    if root.tag != "schema":
        raise root.error(f"the document is a <{root.tag}>; it must be a <schema>.")
    return _SchemaReader(folder, len(text)).schema(root)


def inside(part: Part) -> tuple[Part, ...]:
    """The parts directly within a part; those of a union are its modules."""
    if isinstance(part, Union):
        return part.modules
    return part.parts if isinstance(part, Module | Role) else ()


def module_names(part: Module | Union) -> list[str]:
    """Names that a prompt may import here."""
    return [part.name] if isinstance(part, Module) else [each.name for each in part.modules]


def tidy(text: str) -> str:
    """Text as it is read from markup: the common indentation of its lines is removed, and white
    space with a line break at either end becomes one line break; "" if there is nothing else.
    """
    if not text.strip():
        return "" if "\n" in text else text
    first, newline, rest = text.partition("\n")
    text = first + newline + textwrap.dedent(rest)
    head = text[: len(text) - len(text.lstrip())]
    tail = text[len(text.rstrip()) :]
    return ("\n" if "\n" in head else head) + text.strip() + ("\n" if "\n" in tail else tail)


class _SchemaReader:
    def __init__(self, folder: Path | None, size: int) -> None:
        self._folder = None if folder is None else folder.resolve()
        self._size = size

    def schema(self, root: Element) -> Schema:
        name = self._name(root)
        self._only(root, "name")
        parts = self._parts(root, {}, ("module", "union", *ROLES))
        return Schema(name, parts)

    def _parts(
        self, element: Element, scope: dict[str, int], allowed: tuple[str, ...]
    ) -> tuple[Part, ...]:
        parts: list[Part] = []
        for child in element.children:
            if isinstance(child, str):
                text = tidy(child)
                if text:
                    parts.append(Text(text))
                continue
            if child.tag not in allowed:
                raise child.error(
                    f"<{child.tag}> cannot stand in <{element.tag}>; {_these(allowed)} can."
                )
            parts.append(self._part(child, scope))
        return tuple(parts)

    def _part(self, element: Element, scope: dict[str, int]) -> Part:
        if element.tag == "module":
            return self._module(element, scope)
        if element.tag == "union":
            return self._union(element, scope)
        if element.tag == "parameter":
            return self._parameter(element, scope)
        self._only(element)
        return Role(element.tag, self._parts(element, scope, ("module", "union")))

    def _module(self, element: Element, scope: dict[str, int]) -> Module:
        self._only(element, "name", "src")
        name = self._new_name(element, scope)
        source = element.attributes.get("src")
        if source is None:
            parts = self._parts(element, {}, ("module", "union", "parameter"))
        else:
            if any(not isinstance(child, str) or child.strip() for child in element.children):
                raise element.error(
                    f"module {quote(name)} has src and a content; give one of them."
                )
            parts = (Text(self._file(element, source)),)
        return Module(name, parts, element.line)

    def _union(self, element: Element, scope: dict[str, int]) -> Union:
        self._only(element, "scaffold")
        modules = []
        for child in element.children:
            if isinstance(child, str):
                if child.strip():
                    raise element.error("a <union> holds modules only; put its text into one.")
                continue
            if child.tag != "module":
                raise child.error(f"<{child.tag}> cannot stand in <union>; <module> can.")
            modules.append(self._module(child, scope))
        if not modules:
            raise element.error("a <union> must have one module at least.")
        together = element.attributes.get("scaffold")
        if together is not None and together not in [module.name for module in modules]:
            raise element.error(f"scaffold is {quote(together)}, which is no module of this union.")
        return Union(tuple(modules))

    def _parameter(self, element: Element, scope: dict[str, int]) -> Parameter:
        self._only(element, "name", "length", "scaffold")
        name = self._new_name(element, scope)
        length = element.attributes.get("length", "")
        if not LENGTH.match(length) or not 0 < int(length) <= LONGEST_PARAMETER:
            raise element.error(
                f"length of parameter {quote(name)} is {quote(length)}; it must be a whole "
                f"number of tokens from 1 to {LONGEST_PARAMETER:,}."
            )
        if any(not isinstance(child, str) or child.strip() for child in element.children):
            raise element.error(
                f"parameter {quote(name)} must be empty; its value comes with a prompt."
            )
        return Parameter(name, int(length), element.attributes.get("scaffold"), element.line)

    def _name(self, element: Element) -> str:
        name = element.attributes.get("name", "")
        if not NAME.match(name) or name in RESERVED:
            raise element.error(
                f"name of <{element.tag}> is {quote(name)}; it must begin with a letter or "
                "underscore, go on with letters, digits, points, underscores and hyphens, be no "
                f"longer than {LONGEST_NAME} characters, and be no word of the language."
            )
        return name

    def _new_name(self, element: Element, scope: dict[str, int]) -> str:
        name = self._name(element)
        if name in scope:
            raise element.error(
                f"the name {quote(name)} was given on line {scope[name]} already; names beside "
                "each other must differ."
            )
        scope[name] = element.line
        return name

    def _only(self, element: Element, *known: str) -> None:
        for name in element.attributes:
            if name not in known:
                raise element.error(
                    f"<{element.tag}> has the attribute {quote(name)}; it can have "
                    f"{', '.join(known) or 'none'}."
                )

    def _file(self, element: Element, source: str) -> str:
        if self._folder is None:
            raise element.error(
                f"src is {quote(source)}; this schema was not read from a folder, so put the text "
                "into the module."
            )
        try:
            path = (self._folder / source).resolve()
            if not path.is_relative_to(self._folder) or not path.is_file():
                raise element.error(
                    f"src is {quote(source)}, which is no file in the schema's folder."
                )
            self._size += path.stat().st_size
            if self._size > MOST_BYTES:
                raise element.error(
                    f"with {quote(source)} the schema has {self._size:,} bytes; it may have "
                    f"{MOST_BYTES:,} at most."
                )
            return read_text(path, MOST_BYTES)
        except (OSError, ValueError) as error:
            if isinstance(error, type(element.error(""))):
                raise
            raise element.error(f"src is {quote(source)}, which cannot be read as text.") from None


def _modules(parts: tuple[Part, ...]) -> Iterator[Module]:
    for part in parts:
        if isinstance(part, Module):
            yield part
        yield from _modules(inside(part))


def _these(tags: tuple[str, ...]) -> str:
    return ", ".join(f"<{tag}>" for tag in tags)
