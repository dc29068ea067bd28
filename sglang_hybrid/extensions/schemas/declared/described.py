"""A schema as those see it who ask for it: its parts, their tokens, and how often each was used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_hybrid.extensions.schemas.declared.schema import Module, Part, Role, Text, Union
from sglang_hybrid.extensions.schemas.declared.tree import Path


def described(
    part: Part, length: Callable[[str], int], imports: Mapping[Path, int], path: Path = ()
) -> dict[str, Any]:
    """A part of a schema and all that it holds, as JSON.

    length: tokens of a text. imports: how often each module was imported, by its path. path: of the
    module around the part.
    """

    def inner(parts: Sequence[Part], path: Path) -> list[dict[str, Any]]:
        return [described(each, length, imports, path) for each in parts]

    if isinstance(part, Text):
        return {"text": True, "tokens": length(part.text)}
    if isinstance(part, Module):
        own = (*path, part.name)
        return {
            "module": part.name,
            "line": part.line,
            "imports": imports.get(own, 0),
            "parts": inner(part.parts, own),
        }
    if isinstance(part, Union):
        return {"union": inner(part.modules, path)}
    if isinstance(part, Role):
        return {"role": part.role, "parts": inner(part.parts, path)}
    return {"parameter": part.name, "line": part.line, "length": part.length}
