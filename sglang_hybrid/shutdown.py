"""How a server ends: requests get a few seconds and then an error, and nothing stays behind.

SGLang by itself lets requests go on after SIGTERM for as long as they take, waits for open streams
after Ctrl-C, and kills its processes in a way that leaves their shared memory (there is a note on
that in sglang/srt/utils/stale_shm_cleanup.py). Patch 0013 hands the end of an HTTP server to
`end_on_signal`; other ways to serve (gRPC, several tokenizer processes) end as SGLang ends them.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Never

import psutil

from sglang_hybrid.config import HybridConfig

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

MESSAGE = "The server is shutting down."
"""What a request that is cut off is told, with status 503."""

STEP = 0.1
"""Seconds between two looks at what is left."""

RELEASE_SECONDS = 3.5
"""How long schedulers may take to release what they hold (device memory, pinned host memory)."""

CLOSE_SECONDS = 2.7
"""How long the HTTP server may take to stop; after each stream it has a task of 2 seconds left."""

SHARED_MEMORY = Path("/dev/shm")

_noted: set[int] = set()  # inodes of shared memory whose processes may have ended since
_received: list[int] = []


def exit_status() -> int:
    """Status of a server that ended when it was asked to: 130 after Ctrl-C, otherwise 0."""
    return 128 + signal.SIGINT if _received[:1] == [signal.SIGINT] else 0


async def end_on_signal(manager: TokenizerManager) -> None:
    """Wait for SIGTERM or SIGINT, then end the server that `manager` serves.

    Requests that run go on for `--hybrid-drain-seconds`; what is left then, or still comes, ends
    with an error of status 503. The schedulers release what they hold, and the HTTP server stops.
    A second signal ends everything at once, and so does whatever hangs.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # nobody can be asked there: Python hands signals to the main thread
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def ask(number: int) -> None:
        _received.append(number)
        if asked.is_set():
            leave_at_once(128 + number)
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask, number)
    await asked.wait()
    note_shared_memory()
    await _drain(manager, HybridConfig.from_environment().hybrid_drain_seconds)
    await _release(manager)
    assert manager._server_stop_hook is not None
    manager._server_stop_hook()
    await _cut(manager, CLOSE_SECONDS)  # is cancelled when the HTTP server has stopped
    logger.warning("sglang_hybrid: connections are still open; leaving without them.")
    leave_at_once(exit_status())


async def _drain(manager: TokenizerManager, seconds: float) -> None:
    """Let requests go on for so many seconds, if they can."""
    from sglang.srt.managers.tokenizer_manager import ServerStatus
    from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

    manager.gracefully_exit = True  # /health says 503 from now on
    if manager._subprocess_watchdog is not None:
        manager._subprocess_watchdog.stop()
    if manager.rid_to_state:
        logger.warning(
            "sglang_hybrid: shutting down; %d running requests have %g seconds to end.",
            len(manager.rid_to_state),
            seconds,
        )
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while manager.rid_to_state and loop.time() < until:
        if manager.server_status == ServerStatus.UnHealthy or not collect_scheduler_processes():
            return
        await asyncio.sleep(STEP)


async def _release(manager: TokenizerManager) -> None:
    """Cut requests off and wait until the schedulers have ended, but not for long.

    On the CPU they hold nothing that the system does not take back by itself.
    """
    from sglang.srt.managers.io_struct import ShutdownReq
    from sglang.srt.platforms import current_platform
    from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

    if current_platform.device_type == "cpu":
        await _cut(manager, 0)
        return
    manager._dispatch_to_scheduler(ShutdownReq())
    until = asyncio.get_running_loop().time() + RELEASE_SECONDS
    while asyncio.get_running_loop().time() < until and collect_scheduler_processes():
        await _cut(manager, STEP)


async def _cut(manager: TokenizerManager, seconds: float) -> None:
    """End every request that is there, or comes within so many seconds, with an error.

    Here and not in the scheduler, whose current step may take longer than there is time.
    """
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    reason = FINISH_ABORT(MESSAGE, HTTPStatus.SERVICE_UNAVAILABLE).to_json()
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while True:
        for rid in list(manager.rid_to_state):
            manager._handle_abort_req(AbortReq(rid=rid, finished_reason=reason))
        if loop.time() >= until:
            return
        await asyncio.sleep(STEP)


def leave_at_once(status: int) -> Never:
    """End every process of the server, this one with `status`, and their shared memory."""
    end_processes()
    os._exit(status)


def end_processes() -> None:
    """Kill every process that this one has started, and remove the shared memory they leave."""
    from sglang.srt.utils import kill_process_tree

    note_shared_memory()
    kill_process_tree(os.getpid(), include_parent=False)
    ours = _noted - _mapped(pid for pid in psutil.pids() if pid != os.getpid())
    if not ours:
        return
    for entry in os.scandir(SHARED_MEMORY):
        if entry.inode() in ours:
            Path(entry).unlink(missing_ok=True)


def note_shared_memory() -> None:
    """Remember the shared memory of this process and of those that it has started."""
    children = psutil.Process().children(recursive=True)
    _noted.update(_mapped([os.getpid(), *(child.pid for child in children)]))


def _mapped(pids: Iterable[int]) -> set[int]:
    """Inodes of the shared memory that any of these processes has mapped.

    Not its names, for a semaphore is mapped under another name than it ends up with. `maps` and not
    psutil's `smaps`, for which the kernel walks through all memory of a process.
    """
    found: set[int] = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:  # it has ended, or is not ours
            continue
        found.update(int(line.split()[4]) for line in lines if f" {SHARED_MEMORY}/" in line)
    return found


def leave_ctrl_c_to_the_first_process() -> None:
    """In a process that SGLang has started: do nothing on Ctrl-C.

    A terminal sends it to every process; the first one ends the others when their time has come.
    """
    started = multiprocessing.parent_process() is not None
    if started and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
