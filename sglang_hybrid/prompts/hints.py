"""Our actions in the `kv_hints` envelope that SGLang carries from a request to its cache.

SGLang 0.5.23 checks the envelope (srt/managers/kv_hints.py) and leaves each action's payload to
whatever implements it. Ours have types that begin with `hybrid.`; all others are ignored. Knows
nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from sglang_hybrid.requests.fields import shown

PREFIX = "hybrid."
CHECKPOINT = "hybrid.checkpoint"
VERSION = "1"

MOST_POSITIONS = 16
"""Positions that one request may declare. Each takes a state slot, if need be another state's."""


class Action(Protocol):
    """One action of an envelope."""

    action_type: str
    action_version: str
    payload: Mapping[str, Any]


class Envelope(Protocol):
    """SGLang's KvHintsEnvelope."""

    actions: Sequence[Any]


def checkpoint_hint(positions: Iterable[int]) -> dict[str, Any]:
    """An envelope that declares `positions`, as JSON."""
    action = {
        "action_id": "checkpoint",
        "action_type": CHECKPOINT,
        "action_version": VERSION,
        "payload": {"positions": sorted(positions)},
    }
    return {"protocol_version": "1", "message_id": "hybrid", "actions": [action]}


def declared_positions(envelope: Envelope | None) -> tuple[int, ...]:
    """Positions (tokens from the start of the prompt) at which a checked request wants
    checkpoints, ascending.
    """
    if envelope is None:
        return ()
    asked = {position for action in _ours(envelope) for position in action.payload["positions"]}
    return tuple(sorted(asked))


def check(envelope: Envelope | None, prompt_len: int) -> None:
    """Our actions are known ones and name positions in a prompt of `prompt_len` tokens. Raises
    ValueError with one sentence.
    """
    if envelope is None:
        return
    for action in _ours(envelope):
        if action.action_type != CHECKPOINT:
            raise ValueError(
                f"kv_hints has the action {shown(action.action_type)}; of those that begin with "
                f"{PREFIX} this server knows {CHECKPOINT}."
            )
        if action.action_version != VERSION:
            raise ValueError(
                f"kv_hints has version {shown(action.action_version)} of {CHECKPOINT}; this server "
                f"knows version {VERSION!r}."
            )
        _check_positions(action.payload, prompt_len)
    count = len(declared_positions(envelope))
    if count > MOST_POSITIONS:
        raise ValueError(
            f"kv_hints declares {count} positions; a request may declare {MOST_POSITIONS} at most."
        )


def _check_positions(payload: Mapping[str, Any], prompt_len: int) -> None:
    unknown = payload.keys() - {"positions"}
    if unknown:
        raise ValueError(
            f"the payload of {CHECKPOINT} has the field {shown(min(unknown))}; it has only "
            "positions."
        )
    positions = payload.get("positions")
    if not isinstance(positions, list) or not positions:
        raise ValueError(
            f"positions of {CHECKPOINT} is {shown(positions)}; it must be a list of one position "
            "at least."
        )
    for at, position in enumerate(positions):
        if type(position) is not int or not 0 < position < prompt_len:
            raise ValueError(
                f"positions[{at}] of {CHECKPOINT} is {shown(position)}; in a prompt of "
                f"{prompt_len:,} tokens a position is a whole number from 1 to {prompt_len - 1:,}."
            )


def _ours(envelope: Envelope) -> list[Action]:
    return [action for action in envelope.actions if action.action_type.startswith(PREFIX)]
