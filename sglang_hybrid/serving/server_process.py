"""A server in a process of its own: started, awaited and ended with everything it started."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import requests

TIDY_SECONDS = 3.0
"""Seconds that the processes of a server may outlast the first one."""

TAIL_BYTES = 1 << 16
"""Bytes of the end of a log in which its last lines are looked for."""


class ServerFailed(RuntimeError):
    """The server ended, or was not healthy in time; the message ends with its last lines."""


class ServerProcess:
    """`python -m sglang_hybrid.launch_server` as a context manager.

    Args:
        arguments: the server's flags, without --host and --port.
        port: where it listens on 127.0.0.1; a free port by default.
        module: what Python runs; `sglang.launch_server` for the unmodified server.
        program: a command to run instead of Python, which takes --host and --port, too.
        health: the path that answers with status 200 once it is ready.
        environment: variables set for the server on top of this process's.
        directory: where it runs; here by default.
        timeout: seconds to wait until it is healthy.
    """

    def __init__(
        self,
        arguments: Sequence[str] = (),
        *,
        port: int | None = None,
        module: str = "sglang_hybrid.launch_server",
        program: Sequence[str] | None = None,
        health: str = "/health_generate",
        environment: dict[str, str] | None = None,
        directory: Path | None = None,
        timeout: float = 300.0,
    ) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self._health = health
        self._timeout = timeout
        self._directory = directory
        self._command = [
            *(program or (sys.executable, "-m", module)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *arguments,
        ]
        self._environment = {**os.environ, **(environment or {})}
        descriptor, name = tempfile.mkstemp(prefix="sglang-hybrid-", suffix=".log")
        self._log_descriptor = descriptor
        self.log = Path(name)
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the program without waiting; its output goes to `self.log`."""
        try:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=self._log_descriptor,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._directory,
                start_new_session=True,  # a Ctrl-C for us is passed on by stop(), once
            )
        finally:
            os.close(self._log_descriptor)

    def wait_until_healthy(self) -> None:
        """Return once the server has answered a request; raises `ServerFailed` if it does not."""
        assert self.process is not None
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            status = self.process.poll()
            if status is not None:
                raise ServerFailed(
                    f"the server ended with status {status} before it was ready (log: {self.log}):"
                    f"\n{self.tail()}"
                )
            try:
                if requests.get(self.url + self._health, timeout=5).ok:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.2)
        raise ServerFailed(
            f"the server was not healthy after {self._timeout:.0f} seconds (log: {self.log}):"
            f"\n{self.tail()}"
        )

    def stop(self, timeout: float = 20.0) -> int | None:
        """Ctrl-C, then SIGKILL for whatever is left; returns the exit status."""
        if self.process is None:
            return None
        children = []
        if self.process.poll() is None:  # else its number may be that of another process
            children = _descendants(self.process.pid)
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        # Multiprocessing's tracker of semaphores, which cleans up after the others, ends last.
        _, left = psutil.wait_procs(children, timeout=TIDY_SECONDS)
        for child in left:
            child.kill()
        return self.process.returncode

    def tail(self, lines: int = 8) -> str:
        """The last lines that the server printed; "" if its log is gone."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                last = log.read(TAIL_BYTES)
        except FileNotFoundError:
            return ""
        return "\n".join(last.decode(errors="replace").splitlines()[-lines:])

    def processes(self) -> list[psutil.Process]:
        """The server's processes that are alive, its main process first."""
        assert self.process is not None
        if self.process.poll() is not None:
            return []
        return [psutil.Process(self.process.pid), *_descendants(self.process.pid)]


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on at this moment.

    Outside the ranges that the kernel takes ports of outgoing connections from, and SGLang those
    between its processes (22,000 to 29,999; utils/network.py, get_free_port_below_ephemeral): a
    server binds its port many seconds later, and until then one of those could have taken it.
    """
    while True:
        port = random.randint(10_000, 21_999)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def event_flags() -> list[str]:
    """Flags of a server that publishes KV events at a free port of this machine."""
    config = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{free_port()}", "bind": True}
    return ["--kv-events-config", json.dumps(config)]


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        children: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return children
