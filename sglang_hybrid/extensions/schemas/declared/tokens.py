"""The token ids of a resolved prompt, and the positions at which its modules end."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

from sglang_hybrid.extensions.schemas.declared.resolve import Piece, Resolved
from sglang_hybrid.extensions.schemas.declared.roles import NoRoles, RoleTexts, role_texts
from sglang_hybrid.serving.requests.encoded_pieces import KeptPieces
from sglang_hybrid.serving.tenants import Tenant

MOST_BYTES = 64 << 20
"""Memory of the tokens that are kept; those of the values that prompts give are among them."""

Ids = tuple[int, ...]


@dataclass(frozen=True)
class End:
    """A position (tokens from the start) at which a module ends or prompts part. path: names of
    the modules around it. values: whether values of parameters lie before it.
    """

    position: int
    path: tuple[str, ...]
    values: bool


@dataclass(frozen=True)
class Frame:
    """The texts that the chat template writes around a message: before its text and after it."""

    before: str
    after: str


Frames = Mapping[int, Frame]
"""Frames by the number of the message, counted from 1."""


@dataclass(frozen=True)
class Tokenized:
    """ids [n]; ends, ascending; piece_ends: positions behind each piece."""

    ids: list[int]
    ends: list[End]
    piece_ends: list[int]


class PromptTokenizer:
    """Tokenizes pieces apart, so that each one's tokens depend on its own text only.

    tokenizer: of transformers. Its chat template writes what stands around the messages. kept: the
    tokens of texts. owner: whose texts these are; 64 bytes at most.
    """

    def __init__(self, tokenizer: Any, kept: KeptPieces | None = None, owner: bytes = b"") -> None:
        self._tokenizer = tokenizer
        self._kept = KeptPieces(MOST_BYTES) if kept is None else kept
        self._owner = owner

    def of(self, tenant: Tenant) -> PromptTokenizer:
        """One for the texts of a tenant, whom the time that it takes tells nothing of others."""
        owner = blake2b(repr(tenant).encode("utf-8", "surrogatepass"), digest_size=32).digest()
        return PromptTokenizer(self._tokenizer, self._kept, owner)

    def stored_ids(self, text: str) -> Ids:
        """The tokens of a text that many prompts have; those of the latest texts are kept."""
        encoded = text.encode("utf-8", "surrogatepass")
        key = blake2b(encoded, digest_size=16, key=self._owner).digest()
        (kept,) = self._kept.get([key])
        if kept is not None:
            return tuple(kept)
        ids = self._encode(text)
        self._kept.put([(key, array("i", ids))])
        return ids

    def _encode(self, text: str) -> Ids:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def length(self, text: str) -> int:
        """Tokens of a piece."""
        return len(self.stored_ids(text))

    def ids(self, piece: Piece) -> Ids:
        """Tokens of a piece. Raises ValueError if it is a value that is too long."""
        own = self._encode(piece.text) if piece.part is None else self.stored_ids(piece.text)
        if piece.parameter is not None and len(own) > piece.parameter.length:
            raise ValueError(
                f"the value of parameter {piece.parameter.name!r} has {len(own):,} tokens; it may "
                f"have {piece.parameter.length:,} at most."
            )
        return own

    def around(self, role: str) -> tuple[int, int]:
        """The most tokens that the chat template writes before a message, and those after it."""
        roles = self._roles
        before = (known.get(role, "") for known in (roles.opening, roles.before))
        return max(map(self.length, before)), self.length(roles.after[role])

    def tokenized(self, resolved: Resolved, frames: Frames | None = None) -> Tokenized:
        """The prompt as token ids. Raises ValueError if a value is too long, or if the template
        cannot write the schema's messages.

        frames: around its messages; by default those of a plain conversation.
        """
        in_roles = any(piece.role for piece in resolved.pieces)
        ids: list[int] = [] if in_roles else [*self.start]
        piece_ends: list[int] = []
        ends: list[End] = []
        values = False
        for before, piece, after in self.framed(resolved.pieces, frames):
            values = values or piece.parameter is not None
            ids += [*before, *self.ids(piece)]
            piece_ends.append(len(ids))
            if piece.ends:
                ends.append(End(len(ids), piece.path, values))
            ids += after
        return Tokenized(ids, ends, piece_ends)

    @cached_property
    def start(self) -> list[int]:
        """The tokens that the tokenizer puts before a text."""
        special = list(self._tokenizer("")["input_ids"])
        eos = self._tokenizer.eos_token_id
        return special[:-1] if special and special[-1] == eos else special

    @cached_property
    def _roles(self) -> RoleTexts:
        def render(messages: Sequence[dict[str, str]], asked: bool) -> str:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=asked
                )
            )

        return role_texts(render)

    def framed(
        self, pieces: Sequence[Piece], frames: Frames | None = None
    ) -> list[tuple[Ids, Piece, Ids]]:
        """Each piece with the tokens of what the chat template writes before and after it. Raises
        ValueError if it cannot write the schema's messages.
        """
        around = self.frames(pieces) if frames is None else frames
        framed = []
        for at, piece in enumerate(pieces):
            before = after = ""
            if piece.role is not None:
                frame = around[piece.message]
                if at == 0 or pieces[at - 1].message != piece.message:
                    before = frame.before
                if at + 1 == len(pieces) or pieces[at + 1].message != piece.message:
                    after = frame.after
            framed.append((self.stored_ids(before), piece, self.stored_ids(after)))
        return framed

    def frames(self, pieces: Sequence[Piece]) -> dict[int, Frame]:
        """Around each message of a plain conversation; one that ends with a message of the user's
        asks for an answer. Raises ValueError if the chat template cannot write it.
        """
        found: dict[int, Frame] = {}
        for at, piece in enumerate(pieces):
            if piece.role is None or piece.message in found:
                continue
            known = self._roles.before if at else self._roles.opening
            if piece.role not in known:
                raise NoRoles(
                    f"a message of role {piece.role!r} cannot stand here; a chat begins with one "
                    "of the system or the user, and only the first may be the system's."
                )
            asks = piece.role == "user" and pieces[-1].message == piece.message
            answer = self._roles.answer if asks else ""
            found[piece.message] = Frame(known[piece.role], self._roles.after[piece.role] + answer)
        return found

    def ending(self, role: str) -> str:
        """The text that the chat template writes after a message of a plain conversation."""
        return self._roles.after[role]
