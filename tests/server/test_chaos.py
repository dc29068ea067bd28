"""Two bad minutes: what is answered is right, and at the end nothing is left over."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from sglang_hybrid.extensions.cpu.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.extensions.lab.simulation.traces.line_formats import RecordedLine
from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.chaos import Chaos, Clients
from tests.server.client import Serve, alive, random_prompt, said, until
from tests.server.one_memory import all_is_free
from tests.server.test_shutdown import shared_by
from tests.server.test_soak import CHECKED, FLAGS, PRIORITIES, RUNNING, answers_stand, emptied

pytestmark = pytest.mark.usefixtures("spawned")  # as users' processes start

SECONDS = 120
AT_ONCE = 100
"""Requests from one moment in which nothing runs to the next."""

EVERYTHING = {"scheduler stopped", "weights reloaded", "disk filled", "worker killed"}
"""Faults that happen in every run; whether a flush finds a moment of its own is chance."""

SLOTS = 2 * RUNNING
EARLIER = 3_000
"""Requests that were recorded before the server was started."""

LIMIT = 15
"""Seconds within which a server that is asked to end has ended."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_bad_minutes(
    model_directory: Callable[[str], Path], serve: Serve, seed: int, tmp_path: Path
) -> None:
    model, recording = model_directory(DEFAULT_ARCHITECTURE), tmp_path / "trace.jsonl"
    write_earlier(recording)
    flags = ["--max-mamba-cache-size", str(SLOTS), *FLAGS, *PRIORITIES]
    flags += ["--hybrid-record", str(recording), "--hybrid-tuner-workers", "1"]
    variables = {**CHECKED, "SGLANG_HYBRID_TUNER_WINDOW": "64"}
    with serve(*flags, module="tests.server.checked", environment=variables) as server:
        clients, chaos = Clients(server.url, seed), Chaos(server, model, recording, seed)
        asyncio.run(use(clients, chaos))
        print(clients.outcomes, chaos.happened)
        assert set(chaos.happened) >= EVERYTHING
        assert clients.outcomes["read slowly"] and clients.outcomes["hung up"]
        assert len(clients.watched) > AT_ONCE / 10
        answers_stand(server.url, clients.watched)
        (seen,) = emptied(server)
        assert all_is_free(seen, SLOTS)
        told = seen["recording"]
        assert told["left_out"] > 0 and told["failure"] == ""
        assert said(server)
        nothing_stays(server)
    lines = recording.read_bytes().splitlines(keepends=True)
    assert all(line.endswith(b"\n") for line in lines)
    arrivals = [msgspec.json.decode(line, type=RecordedLine).t for line in lines]
    assert len(arrivals) == EARLIER + told["written"]
    assert min(arrivals[EARLIER:]) >= max(arrivals[:EARLIER])


async def use(clients: Clients, chaos: Chaos) -> None:
    """Clients and disturbances side by side, for `SECONDS`."""
    stop = asyncio.Event()
    disturb = asyncio.create_task(chaos.run(stop))
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and not disturb.done():
        await clients.send(AT_ONCE)
    stop.set()
    await disturb


def write_earlier(recording: Path) -> None:
    """A recording that is larger than the server's log will be."""
    tokens = random_prompt(1_000, seed=1)
    with recording.open("wb") as file:
        for number in range(EARLIER):
            file.write(msgspec.json.encode(RecordedLine(number / 10, tokens, [1])) + b"\n")


def nothing_stays(server: ServerProcess) -> None:
    """End the server; no process and no shared memory of it is left."""
    processes = server.processes()
    memory = {inode for process in processes for inode in shared_by(process)}
    assert memory
    assert server.stop() == 130
    until(lambda: not any(map(alive, processes)), LIMIT)
    assert not [entry for entry in os.scandir("/dev/shm") if entry.inode() in memory]
