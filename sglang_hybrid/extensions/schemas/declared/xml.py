"""XML from strangers: elements with their line and column, within limits, without entities.

Parsed by defusedxml, which refuses document types, entities and anything external.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from xml.etree.ElementTree import ParseError

from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import DefusedXMLParser

MOST_BYTES = 1 << 20
"""Bytes of a schema or a prompt, with all files that it names."""

MOST_DEPTH = 64
MOST_ELEMENTS = 2_000


class MarkupError(ValueError):
    """A mistake in a document, and its place; the message is one sentence."""

    def __init__(self, message: str, line: int = 0, column: int = 0) -> None:
        place = f"line {line}, column {column}: " if line else ""
        super().__init__(place + message)
        self.line = line
        self.column = column


@dataclass
class Element:
    """An element. children: elements and runs of text. line, column: of its start, from 1."""

    tag: str
    attributes: Mapping[str, str]
    line: int
    column: int
    children: list[Element | str] = field(default_factory=list)

    def error(self, message: str) -> MarkupError:
        """An error at this element."""
        return MarkupError(message, self.line, self.column)


def parse(text: str) -> Element:
    """The root element of `text`. Raises MarkupError."""
    data = text.encode()
    if len(data) > MOST_BYTES:
        raise MarkupError(
            f"the document has {len(data):,} bytes; it may have {MOST_BYTES:,} at most."
        )
    builder = _Builder()
    parser = DefusedXMLParser(target=builder, encoding="utf-8", forbid_dtd=True)
    builder.expat = parser.parser
    try:
        parser.feed(data)
        root: Element = parser.close()
    except ParseError as error:
        line, column = error.position
        reason = str(error).partition(":")[0]
        raise MarkupError(
            f"the document is not well-formed ({reason}).", line, column + 1
        ) from None
    except DefusedXmlException:
        line, column = builder.place()
        raise MarkupError(
            "the document has a document type or an entity; leave it out.", line, column
        ) from None
    return root


class _Builder:
    """Builds the tree of elements while expat reads."""

    def __init__(self) -> None:
        self.expat: object = None
        self._open: list[Element] = []
        self._root: Element | None = None
        self._count = 0
        self._runs: list[str] = []  # of the text that is being read, which comments may divide

    def place(self) -> tuple[int, int]:
        """Line and column that are being read, from 1."""
        return (
            getattr(self.expat, "CurrentLineNumber", 0),
            getattr(self.expat, "CurrentColumnNumber", 0) + 1,
        )

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        element = Element(tag, dict(attributes), *self.place())
        self._end_text()
        self._count += 1
        if len(self._open) >= MOST_DEPTH:
            raise element.error(f"elements are nested more than {MOST_DEPTH} deep.")
        if self._count > MOST_ELEMENTS:
            raise element.error(f"the document has more than {MOST_ELEMENTS:,} elements.")
        if self._open:
            self._open[-1].children.append(element)
        else:
            self._root = element
        self._open.append(element)

    def end(self, tag: str) -> None:
        self._end_text()
        self._open.pop()

    def data(self, text: str) -> None:
        self._runs.append(text)

    def _end_text(self) -> None:
        if self._runs:
            self._open[-1].children.append("".join(self._runs))
            self._runs.clear()

    def close(self) -> Element:
        assert self._root is not None
        return self._root
