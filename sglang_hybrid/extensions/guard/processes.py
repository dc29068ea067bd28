"""The processes that a server has started, and the shared memory that they leave.

SGLang kills its processes, which then unlink nothing (sglang/srt/utils/stale_shm_cleanup.py says
so). Shared memory is remembered here while somebody maps it, and removed with the processes. What
cannot be remembered, because the first process itself is killed, Python's resource tracker removes:
a small process that outlives the others, and that is spared for it (hooks/serving.py).
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
SEMAPHORE = "sem."
LOADS = "sglang_loads_"
"""The beginnings of names of shared memory that is known to the resource tracker."""

SGLANG_PROCESSES = "sglang.srt.managers."
"""The package of functions that SGLang starts as processes."""

REAP_SECONDS = 10.0
PR_SET_PDEATHSIG = 1

_noted: set[int] = set()  # inodes of shared memory whose processes may have ended since
_told: set[int] = set()  # those that the resource tracker was told to forget, which it is once


def end_processes() -> None:
    """Kill every process that this one has started, and remove the shared memory they leave."""
    note_shared_memory()
    children = [it for it in psutil.Process().children(recursive=True) if not is_tracker(it.pid)]
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(children, timeout=REAP_SECONDS)
    if alive:
        logger.warning("sglang_hybrid: %d processes do not end: %s.", len(alive), alive)
    remove_shared_memory()


def note_shared_memory() -> None:
    """Remember the shared memory of this process and of those that it has started."""
    children = psutil.Process().children(recursive=True)
    _noted.update(_mapped([os.getpid(), *(child.pid for child in children)]))


def remove_shared_memory() -> None:
    """Remove what was noted, unless somebody else maps it: then that process answers for it. One of
    several tokenizer processes leaves it to the first process, which they have in common.
    """
    if not _noted or is_http_worker():
        return
    others = _mapped(pid for pid in psutil.pids() if pid != os.getpid())
    for entry in os.scandir(SHARED_MEMORY):
        inode = entry.inode()
        if inode not in _noted:
            continue
        if inode not in others:
            Path(entry).unlink(missing_ok=True)
        if inode not in _told:
            _told.add(inode)
            _tell_tracker("UNREGISTER", entry.name)


def register_shared_memory(path: str) -> None:
    """`path` was made by other means than Python's: the resource tracker must know of it."""
    _tell_tracker("REGISTER", Path(path).name)


def is_http_worker() -> bool:
    """True if this is one of several tokenizer processes (`--tokenizer-worker-num`), which uvicorn
    starts.
    """
    function = getattr(multiprocessing.current_process(), "_target", None)
    return getattr(function, "__module__", "").startswith("uvicorn.")


def is_tracker(pid: int) -> bool:
    """True if this process is Python's resource tracker, which ends when all others have."""
    return pid == getattr(resource_tracker._resource_tracker, "_pid", None)


def ignore_signals_for_the_first_process() -> None:
    """Called in a process that SGLang has started: do nothing on Ctrl-C or SIGTERM, and end with
    the first process. Any other process keeps what it does on signals.

    A terminal, a shell and systemd send them to every process; the first one ends the others when
    their time has come.
    """
    parent = multiprocessing.parent_process()
    function = getattr(multiprocessing.current_process(), "_target", None)
    if parent is None or not getattr(function, "__module__", "").startswith(SGLANG_PROCESSES):
        return  # an application may make an engine in a process that it has started itself
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it ended before that
        os._exit(1)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _tell_tracker(command: str, name: str) -> None:
    """Tell the tracker of a file in /dev/shm, if it is of a kind that the tracker is told of."""
    tracker = resource_tracker._resource_tracker
    if getattr(tracker, "_fd", None) is None:
        return
    tell = tracker.register if command == "REGISTER" else tracker.unregister
    if name.startswith(SEMAPHORE):
        tell(f"/{name.removeprefix(SEMAPHORE)}", "semaphore")
    elif name.startswith(LOADS):
        tell(f"/{name}", "shared_memory")


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
