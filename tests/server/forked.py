"""Servers that are forked from a process that has imported SGLang: ten seconds of a core less each.

`python -m tests.server.forked` imports what the first process of a server imports, and forks one
for each order, a line of JSON on stdin. The process that runs the tests adopts it: to them it is as
one that they have started. See tests/forking/sitecustomize.py for the processes that it starts.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Never

import psutil
from setproctitle import setproctitle

from sglang_hybrid.core.extensions import GUARD
from sglang_hybrid.serving.server_process import ServerProcess

OURS = "SGLANG_HYBRID_"
"""Variables that begin so are read when a server starts, but for GUARD; others may have been read
by an import.
"""

TEST = "PYTEST_CURRENT_TEST"
"""Set by pytest, another one for each test."""

PAGE = "--hybrid-ui"

MODULE = "tests.server.forked"

CHILD_SUBREAPER = 36
"""`PR_SET_CHILD_SUBREAPER` of prctl(2)."""

start_by_python = ServerProcess.start


class ForkedProcess:
    """A process that this one adopted, with what `ServerProcess` needs of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._process = psutil.Process(pid)

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, negative for a signal; raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            try:
                status = self._process.wait(timeout)
            except psutil.TimeoutExpired:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0) from None
            self.returncode = int(status or 0)  # None where another has waited, as Popen says 0
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A process that has imported SGLang in an environment."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,  # it ends when its stdin does
        )

    def fork(self, **order: Any) -> ForkedProcess:
        """See `serve` for what an order has."""
        assert self._process.stdin is not None and self._process.stdout is not None
        adopt_orphans(True)
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return ForkedProcess(int(self._process.stdout.readline()))
        finally:
            adopt_orphans(False)

    def close(self) -> None:
        """Servers that were forked go on."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


Environment = frozenset[tuple[str, str]]

kept: dict[Environment, ForkServer] = {}
"""The last one that was made, of half a gigabyte: most servers of a file have one environment."""

forking = threading.Lock()
"""Tests start servers in threads, too."""


def adopt_orphans(wanted: bool) -> None:
    """Make descendants whose parents end children of this process from now on, or do not."""
    if ctypes.CDLL(None).prctl(CHILD_SUBREAPER, int(wanted), 0, 0, 0):
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed")


def fork_server(environment: dict[str, str]) -> ForkServer:
    """The one for servers that have this environment. The caller holds `forking`."""
    read_late = {name for name in environment if name.startswith(OURS) and name != GUARD}
    usual = {name: environment[name] for name in environment.keys() - read_late - {TEST}}
    key = frozenset(usual.items())
    if key not in kept:
        for other in kept.values():
            other.close()
        kept.clear()
        kept[key] = ForkServer(usual)
    return kept[key]


def start(server: ServerProcess) -> None:
    """`ServerProcess.start` that forks where it can: not other programs, not SGLang without us, not
    where processes are to be spawned, and not with a page, whose routes an import adds.
    """
    python, _, module, *arguments = server._command
    environment = server._environment
    spawns = environment.get("TEST_SERVERS") == "spawn"
    with_us = module.startswith(("sglang_hybrid.", "tests."))
    forks = not spawns and python == sys.executable and with_us and PAGE not in arguments
    if not forks:
        start_by_python(server)
        return
    with forking:
        server.process = fork_server(environment).fork(  # type: ignore[assignment]
            module=module,
            arguments=arguments,
            environment=environment,
            directory=str(server._directory or os.getcwd()),
            log=str(server.log),
        )
    os.close(server._log_descriptor)


def serve(
    module: str, arguments: list[str], environment: dict[str, str], directory: str, log: str
) -> Never:
    """Become `python -m module arguments...`, with its output in a file; say the process's number
    before.
    """
    os.write(1, f"{os.getpid()}\n".encode())
    os.setsid()
    setproctitle(" ".join((sys.executable, "-m", module, *arguments)))
    for path, mode, descriptors in (
        (os.devnull, os.O_RDONLY, (0,)),
        (log, os.O_WRONLY | os.O_APPEND, (1, 2)),
    ):
        opened = os.open(path, mode)
        for descriptor in descriptors:
            os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path[0] = directory
    sys.argv[1:] = arguments
    sys.modules.pop(module, None)  # runpy warns of a module that was imported before
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def main() -> None:
    """Import SGLang, then fork a server for each line of stdin."""
    given = dict(os.environ)
    from sglang_hybrid import launch_server, launcher  # noqa: F401 first: its hook must see all

    # isort: split
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.managers.tp_worker
    import sglang.srt.models.registry  # noqa: F401 it imports every model

    setproctitle(f"python -m {MODULE}")  # finds its place before the environment is another
    by_imports = {name: os.environ[name] for name in os.environ.keys() - given.keys()}
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if not child:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:  # whoever ordered is the parent then
                time.sleep(0.001)
            order["environment"] = by_imports | order["environment"]
            serve(**order)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
