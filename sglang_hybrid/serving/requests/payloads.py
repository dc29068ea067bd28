"""Payloads of our actions in `kv_hints`, field by field; core/returns/hints.py has their meaning.

A wrong value raises ValueError with one sentence that names the field, the value, and what it may
be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sglang_hybrid.core.records.pin import Priority
from sglang_hybrid.core.returns.hints import (
    CHECKPOINT,
    EXACT,
    PIN,
    PREWARM,
    SEGMENTS,
    SESSION,
    UNTIMED,
    Hint,
    Next,
)
from sglang_hybrid.core.sentences import quote

FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    CHECKPOINT: ("positions",),
    PIN: ("positions", "ttl", "priority"),
    PREWARM: ("tokens_per_second",),
    SEGMENTS: ("segments",),
    SESSION: ("next", "seconds"),
    EXACT: (),
}
"""The fields that the payload of an action may have; those of a schema are in
extensions/schemas/endpoints/chat.py.
"""

MOST_LIFETIME: Final = 86_400
"""Seconds that a pin may last: a day."""

MOST_RATE: Final = 10**9
"""Tokens per second at which a prompt may be computed while others run."""


def read_session(payload: Mapping[str, Any]) -> Hint:
    """The hint that the payload of `hybrid.session` gives. Raises ValueError."""
    check_fields(SESSION, payload)
    follows, seconds = payload.get("next"), payload.get("seconds")
    if not isinstance(follows, str) or follows not in UNTIMED:
        raise ValueError(
            f"the payload of {SESSION} says {quote(follows)} of the session; say 'end' or 'return'."
        )
    if seconds is None:
        return UNTIMED[follows]
    if follows == Next.ENDS.value or type(seconds) not in (int, float):
        raise ValueError(
            f"seconds in the payload of {SESSION} is {quote(seconds)}; it is a number, and "
            "only for a session that returns."
        )
    try:
        return Hint.after(seconds)
    except ValueError as error:
        raise ValueError(f"the payload of {SESSION}: {error}.") from None


def check_fields(kind: str, payload: Mapping[str, Any]) -> None:
    """The payload of an action of this kind has none but its fields. Raises ValueError."""
    fields = FIELDS[kind]
    unknown = payload.keys() - {*fields}
    if unknown:
        raise ValueError(
            f"the payload of {kind} has the field {quote(min(unknown))}; "
            f"{'it has only ' + ', '.join(fields) if fields else 'it has none'}."
        )


def read_positions(kind: str, payload: Mapping[str, Any], prompt_len: float) -> list[int]:
    """The positions in the payload of an action of this kind, which lie within a prompt of
    `prompt_len` tokens and before its last one. Raises ValueError.
    """
    positions = payload.get("positions")
    if not isinstance(positions, list) or not positions:
        raise ValueError(
            f"positions of {kind} is {quote(positions)}; it must be a list of one position "
            "at least."
        )
    for at, position in enumerate(positions):
        if type(position) is not int or not 0 < position < prompt_len:
            raise ValueError(
                f"positions[{at}] of {kind} is {quote(position)}; in a prompt of "
                f"{prompt_len:,} tokens a position is a whole number from 1 to {prompt_len - 1:,}."
            )
    return positions


def read_lifetime(where: str, ttl: Any) -> float:
    """The seconds of a pin; `where` names the field. Raises ValueError."""
    if type(ttl) not in (int, float) or not 0 < ttl <= MOST_LIFETIME:
        raise ValueError(
            f"{where} is {quote(ttl)}; it is a number of seconds, above 0 and at most "
            f"{MOST_LIFETIME:,}."
        )
    return float(ttl)


def read_priority(where: str, priority: Any) -> Priority:
    """The priority of a pin; `where` names the field. Raises ValueError."""
    known = [each.value for each in Priority]
    if priority not in known:
        raise ValueError(f"{where} is {quote(priority)}; it may be {', '.join(map(repr, known))}.")
    return Priority(priority)


def read_rate(payload: Mapping[str, Any]) -> float | None:
    """Tokens per second at which a payload of `hybrid.prewarm` lets a prompt be computed while
    others run; None: only while none does. Raises ValueError.
    """
    check_fields(PREWARM, payload)
    rate = payload.get("tokens_per_second")
    if rate is not None and (type(rate) not in (int, float) or not 0 < rate <= MOST_RATE):
        raise ValueError(
            f"tokens_per_second of {PREWARM} is {quote(rate)}; it is a number above 0 and at most "
            f"{MOST_RATE:,}, or null."
        )
    return rate
