"""An idle server waits a moment for prompts that were sent at the same time (hooks/scheduling.py).

Requests that a client sends at once arrive some milliseconds apart. Without the wait the first one
would be prefilled alone, before it is known where the others branch off. The server waits for
prompts that a tokenizing process has received and not sent yet (`serving/requests/on_the_way.py`),
and for prompts that nothing is known of where the tenant's long prompts usually come in company
(`company.py`). Whose prompts come alone never waits.

Only the rank that receives requests waits; the others get what it got, as always. A prompt of which
little is left to prefill, because the cache has the rest, is not waited for, and none waits longer
than a share of what its prefill is expected to take.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from math import ceil
from typing import Any, Protocol, TypeAlias
from weakref import ref

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

WAIT = 0.5
"""The window lasts at most this share of the longest prefill that it delays."""

Prefilled: TypeAlias = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput
"""Of all messages that schedulers receive, those whose `input_ids` are prefilled."""

_BATCHES = (BatchTokenizedGenerateReqInput, BatchTokenizedEmbeddingReqInput)


class Prefills(Protocol):
    """What a cache knows of prefills to come."""

    def cached_tokens(self, request: Prefilled, /) -> int:
        """How many tokens of a tokenized request's prompt are cached."""

    def prefill_seconds(self, begin: int, end: int, /) -> float:
        """How long positions `begin` to `end` of a prompt are expected to take."""


_newest: list[ref[Prefills]] = []  # of the cache that was built last


def ask(prefills: Prefills) -> None:
    """Ask `prefills` from now on, as long as it is there."""
    _newest[:] = [ref(prefills)]


def requests_in_window(receiver: Any, received: list[Any]) -> list[Any]:
    """What is read after `received`, while more prompts are known or expected to come; nothing at
    once if the server is busy or no prompt has many tokens that are not cached.

    A gap ends the wait for prompts that are only expected: of SGLANG_HYBRID_BURST_MS, or longer
    where the tenant's groups have longer ones (`company.py`).

    receiver: SGLang's SchedulerRequestReceiver, on the rank that reads the socket.
    """
    prefills = next((found() for found in _newest), None)
    socket = receiver.recv_from_tokenizer
    if not _quiet_ms() or not received or prefills is None or not isinstance(socket, zmq.Socket):
        return []
    prompts = [one for message in received for one in _on_arrival(message, prefills)]
    if receiver.get_last_batch() is not None:
        return []
    window = WAIT * max((_seconds(prompt, prefills) for prompt in prompts), default=0.0)
    if not window:
        return []
    on_the_way: dict[str | None, int] = {}  # by the process that tokenizes
    for message in received:
        on_the_way |= _others(message)
    end = time.monotonic() + window
    rest: list[Any] = []
    while not receiver.recv_limit_reached(len(received) + len(rest)):
        left = end - time.monotonic()
        if not any(on_the_way.values()):
            patience = (_company().patience(tenant_of_sent(one), window) for one in prompts)
            left = min(left, max(patience))
        if left <= 0 or not socket.poll(ceil(left * 1000)):
            break
        rest.append(sock_recv(socket, zmq.NOBLOCK))
        on_the_way |= _others(rest[-1])
        prompts += _on_arrival(rest[-1], prefills)
    return rest


def _on_arrival(message: Any, prefills: Prefills) -> list[Prefilled]:
    """The long prompts of a message that was received. It is one arrival: who sends several prompts
    in one body has sent them all.
    """
    prompts = list(_long_prompts(message))
    if prompts:
        first = prompts[0]
        most = WAIT * prefills.prefill_seconds(0, len(first.input_ids))
        _company().on_arrival(tenant_of_sent(first), _arrival(first), most)
    return prompts


def _seconds(prompt: Prefilled, prefills: Prefills) -> float:
    """How long the prefill of a long prompt is expected to take; 0 if the cache has most of it."""
    begin, end = prefills.cached_tokens(prompt), len(prompt.input_ids)
    return prefills.prefill_seconds(begin, end) if end - begin >= LONG_PROMPT else 0.0


def _prompts(message: Any) -> list[Prefilled]:
    if isinstance(message, _BATCHES):
        return list(message.batch)
    return [message] if isinstance(message, Prefilled) else []


def _long_prompts(message: Any) -> Iterator[Prefilled]:
    for prompt in _prompts(message):
        if prompt.input_ids is not None and len(prompt.input_ids) >= LONG_PROMPT:
            yield prompt


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
    return Company(_quiet_ms() / 1000)


@cache
def _quiet_ms() -> float:
    return HybridConfig.from_environment().hybrid_burst_ms
