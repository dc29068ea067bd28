"""Our actions in the `kv_hints` envelope that SGLang carries from a request to its cache.

SGLang 0.5.23 checks the envelope (srt/managers/kv_hints.py) and leaves each action's payload to
its implementation. Ours have types that begin with `hybrid.`; all others are ignored. Payloads are
defined in `core/returns/hints.py`. This file needs nothing of SGLang.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_hybrid.core.records.pin import PinRequest, Priority
from sglang_hybrid.core.returns.hints import (
    CHECKPOINT,
    EXACT,
    IMPORT,
    NO_HINTS,
    PIN,
    PREWARM,
    SEGMENTS,
    SESSION,
    Hint,
    PromptHints,
)
from sglang_hybrid.core.sentences import quote
from sglang_hybrid.serving.headers import value
from sglang_hybrid.serving.requests.payloads import (
    check_fields,
    read_lifetime,
    read_positions,
    read_priority,
    read_session,
)

if TYPE_CHECKING:
    from sglang.srt.managers.kv_hints import KvHintsEnvelope

PREFIX = "hybrid."
KNOWN = (CHECKPOINT, PIN, IMPORT, PREWARM, SEGMENTS, SESSION, EXACT)
VERSION = "1"
"""The version of all our actions."""

SESSION_HEADER = "Session"
"""A header of ours (headers.py): what a client says of its session, as the action `hybrid.session`:
`end`, `return`, or `return; seconds=20`.
"""

EXACT_HEADER = "Exact"
"""`true`: to be answered from exact copies only, as the action `hybrid.exact`."""

HINTS_HEADER = "Kv-Hints"
"""The `actions` of `kv_hints`, a list as JSON, where a body has no place for them or loses them."""


def read(envelope: KvHintsEnvelope | None, prompt_len: float = math.inf) -> PromptHints:
    """All that our actions say; the last one about a position, or about the session, counts.

    Args:
        envelope: of a request, None if it has none.
        prompt_len: tokens of its prompt.

    Raises ValueError with one sentence for what a request may not say.
    """
    if envelope is None:
        return NO_HINTS
    checkpoints: set[int] = set()
    pins: dict[int, PinRequest] = {}
    session, exact = None, False
    for action in envelope.actions:
        kind, payload = action.action_type, action.payload
        if not kind.startswith(PREFIX):
            continue
        _check_kind(action)
        if kind == SESSION:
            session = read_session(payload)
            continue
        check_fields(kind, payload)
        if kind == EXACT:
            exact = True
        elif kind == CHECKPOINT:
            checkpoints.update(read_positions(kind, payload, prompt_len))
        else:
            positions = read_positions(kind, payload, prompt_len)
            ttl = read_lifetime(f"ttl of {kind}", payload.get("ttl"))
            priority = read_priority(f"priority of {kind}", payload.get("priority", "normal"))
            pins.update((at, PinRequest(at, ttl, priority)) for at in positions)
    by_position = tuple(pins[at] for at in sorted(pins))
    hints = PromptHints(tuple(sorted(checkpoints)), by_position, session, exact)
    hints.check_count()
    return hints


def _check_kind(action: Any) -> None:
    """The action is one that a request of any kind may have, of the version that is known."""
    kind = action.action_type
    if kind not in KNOWN:
        raise ValueError(
            f"kv_hints has the action {quote(kind)}; of those that begin with {PREFIX} this server "
            f"knows {', '.join(KNOWN)}."
        )
    _check_version(kind, action.action_version)
    if kind in (IMPORT, PREWARM, SEGMENTS):
        raise ValueError(
            f"kv_hints has {kind}, which is for requests of one prompt to /generate; leave it out."
        )


def _check_version(kind: str, version: Any) -> None:
    if version != VERSION:
        raise ValueError(
            f"kv_hints has version {quote(version)} of {kind}; this server knows version "
            f"{VERSION!r}."
        )


def write(hints: PromptHints, kv_hints: Any = None) -> Any:
    """The `kv_hints` of a client's request, as JSON: what `hints` say, behind what they say
    already.

    kv_hints: as the request came: an envelope, None, or a list with one for each prompt of a batch.
    What is no envelope stays, for SGLang to refuse.
    """
    return _joined(kv_hints, _actions(hints))


def _joined(kv_hints: Any, actions: Sequence[Any]) -> Any:
    """`kv_hints` as `write` takes them, with these actions behind their own."""
    if isinstance(kv_hints, list):
        return [_joined(each, actions) for each in kv_hints]
    envelope = msgspec.to_builtins(kv_hints or {})
    if not isinstance(envelope, dict) or not isinstance(envelope.get("actions", []), list):
        return kv_hints
    head = envelope or {"protocol_version": "1", "message_id": "hybrid"}
    return {**head, "actions": [*envelope.get("actions", []), *actions]}


def _actions(hints: PromptHints) -> list[dict[str, Any]]:
    together: dict[tuple[float, Priority], list[int]] = {}
    for pin in hints.pins:
        together.setdefault((pin.ttl, pin.priority), []).append(pin.position)
    payloads: list[tuple[str, dict[str, Any]]] = [
        (PIN, {"positions": sorted(pinned), "ttl": ttl, "priority": priority.value})
        for (ttl, priority), pinned in together.items()
    ]
    if hints.checkpoints:
        payloads.append((CHECKPOINT, {"positions": sorted(hints.checkpoints)}))
    if hints.session is not None:
        payloads.append((SESSION, hints.session.payload()))
    if hints.exact:
        payloads.append((EXACT, {}))
    return [
        {
            "action_id": kind.removeprefix(PREFIX),
            "action_type": kind,
            "action_version": VERSION,
            "payload": payload,
        }
        for kind, payload in payloads
    ]


def with_headers(kv_hints: Any, headers: Mapping[str, str]) -> Any:
    """The `kv_hints` of a request as it came, which also say what its HTTP headers do. Raises
    ValueError with one sentence.
    """
    session, exact, more = (
        value(headers, name) for name in (SESSION_HEADER, EXACT_HEADER, HINTS_HEADER)
    )
    if more is not None:
        try:
            kv_hints = _joined(kv_hints, msgspec.json.decode(more, type=list[dict[str, Any]]))
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(
                f"the header X-Hybrid-{HINTS_HEADER} is no JSON list of actions: {error}."
            ) from None
    if session is not None:
        try:
            kv_hints = write(PromptHints(session=Hint.parse(session)), kv_hints)
        except ValueError as error:
            raise ValueError(
                f"the header X-Hybrid-{SESSION_HEADER} is {quote(session)}; {error}."
            ) from None
    if exact is not None:
        if exact != "true":
            raise ValueError(
                f"the header X-Hybrid-{EXACT_HEADER} is {quote(exact)}; it may be 'true'."
            )
        kv_hints = write(PromptHints(exact=True), kv_hints)
    return kv_hints


def take(kv_hints: Any, kind: str) -> tuple[Mapping[str, Any] | None, Any]:
    """The payload of the one action `kind` in the `kv_hints` of a request as it came, or None; and
    the `kv_hints` without it. Raises ValueError.

    For actions that are done before a scheduler sees the request; they stand in the envelope of a
    request, not in those of its batch. A value that is no envelope stays, for SGLang to refuse.
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
    _check_version(kind, found[0].get("action_version"))
    payload = found[0].get("payload", {})
    if not isinstance(payload, dict):
        raise ValueError(f"the payload of {kind} is {quote(payload)}; it must be an object.")
    rest = [one for one in actions if one is not found[0]]
    return payload, {**envelope, "actions": rest} if rest else None
