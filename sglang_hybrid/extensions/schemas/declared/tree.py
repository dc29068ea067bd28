"""All prompts that a schema allows, as a tree of their common prefixes, with probabilities.

A node is a position at which a checkpoint could be held: the end of a module, or where prompts
part. Parameters end a path, since the next tokens depend on their values. The parts that may follow
depend on the place in the schema only, so the tree is kept as one shape per place and made node by
node where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from sglang_hybrid.extensions.schemas.declared.resolve import Import
from sglang_hybrid.extensions.schemas.declared.schema import (
    Module,
    Parameter,
    Part,
    Role,
    Schema,
    Text,
    Union,
    inside,
)

LONGEST_CHAIN = 150
"""Texts and choices that may follow each other on one path."""

MOST_EDGES = 20_000

Path: TypeAlias = tuple[str, ...]
"""Names of a module and of those around it, the outermost first."""


@dataclass
class Shape:
    """The parts that may follow at a place of a schema."""

    edges: list[Edge] = field(default_factory=list)


@dataclass(frozen=True)
class Edge:
    """A text that may come next. share: of the prompts that reach this place, how many continue
    with it (0 to 1). imports: modules that these prompts import for it. target: what may follow it.
    """

    share: float
    tokens: int
    imports: tuple[Path, ...]
    target: Shape


@dataclass(eq=False)
class PrefixNode:
    """A position: tokens from the start, and the probability that a prompt passes it. imports: the
    modules that a prompt imports to come here.
    """

    shape: Shape
    parent: PrefixNode | None = None
    depth: int = 0
    probability: float = 1.0
    imports: tuple[Path, ...] = ()

    @cached_property
    def children(self) -> list[PrefixNode]:
        return [
            PrefixNode(
                edge.target,
                self,
                self.depth + edge.tokens,
                self.probability * edge.share,
                self.imports + edge.imports,
            )
            for edge in self.shape.edges
        ]

    def above(self) -> Iterator[PrefixNode]:
        """Nodes above this one, the nearest first, without the root."""
        node = self.parent
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def walk(self) -> Iterator[PrefixNode]:
        """This node and all below it, level by level."""
        level = [self]
        while level:
            yield from level
            level = [child for node in level for child in node.children]


def prefix_tree(
    schema: Schema, length: Callable[[str], int], counts: Mapping[Path, int], requests: int
) -> PrefixNode:
    """The root of the tree of a schema's prefixes. Raises ValueError if it is too large.

    length: tokens of a text. counts: how often each module was imported in so many `requests`; at
    first each choice is as likely as the others (a prior of one request each).
    """
    chain = _chain(schema.parts)
    if chain > LONGEST_CHAIN:
        raise ValueError(
            f"the schema has {chain:,} parts one after another; the prefixes of at most "
            f"{LONGEST_CHAIN} can be weighed."
        )
    steps = tuple((part, ()) for part in schema.parts)
    return PrefixNode(_Shapes(length, counts, requests).after(steps))


def _chain(parts: tuple[Part, ...]) -> int:
    """The number of parts on the longest path."""
    total = 0
    for part in parts:
        ways = [way.parts for way in part.modules] if isinstance(part, Union) else [inside(part)]
        total += 1 + max(map(_chain, ways))
    return total


def as_imports(paths: tuple[Path, ...]) -> tuple[Import, ...]:
    """Modules by their paths as the imports of a prompt."""
    names = dict.fromkeys(path[0] for path in paths)
    return tuple(
        Import(name, {}, as_imports(tuple(p[1:] for p in paths if p[0] == name and p[1:])))
        for name in names
    )


Steps: TypeAlias = tuple[tuple[Part, Path], ...]


class _Shapes:
    """One shape for each place in a schema."""

    def __init__(
        self, length: Callable[[str], int], counts: Mapping[Path, int], requests: int
    ) -> None:
        self._length = length
        self._counts = counts
        self._requests = requests
        self._known: dict[tuple[tuple[int, Path], ...], Shape] = {}
        self._edges_left = MOST_EDGES

    def after(self, steps: Steps) -> Shape:
        """The parts that may follow at the place of a schema whose next parts are `steps`, each
        with its path.
        """
        key = tuple((id(part), path) for part, path in steps)
        if key not in self._known:
            edges = self._edges(steps)
            self._check(edges)
            self._edges_left -= len(edges)
            self._known[key] = Shape(edges)
        return self._known[key]

    def _check(self, edges: Sequence[Edge]) -> None:
        """Raise ValueError if there are more edges with these than may be."""
        if len(edges) > self._edges_left:
            raise ValueError(
                f"the schema's parts can follow each other in more than {MOST_EDGES:,} ways; "
                "its prefixes cannot be weighed."
            )

    def _edges(self, steps: Steps) -> list[Edge]:
        if not steps:
            return []
        (part, path), rest = steps[0], steps[1:]
        if isinstance(part, Parameter):
            return []
        if isinstance(part, Text):
            return [Edge(1.0, self._length(part.text), (), self.after(rest))]
        if isinstance(part, Role):
            return self.after((*((each, path) for each in part.parts), *rest)).edges
        return self._choices(part, path, rest)

    def _choices(self, part: Module | Union, path: Path, rest: Steps) -> list[Edge]:
        modules = (part,) if isinstance(part, Module) else part.modules
        around = self._counts.get(path, 0) if path else self._requests
        total = around + len(modules) + 1
        left = around
        edges: list[Edge] = []
        for module in modules:
            own = (*path, module.name)
            count = min(self._counts.get(own, 0), left)
            left -= count
            inner = self.after((*((each, own) for each in module.parts), *rest))
            edges += [
                replace(edge, share=edge.share * (count + 1) / total, imports=(own, *edge.imports))
                for edge in inner.edges
            ]
            self._check(edges)
        skipped = (left + 1) / total
        edges += [replace(edge, share=edge.share * skipped) for edge in self.after(rest).edges]
        return edges
