"""Faults around a server while clients use it: one thing at a time, at random."""

from __future__ import annotations

import asyncio
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.soak import LOGPROBS, Soak, last_event

BETWEEN = (0.5, 2.5)
"""Seconds from one disturbance to the next."""

SOON = 15
"""Seconds to wait for a worker."""

ROOM = 4_096
"""Bytes that a disk has left when it is about to be full."""


class Clients(Soak):
    """The soak's clients, some of them slow readers, who take a refusal for an answer."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(url, seed, priorities=True)

    def _next(self) -> tuple[int, Callable[[], Any]]:
        return (1, self._read_slowly) if self._random.random() < 0.05 else super()._next()

    async def _read_slowly(self) -> None:
        body = self._body(self._prompt(), new_tokens=40) | LOGPROBS | {"stream": True}
        async with self._session.post("/generate", json=body) as response:
            if response.status != 200:
                self.outcomes[f"status {response.status}"] += 1
                return
            record, _ = await last_event(response, lambda: self._random.random() / 10)
        self.outcomes["read slowly"] += 1
        self._watch(body["input_ids"], record)

    async def _post(self, body: dict[str, Any]) -> Any:
        async with self._session.post("/generate", json=body) as response:
            if response.status == 200:
                answer = await response.json()
            else:
                self.outcomes[f"status {response.status}"] += 1
                nothing = {"output_ids": [], "meta_info": {"finish_reason": {"type": "refused"}}}
                prompts = body["input_ids"]
                answer = [nothing for _ in prompts] if isinstance(prompts[0], list) else nothing
        for record in answer if isinstance(answer, list) else [answer]:
            self.outcomes[record["meta_info"]["finish_reason"]["type"]] += 1
        return answer

    def _watch(self, prompt: list[int], record: dict[str, Any]) -> None:
        if record["meta_info"]["finish_reason"]["type"] == "length":
            super()._watch(prompt, record)


class Chaos:
    """Disturbs one server. happened: how often what was done.

    Args:
        server: started, with a tuner and a recording.
        model: the directory of its weights.
        recording: the file.
        seed: decides what happens.
    """

    def __init__(self, server: ServerProcess, model: Path, recording: Path, seed: int) -> None:
        self.server = server
        self.happened: Counter[str] = Counter()
        self._model = model
        self._recording = recording
        self._random = random.Random(seed)

    async def run(self, stop: asyncio.Event) -> None:
        """Everything once, in random order, and again until `stop` is set, which interrupts nothing
        that has begun.
        """
        acts: list[Callable[[], Awaitable[None]]] = [
            self._flush,
            self._pause,
            self._stop_the_scheduler,
            self._reload,
            self._kill_worker,
            self._fill_disk,
        ]
        timeout = aiohttp.ClientTimeout(300)
        async with aiohttp.ClientSession(self.server.url, timeout=timeout) as self._session:
            left: list[Callable[[], Awaitable[None]]] = []
            while not stop.is_set():
                left = left or self._random.sample(acts, len(acts))
                await left.pop()()
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), self._random.uniform(*BETWEEN))

    async def _flush(self) -> None:
        """Waits for a moment in which nothing runs, which may not come."""
        async with self._session.post("/flush_cache", params={"timeout": 1}) as response:
            self._note("flushed" if response.status == 200 else "flush refused")

    async def _pause(self) -> None:
        mode = self._random.choice(("abort", "retract", "in_place"))
        await self._done("/pause_generation", {"mode": mode})
        await asyncio.sleep(self._random.random())
        await self._done("/continue_generation", {})
        self._note(f"paused, {mode}")

    async def _stop_the_scheduler(self) -> None:
        """Stop the scheduler for a while, as a debugger does, or a machine short of processors."""
        scheduler = self._scheduler()
        scheduler.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(2 * self._random.random())
        finally:
            scheduler.send_signal(signal.SIGCONT)
        self._note("scheduler stopped")

    async def _reload(self) -> None:
        """Load the same weights again, which empties the cache."""
        abort = self._random.random() < 0.5
        body = {"model_path": str(self._model), "abort_all_requests": abort}
        await self._done("/update_weights_from_disk", body)
        self._note("weights reloaded")

    async def _kill_worker(self) -> None:
        """Kill the next worker that the tuner starts, if it starts one soon."""
        until = time.monotonic() + SOON
        while time.monotonic() < until:
            for process in self.server.processes():
                with suppress(psutil.Error):
                    if "sglang_hybrid.extensions.lab.simulation.workers" in process.cmdline():
                        process.kill()
                        self._note("worker killed")
                        return
            await asyncio.sleep(0.2)

    async def _fill_disk(self) -> None:
        """Limit the size of the scheduler's files; its log is smaller than the recording."""
        scheduler = self._scheduler()
        _, most = scheduler.rlimit(resource.RLIMIT_FSIZE)
        room = self._recording.stat().st_size + ROOM
        assert self.server.log.stat().st_size < room // 2
        scheduler.rlimit(resource.RLIMIT_FSIZE, (room, most))
        try:
            await asyncio.sleep(1 + 2 * self._random.random())
        finally:
            scheduler.rlimit(resource.RLIMIT_FSIZE, (most, most))
        self._note("disk filled")

    def _scheduler(self) -> psutil.Process:
        """The scheduler, not the tuner's worker, which has the same title until it has started."""
        first, *others = self.server.processes()
        (scheduler,) = [
            one
            for one in others
            if one.ppid() == first.pid and "sglang::scheduler" in one.cmdline()[0]
        ]
        return scheduler

    def _note(self, what: str) -> None:
        self.happened[what] += 1

    async def _done(self, path: str, body: dict[str, Any]) -> None:
        async with self._session.post(path, json=body) as response:
            assert response.status == 200, (path, await response.text())
