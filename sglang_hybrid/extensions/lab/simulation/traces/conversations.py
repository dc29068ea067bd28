"""Conversations as text: ShareGPT's and OpenAI's messages, with a model's own tokenizer and chat
template.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from sglang_hybrid.core.named_files import (
    MOST_BYTES,
    decode_as,
    read_bytes,
    read_json,
    read_text,
)
from sglang_hybrid.core.traffic.requests import (
    Request,
    Seconds,
    TokenArray,
    make_request,
)
from sglang_hybrid.extensions.lab.simulation.traces.arrivals import WORDS_PER_SECOND, session_starts
from sglang_hybrid.extensions.lab.simulation.traces.lines import (
    Room,
    Skipped,
    TraceError,
    joined,
    numbered_lines,
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MOST_MESSAGES: Final = 1_000
"""Messages of one conversation, at most: each answer's prompt has all messages before it."""

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}


class ShareGptTurn(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class ShareGpt(msgspec.Struct):
    conversations: list[ShareGptTurn]

    def messages(self) -> list[dict[str, Any]]:
        return [
            {"role": ROLES.get(turn.speaker, turn.speaker), "content": turn.value}
            for turn in self.conversations
        ]


class OpenAiMessage(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None

    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(str(part.get("text", "")) for part in self.content)
        return self.content or ""


class OpenAi(msgspec.Struct):
    turns: list[OpenAiMessage] = msgspec.field(name="messages")
    t: Seconds | None = None  # seconds at which the conversation begins

    def messages(self) -> list[dict[str, Any]]:
        return [{"role": turn.role, "content": turn.text()} for turn in self.turns]


class ChatTokenizer:
    """A model directory's tokenizer.json and its chat template; where it has none, ChatML."""

    def __init__(self, directory: str | None) -> None:
        """Raises ValueError, in one sentence, if there is no tokenizer."""
        if directory is None:
            raise ValueError("conversations are text: give the model's directory as --tokenizer")
        path = Path(directory) / "tokenizer.json"
        if not path.exists():
            raise ValueError(f"there is no tokenizer {path}")
        content = read_bytes(path, MOST_BYTES)
        beside, alone = (
            path.with_name("tokenizer_config.json"),
            path.with_name("chat_template.jinja"),
        )
        config: dict[str, Any] = {}
        if beside.exists():
            config = read_json(beside, dict[str, Any], "tokenizer's config")
        template = read_text(alone) if alone.exists() else config.get("chat_template")
        try:
            self._tokenizer = Tokenizer.from_buffer(content)
            environment = ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
            )
            environment.globals["raise_exception"] = _refuse
            self._template = environment.from_string(
                template if isinstance(template, str) else CHATML
            )
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"the tokenizer {path} cannot be loaded ({reason})") from error
        self._special = {
            name: token.get("content") if isinstance(token, dict) else token
            for name, token in config.items()
            if name.endswith("_token")
        }

    def render(self, messages: list[dict[str, Any]], answer_next: bool = False) -> str:
        """The text of `messages`, and what comes before an answer if that is next."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=answer_next, **self._special
            )
        except Exception as error:  # a template is a program
            raise ValueError(f"the chat template refuses it: {error}") from error

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


@dataclass
class ConversationReader:
    """Every answer of a conversation is a request: the messages before it, and the answer.

    Times, where the file has none: conversations are Poisson arrivals, and a person reads the
    answer and types the next message at 90 words a minute.
    """

    tokenizer: ChatTokenizer
    skipped: Skipped
    session_rate: float
    seed: int
    room: Room

    def read(
        self, path: Path, schema: type[ShareGpt] | type[OpenAi], limit: int | None = None
    ) -> list[Request]:
        """Read a JSON array or JSON Lines. Raises TraceError."""
        conversations: list[tuple[str, list[dict[str, Any]], float | None]] = []
        for where, text in _entries(path, self.skipped):
            try:
                entry = decode_as(text, schema)
                messages = entry.messages()
                if len(messages) > MOST_MESSAGES:
                    raise ValueError(f"it has more than {MOST_MESSAGES:,} messages")
                if not any(message["role"] == "assistant" for message in messages[1:]):
                    raise ValueError("it holds no answer")
            except ValueError as error:
                known = isinstance(error, msgspec.ValidationError)
                plain = isinstance(error, msgspec.DecodeError) and not known
                what = "not JSON" if plain else "not a conversation"
                self.skipped.bad(f"{where}: {what} ({error})", error)
                continue
            conversations.append((where, messages, getattr(entry, "t", None)))
        starts: list[float] = []
        if conversations:
            rng = np.random.default_rng(self.seed)
            starts = session_starts(rng, len(conversations), self.session_rate)
        for session, (_, _, stamp) in enumerate(conversations):
            starts[session] = starts[session] if stamp is None else stamp
        requests: list[Request] = []
        begun = 0
        for start, session in sorted(zip(starts, range(len(starts)), strict=True)):
            if begun == limit:  # each of them has a request at least
                break
            where, messages, _ = conversations[session]
            made: list[Request] = []
            try:
                for request in self._requests(session, messages, start):
                    self.room.take(request)
                    made.append(request)
            except TraceError:
                raise
            except ValueError as error:
                self.skipped.bad(f"{where}: {error}", error)
                continue
            requests.extend(made)
            begun += 1
        requests.sort(key=lambda request: request.arrival)
        return requests[:limit]

    def _requests(
        self, session: int, messages: list[dict[str, Any]], time: float
    ) -> Iterator[Request]:
        turn = 0
        rendered: dict[int, TokenArray] = {}

        def first(count: int) -> TokenArray:
            """Tokens of the first `count` messages."""
            if count not in rendered:
                rendered[count] = self._render(messages[:count])
            return rendered[count]

        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                time += len(message["content"].split()) / WORDS_PER_SECOND if turn else 0.0
                continue
            if not index:
                continue
            prompt = self._render(messages[:index], answer_next=True)
            text = prompt.tobytes()
            answer = first(index + 1)
            if answer.tobytes().startswith(text):
                answer = answer[len(prompt) :]
            else:
                answer = self._tokens(message["content"])
            before = map(first, range(1, index))
            starts = [len(each) for each in before if text.startswith(each.tobytes())]
            yield make_request(session, turn, time, prompt, answer, tuple(starts))
            time += len(message["content"].split()) / WORDS_PER_SECOND
            turn += 1

    def _render(self, messages: list[dict[str, Any]], answer_next: bool = False) -> TokenArray:
        return self._tokens(self.tokenizer.render(messages, answer_next))

    def _tokens(self, text: str) -> TokenArray:
        return np.array(self.tokenizer.encode(text), np.int32)


def _entries(path: Path, skipped: Skipped) -> Iterator[tuple[str, bytes]]:
    """The place of each entry in the file, and its text: items of an array, or lines."""
    lines = numbered_lines(path, skipped)
    first = list(islice(lines, 1))
    lines = chain(first, lines)
    if not first or not first[0][1].lstrip().startswith(b"["):
        yield from ((f"{path}:{number}", line) for number, line in lines if line.strip())
        return
    try:
        items = decode_as(joined(lines, path), list[msgspec.Raw])
    except TraceError:
        raise
    except ValueError as error:
        skipped.bad(f"{path}: not JSON ({error})", error)
        return
    yield from ((f"{path}: conversation {i}", bytes(item)) for i, item in enumerate(items, 1))


def _refuse(reason: str) -> None:
    raise TemplateError(reason)
