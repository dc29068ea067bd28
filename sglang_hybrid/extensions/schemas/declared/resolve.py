"""Resolves the modules that a prompt imports to its text, in pieces, in the schema's order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sglang_hybrid.extensions.schemas.declared.schema import (
    ROLES,
    Module,
    Parameter,
    Part,
    Role,
    Schema,
    Text,
    Union,
    module_names,
    tidy,
)
from sglang_hybrid.extensions.schemas.declared.xml import Element, MarkupError, parse

MODES = ("exact", "modular")
SPACE = "{http://www.w3.org/XML/1998/namespace}space"


@dataclass(frozen=True)
class Import:
    """A module that a prompt imports, with values of its parameters and modules within it."""

    name: str
    values: Mapping[str, str] = field(default_factory=dict)
    imports: tuple[Import, ...] = ()
    line: int = 0
    column: int = 0

    def error(self, message: str) -> MarkupError:
        return MarkupError(message, self.line, self.column)


@dataclass(frozen=True)
class Prompt:
    """A prompt as a client sends it. tail: new text behind the imports, with its role or None.
    modular: modules are computed apart (`modular.py`).
    """

    schema: str
    imports: tuple[Import, ...]
    tail: tuple[tuple[str | None, str], ...] = ()
    modular: bool = False


@dataclass(frozen=True)
class Piece:
    """Text that is tokenized apart.

    role: of its message; None outside of any. message: counts messages, so that two of one role are
    told apart. path: names of the modules it stands in. ends: whether a module ends behind it, or
    prompts part there. part: the text of the schema that it is, or the parameter whose value it is;
    None for text that is no part of the schema.
    """

    text: str
    path: tuple[str, ...]
    role: str | None = None
    message: int = 0
    ends: bool = False
    part: Text | Parameter | None = None

    @property
    def parameter(self) -> Parameter | None:
        """The parameter whose value it is."""
        return self.part if isinstance(self.part, Parameter) else None


@dataclass(frozen=True)
class Resolved:
    """A prompt in the schema's order. warnings: sentences for whoever sent it."""

    pieces: tuple[Piece, ...]
    warnings: tuple[str, ...] = ()


def read_prompt(text: str) -> Prompt:
    """The prompt in `text`: `<prompt schema="..." mode="...">`, imports, then new text. Raises
    MarkupError.
    """
    root = parse(text)
    if root.tag != "prompt":
        raise root.error(f"the document is a <{root.tag}>; it must be a <prompt>.")
    unknown = root.attributes.keys() - {"schema", "mode"}
    if unknown or "schema" not in root.attributes:
        raise root.error("a <prompt> has the attribute schema, and may have mode, and no other.")
    mode = root.attributes.get("mode", "exact")
    if mode not in MODES:
        raise root.error(f"mode is {mode!r}; it must be {' or '.join(MODES)}.")
    imports: list[Import] = []
    tail: list[tuple[str | None, str]] = []
    for child in root.children:
        if isinstance(child, str):
            if child.strip():
                tail.append((None, tidy(child)))
        elif child.tag in ROLES:
            tail.append((child.tag, _message(child)))
        elif tail:
            raise child.error(f"<{child.tag}> is imported behind new text; imports come first.")
        else:
            imports.append(_import(child))
    return Prompt(root.attributes["schema"], tuple(imports), tuple(tail), mode == "modular")


def resolve(schema: Schema, prompt: Prompt) -> Resolved:
    """The pieces of a prompt. Raises MarkupError if it imports what the schema does not have."""
    resolver = _Resolver()
    pieces = [*resolver.parts(schema.parts, (), prompt.imports, f"schema {schema.name!r}")]
    message = max((piece.message for piece in pieces), default=0)
    for role, text in prompt.tail:
        message += 1
        pieces.append(Piece(text, (), role, message if role else 0))
    return Resolved(tuple(pieces), tuple(resolver.warnings))


class _Resolver:
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self._message = 0

    def parts(
        self,
        parts: tuple[Part, ...],
        path: tuple[str, ...],
        imports: tuple[Import, ...],
        where: str,
        values: Mapping[str, str] | None = None,
    ) -> Iterator[Piece]:
        """Pieces of the parts of a schema or of a module, which `where` names."""
        asked = self._asked(parts, imports, where)
        yield from self._of(parts, path, asked, values or {}, None)

    def _of(
        self,
        parts: tuple[Part, ...],
        path: tuple[str, ...],
        asked: Mapping[str, Import],
        values: Mapping[str, str],
        role: str | None,
    ) -> Iterator[Piece]:
        for at, part in enumerate(parts):
            if isinstance(part, Text | Parameter):
                text = _text_of(part, values)
                branches = at + 1 == len(parts) or isinstance(parts[at + 1], Module | Union)
                yield Piece(text, path, role, self._message if role else 0, branches, part)
            elif isinstance(part, Role):
                self._message += 1
                yield from self._of(part.parts, path, asked, values, part.role)
            else:
                for module in (part,) if isinstance(part, Module) else part.modules:
                    if module.name in asked:
                        yield from self._module(module, path, asked[module.name], role)

    def _module(
        self, module: Module, path: tuple[str, ...], asked: Import, role: str | None
    ) -> Iterator[Piece]:
        known = {part.name: part for part in module.parts if isinstance(part, Parameter)}
        for name in asked.values:
            if name not in known:
                raise asked.error(f"module {module.name!r} has no parameter {name!r}.")
        for name, parameter in known.items():
            if name not in asked.values and parameter.default is None:
                raise asked.error(
                    f"parameter {name!r} of module {module.name!r} has no value; give it as an "
                    "attribute."
                )
        inner = self._asked(module.parts, asked.imports, f"module {module.name!r}")
        yield from self._of(module.parts, (*path, module.name), inner, asked.values, role)

    def _asked(
        self, parts: tuple[Part, ...], imports: tuple[Import, ...], where: str
    ) -> dict[str, Import]:
        """Imports by name: each is there, once, one of a union, in the schema's order."""
        groups = [module_names(part) for part in _flat(parts)]
        order = {name: at for at, names in enumerate(groups) for name in names}
        asked: dict[str, Import] = {}
        taken: dict[int, str] = {}
        last = -1
        for one in imports:
            if one.name not in order:
                raise one.error(f"{where} has no module {one.name!r} here.")
            at = order[one.name]
            if one.name in asked:
                raise one.error(f"module {one.name!r} is imported twice.")
            if at in taken:
                raise one.error(
                    f"modules {taken[at]!r} and {one.name!r} exclude each other; import one of "
                    "them."
                )
            if at < last:
                self.warnings.append(
                    f"Module {one.name!r} was imported out of order; it stands where {where} has "
                    "it."
                )
            last = max(last, at)
            asked[one.name], taken[at] = one, one.name
        return asked


def _text_of(part: Text | Parameter, values: Mapping[str, str]) -> str:
    if isinstance(part, Text):
        return part.text
    value = values.get(part.name, part.default)
    assert value is not None  # the import was checked
    return value


def _flat(parts: tuple[Part, ...]) -> Iterator[Module | Union]:
    """Modules and unions that can be imported directly, those within roles among them."""
    for part in parts:
        if isinstance(part, Role):
            yield from _flat(part.parts)
        elif isinstance(part, Module | Union):
            yield part


def _import(element: Element) -> Import:
    inner = []
    for child in element.children:
        if not isinstance(child, str):
            inner.append(_import(child))
        elif child.strip():
            raise element.error(
                f"<{element.tag}> has text; values of parameters are attributes, and new text "
                "comes behind all imports."
            )
    return Import(element.tag, element.attributes, tuple(inner), element.line, element.column)


def _message(element: Element) -> str:
    """The text of a message, as it is with xml:space="preserve"."""
    space = element.attributes.get(SPACE, "default")
    if element.attributes.keys() - {SPACE} or space not in ("default", "preserve"):
        raise element.error(f'<{element.tag}> of a prompt may have xml:space="preserve" alone.')
    if any(not isinstance(child, str) for child in element.children):
        raise element.error(f"<{element.tag}> of a prompt holds text only.")
    text = "".join(child for child in element.children if isinstance(child, str))
    return text if space == "preserve" else tidy(text)
