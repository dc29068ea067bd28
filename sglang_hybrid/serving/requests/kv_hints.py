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

from sglang_hybrid.core.records.pins import PinRequest, Priority
from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.serving.requests.fields import shown
from sglang_hybrid.serving.requests.hint_payloads import (
    VERSION,
    Action,
    check_fields,
    check_lifetime,
    check_positions,
    check_priority,
    check_version,
    said_of_session,
)

PREFIX = "hybrid."
CHECKPOINT = "hybrid.checkpoint"
PIN = "hybrid.pin"
SESSION = "hybrid.session"
EXACT = "hybrid.exact"
IMPORT = "hybrid.import"
PREWARM = "hybrid.prewarm"
KNOWN = (CHECKPOINT, PIN, IMPORT, PREWARM, SESSION, EXACT)
SEGMENTS = "hybrid.segments"

MOST_POSITIONS = 16
"""Positions that one request may declare. Each takes a state slot, if need be another state's."""


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


def pin_hint(pins: Iterable[PinRequest], positions: Sequence[int] = ()) -> dict[str, Any]:
    """An envelope that declares the positions of `pins` and wants them kept, and declares other
    `positions`, as JSON.
    """
    together: dict[tuple[float, Priority], list[int]] = {}
    for pin in pins:
        together.setdefault((pin.ttl, pin.priority), []).append(pin.position)
    actions = [
        _action(PIN, {"positions": sorted(pinned), "ttl": ttl, "priority": priority.value})
        for (ttl, priority), pinned in together.items()
    ]
    if positions:
        actions.append(_action(CHECKPOINT, {"positions": sorted(positions)}))
    return _envelope(*actions)


def imported(envelope: Envelope | None) -> Imported | None:
    """What a checked request takes from elsewhere in the cache, or None."""
    asked = [] if envelope is None else _ours(envelope, SEGMENTS)
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


def with_checkpoints(kv_hints: Any, positions: Iterable[int]) -> Any:
    """The `kv_hints` of a request as it came, which also declare `positions`."""
    return _with(kv_hints, _action(CHECKPOINT, {"positions": sorted(positions)}))


def with_segments(kv_hints: Any, imported: Imported) -> Any:
    """The `kv_hints` of a request as it came, which also take segments from the cache. Only the
    server itself may send them (`check` refuses them from clients).
    """
    segments = [list(segment) for segment in imported.segments]
    return _with(kv_hints, _action(SEGMENTS, {"segments": segments, "position": imported.position}))


def take(kv_hints: Any, kind: str) -> tuple[Mapping[str, Any] | None, Any]:
    """The payload of the one action `kind` in the `kv_hints` of a request as it came, or None; and
    the `kv_hints` without it. Raises ValueError.

    For actions that are done before a scheduler sees the request; they stand in the envelope of a
    request, not in those of its batch. What is no envelope stays, for SGLang to refuse.
    """
    if isinstance(kv_hints, list):
        for one in kv_hints:
            if take(one, kind)[0] is not None:
                raise ValueError(
                    f"kv_hints is a list with {kind}; that action is for a request of one prompt."
                )
        return None, kv_hints
    envelope = msgspec.to_builtins(kv_hints) if kv_hints else None
    if not isinstance(envelope, dict):
        return None, kv_hints
    actions = envelope.get("actions")
    if not isinstance(actions, list) or not all(isinstance(one, dict) for one in actions):
        return None, kv_hints
    found = [one for one in actions if one.get("action_type") == kind]
    if not found:
        return None, kv_hints
    if len(found) > 1:
        raise ValueError(f"kv_hints has {kind} {len(found)} times; it may stand there once.")
    check_version(kind, found[0].get("action_version"))
    payload = found[0].get("payload", {})
    if not isinstance(payload, dict):
        raise ValueError(f"the payload of {kind} is {shown(payload)}; it must be an object.")
    rest = [one for one in actions if one is not found[0]]
    return payload, {**envelope, "actions": rest} if rest else None


def wants_exact(envelope: Envelope | None) -> bool:
    """Whether a checked request is to be answered from exact copies only."""
    return envelope is not None and bool(_ours(envelope, EXACT))


def session_hint(envelope: Envelope | None) -> Hint | None:
    """What a checked request says of its session: the last one of such actions."""
    said = [] if envelope is None else _ours(envelope, SESSION)
    return said_of_session(said[-1]) if said else None


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
    server made the request, and may pin its end. Raises ValueError with one sentence.
    """
    if envelope is None:
        return
    for action in _ours(envelope):
        if own and action.action_type == SEGMENTS:
            continue
        if action.action_type not in KNOWN:
            raise ValueError(
                f"kv_hints has the action {shown(action.action_type)}; of those that begin with "
                f"{PREFIX} this server knows {', '.join(KNOWN)}."
            )
        check_version(action.action_type, action.action_version)
        if action.action_type == SESSION:
            said_of_session(action)
            check_fields(action, "next", "seconds")
        elif action.action_type in (IMPORT, PREWARM):
            raise ValueError(
                f"kv_hints has {action.action_type}, which is for requests of one prompt to "
                "/generate; leave it out."
            )
        elif action.action_type == EXACT:
            check_fields(action)
        elif action.action_type == PIN:
            check_fields(action, "positions", "ttl", "priority")
            check_positions(action, prompt_len + own)
            check_lifetime(f"ttl of {PIN}", action.payload.get("ttl"))
            check_priority(f"priority of {PIN}", action.payload.get("priority", "normal"))
        else:
            check_fields(action, "positions")
            check_positions(action, prompt_len)
    count = len(declared_positions(envelope))
    if count > MOST_POSITIONS:
        raise ValueError(
            f"kv_hints declares {count} positions; a request may declare {MOST_POSITIONS} at most."
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
