"""What the payloads of our actions in `kv_hints` may hold. Every check raises ValueError with one
sentence that names the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from sglang_hybrid.core.records.pins import Priority
from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.serving.requests.fields import shown

VERSION = "1"
"""Of all our actions."""

LONGEST_LIFETIME = 86_400
"""Seconds that a pin may last."""


class Action(Protocol):
    """One action of an envelope."""

    action_type: str
    action_version: str
    payload: Mapping[str, Any]


def session_of_header(name: str, value: str) -> Hint:
    """What the header `name` says of a session. Raises ValueError with one sentence."""
    try:
        return Hint.parse(value)
    except ValueError as error:
        raise ValueError(f"the header {name} is {shown(value)}; {error}.") from None


def said_of_session(action: Action) -> Hint:
    """What an action says of the session. Raises ValueError with one sentence."""
    value, seconds = action.payload.get("next"), action.payload.get("seconds")
    known = {"end": Hint.ENDS, "return": Hint.RETURNS}
    if not isinstance(value, str) or value not in known:
        raise ValueError(
            f"the payload of {action.action_type} says {shown(value)} of the session; say 'end' or "
            "'return'."
        )
    if seconds is None:
        return known[value]
    if known[value] is Hint.ENDS or type(seconds) not in (int, float):
        raise ValueError(
            f"seconds in the payload of {action.action_type} is {shown(seconds)}; it is a number, "
            "and only for a session that returns."
        )
    try:
        return Hint.after(seconds)
    except ValueError as error:
        raise ValueError(f"the payload of {action.action_type}: {error}.") from None


def check_version(kind: str, version: Any) -> None:
    """An action of this kind has the version that this server knows."""
    if version != VERSION:
        raise ValueError(
            f"kv_hints has version {shown(version)} of {kind}; this server knows version "
            f"{VERSION!r}."
        )


def check_fields(action: Action, *fields: str) -> None:
    """The payload has none but these fields."""
    unknown = action.payload.keys() - {*fields}
    if unknown:
        raise ValueError(
            f"the payload of {action.action_type} has the field {shown(min(unknown))}; "
            f"{'it has only ' + ', '.join(fields) if fields else 'it has none'}."
        )


def check_lifetime(where: str, ttl: Any) -> float:
    """The lifetime that `where` gives. Raises ValueError with one sentence."""
    numeric = isinstance(ttl, int | float) and not isinstance(ttl, bool)
    if ttl is None or not numeric or not 0 < ttl <= LONGEST_LIFETIME:
        raise ValueError(
            f"{where} is {shown(ttl)}; it is a number of seconds, above 0 and at most "
            f"{LONGEST_LIFETIME:,}."
        )
    return float(ttl)


def check_priority(where: str, priority: Any) -> Priority:
    """The priority that `where` gives. Raises ValueError with one sentence."""
    known = [each.value for each in Priority]
    if priority not in known:
        raise ValueError(f"{where} is {shown(priority)}; it may be {', '.join(map(repr, known))}.")
    return Priority(priority)


def check_positions(action: Action, prompt_len: int) -> None:
    """Positions lie within a prompt of `prompt_len` tokens, before its last one."""
    name = action.action_type
    positions = action.payload.get("positions")
    if not isinstance(positions, list) or not positions:
        raise ValueError(
            f"positions of {name} is {shown(positions)}; it must be a list of one position "
            "at least."
        )
    for at, position in enumerate(positions):
        if type(position) is not int or not 0 < position < prompt_len:
            raise ValueError(
                f"positions[{at}] of {name} is {shown(position)}; in a prompt of "
                f"{prompt_len:,} tokens a position is a whole number from 1 to {prompt_len - 1:,}."
            )


def prewarm_rate(payload: Mapping[str, Any]) -> float | None:
    """Tokens per second at which a payload of `hybrid.prewarm` lets a prompt be computed while
    others run; None: only while none does. Raises ValueError.
    """
    rate = payload.get("tokens_per_second")
    numeric = isinstance(rate, int | float) and not isinstance(rate, bool)
    if rate is not None and (not numeric or not 0 < rate < math.inf):
        raise ValueError(
            f"tokens_per_second of hybrid.prewarm is {shown(rate)}; it is a number above 0, or "
            "null."
        )
    unknown = payload.keys() - {"tokens_per_second"}
    if unknown:
        raise ValueError(
            f"the payload of hybrid.prewarm has the field {shown(min(unknown))}; it has only "
            "tokens_per_second."
        )
    return rate
