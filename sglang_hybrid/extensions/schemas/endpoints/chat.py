"""`prompt_schema` of a chat completion: modules of a schema stand before the chat's messages.

The chat template writes the whole chat (patch 0040). While it does, each message of the schema
holds a mark in place of its text, so that all that the template writes around it is known, with
tools and whatever else the request asks of it. Then the texts of the modules are tokenized apart,
as in `/generate`, and so is what stands behind the schema's messages.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

from sglang_hybrid.chats.fields import ImportedModule, PromptSchema
from sglang_hybrid.chats.rendering import encoding
from sglang_hybrid.explain.prompt_route import is_prompt_query
from sglang_hybrid.extensions.schemas.declared.registry import Draft, Registry
from sglang_hybrid.extensions.schemas.declared.resolve import Import, Piece, Prompt, read_prompt
from sglang_hybrid.extensions.schemas.declared.roles import split_at
from sglang_hybrid.extensions.schemas.declared.tokens import (
    Frame,
    Frames,
    PromptTokenizer,
    Tokenized,
)
from sglang_hybrid.extensions.schemas.endpoints import apart
from sglang_hybrid.extensions.schemas.endpoints.server_registry import registry_of
from sglang_hybrid.serving.requests.encoded_pieces import Encode
from sglang_hybrid.serving.requests.errors import mistakes_are_value_errors
from sglang_hybrid.serving.requests.fields import check_single
from sglang_hybrid.serving.tenants import tenant

_MARK = f"\ue000{secrets.token_hex(8)}-"
"""The beginning of a mark: no client can send one by guessing."""

OTHER_FRAMES = (
    "What the chat template writes around the schema's messages is not what it writes in a plain "
    "conversation, as with tools, so the prompt was computed as a whole."
)


@dataclass(frozen=True)
class Beginning:
    """The tokens of a chat that begins with modules of a schema. start: tokens before its own
    messages. plain: whether the schema's messages stand there as in a plain conversation, which
    modular mode needs.
    """

    draft: Draft
    tokenized: Tokenized
    start: int
    plain: bool


def with_schemas(process: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's method that renders and encodes a chat, for chats with `prompt_schema`, too. Its
    result then has the attribute `beginning`. Raises ValueError.
    """
    process = mistakes_are_value_errors(process)

    @wraps(process)
    def processed(serving: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(request, "prompt_schema", None) is None:
            return process(serving, request, *args, **kwargs)
        writer = _Writer(registry_of(serving.tokenizer_manager), request)
        own = request.messages
        request.messages = [*writer.messages(), *own]
        try:
            with encoding(writer.encoding):
                result = process(serving, request, *args, **kwargs)
        finally:
            request.messages = own
        if writer.beginning is None:
            raise ValueError(
                "prompt_schema is for chats that a Jinja template writes; this model's are not."
            )
        result.beginning = writer.beginning
        return result

    return processed


def begin_with_schema(manager: Any, adapted: Any, processed: Any) -> None:
    """Ask for what the `prompt_schema` of a chat needs. Raises ValueError.

    adapted: SGLang's GenerateReqInput of the chat. processed: what `with_schemas` returned for it.
    """
    beginning: Beginning | None = getattr(processed, "beginning", None)
    if beginning is None:
        return
    if adapted.input_ids is None:
        raise ValueError("prompt_schema is for chats of text; send images without it.")
    whole = apart.why_whole(manager) or ("" if beginning.plain else OTHER_FRAMES)
    expanded = registry_of(manager).counted(
        beginning.draft, beginning.tokenized, whole=whole, counts=not is_prompt_query()
    )
    expanded.start = beginning.start
    if expanded.modular is not None:
        continued = adapted.input_ids[len(beginning.tokenized.ids) :]
        new = (*expanded.modular.new, *continued)
        expanded.modular = replace(expanded.modular, new=new)
    apart.ask(manager, adapted, expanded)


def with_prompt_report(extension: Any, kind: Callable[..., Any], answer: Mapping[str, Any]) -> Any:
    """`sglext` of a chat's answer, with what became of its `prompt_schema`.

    extension: SGLang's SglExt, which is of class `kind`, or None.
    """
    told = answer["meta_info"].get("prompt")
    if told is None:
        return extension
    if extension is None:
        extension = kind()
    extension.prompt = told
    return extension


class _Writer:
    """Writes one chat: marks as the schema's messages, then its tokens in their place."""

    def __init__(self, registry: Registry, request: Any) -> None:
        self.beginning: Beginning | None = None
        check_single(request, ("extra_key", "cache_salt"), "prompt_schema")
        if request.input_ids is not None:
            raise ValueError("the request has prompt_schema and input_ids; give one of them.")
        own = tenant(request.extra_key, request.cache_salt)
        self._draft = registry.draft(own, prompt_of(request.prompt_schema))
        self._tokenizer: PromptTokenizer = self._draft.registered.tokenizer
        self._pieces = self._draft.resolved.pieces
        for piece in self._pieces:
            if piece.role is None:
                raise ValueError(
                    f"schema {self._draft.prompt.schema!r} has text outside of messages; in a chat "
                    "completion all of it stands in <system>, <user> or <assistant>."
                )

    def messages(self) -> list[Any]:
        """The schema's messages, each a mark."""
        from sglang.srt.entrypoints.openai import protocol

        found: list[Any] = []
        for number, role in self._roles().items():
            user = role == "user"
            kind = (
                protocol.ChatCompletionMessageUserParam
                if user
                else protocol.ChatCompletionMessageGenericParam
            )
            found.append(kind(role=role, content=_mark(number)))
        return found

    def encoding(self, outer: Encode | None) -> Encode:
        """A function that encodes the rendered chat; `outer` gets only what stands behind the
        schema.
        """

        def encode(text: str, encode_kwargs: Mapping[str, Any]) -> list[int]:
            frames, rest = self._frames(text)
            if outer is not None:
                return outer(rest, {"add_special_tokens": False} if frames else encode_kwargs)
            self.beginning = self._begun(frames, rest)
            return list(self.beginning.tokenized.ids)

        return encode

    def _begun(self, frames: Frames, rest: str) -> Beginning:
        if not frames:  # nothing is imported: the chat is the template's alone
            ids = [*self._tokenizer.ids(Piece(rest, ()))]
            exact = replace(self._draft.prompt, modular=False)
            draft = replace(self._draft, prompt=exact)
            return Beginning(draft, Tokenized(ids, [], []), 0, plain=False)
        draft = self._draft.followed_by(rest) if rest else self._draft
        pieces = draft.resolved.pieces
        tokenized = self._tokenizer.tokenized(draft.resolved, frames)
        behind = len(self._tokenizer.ids(pieces[-1])) if rest else 0
        plain = draft.prompt.modular and frames == self._tokenizer.frames(pieces)
        return Beginning(draft, tokenized, len(tokenized.ids) - behind, plain)

    def _frames(self, text: str) -> tuple[Frames, str]:
        """The texts that the template wrote around each message of the schema, and behind the last
        one.
        """
        roles = self._roles()
        try:
            head, *gaps = split_at(text, [_mark(number) for number in roles])
        except ValueError:
            raise ValueError(
                "the chat template does not write each message once, in their order, so it cannot "
                "stand behind modules of a schema."
            ) from None
        frames: dict[int, Frame] = {}
        for at, (number, role) in enumerate(roles.items()):
            gap, ending = gaps[at], self._tokenizer.ending(role)
            known = gap.startswith(ending)
            after = ending if known else ("" if number == [*roles][-1] else gap)
            frames[number] = Frame(head, after)
            head = gap[len(after) :]
        return frames, head

    def _roles(self) -> dict[int, str]:
        """Roles of the schema's messages by their numbers."""
        return {piece.message: piece.role for piece in self._pieces if piece.role}


def prompt_of(asked: str | PromptSchema) -> Prompt:
    """The imports of markup, or of an object. Raises MarkupError."""
    if isinstance(asked, str):
        return read_prompt(asked)
    return Prompt(asked.name, _imports(asked.imports), modular=asked.mode == "modular")


def _imports(asked: Sequence[str | ImportedModule]) -> tuple[Import, ...]:
    return tuple(
        Import(one)
        if isinstance(one, str)
        else Import(one.name, one.parameters, _imports(one.imports))
        for one in asked
    )


def _mark(number: int) -> str:
    return f"{_MARK}{number}\ue001"
