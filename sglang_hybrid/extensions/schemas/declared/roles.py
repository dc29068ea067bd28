"""The texts that a chat template writes around the messages of each role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MARKS = ("\ue000", "\ue001", "\ue002", "\ue003")
"""Contents that no template writes by itself."""

Message = dict[str, str]


class NoRoles(ValueError):
    """The chat template does not write messages one after another."""


@dataclass(frozen=True)
class RoleTexts:
    """opening: of a chat that begins with a role. before, after: a further message's content.
    answer: what asks for the assistant's answer.
    """

    opening: dict[str, str]
    before: dict[str, str]
    after: dict[str, str]
    answer: str


def role_texts(render: Callable[[Sequence[Message], bool], str]) -> RoleTexts:
    """Learnt from conversations that `render(messages, add_generation_prompt)` makes text of.
    Raises NoRoles if what is learnt does not explain them.
    """
    roles = ("system", "user", "assistant", "user")
    chat = [{"role": role, "content": mark} for role, mark in zip(roles, MARKS, strict=True)]
    try:
        parts = split_at(render(chat, False), MARKS)
        opening, system_user, user_assistant, assistant_user, after_user = parts
        alone = render(chat[:1], False).partition(MARKS[0])[2]
        first_user = render(chat[1:2], False).partition(MARKS[1])[0]
        asked = render(chat, True).partition(MARKS[3])[2]
    except Exception as error:  # a template may refuse a chat with anything
        raise NoRoles(f"the chat template refuses a plain conversation: {error}") from None
    before_user = _text_after(system_user, alone)
    texts = RoleTexts(
        {"system": opening, "user": first_user},
        {"user": before_user, "assistant": _text_after(user_assistant, after_user)},
        {
            "system": alone,
            "user": after_user,
            "assistant": assistant_user.removesuffix(before_user),
        },
        _text_after(asked, after_user),
    )
    if texts.after["assistant"] + before_user != assistant_user:
        raise NoRoles("the chat template writes messages of one role in several ways.")
    return texts


def split_at(text: str, marks: Sequence[str]) -> list[str]:
    """The texts before, between and behind `marks`. Raises ValueError if `text` does not have each
    mark once, in their order.
    """
    parts = []
    for mark in marks:
        head, found, text = text.partition(mark)
        if not found or mark in text:
            raise ValueError("it does not write each message once, in their order")
        parts.append(head)
    return [*parts, text]


def _text_after(text: str, start: str) -> str:
    if not text.startswith(start):
        raise NoRoles("the chat template ends messages of one role in several ways.")
    return text[len(start) :]
