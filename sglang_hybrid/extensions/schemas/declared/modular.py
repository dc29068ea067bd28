"""Modular mode: the modules of a schema are computed apart and put together in any selection.

That is what Prompt Cache computes (Gim et al., arXiv 2311.04934, section 3.3). Each module has a
place of its own in the schema, and its keys and values are computed as if nothing else were in the
prompt, at the positions of that place. A prompt takes those of the modules that it imports, and
new text attends to all of them. The result differs from that of the whole prompt, so such prompts
never share anything with exact ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from sglang_hybrid.extensions.schemas.declared.resolve import Resolved
from sglang_hybrid.extensions.schemas.declared.schema import (
    Module,
    Parameter,
    Part,
    Role,
    Schema,
    Text,
    Union,
)
from sglang_hybrid.extensions.schemas.declared.tokens import PromptTokenizer


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
        """The position of the prompt's last token."""
        return self.position + len(self.new) - 1

    @property
    def digest(self) -> str:
        """A digest of all positions, so that equal tokens at other positions have other keys."""
        places = ",".join(f"{one.start}:{len(one.ids)}" for one in self.segments)
        return blake2b(f"{places},{self.position}".encode(), digest_size=12).hexdigest()


@dataclass(frozen=True)
class Run:
    """Texts and parameters of one module that no optional part separates. They are computed
    together, one behind the other. start: position of the first token.
    """

    start: int
    parts: list[Text | Parameter]


class Layout:
    """The place of each text of a schema: modules that exclude each other share theirs, and a
    parameter has room for its longest value.

    runs: in the schema's order. end: position behind all of them.
    """

    def __init__(self, schema: Schema, tokenizer: PromptTokenizer) -> None:
        self.schema = schema
        self.tokenizer = tokenizer
        self.runs: list[Run] = []
        self._opened: list[int] = []
        self._closed: list[int] = []
        in_messages = any(isinstance(part, Role) for part in schema.parts)
        self.end = self._place(schema.parts, 0 if in_messages else len(tokenizer.start))
        self._starts = {id(run.parts[0]): run.start for run in self.runs}

    def start_of(self, part: Text | Parameter) -> int | None:
        """Position of the run that begins with `part`, a part of this layout's schema; None if
        `part` continues the run of the part before it.
        """
        return self._starts.get(id(part))

    def opened(self, message: int) -> int:
        """Position of what the chat template writes before a message, counted from 1."""
        return self._opened[message - 1]

    def closed(self, message: int) -> int:
        """Position of what the chat template writes after a message, counted from 1."""
        return self._closed[message - 1]

    def _place(self, parts: Sequence[Part], at: int) -> int:
        """Place parts from position `at` on; returns the position behind them."""
        begins = True
        for part in parts:
            if isinstance(part, Text | Parameter):
                if begins:
                    self.runs.append(Run(at, []))
                self.runs[-1].parts.append(part)
                at += self.tokenizer.length(part.text) if isinstance(part, Text) else part.length
                begins = False
                continue
            begins = True
            if isinstance(part, Module):
                at = self._place(part.parts, at)
            elif isinstance(part, Union):
                at = max(self._place(one.parts, at) for one in part.modules)
            else:
                before, after = self.tokenizer.around(part.role)
                self._opened.append(at)
                at = self._place(part.parts, at + before)
                self._closed.append(at)
                at += after
        return at


def modular(layout: Layout, resolved: Resolved) -> ModularPrompt:
    """A prompt whose imports are segments. Raises ValueError like `PromptTokenizer.tokenized`.

    layout: of the schema from which `resolved` imports.
    """
    tokenizer = layout.tokenizer
    segments: list[Segment] = []
    new: list[int] = []
    if not any(piece.role for piece in resolved.pieces):
        segments.append(Segment(tuple(tokenizer.start), 0))
    for before, piece, after in tokenizer.framed(resolved.pieces):
        ids = tokenizer.ids(piece)
        if piece.part is None:
            new += [*before, *ids, *after]
            continue
        if before:
            segments.append(Segment(before, layout.opened(piece.message)))
        start = layout.start_of(piece.part)
        if start is None:
            last = segments.pop()
            segments.append(Segment(last.ids + ids, last.start))
        else:
            segments.append(Segment(ids, start))
        if after:
            segments.append(Segment(after, layout.closed(piece.message)))
    return _with_new_token(tuple(one for one in segments if one.ids), tuple(new), layout.end)


def prepared_segments(layout: Layout) -> list[Segment]:
    """The runs that hold no values, and so can be computed before any prompt comes."""
    found = []
    for run in layout.runs:
        texts = [part for part in run.parts if isinstance(part, Text)]
        if len(texts) == len(run.parts):
            ids = [token for part in texts for token in layout.tokenizer.stored_ids(part.text)]
            found.append(Segment(tuple(ids), run.start))
    return [segment for segment in found if segment.ids]


def _with_new_token(
    segments: tuple[Segment, ...], new: tuple[int, ...], position: int
) -> ModularPrompt:
    """The prompt with at least one new token, since the next one is read from its output."""
    if new or not segments:
        return ModularPrompt(segments, new, position)
    *rest, last = segments
    shorter = [Segment(last.ids[:-1], last.start)] if len(last.ids) > 1 else []
    return ModularPrompt((*rest, *shorter), last.ids[-1:], last.start + len(last.ids) - 1)
