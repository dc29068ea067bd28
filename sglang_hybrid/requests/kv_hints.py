"""Our actions in the `kv_hints` envelope that SGLang carries from a request to its cache.

SGLang 0.5.23 checks the envelope (srt/managers/kv_hints.py) and leaves each action's payload to
whatever implements it. Ours have types that begin with `hybrid.`; all others are ignored. Knows
nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from sglang_hybrid.core.hints import Hint
from sglang_hybrid.core.pins import PinRequest, Priority
from sglang_hybrid.requests.fields import shown

PREFIX = "hybrid."
CHECKPOINT = "hybrid.checkpoint"
PIN = "hybrid.pin"
SESSION = "hybrid.session"
EXACT = "hybrid.exact"
KNOWN = (CHECKPOINT, PIN, SESSION, EXACT)
IMPORT = "hybrid.import"
VERSION = "1"

MOST_POSITIONS = 16
"""Positions that one request may declare. Each takes a state slot, if need be another state's."""

LONGEST_LIFETIME = 86_400
"""Seconds that a pin may last."""


class Action(Protocol):
    """One action of an envelope."""

    action_type: str
    action_version: str
    payload: Mapping[str, Any]


@dataclass(frozen=True)
class Imported:
    """What a prompt takes from elsewhere in the cache, as the server itself asks for it.

    segments: position of the first token, and tokens, of each. position: of the first token behind
    them.
    """

    segments: tuple[tuple[int, int], ...]
    position: int

    @property
    def length(self) -> int:
        """Tokens of all segments."""
        return sum(length for _, length in self.segments)


class Envelope(Protocol):
    """SGLang's KvHintsEnvelope."""

    actions: Sequence[Any]


def checkpoint_hint(positions: Iterable[int]) -> dict[str, Any]:
    """An envelope that declares `positions`, as JSON."""
    return _envelope(_action(CHECKPOINT, {"positions": sorted(positions)}))


def pin_hint(pins: Iterable[PinRequest], checkpoints: Iterable[int] = ()) -> dict[str, Any]:
    """An envelope that declares the positions of `pins`, wants them kept, and declares the
    positions `checkpoints` besides, as JSON.
    """
    together: dict[tuple[float, Priority], list[int]] = {}
    for pin in pins:
        together.setdefault((pin.ttl, pin.priority), []).append(pin.position)
    actions = [
        _action(PIN, {"positions": sorted(positions), "ttl": ttl, "priority": priority.value})
        for (ttl, priority), positions in together.items()
    ]
    if others := sorted(checkpoints):
        actions.append(_action(CHECKPOINT, {"positions": others}))
    return _envelope(*actions)


def import_hint(imported: Imported) -> dict[str, Any]:
    """An envelope that only the server itself may send (`check` refuses it from clients)."""
    segments = [list(segment) for segment in imported.segments]
    return _envelope(_action(IMPORT, {"segments": segments, "position": imported.position}))


def imported(envelope: Envelope | None) -> Imported | None:
    """What a checked request takes from elsewhere in the cache, or None."""
    asked = [] if envelope is None else _ours(envelope, IMPORT)
    if not asked:
        return None
    payload = asked[0].payload
    segments = tuple((start, length) for start, length in payload["segments"])
    return Imported(segments, payload["position"])


def composed_key(extra_key: str | None, digest: str) -> str:
    """The extra key under which prompts made of segments are stored, apart from all others of this
    tenant. digest: of where the segments stand.
    """
    return f"modular/{digest}/" + ("-" if extra_key is None else f"+{extra_key}")


def segment_key(composed: str, start: int) -> str:
    """The extra key of a segment that begins at position `start`, for a prompt under the key
    `composed`. What stands before that key, as the mark of exact requests, stays.
    """
    head, _, tenant = composed.split("/", 2)
    return f"{head.removesuffix('modular')}module/{start}/{tenant}"


def check_key(extra_key: object) -> None:
    """A client's extra key is none of those that the server makes. Raises ValueError."""
    if isinstance(extra_key, str) and extra_key.startswith(("modular/", "module/")):
        raise ValueError(
            f"extra_key is {shown(extra_key)}; names that begin with modular/ or module/ are the "
            "server's own."
        )


def with_session(kv_hints: Any, hint: Hint) -> Any:
    """The `kv_hints` of a request as it came, which also say what becomes of the session."""
    payload = {"next": "end" if hint == Hint.ENDS else "return", "seconds": hint.seconds}
    said = {name: value for name, value in payload.items() if value is not None}
    return _with(kv_hints, _action(SESSION, said))


def with_exact(kv_hints: Any) -> Any:
    """The `kv_hints` of a request as it came, which also ask for exact copies only."""
    return _with(kv_hints, _action(EXACT, {}))


def _with(kv_hints: Any, action: dict[str, Any]) -> Any:
    """`kv_hints` (an envelope, None, or a list with one for each prompt of a batch) and `action`.
    What is no envelope stays, for SGLang to refuse.
    """
    if isinstance(kv_hints, list):
        return [_with(each, action) for each in kv_hints]
    if not kv_hints:
        return _envelope(action)
    envelope = msgspec.to_builtins(kv_hints)
    if not isinstance(envelope, dict) or not isinstance(envelope.get("actions", []), list):
        return kv_hints
    return {**envelope, "actions": [*envelope.get("actions", []), action]}


def wants_exact(envelope: Envelope | None) -> bool:
    """Whether a checked request is to be answered from exact copies only."""
    return envelope is not None and bool(_ours(envelope, EXACT))


def session_hint(envelope: Envelope | None) -> Hint | None:
    """What a checked request says of its session: the last one of such actions."""
    said = [] if envelope is None else _ours(envelope, SESSION)
    return _said(said[-1]) if said else None


def declared_positions(envelope: Envelope | None) -> tuple[int, ...]:
    """Positions (tokens from the start of the prompt) at which a checked request wants
    checkpoints, ascending.
    """
    if envelope is None:
        return ()
    asked = {
        position
        for kind in (CHECKPOINT, PIN)
        for action in _ours(envelope, kind)
        for position in action.payload["positions"]
    }
    return tuple(sorted(asked))


def pins(envelope: Envelope | None) -> tuple[PinRequest, ...]:
    """What a checked request wants kept, by ascending position; the last word about each counts."""
    found = {
        position: PinRequest(
            position, action.payload["ttl"], Priority(action.payload.get("priority", "normal"))
        )
        for action in ([] if envelope is None else _ours(envelope, PIN))
        for position in action.payload["positions"]
    }
    return tuple(found[position] for position in sorted(found))


def check(envelope: Envelope | None, prompt_len: int, *, own: bool = False) -> None:
    """Our actions are known ones and name positions in a prompt of `prompt_len` tokens. own: the
    server made the request. Raises ValueError with one sentence.
    """
    if envelope is None:
        return
    for action in _ours(envelope):
        if own and action.action_type == IMPORT:
            continue
        if action.action_type not in KNOWN:
            raise ValueError(
                f"kv_hints has the action {shown(action.action_type)}; of those that begin with "
                f"{PREFIX} this server knows {', '.join(KNOWN)}."
            )
        if action.action_version != VERSION:
            raise ValueError(
                f"kv_hints has version {shown(action.action_version)} of {action.action_type}; "
                f"this server knows version {VERSION!r}."
            )
        if action.action_type == SESSION:
            _said(action)
            _check_fields(action, "next", "seconds")
        elif action.action_type == EXACT:
            _check_fields(action)
        elif action.action_type == PIN:
            _check_fields(action, "positions", "ttl", "priority")
            _check_positions(action, prompt_len)
            _check_lifetime(action)
        else:
            _check_fields(action, "positions")
            _check_positions(action, prompt_len)
    count = len(declared_positions(envelope))
    if count > MOST_POSITIONS:
        raise ValueError(
            f"kv_hints declares {count} positions; a request may declare {MOST_POSITIONS} at most."
        )


def session_of_header(name: str, value: str) -> Hint:
    """What the header `name` says of a session. Raises ValueError with one sentence."""
    try:
        return Hint.parse(value)
    except ValueError as error:
        raise ValueError(f"the header {name} is {shown(value)}; {error}.") from None


def _said(action: Action) -> Hint:
    """What an action says of the session. Raises ValueError with one sentence."""
    value, seconds = action.payload.get("next"), action.payload.get("seconds")
    known = {"end": Hint.ENDS, "return": Hint.RETURNS}
    if not isinstance(value, str) or value not in known:
        raise ValueError(
            f"the payload of {SESSION} says {shown(value)} of the session; say 'end' or 'return'."
        )
    if seconds is None:
        return known[value]
    if known[value] is Hint.ENDS or type(seconds) not in (int, float):
        raise ValueError(
            f"seconds in the payload of {SESSION} is {shown(seconds)}; it is a number, and only "
            "for a session that returns."
        )
    try:
        return Hint.after(seconds)
    except ValueError as error:
        raise ValueError(f"the payload of {SESSION}: {error}.") from None


def _check_fields(action: Action, *fields: str) -> None:
    unknown = action.payload.keys() - {*fields}
    if unknown:
        raise ValueError(
            f"the payload of {action.action_type} has the field {shown(min(unknown))}; "
            f"{'it has only ' + ', '.join(fields) if fields else 'it has none'}."
        )


def _check_lifetime(action: Action) -> None:
    ttl = action.payload.get("ttl")
    numeric = isinstance(ttl, int | float) and not isinstance(ttl, bool)
    if ttl is None or not numeric or not 0 < ttl <= LONGEST_LIFETIME:
        raise ValueError(
            f"ttl of {PIN} is {shown(ttl)}; it is a number of seconds, above 0 and at most "
            f"{LONGEST_LIFETIME:,}."
        )
    priority = action.payload.get("priority", Priority.NORMAL.value)
    known = [each.value for each in Priority]
    if priority not in known:
        raise ValueError(
            f"priority of {PIN} is {shown(priority)}; it may be {', '.join(map(repr, known))}."
        )


def _check_positions(action: Action, prompt_len: int) -> None:
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


def _action(action_type: str, payload: dict[str, Any]) -> dict[str, Any]:
    return {
        "action_id": action_type.removeprefix(PREFIX),
        "action_type": action_type,
        "action_version": VERSION,
        "payload": payload,
    }


def _envelope(*actions: dict[str, Any]) -> dict[str, Any]:
    return {"protocol_version": "1", "message_id": "hybrid", "actions": list(actions)}


def _ours(envelope: Envelope, prefix: str = PREFIX) -> list[Action]:
    return [action for action in envelope.actions if action.action_type.startswith(prefix)]
