"""What keeps a schema's prompts from being cached, and what would mend it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from sglang_hybrid.prompts.schemas.budget import saved
from sglang_hybrid.prompts.schemas.schema import Module, Parameter, Part, Role, Schema, Text, Union
from sglang_hybrid.prompts.schemas.tree import Path, prefix_tree

EARLY_SHARE = 0.5
"""Of a schema's tokens: what comes before so many of them is early."""

MOST_MODULES = 200
"""Of a schema whose order is weighed."""

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
    """What to change in a schema, by line.

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
        found += _early_unions(schema, length, counts or {}, requests)
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
        elif isinstance(part, Module):
            inner = list(_pieces(part.parts, length, part.line, before))
        elif isinstance(part, Role):
            inner = list(_pieces(part.parts, length, line, before))
        else:
            ways = [list(_pieces((module,), length, line, before)) for module in part.modules]
            inner = max(ways, key=_tokens)
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
                f"{behind:,} of {total:,} tokens come behind parameter {piece.part.name!r} and "
                "are computed again for each new value; move it to the end.",
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
                f"module {module.name!r} has {tokens:,} tokens; a state takes the memory of "
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
                f"{match[0]!r} looks like a date or an id; if it changes, everything behind it is "
                "computed again. Make it a parameter at the end.",
            )


def _early_unions(
    schema: Schema, length: Callable[[str], int], counts: Mapping[Path, int], requests: int
) -> Iterator[Finding]:
    """Unions and modules whose place would better be another one's: those that vary most belong
    behind those that vary least. Told for neighbours whose exchange saves most, with one state held
    at each of the positions that most prompts pass.
    """
    for owner, parts in _lists(schema.parts):
        choices = [at for at, part in enumerate(parts) if isinstance(part, Module | Union)]
        best: tuple[float, int, int] | None = None
        for first, second in itertools.pairwise(choices):
            if second != first + 1:
                continue
            gain = _gain(schema, parts, first, second, length, counts, requests)
            if gain > 1 and (best is None or gain > best[0]):
                best = (gain, first, second)
        if best is not None:
            gain, first, second = best
            yield Finding(
                _line(parts[first], owner),
                "early-choice",
                f"{_name(parts[first])} varies more than {_name(parts[second])} behind it; in the "
                f"other order a state at the likeliest prefixes would save {gain:,.0f} tokens more "
                "per prompt.",
            )


def _gain(
    schema: Schema,
    parts: tuple[Part, ...],
    first: int,
    second: int,
    length: Callable[[str], int],
    counts: Mapping[Path, int],
    requests: int,
) -> float:
    swapped = list(parts)
    swapped[first], swapped[second] = parts[second], parts[first]
    other = _replaced(schema, parts, tuple(swapped))
    return _saving(other, length, counts, requests) - _saving(schema, length, counts, requests)


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
    def of(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        if parts is old:
            return new
        return tuple(
            Role(part.role, of(part.parts))
            if isinstance(part, Role)
            else Module(part.name, of(part.parts), part.line)
            if isinstance(part, Module)
            else part
            for part in parts
        )

    return Schema(schema.name, of(schema.parts))


def _lists(parts: tuple[Part, ...], owner: int = 0) -> Iterator[tuple[int, tuple[Part, ...]]]:
    """Lists of parts whose order could be another: of the schema, its roles and its modules."""
    yield owner, parts
    for part in parts:
        if isinstance(part, Role):
            yield from _lists(part.parts, owner)
        elif isinstance(part, Module):
            yield from _lists(part.parts, part.line)


def _line(part: Part, owner: int) -> int:
    if isinstance(part, Union):
        return part.modules[0].line
    return part.line if isinstance(part, Module) else owner


def _name(part: Part) -> str:
    if isinstance(part, Union):
        return f"the union of {part.modules[0].name!r}"
    return f"module {part.name!r}" if isinstance(part, Module) else "text"
