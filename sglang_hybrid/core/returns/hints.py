"""Hints that a client may give of a prompt and of its session: the fields of these hints, their
bounds and their meaning.

Requests are checked by this definition (`serving/requests/payloads.py`), the cache acts on what it
reads by it, and traces have hints of sessions as their text (`Hint.parse`).

    hybrid.checkpoint  the prefill leaves a checkpoint at each of its positions
    hybrid.pin         so it does, and each is used again within seconds (core/records/pin.py)
    hybrid.session     whether another request follows in the session, and when (`Hint`)
    hybrid.exact       only what comes from exact copies may be hit
    hybrid.prewarm     the prompt is computed and nothing generated (serving/requests/payloads.py)
    hybrid.import      the prompt begins with modules of a schema (schemas/endpoints/actions.py)
    hybrid.segments    spans of the prompt are modules without a schema (schemas/endpoints/spans.py)

A position counts tokens from the start of the prompt. A wrong hint raises ValueError with one
sentence that names the field, its value and what it may be.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar, Final

from sglang_hybrid.core.records.pin import PinRequest
from sglang_hybrid.core.sentences import quote

CHECKPOINT: Final = "hybrid.checkpoint"
PIN: Final = "hybrid.pin"
SESSION: Final = "hybrid.session"
EXACT: Final = "hybrid.exact"
IMPORT: Final = "hybrid.import"
PREWARM: Final = "hybrid.prewarm"
SEGMENTS: Final = "hybrid.segments"

MOST_POSITIONS: Final = 16
"""Positions that one request may declare. Each takes a state slot, if need be another state's."""

LEAST_SECONDS: Final = 0.125
"""The shortest wait until a session returns; shorter ones count as this."""

MOST_SECONDS: Final = 604_800
"""The longest wait until a session returns: a week."""

_TIMED: Final = re.compile(r"return *; *seconds *= *(?P<seconds>[0-9]+(\.[0-9]+)?)\Z")


class Next(Enum):
    """The event that follows a request in its session. ENDS: nothing. RETURNS: another request.
    RETURNS_AFTER: another request, so many seconds after the end of this one.
    """

    ENDS = "end"
    RETURNS = "return"
    RETURNS_AFTER = "return after"


@dataclass(frozen=True, slots=True)
class Hint:
    """The event that follows in the session. seconds: until the next request, of RETURNS_AFTER;
    None where `HintRecord` found that they tell nothing.
    """

    next: Next
    seconds: float | None = None

    ENDS: ClassVar[Hint]
    RETURNS: ClassVar[Hint]

    @classmethod
    def after(cls, seconds: float) -> Hint:
        """A hint that another request follows after so many seconds. Raises ValueError."""
        if not 0 < seconds <= MOST_SECONDS:
            raise ValueError(
                f"a session returns after {quote(seconds)} seconds; say more than 0 and at most "
                f"{MOST_SECONDS:,}"
            )
        return cls(Next.RETURNS_AFTER, float(seconds))

    @classmethod
    def parse(cls, text: str) -> Hint:
        """`end`, `return`, or `return; seconds=20`, as headers and traces say it. Raises ValueError
        for anything else.
        """
        if timed := _TIMED.match(text.strip()):
            return cls.after(float(timed["seconds"]))
        if text not in UNTIMED:
            raise ValueError("it is neither 'end' nor 'return' nor 'return; seconds=N'")
        return UNTIMED[text]

    def payload(self) -> dict[str, Any]:
        """The payload of `hybrid.session` that says it."""
        seconds = {} if self.seconds is None else {"seconds": self.seconds}
        return {"next": "end" if self.next is Next.ENDS else "return", **seconds}

    def __str__(self) -> str:
        """The text that `parse` reads."""
        if self.seconds is None:
            return "end" if self.next is Next.ENDS else "return"
        return f"return; seconds={self.seconds:g}"

    def without_time(self) -> Hint:
        """The same hint, for those whose time does not count seconds."""
        return self if self.seconds is None else replace(self, seconds=None)


Hint.ENDS = Hint(Next.ENDS)
Hint.RETURNS = Hint(Next.RETURNS)
UNTIMED: Final = {"end": Hint.ENDS, "return": Hint.RETURNS}


@dataclass(frozen=True)
class PromptHints:
    """All that one request says.

    checkpoints: positions of `hybrid.checkpoint`, ascending. pins: ascending by position, one for
    each. session: None if it says nothing of it. exact: only exact copies may be hit.
    """

    checkpoints: tuple[int, ...] = ()
    pins: tuple[PinRequest, ...] = ()
    session: Hint | None = None
    exact: bool = False

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions at which a checkpoint is wanted, those of pins among them, ascending."""
        return tuple(sorted({*self.checkpoints, *(pin.position for pin in self.pins)}))

    def joined(self, other: PromptHints) -> PromptHints:
        """The hints of both; `other` counts about a position that both pin, and about the session.
        Raises ValueError where they declare more than `MOST_POSITIONS`.
        """
        if other == NO_HINTS:
            return self
        pins = {pin.position: pin for pin in (*self.pins, *other.pins)}
        said = PromptHints(
            tuple(sorted({*self.checkpoints, *other.checkpoints})),
            tuple(pins[at] for at in sorted(pins)),
            self.session if other.session is None else other.session,
            self.exact or other.exact,
        )
        said.check_count()
        return said

    def check_count(self) -> None:
        """Raise ValueError where more than `MOST_POSITIONS` positions are declared."""
        count = len(self.positions)
        if count > MOST_POSITIONS:
            raise ValueError(
                f"kv_hints declares {count} positions; a request may declare {MOST_POSITIONS} at "
                "most."
            )


NO_HINTS: Final = PromptHints()
"""The hints of a request that says nothing."""
