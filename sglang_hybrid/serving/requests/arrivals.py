"""Prompts that reach an idle server together are sent to its scheduler together.

Several connections bring the prompts of one client at the same time. The process that tokenizes
handles them one after the other, so they would reach an idle scheduler some milliseconds apart, and
the first one would be prefilled before it is known where the others branch off. Here a prompt is
sent once this process has handled what has reached it already, in one message with all prompts that
came of it. Nothing is waited for that has not arrived: a prompt that is alone is sent after a few
empty turns of the event loop, within about 0.1 ms, and none is held for more than `MOST_SECONDS`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

from sglang_hybrid.serving.config import BACKEND, HybridConfig

QUIET_TURNS: Final = 8
"""Turns of the event loop without another prompt after which all that arrived has been handled."""

MOST_SECONDS: Final = 0.005
"""A prompt is held no longer, whatever else this process is handling."""


@dataclass(frozen=True, eq=False)
class _Held:
    """A tokenized prompt, and what its sender awaits."""

    prompt: Any
    sent: asyncio.Future[None]


class Arrivals:
    """The prompts that one tokenizing process is about to send.

    Args:
        is_busy: returns whether a request of this process is in the scheduler.
        send: sends one tokenized prompt. send_all: several, in one message.
    """

    def __init__(
        self,
        is_busy: Callable[[], bool],
        send: Callable[[Any], Awaitable[None]],
        send_all: Callable[[list[Any]], Awaitable[None]],
    ) -> None:
        self._is_busy = is_busy
        self._send = send
        self._send_all = send_all
        self._held: list[_Held] = []
        self._sending: asyncio.Task[None] | None = None

    async def send(self, prompt: Any) -> None:
        """Return when `prompt` has been sent. Raises what sending raises."""
        if self._is_busy():  # the scheduler looks for more prompts at its next step anyway
            await self._send(prompt)
            return
        held = _Held(prompt, asyncio.get_running_loop().create_future())
        self._held.append(held)
        if len(self._held) == 1:
            self._sending = asyncio.create_task(self._send_held())
        try:
            await held.sent
        except asyncio.CancelledError:  # its client has gone
            if held in self._held:
                self._held.remove(held)
            raise

    async def _send_held(self) -> None:
        end = time.monotonic() + MOST_SECONDS
        quiet, known = 0, len(self._held)
        while quiet < QUIET_TURNS and time.monotonic() < end:
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self._held) <= known else 0
            known = len(self._held)
        group, self._held = self._held, []
        try:
            if len(group) > 1:
                await self._send_all([one.prompt for one in group])
            elif group:
                await self._send(group[0].prompt)
        except Exception as error:
            for one in group:
                if not one.sent.done():
                    one.sent.set_exception(error)
            return
        for one in group:
            if not one.sent.done():
                one.sent.set_result(None)


def are_gathered(manager: Any, prompt: Any) -> bool:
    """True if a tokenized prompt is sent together with others: on a server whose cache decides
    itself which states it keeps. SGLang sends images and what belongs to them one by one.

    manager: SGLang's TokenizerManager.
    """
    decides = manager.server_args.radix_cache_backend == BACKEND
    decides = decides and HybridConfig.from_environment().is_judicious
    return decides and type(prompt) is TokenizedGenerateReqInput and prompt.mm_inputs is None


@lru_cache(maxsize=1)
def arrivals_of(manager: Any, send: Callable[[Any, Any], Awaitable[None]]) -> Arrivals:
    """The arrivals of a tokenizer manager. send: SGLang's function that sends one prompt."""

    def is_busy() -> bool:
        return any(state.dispatched for state in manager.rid_to_state.values())

    async def send_one(prompt: Any) -> None:
        await send(manager, prompt)

    return Arrivals(is_busy, send_one, manager._send_batch_request)
