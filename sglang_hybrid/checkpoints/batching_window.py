"""An idle server waits a moment for requests that were sent at the same time (hooks/scheduling.py).

Requests that a client sends at once arrive some milliseconds apart. Without the wait the first one
would be prefilled alone, before it is known where the others branch off. Only the rank that
receives requests waits; the others get what it got, as always. A prompt of which little is left to
prefill, because the cache has the rest, is not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from math import ceil
from typing import Any, TypeAlias
from weakref import WeakMethod

import zmq
from sglang.srt.managers.io_struct import (
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    sock_recv,
)

from sglang_hybrid.serving.config import HybridConfig

LONG_PROMPT = 512
"""New tokens from which on a prefill takes much longer than the wait."""

MOST_WAITS = 4
"""The window is at most so many quiet periods long."""

Prefilled: TypeAlias = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput
"""Of all messages that schedulers receive, those whose `input_ids` are prefilled."""

LookUp = Callable[[Prefilled], int]
"""How many tokens of a tokenized request's prompt are cached."""

_look_ups: list[WeakMethod[LookUp]] = []  # of the newest cache


def look_up_with(cached_tokens: LookUp) -> None:
    """Ask this method of a cache how much of a prompt it has, as long as the cache is there."""
    _look_ups[:] = [WeakMethod(cached_tokens)]


def requests_in_window(receiver: Any, received: list[Any]) -> list[Any]:
    """What follows `received` with less than SGLANG_HYBRID_BURST_MS in between; nothing at once if
    the server is busy or no prompt has many tokens that are not cached.

    receiver: SGLang's SchedulerRequestReceiver, on the rank that reads the socket.
    """
    quiet = _quiet_ms()
    socket = receiver.recv_from_tokenizer
    if not quiet or not received or not isinstance(socket, zmq.Socket):
        return []
    if receiver.get_last_batch() is not None or not any(map(_is_long, received)):
        return []
    rest: list[Any] = []
    deadline = time.monotonic() + quiet * MOST_WAITS / 1000
    while not receiver.recv_limit_reached(len(received) + len(rest)):
        left = deadline - time.monotonic()
        if left <= 0 or not socket.poll(ceil(min(quiet, left * 1000))):
            break
        rest.append(sock_recv(socket, zmq.NOBLOCK))
    return rest


def _is_long(received: Any) -> bool:
    if not isinstance(received, Prefilled):
        return False
    prompt = received.input_ids
    if prompt is None or len(prompt) < LONG_PROMPT:
        return False
    look_up = next((found() for found in _look_ups), None)
    return look_up is None or len(prompt) - look_up(received) >= LONG_PROMPT


@cache
def _quiet_ms() -> float:
    return HybridConfig.from_environment().hybrid_burst_ms
