"""Finds what keeps a schema's prompts from being cached, and what would mend it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from sglang_hybrid.core.sentences import quote
from sglang_hybrid.extensions.schemas.declared.budget import saved
from sglang_hybrid.extensions.schemas.declared.schema import (
    Module,
    Parameter,
    Part,
    Role,
    Schema,
    Text,
    Union,
)
from sglang_hybrid.extensions.schemas.declared.tree import Path, prefix_tree

EARLY_SHARE = 0.5
"""Share of a schema's tokens: text that begins before it is early."""

MOST_MODULES = 200
"""Modules of a schema whose order is examined, at most."""

DATES = re.compile(
    r"\b\d{4}-\d{2}-\d{2}\b|\b\d{1,2}:\d{2}\b"
    r"|\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"
    r"|\b\d{9,}\b|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,}\b",
    re.IGNORECASE,
)
"""Dates, times of day, UUIDs, long numbers and hexadecimal ids: text that an application probably
writes anew each time.
"""


@dataclass(frozen=True)
class Finding:
    """A sentence about a part. line: in the schema, 0 if it is about the whole."""

    line: int
    rule: str
    sentence: str


def lint(
    schema: Schema,
    length: Callable[[str], int],
    *,
    state_tokens: int = 0,
    counts: Mapping[Path, int] | None = None,
    requests: int = 0,
) -> list[Finding]:
    """The changes to make in a schema, by line.

    length: tokens of a text. state_tokens: tokens whose KV takes as much memory as a state; 0 if
    that is not known. counts: how often each module was imported in so many `requests`.
    """
    pieces = list(_pieces(schema.parts, length))
    total = sum(piece.tokens for piece in pieces)
    found = [
        *_parameters(pieces, total),
        *_short_modules(schema, length, state_tokens),
        *_changing_text(pieces, total),
    ]
    if sum(1 for _ in schema.modules()) <= MOST_MODULES:
        saving = partial(_saving, length=length, counts=counts or {}, requests=requests)
        found += _early_choices(schema, saving)
    return sorted(found, key=lambda finding: finding.line)


@dataclass(frozen=True)
class _Placed:
    """A text or a parameter, with the tokens before it on the longest path."""

    part: Text | Parameter
    line: int
    before: int
    tokens: int


def _pieces(
    parts: tuple[Part, ...], length: Callable[[str], int], line: int = 0, before: int = 0
) -> Iterator[_Placed]:
    for part in parts:
        if isinstance(part, Text):
            inner = [_Placed(part, line, before, length(part.text))]
        elif isinstance(part, Parameter):
            inner = [_Placed(part, part.line, before, part.length)]
        elif isinstance(part, Union):
            ways = [list(_pieces((module,), length, line, before)) for module in part.modules]
            inner = max(ways, key=_tokens)
        else:
            around = part.line if isinstance(part, Module) else line
            inner = list(_pieces(part.parts, length, around, before))
        yield from inner
        before += _tokens(inner)


def _tokens(pieces: list[_Placed]) -> int:
    return sum(piece.tokens for piece in pieces)


def _parameters(pieces: list[_Placed], total: int) -> Iterator[Finding]:
    for piece in pieces:
        behind = total - piece.before - piece.tokens
        if isinstance(piece.part, Parameter) and behind > EARLY_SHARE * total:
            yield Finding(
                piece.line,
                "early-parameter",
                f"{behind:,} of {total:,} tokens come behind parameter {quote(piece.part.name)} "
                "and are computed again for each new value; move it to the end.",
            )


def _short_modules(
    schema: Schema, length: Callable[[str], int], state_tokens: int
) -> Iterator[Finding]:
    for module in schema.modules():
        tokens = _tokens(list(_pieces(module.parts, length)))
        if tokens < state_tokens:
            yield Finding(
                module.line,
                "short-module",
                f"module {quote(module.name)} has {tokens:,} tokens; a state takes the memory of "
                f"{state_tokens:,} tokens of KV. Join it with a neighbour if it can be.",
            )


def _changing_text(pieces: list[_Placed], total: int) -> Iterator[Finding]:
    for piece in pieces:
        if not isinstance(piece.part, Text) or piece.before >= EARLY_SHARE * total:
            continue
        match = DATES.search(piece.part.text)
        if match is not None:
            yield Finding(
                piece.line,
                "changing-text",
                f"{quote(match[0])} looks like a date or an id; if it changes, everything behind "
                "it is computed again. Make it a parameter at the end.",
            )


def _early_choices(schema: Schema, saving: Callable[[Schema], float]) -> Iterator[Finding]:
    """Unions and modules whose place would better be another one's: those that vary most belong
    behind those that vary least. Of each list of parts the neighbours are told whose exchange saves
    most.

    saving: expected tokens that a schema's prompts save.
    """
    before = saving(schema)
    for parts in _lists(schema.parts):
        best: tuple[float, Module | Union, Module | Union] | None = None
        for at, (first, second) in enumerate(itertools.pairwise(parts)):
            if not (isinstance(first, Module | Union) and isinstance(second, Module | Union)):
                continue
            swapped = (*parts[:at], second, first, *parts[at + 2 :])
            gain = saving(_replaced(schema, parts, swapped)) - before
            if gain > 1 and (best is None or gain > best[0]):
                best = (gain, first, second)
        if best is not None:
            gain, first, second = best
            yield Finding(
                first.modules[0].line if isinstance(first, Union) else first.line,
                "early-choice",
                f"{_name(first)} varies more than {_name(second)} behind it; in the other order a "
                f"state at the likeliest prefixes would save {gain:,.0f} tokens more per prompt.",
            )


def _saving(
    schema: Schema, length: Callable[[str], int], counts: Mapping[Path, int], requests: int
) -> float:
    """Expected tokens saved by states along the likeliest path; 0 if the schema is too large."""
    try:
        node = prefix_tree(schema, length, counts, requests)
    except ValueError:
        return 0.0
    chosen = []
    while node.children:
        node = max(node.children, key=lambda child: child.probability)
        chosen.append(node)
    return saved(chosen)


def _replaced(schema: Schema, old: tuple[Part, ...], new: tuple[Part, ...]) -> Schema:
    """The schema with `new` in the place of its list of parts `old`."""

    def of(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        if parts is old:
            return new
        return tuple(
            replace(part, parts=of(part.parts)) if isinstance(part, Role | Module) else part
            for part in parts
        )

    return replace(schema, parts=of(schema.parts))


def _lists(parts: tuple[Part, ...]) -> Iterator[tuple[Part, ...]]:
    """Lists of parts whose order could be another: of the schema, its roles and its modules."""
    yield parts
    for part in parts:
        if isinstance(part, Role | Module):
            yield from _lists(part.parts)


def _name(part: Module | Union) -> str:
    if isinstance(part, Union):
        return f"the union of {quote(part.modules[0].name)}"
    return f"module {quote(part.name)}"
