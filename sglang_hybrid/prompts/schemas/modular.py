"""Modular mode: the modules of a schema are computed apart and put together in any selection.

That is what Prompt Cache computes (Gim et al., arXiv 2311.04934, section 3.3). Each module has a
place of its own in the schema, and its keys and values are computed as if nothing else were in the
prompt, at the positions of that place. A prompt takes those of the modules that it imports, and
new text attends to all of them. The result differs from that of the whole prompt, so such prompts
never share anything with exact ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from sglang_hybrid.prompts.schemas.resolve import Piece, Resolved
from sglang_hybrid.prompts.schemas.schema import Module, Parameter, Part, Role, Schema, Text, Union
from sglang_hybrid.prompts.schemas.tokens import PromptTokenizer

Path = tuple[str, ...]


@dataclass(frozen=True)
class Segment:
    """Tokens that are computed together, without anything else. start: position of the first."""

    ids: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class ModularPrompt:
    """Segments in the schema's order, then new tokens. position: of the first of those."""

    segments: tuple[Segment, ...]
    new: tuple[int, ...]
    position: int

    @property
    def ids(self) -> list[int]:
        """All tokens, one after another."""
        return [token for segment in self.segments for token in segment.ids] + list(self.new)

    @property
    def last_position(self) -> int:
        """Of the prompt's last token."""
        return self.position + len(self.new) - 1

    @property
    def digest(self) -> str:
        """Of where everything stands: equal tokens at other positions have other keys."""
        places = ",".join(f"{one.start}:{len(one.ids)}" for one in self.segments)
        return blake2b(f"{places},{self.position}".encode(), digest_size=12).hexdigest()


class Layout:
    """The place of each text of a schema: modules that exclude each other share theirs, and a
    parameter has room for its longest value.

    Texts and values of one module that nothing optional parts are a run: they are computed
    together, one behind the other.
    """

    def __init__(self, schema: Schema, tokenizer: PromptTokenizer) -> None:
        self.schema = schema
        self.tokenizer = tokenizer
        self._runs: dict[tuple[Path, int], int | None] = {}
        self._counts: Counter[Path] = Counter()
        self._opened: list[int] = []
        self._closed: list[int] = []
        in_messages = any(isinstance(part, Role) for part in schema.parts)
        self.end = self._of(schema.parts, (), 0 if in_messages else len(tokenizer.start))

    def run(self, path: Path, number: int) -> int | None:
        """Position of the run that begins with this text, counted among those directly in the
        module at `path`; None if it goes on with the run before it.
        """
        return self._runs[path, number]

    def opened(self, message: int) -> int:
        """Position of what the chat template writes before a message, counted from 1."""
        return self._opened[message - 1]

    def closed(self, message: int) -> int:
        """Position of what it writes after it."""
        return self._closed[message - 1]

    def _of(self, parts: Sequence[Part], path: Path, at: int) -> int:
        """Lay out parts from position `at`; returns the position behind them."""
        begins = True
        for part in parts:
            if isinstance(part, Text | Parameter):
                self._runs[path, self._counts[path]] = at if begins else None
                self._counts[path] += 1
                at += self.tokenizer.length(part.text) if isinstance(part, Text) else part.length
                begins = False
                continue
            begins = True
            if isinstance(part, Module):
                at = self._of(part.parts, (*path, part.name), at)
            elif isinstance(part, Union):
                at = max(self._of(one.parts, (*path, one.name), at) for one in part.modules)
            else:
                before, after = self.tokenizer.around(part.role)
                self._opened.append(at)
                at = self._of(part.parts, path, at + before)
                self._closed.append(at)
                at += after
        return at


def modular(layout: Layout, resolved: Resolved) -> ModularPrompt:
    """A prompt whose imports are segments. Raises ValueError like `PromptTokenizer.tokenized`.

    layout: of the schema that it imports from.
    """
    tokenizer = layout.tokenizer
    segments: list[Segment] = []
    new: list[int] = []
    counts: Counter[Path] = Counter()
    if not any(piece.role for piece in resolved.pieces):
        segments.append(Segment(tuple(tokenizer.start), 0))
    for before, piece, after in tokenizer.framed(resolved.pieces):
        ids = tokenizer.ids(piece)
        if piece.is_new:
            new += [*before, *ids, *after]
            continue
        if before:
            segments.append(Segment(before, layout.opened(piece.message)))
        start = layout.run(piece.path, counts[piece.path])
        counts[piece.path] += 1
        if start is None:
            last = segments.pop()
            segments.append(Segment(last.ids + ids, last.start))
        else:
            segments.append(Segment(ids, start))
        if after:
            segments.append(Segment(after, layout.closed(piece.message)))
    return _ending_in_new(tuple(one for one in segments if one.ids), tuple(new), layout.end)


def prepared_segments(layout: Layout) -> list[Segment]:
    """Runs of every module that hold no values, and so can be computed before any prompt comes."""
    return [run for run in _runs(layout.schema.parts, (), layout, Counter()) if run.ids]


def _runs(
    parts: Sequence[Part], path: Path, layout: Layout, counts: Counter[Path]
) -> Iterator[Segment]:
    run: Segment | None = None
    for part in (*parts, None):
        if isinstance(part, Text | Parameter):
            start = layout.run(path, counts[path])
            counts[path] += 1
            ids = layout.tokenizer.ids(Piece(part.text, path)) if isinstance(part, Text) else ()
            if start is not None:
                run = Segment((), start)
            if isinstance(part, Parameter):
                run = None  # what is computed with it depends on its value
            elif run is not None:
                run = Segment(run.ids + ids, run.start)
            continue
        if run is not None:
            yield run
            run = None
        if isinstance(part, Role):
            yield from _runs(part.parts, path, layout, counts)
        elif part is not None:
            for one in part.modules if isinstance(part, Union) else (part,):
                yield from _runs(one.parts, (*path, one.name), layout, counts)


def _ending_in_new(
    segments: tuple[Segment, ...], new: tuple[int, ...], position: int
) -> ModularPrompt:
    """At least one token is new, for the next one is read from its output."""
    if new or not segments:
        return ModularPrompt(segments, new, position)
    *rest, last = segments
    shorter = [Segment(last.ids[:-1], last.start)] if len(last.ids) > 1 else []
    return ModularPrompt((*rest, *shorter), last.ids[-1:], last.start + len(last.ids) - 1)
