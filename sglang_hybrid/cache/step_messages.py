"""Messages from the rank that receives requests to all ranks: they go with the requests of a step,
so all ranks have them at the same step (hooks/scheduling.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, TypeAlias

Handlers: TypeAlias = list[tuple[type, Callable[[Any], None]]]


class Source(Protocol):
    """A source of messages to all ranks."""

    def poll(self) -> Iterable[Any]:
        """The new messages, asked on the rank that receives requests, at every step."""

    def handlers(self) -> Handlers:
        """The functions that are called with messages of each type, on every rank."""


class StepMessages:
    """Keeps each message until it has arrived: with `--scheduler-recv-interval` SGLang receives
    nothing in most steps, and drops what was to go with the requests of such a step. Of several
    messages of one type only the newest is kept.
    """

    def __init__(self, *sources: Source) -> None:
        self._sources = sources
        self._unsent: dict[type, Any] = {}

    def poll(self) -> list[Any]:
        """The messages to send with this step's requests, on the rank that receives requests."""
        for source in self._sources:
            for message in source.poll():
                self._unsent[type(message)] = message
        return list(self._unsent.values())

    def handlers(self) -> Handlers:
        """The handlers that the scheduler's dispatcher must know."""
        return [
            (kind, partial(self._arrived, handle))
            for source in self._sources
            for kind, handle in source.handlers()
        ]

    def _arrived(self, handle: Callable[[Any], None], message: Any) -> None:
        """Messages that are sent together arrive together, before the next `poll`."""
        self._unsent.pop(type(message), None)
        handle(message)
