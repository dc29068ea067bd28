"""Finds where messages begin in a prompt's token ids, learnt from the tokenizer's chat template.

Short conversations are rendered with contents that differ in one message. The text between two
contents that stays the same is the template's: the end of one message and the opener of the next.
The same conversation, cut off after the first message, shows where that one ends.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

Opener = tuple[int, ...]
Answer = TypeVar("Answer")

MOST_BEHIND = 16
"""Tokens that a chat template writes behind the reply's opener, at most: the start of a thought, or
an empty one."""

# Unlike each other at both ends, so that no tokenizer's merges make two of them look alike.
CONTENTS = ("quartz", "7 lanterns", "(velvet)")

CALLS = {"call": 1, "calls": 2}  # the assistant's messages that call a tool so many times

# A tool's name and the ids of its calls, of nine characters, as Mistral demands.
TOOLS = (("lookup", ("call00001", "call00002")), ("weather", ("3xW9kQz7b", "7Yv5mRt2c")))

# Conversations whose last message opens with its role's tokens.
CONVERSATIONS = (
    ("user", "assistant", "user"),
    ("user", "call", "tool"),
    ("user", "calls", "tool", "tool"),
)


class MessageBoundaries:
    """The token sequences that open a message of each role but the assistant's, and the one that
    opens the assistant's reply: what a prompt for it has in common with a later prompt that shows
    it.

    False if there are none: then no message is ever found.
    """

    def __init__(
        self,
        openers: Mapping[str, Sequence[Opener]] = MappingProxyType({}),
        reply_opener: Opener = (),
    ) -> None:
        self.openers = {role: tuple(sequences) for role, sequences in openers.items()}
        self.reply_opener = reply_opener
        self._sequences = sorted({opener for known in self.openers.values() for opener in known})

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, **template: Any) -> MessageBoundaries:
        """The text of the chat template, whatever role it refuses; empty if it refuses them all.

        template: further arguments of `apply_chat_template`, as `chat_template` or the template's
        own variables.
        """
        found = (
            openers
            for as_content in (_text, _parts)
            for openers in _probe(_openers, tokenizer, as_content, template)
        )
        openers, reply_opener = next(found, ({}, ()))
        if "user" in openers:
            return cls(openers, reply_opener)
        logger.info(
            "sglang_hybrid: no role tokens in the chat template; messages' starts are unknown."
        )
        return cls()

    def __bool__(self) -> bool:
        return bool(self._sequences)

    def message_starts(self, tokens: Sequence[int] | npt.NDArray[np.int64]) -> list[int]:
        """Positions, ascending, of the first token of each message that is not the assistant's.

        tokens: ids of a prompt; an array is not copied. An opener inside a longer one opens nothing
        of its own.
        """
        if not self:
            return []
        if isinstance(tokens, (np.ndarray, array)):
            ids = np.asarray(tokens)
        else:
            ids = np.fromiter(tokens, np.int64, len(tokens))
        found = [(at, at + len(it)) for it in self._sequences for at in _find(ids, it).tolist()]
        starts: list[int] = []
        end = 0
        for start, stop in sorted(found, key=lambda span: (span[0], -span[1])):
            if start >= end:
                starts.append(start)
                end = stop
        return starts

    def reply_start(self, tokens: Sequence[int]) -> int:
        """Position of the first token of the reply's opener, where the prompt has a few tokens more
        behind it; 0 if it ends there, or further behind, or has none.

        Those tokens are the template's: a thought that begins, or is empty. Chat templates leave
        thoughts out of history, so that the next turn shares the prompt up to the opener only.
        """
        opener = self.reply_opener
        if not opener:
            return 0
        begin = max(0, len(tokens) - len(opener) - MOST_BEHIND)
        found = _find(np.asarray(tokens[begin:]), opener)
        if not found.size:
            return 0
        start = begin + int(found[-1])
        return start if start + len(opener) < len(tokens) else 0


def learn_message_boundaries(tp_worker: Any) -> MessageBoundaries:
    """Role tokens of the served model, in a scheduler process; nothing, and one line in the log, if
    they cannot be had.

    The worker's tokenizer is used, or loaded under --skip-tokenizer-init, where clients may well
    send the ids of chats. A Jinja file given as --chat-template counts before the tokenizer's own
    template. SGLang's built-in conversations do not: the tokenizer's template is read instead.
    """
    try:
        from sglang.srt.runtime_context import get_serving

        serving = get_serving()
        tokenizer = getattr(tp_worker, "tokenizer", None)
        if tokenizer is None:
            tokenizer = _load_tokenizer()
        template = _chat_template(serving, getattr(tp_worker, "processor", None), tokenizer)
        variables = serving.default_chat_template_kwargs or {}
        if template is not None:
            variables = {"chat_template": template, **variables}
        return MessageBoundaries.from_tokenizer(tokenizer, **variables)
    except Exception as error:  # remote code and anybody's files; serving goes on without
        logger.warning(
            "sglang_hybrid: cannot read the chat template (%s: %s); messages' starts are unknown.",
            type(error).__name__,
            error,
        )
        return MessageBoundaries()


def _load_tokenizer() -> Any:
    from sglang.srt.runtime_context import get_model, get_serving
    from sglang.srt.utils.hf_transformers import get_tokenizer

    serving, model = get_serving(), get_model()
    return get_tokenizer(
        serving.tokenizer_path,
        tokenizer_mode=serving.tokenizer_mode,
        trust_remote_code=model.trust_remote_code,
        revision=model.revision,
        tokenizer_backend=serving.tokenizer_backend,
    )


def _chat_template(serving: Any, processor: Any, tokenizer: Any) -> str | None:
    """The Jinja text that SGLang's TemplateManager would render (parser/template_manager.py)."""
    named = serving.chat_template
    if named and named.endswith(".jinja"):
        return Path(named).read_text().strip("\n").replace("\\n", "\n")
    template = getattr(processor, "chat_template", None) or getattr(
        tokenizer, "chat_template", None
    )
    if isinstance(template, dict):
        template = template[serving.hf_chat_template_name or next(iter(template))]
    return template


def _text(content: str) -> Any:
    return content


def _parts(content: str) -> Any:
    return [{"type": "text", "text": content}]


def _openers(
    tokenizer: Any, as_content: Callable[[str], Any], template: Mapping[str, Any]
) -> tuple[dict[str, list[Opener]], Opener]:
    probe, twin = (_Probe(tokenizer, as_content, template, *names) for names in TOOLS)
    probe.check()
    return probe.openers(twin), next(iter(_probe(probe.reply_opener)), ())


class _Probe:
    """Conversations under one chat template, and what their renderings have in common."""

    def __init__(
        self,
        tokenizer: Any,
        as_content: Callable[[str], Any],
        template: Mapping[str, Any],
        tool: str,
        calls: tuple[str, str],
    ) -> None:
        self._tokenizer = tokenizer
        self._as_content = as_content
        self._template = template
        self._tool = tool
        self._calls = calls
        vocabulary: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
        self._special_ids = {index for text, index in vocabulary.items() if text.strip()}
        self._special_ids.update(tokenizer.all_special_ids)
        self._bos: int | None = tokenizer.bos_token_id
        self._eos: int | None = tokenizer.eos_token_id
        self._assistant: list[list[int]] = []

    def check(self) -> None:
        """Raises if the template does not show contents of this form."""
        self._renderings(("user",), 0)

    def openers(self, twin: _Probe) -> dict[str, list[Opener]]:
        """Openers by role; a role that the template refuses is left out.

        twin: calls another tool, so that no opener ends in a tool's name or the id of a call.
        """
        self._assistant = [*_probe(self._reply), *_probe(self._generation_prompt)]
        headers = [("system", header) for header in _probe(self._first, ("system", "user"))]
        for roles in CONVERSATIONS:
            pairs = zip(_probe(self._between, roles), _probe(twin._between, roles), strict=False)
            headers += [(roles[-1], pair[0][: _shared_len(pair)]) for pair in pairs]
        found = dict.fromkeys((role, tuple(self._shortest(header))) for role, header in headers)
        usable = [
            (role, opener)
            for role, opener in found
            if opener and not any(_contains(reply, opener) for reply in self._assistant)
        ]
        with_special_ids = [
            (role, opener) for role, opener in usable if self._has_special_id(opener)
        ]
        openers: dict[str, list[Opener]] = {}
        for role, opener in with_special_ids or usable:
            openers.setdefault(role, []).append(opener)
        return openers

    def reply_opener(self) -> Opener:
        """The tokens that the prompt for a reply adds, as far as a conversation that goes on behind
        the reply has it, too; from an added token on, nothing without one.
        """
        prompt, begins = self._prompt()
        later = self._renderings(("user", "assistant", "user"), 1)
        opener = prompt[begins : _shared_len([prompt, *later])]
        special_at = self._special_at(opener)
        return tuple(opener[special_at[0] :]) if special_at else ()

    def _reply(self) -> list[int]:
        """The tokens between a user's message and the assistant's."""
        ids, start, end = self._gap(("user", "assistant"))
        return ids[start:end]

    def _generation_prompt(self) -> list[int]:
        prompt, begins = self._prompt()
        return prompt[begins:]

    def _prompt(self) -> tuple[list[int], int]:
        """A prompt for a reply, and where what only a prompt for one has begins in it."""
        without, prompt = (self._render(("user",), prompted=prompted) for prompted in (False, True))
        return prompt, _shared_len([without, prompt])

    def _first(self, roles: Sequence[str]) -> list[int]:
        """The tokens before the content of the first message, without the begin of text."""
        renderings = self._renderings(roles, 0)
        header = renderings[0][: _shared_len(renderings)]
        return self._from_text(header[header[:1] == [self._bos] :])

    def _between(self, roles: Sequence[str]) -> list[int]:
        """The tokens before the content of the last message that do not end the one before."""
        ids, start, end = self._gap(roles)
        gap = ids[start:end]
        tail = next(iter(_probe(self._tail, roles[:-1])), self._through_eos(gap))
        cut = _shared_len([gap, tail])
        header = gap[cut:]
        if cut < len(tail) and not self._has_special_id(header):
            # The conversation cut off goes on with an opener that begins alike.
            special_at = self._special_at(gap[:cut])
            header = gap[special_at[-1] :] if special_at else header
        return self._from_text(header)

    def _gap(self, roles: Sequence[str]) -> tuple[list[int], int, int]:
        """A rendering, and from where to where it is between its last two contents."""
        renderings = self._renderings(roles, len(roles) - 1)
        ids = renderings[0]
        return ids, len(ids) - len(self._rest(roles, len(roles) - 2)), _shared_len(renderings)

    def _through_eos(self, gap: list[int]) -> list[int]:
        return gap[: max((at + 1 for at, index in enumerate(gap) if index == self._eos), default=0)]

    def _tail(self, roles: Sequence[str]) -> list[int]:
        return self._rest(roles, len(roles) - 1)

    def _rest(self, roles: Sequence[str], place: int) -> list[int]:
        """The tokens after the content of the message at a place."""
        renderings = self._renderings(roles, place)
        length = _shared_len([ids[::-1] for ids in renderings])
        return renderings[0][len(renderings[0]) - length :]

    def _renderings(self, roles: Sequence[str], place: int) -> list[list[int]]:
        """The conversation with each content at a place, and the first content everywhere else."""
        renderings = [self._render(roles, place, content) for content in CONTENTS]
        if any(ids == renderings[0] for ids in renderings[1:]):
            raise ValueError(f"The template does not show the content of {roles[place]!r}.")
        return renderings

    def _render(
        self,
        roles: Sequence[str],
        place: int = 0,
        content: str = CONTENTS[0],
        *,
        prompted: bool = False,
    ) -> list[int]:
        calls = iter(self._calls)
        messages = [
            self._message(role, content if index == place else CONTENTS[0], calls)
            for index, role in enumerate(roles)
        ]
        return list(
            self._tokenizer.apply_chat_template(
                messages,
                tokenize=True,
                return_dict=False,
                add_generation_prompt=prompted,
                **self._template,
            )
        )

    def _message(self, role: str, content: str, calls: Iterator[str]) -> dict[str, Any]:
        if role in CALLS:
            words = [*[CONTENTS[0]] * (CALLS[role] - 1), content]
            called = [self._call(*pair) for pair in zip(self._calls, words, strict=False)]
            return {"role": "assistant", "content": "", "tool_calls": called}
        message = {"role": role, "content": self._as_content(content)}
        if role == "tool":
            message |= {"name": self._tool, "tool_call_id": next(calls)}
        return message

    def _call(self, call: str, word: str) -> dict[str, Any]:
        function = {"name": self._tool, "arguments": {"word": word}}
        return {"id": call, "type": "function", "function": function}

    def _has_special_id(self, ids: Sequence[int]) -> bool:
        return bool(self._special_at(ids))

    def _special_at(self, ids: Sequence[int]) -> list[int]:
        """The places of added tokens."""
        return [at for at, index in enumerate(ids) if index in self._special_ids]

    def _shortest(self, header: list[int]) -> list[int]:
        """The part of a header that no content can merge with and that tells it from a reply's.

        It ends with the last added token, and the role's name if the assistant's messages have the
        same added tokens. Without added tokens it is all text, and more than one token.
        """
        special_at = self._special_at(header)
        if not special_at:
            while header and self._is_blank(header[-1]):
                header = header[:-1]
            return header if len(header) > 1 else []
        end = special_at[-1] + 1
        core = header[:end]
        if {*core} <= {self._bos, self._eos} or any(
            _contains(reply, core) for reply in self._assistant
        ):
            while end < len(header) and not self._is_blank(header[end]):
                end += 1
        return header[:end]

    def _from_text(self, header: list[int]) -> list[int]:
        while header and self._is_blank(header[0]):
            header = header[1:]
        return header

    def _is_blank(self, index: int) -> bool:
        """True if a token is white space, or ends a line."""
        text = self._tokenizer.decode([index])
        return index not in self._special_ids and (not text.strip() or "\n" in text)


def _probe(probe: Callable[..., Answer], *args: Any) -> list[Answer]:
    """The answer of a probe, or none where the template refuses the conversation."""
    try:
        return [probe(*args)]
    except Exception as error:  # a template may raise anything
        logger.debug("sglang_hybrid: the chat template refuses %s: %s", args, error)
        return []


def _shared_len(sequences: Sequence[Sequence[int]]) -> int:
    """Length of the common prefix."""
    shortest = min(map(len, sequences))
    columns = zip(*sequences, strict=False)
    return next((at for at, ids in enumerate(columns) if len({*ids}) > 1), shortest)


def _contains(ids: list[int], part: Sequence[int]) -> bool:
    return bool(_find(np.array(ids, np.int64), part).size)


def _find(ids: npt.NDArray[np.int64], part: Sequence[int]) -> npt.NDArray[np.intp]:
    """The places where a sequence occurs."""
    last = len(ids) - len(part)
    if last < 0:
        return np.empty(0, np.intp)
    places = np.flatnonzero(ids[: last + 1] == part[0])
    for offset, index in enumerate(part[1:], 1):
        places = places[ids[places + offset] == index]
    return places
