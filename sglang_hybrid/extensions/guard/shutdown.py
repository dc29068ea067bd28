"""The end of a server: it refuses new requests, lets the others end for a bounded time, and leaves
nothing behind.

SGLang by itself lets requests go on after SIGTERM for as long as they take, waits for open streams
after Ctrl-C, and kills itself when one of its processes has died, without a word to the requests
that run. A hook hands the end of an HTTP server to `end_on_signal`, and `GracefulEnd` sees its
requests (serving/routes.py); other ways to serve (gRPC, several tokenizer processes) end as
SGLang ends them.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Never

import psutil
from starlette._utils import get_route_path
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse

from sglang_hybrid.extensions.guard.processes import end_processes, note_shared_memory
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.startup import cannot_start, fail, failure, remove_private_files

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

MESSAGE = "The server is shutting down."
"""The message for a request that is refused or cut off, with status 503."""

DIED = "A process of the server has ended, so it cannot go on."
"""The message for such a request if the server was not asked to end."""

PROCESS_DIED = os.EX_SOFTWARE
"""Exit status (70) of a server that ends because one of its processes did."""

STEP = 0.1
"""Seconds between two looks at what is left."""

INTERRUPT_SECONDS = 3.0
"""Seconds that requests may go on after Ctrl-C, at most: somebody waits at the terminal."""

BODY_SECONDS = 5.0
"""Seconds that the body of a request that is refused is read: a connection that is closed before
may lose the answer.
"""

RETRY = {"Retry-After": "1", "Connection": "close"}
"""Headers of a refusal: the client may ask again soon, on a new connection, which another server
has taken over by then. A router sends the request to another server itself (router/envoy.py).
"""

ANSWERED = ("/metrics", "/abort_request", "/v1/responses/")
"""Beginnings of paths that are answered to the end: they concern requests that run, or count them.
"""

RELEASE_SECONDS = 3.5
"""Seconds that schedulers may take to release what they hold (device memory, pinned host memory).
"""

CLOSE_SECONDS = 2.7
"""Seconds that the HTTP server may take to stop; after each stream it has a task of 2 seconds left.
"""

LATE_OUTPUT = "the state was deleted in TokenizerManager"
"""SGLang's log line about an output whose request is not there (managers/tokenizer_manager.py)."""

TITLE = "sglang::"
"""The names of SGLang's processes, but for the first."""


@dataclass
class _End:
    """The end of the server, and its reason. status: its exit status. open: requests that wait for
    their answers, or for the rest of them.
    """

    reached: bool = False
    status: int = 0
    because_of: str = ""
    open: int = 0


_end = _End()


def exit_status() -> int:
    """The exit status of this server: 130 after Ctrl-C, 70 if a process died, otherwise 0."""
    return _end.status


class GracefulEnd:
    """ASGI middleware: once the server ends, each request that begins gets status 503, whatever it
    asks, so that readiness probes fail, too. Those that began before are counted until their last
    byte, and one that fails with status 503 is told to come again.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _end.reached and not get_route_path(scope).startswith(ANSWERED):
            await _refuse(scope, receive, send)
            return
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        is_open = True
        _end.open += 1

        def close() -> None:
            nonlocal is_open
            _end.open -= is_open
            is_open = False

        async def sent(message: Message) -> None:
            if _end.reached and message.get("status") == HTTPStatus.SERVICE_UNAVAILABLE:
                message.setdefault("headers", [])
                MutableHeaders(scope=message).update(RETRY)
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                close()  # the application may go on for a while

        try:
            await self._app(scope, receive, sent)
        finally:
            close()


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request that comes too late."""
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1012})  # service restart (RFC 6455)
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(BODY_SECONDS):
            while (await receive()).get("more_body"):
                pass
    status = HTTPStatus.SERVICE_UNAVAILABLE
    error = {"message": DIED if _end.because_of else MESSAGE, "code": status.value}
    await JSONResponse({"error": error}, status, RETRY)(scope, receive, send)


async def end_on_signal(manager: TokenizerManager) -> None:
    """Wait for SIGTERM, SIGINT or the death of a process, then end the server of `manager`.

    Requests that run or wait go on until they end, for SGLANG_HYBRID_DRAIN_SECONDS at most, and for
    INTERRUPT_SECONDS at most after SIGINT. Those that are left then end with an error of status
    503. The schedulers release what they hold, and the HTTP server stops. If a process died,
    requests end at once. A second signal ends everything at once, and so does whatever hangs.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # nobody can be asked there: Python hands signals to the main thread
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def on_signal(number: int) -> None:
        if ended.is_set():
            leave_at_once(128 + number)
        _end.status = 128 + number if number == signal.SIGINT else 0
        _end.reached = True
        ended.set()

    def on_death(process: str) -> None:
        if not ended.is_set():
            _end.reached, _end.status, _end.because_of = True, PROCESS_DIED, process
            ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    # Sent by SGLang's processes to the first one when they fail.
    loop.add_signal_handler(signal.SIGQUIT, on_death, "a process, which reported an error,")
    watch = _watch(loop, on_death)
    note_shared_memory()
    await ended.wait()
    for descriptor in watch:
        loop.remove_reader(descriptor)
    note_shared_memory()
    if manager._subprocess_watchdog is not None:
        manager._subprocess_watchdog.stop()
    manager.gracefully_exit = True  # SGLang's own routes say so
    ignore_late_output()
    if _end.because_of:
        await _give_up(manager)
        message = DIED
    else:
        seconds = HybridConfig.from_environment().hybrid_drain_seconds
        if _end.status:
            seconds = min(seconds, INTERRUPT_SECONDS)
        await _drain(manager, seconds)
        await _release(manager)
        message = MESSAGE
    assert manager._server_stop_hook is not None
    _exit_after_timeout()
    manager._server_stop_hook()
    await _cut(manager, CLOSE_SECONDS, message)  # is cancelled when the HTTP server has stopped
    logger.warning("sglang_hybrid: connections are still open; leaving without them.")
    leave_at_once(exit_status())


def _watch(loop: asyncio.AbstractEventLoop, on_death: Callable[[str], None]) -> list[int]:
    """Have `on_death` called when one of SGLang's processes ends; descriptors of the processes."""
    descriptors = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = process.cmdline()[:1]
            if not title or not title[0].startswith(TITLE):
                continue
            descriptor = os.pidfd_open(process.pid)
        except (
            psutil.NoSuchProcess,
            OSError,
        ):  # where that is forbidden, SGLang's watchdog sees it
            continue
        name = f"{title[0].removeprefix(TITLE)} (process {process.pid})"
        loop.add_reader(descriptor, on_death, name)
        descriptors.append(descriptor)
    return descriptors


async def _give_up(manager: TokenizerManager) -> None:
    """A process died: tell all requests, and let SGLang dump what is known of it."""
    logger.error(
        "sglang_hybrid: %s has ended; %d running requests end with an error, and so does the "
        "server, with status %d.",
        *(_end.because_of, len(manager.rid_to_state), PROCESS_DIED),
    )
    dump = asyncio.create_task(asyncio.to_thread(manager.dump_requests_before_crash))
    if manager.crash_dump_folder:  # it is to have the requests that run
        await dump
    while not dump.done():  # with CUDA it waits a minute for core dumps
        await _cut(manager, STEP, DIED)


async def _drain(manager: TokenizerManager, seconds: float) -> None:
    """Let requests go on until they are answered, for so many seconds, if they can. Some are open
    that SGLang does not know: their bodies or their last events are on the way.
    """
    from sglang.srt.managers.tokenizer_manager import ServerStatus
    from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

    if left := max(len(manager.rid_to_state), _end.open):
        logger.warning(
            "sglang_hybrid: shutting down; %d requests have %g seconds to end.", left, seconds
        )
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while (manager.rid_to_state or _end.open) and loop.time() < until:
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


async def _cut(manager: TokenizerManager, seconds: float, message: str = MESSAGE) -> None:
    """End every request that is there, or comes within so many seconds, with an error.

    Here and not in the scheduler, whose current step may take longer than there is time.
    """
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    reason = FINISH_ABORT(message, HTTPStatus.SERVICE_UNAVAILABLE).to_json()
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while True:
        for rid in list(manager.rid_to_state):
            manager._handle_abort_req(AbortReq(rid=rid, finished_reason=reason))
        if loop.time() >= until:
            return
        await asyncio.sleep(STEP)


def ignore_late_output() -> None:
    """Log nothing of each output of a request that was cut off: schedulers go on for a moment."""
    log = logging.getLogger("sglang.srt.managers.tokenizer_manager")
    log.addFilter(lambda record: LATE_OUTPUT not in str(record.msg))


def _exit_after_timeout() -> None:
    """End the process after a time, by a thread: the HTTP server's last steps block the loop."""
    timer = threading.Timer(CLOSE_SECONDS + 1, lambda: leave_at_once(exit_status()))
    timer.daemon = True
    timer.start()


def kill_process_tree(
    parent_pid: int | None,
    include_parent: bool = True,
    skip_pid: int | None = None,
    wait_timeout: float | None = 60,
) -> None:
    """SGLang's function of this name (utils/common.py), but for this process's own tree: there
    nothing is left behind, and this process ends with a status that says why.
    """
    if parent_pid not in (None, os.getpid()) or skip_pid is not None:
        from sglang.srt.utils import common

        common.kill_process_tree(parent_pid, include_parent, skip_pid, wait_timeout)
        return
    if parent_pid is not None and include_parent:
        leave_after_failure()
    end_processes()


def leave_after_failure() -> Never:
    """End the server because something failed, with a status that says so and nothing left. SGLang
    kills it, with SIGKILL.
    """
    told = failure()
    if told is not None:
        leave_at_once(fail(cannot_start(told)))
    if _end.reached:
        leave_at_once(exit_status())
    if _starting():
        leave_at_once(fail(cannot_start("something failed that the lines above tell of")))
    print(f"sglang_hybrid: {DIED}", file=sys.stderr, flush=True)
    leave_at_once(PROCESS_DIED)


def _starting() -> bool:
    """True if an HTTP server has not answered its own first request yet."""
    server: Any = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is None:
        return False
    state = server._global_state
    return state is None or state.tokenizer_manager.server_status.name == "Starting"


def leave_at_once(status: int) -> Never:
    """End every process of the server, this one with `status`, and what they leave."""
    end_processes()
    remove_private_files()
    _exit(status)


def leave(status: int) -> Never:
    """End this process, its exit functions done, without tearing the interpreter down: threads of
    libraries outlive that, and Triton's extension says of what they hold that it leaked.
    """
    atexit._run_exitfuncs()
    _exit(status)


def _exit(status: int) -> Never:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
