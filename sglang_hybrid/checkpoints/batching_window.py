"""An idle server waits a moment for prompts that were sent at the same time (hooks/scheduling.py).

Requests that a client sends at once arrive some milliseconds apart. Without the wait the first one
would be prefilled alone, before it is known where the others branch off. The server waits for
prompts that a tokenizing process has received and not sent yet (`serving/requests/on_the_way.py`),
and for prompts that nothing is known of where the tenant's long prompts usually come in company
(`company.py`). Whose prompts come alone never waits.

Only the rank that receives requests waits; the others get what it got, as always. A prompt of which
little is left to prefill, because the cache has the rest, is not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from math import ceil
from typing import Any, TypeAlias
from weakref import WeakMethod

import zmq
from sglang.srt.managers.io_struct import (
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    sock_recv,
    unwrap_from_pickle,
)

from sglang_hybrid.checkpoints.company import Company
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.tenants import tenant_of_sent

LONG_PROMPT = 512
"""New tokens from which on a prefill takes much longer than the wait."""

MOST_WAITS = 4
"""The window is at most so many quiet periods long for every `LONG_PROMPT` tokens to prefill."""

Prefilled: TypeAlias = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput
"""Of all messages that schedulers receive, those whose `input_ids` are prefilled."""

_BATCHES = (BatchTokenizedGenerateReqInput, BatchTokenizedEmbeddingReqInput)

LookUp = Callable[[Prefilled], int]
"""How many tokens of a tokenized request's prompt are cached."""

_look_ups: list[WeakMethod[LookUp]] = []  # of the newest cache


def look_up_with(cached_tokens: LookUp) -> None:
    """Ask this method of a cache how much of a prompt it has, as long as the cache is there."""
    _look_ups[:] = [WeakMethod(cached_tokens)]


def requests_in_window(receiver: Any, received: list[Any]) -> list[Any]:
    """What is read after `received`, while more prompts are known or expected to come; nothing at
    once if the server is busy or no prompt has many tokens that are not cached.

    A gap ends the wait for prompts that are only expected: of SGLANG_HYBRID_BURST_MS, or longer
    where the tenant's groups have longer ones (`company.py`).

    receiver: SGLang's SchedulerRequestReceiver, on the rank that reads the socket.
    """
    quiet = _quiet_ms() / 1000
    socket = receiver.recv_from_tokenizer
    if not quiet or not received or not isinstance(socket, zmq.Socket):
        return []
    prompts = [one for message in received for one in _long_prompts(message)]
    for prompt in prompts:
        _company().on_arrival(tenant_of_sent(prompt), _arrival(prompt))
    new = 0 if receiver.get_last_batch() is not None else max(map(_new_tokens, prompts), default=0)
    if new < LONG_PROMPT:
        return []
    on_the_way: dict[str | None, int] = {}  # by the process that tokenizes
    for message in received:
        on_the_way |= _others(message)
    patience = max(_company().patience(tenant_of_sent(prompt)) for prompt in prompts)
    end = time.monotonic() + quiet * MOST_WAITS * new / LONG_PROMPT
    rest: list[Any] = []
    while not receiver.recv_limit_reached(len(received) + len(rest)):
        left = end - time.monotonic()
        if not any(on_the_way.values()):
            left = min(left, patience)
        if left <= 0 or not socket.poll(ceil(left * 1000)):
            break
        rest.append(sock_recv(socket, zmq.NOBLOCK))
        on_the_way |= _others(rest[-1])
        for prompt in _long_prompts(rest[-1]):
            _company().on_arrival(tenant_of_sent(prompt), _arrival(prompt))
            patience = max(patience, _company().patience(tenant_of_sent(prompt)))
    return rest


def _prompts(message: Any) -> list[Prefilled]:
    if isinstance(message, _BATCHES):
        return list(message.batch)
    return [message] if isinstance(message, Prefilled) else []


def _long_prompts(message: Any) -> Iterator[Prefilled]:
    for prompt in _prompts(message):
        if prompt.input_ids is not None and len(prompt.input_ids) >= LONG_PROMPT:
            yield prompt


def _new_tokens(prompt: Prefilled) -> int:
    """Tokens of a long prompt that are not cached."""
    look_up = next((found() for found in _look_ups), None)
    return len(prompt.input_ids) - (0 if look_up is None else look_up(prompt))


def _others(message: Any) -> dict[str | None, int]:
    """How many prompts the process that sent `message` had still to send, under its name."""
    return {one.http_worker_ipc: getattr(_stats(one), "on_the_way", 0) for one in _prompts(message)}


def _arrival(prompt: Prefilled) -> float:
    """When SGLang received the request, in seconds; now if its arrival did not come with it."""
    return getattr(_stats(prompt), "created_time", 0.0) or time.perf_counter()


def _stats(prompt: Prefilled) -> Any:
    return unwrap_from_pickle(prompt.time_stats)


@cache
def _company() -> Company:
    return Company(_quiet_ms() / 1000, MOST_WAITS * _quiet_ms() / 1000)


@cache
def _quiet_ms() -> float:
    return HybridConfig.from_environment().hybrid_burst_ms
