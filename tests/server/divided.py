"""Prefill and decode servers of one model behind SGLang's router, on this machine over TCP.

Needs `pip install sglang-router mooncake-transfer-engine-non-cuda` and Debian's libibverbs1,
librdmacm1 and libnuma1.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Self

import pytest

from sglang_hybrid.serving.server_process import ServerProcess, free_port

NEEDED = ("sglang_router", "mooncake")
CAN_TRANSFER = all(importlib.util.find_spec(name) for name in NEEDED)
WITHOUT_TRANSFERS = "sglang-router or mooncake-transfer-engine-non-cuda is not installed"

needs_transfers = pytest.mark.skipif(not CAN_TRANSFER, reason=WITHOUT_TRANSFERS)

OVER_TCP = ("--disaggregation-transfer-backend", "mooncake_tcp")


Divide = Callable[..., "Divided"]
"""The fixture `divide`: servers, not started yet, of `of`, the name of an architecture, with these
flags and the keyword arguments of `Divided`.
"""


class Divided:
    """Prefill servers, decode servers and a router before them, as a context manager.

    Args:
        flags: of all servers; ``prefill`` and ``decode``: more of them, of each kind.
        prefills, decodes: how many servers of each kind there are.
        more: keyword arguments of each `ServerProcess`, its module for example.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
        prefills: int = 1,
        decodes: int = 1,
        **more: Any,
    ) -> None:
        self._more = more
        self._flags: list[list[str]] = []
        program = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
        self.servers: list[ServerProcess] = []
        for number in range(prefills + decodes):
            port = str(free_port())
            if number < prefills:
                mode = [*prefill, "--disaggregation-mode", "prefill"]
                mode += ["--disaggregation-bootstrap-port", port]
            else:
                mode = [*decode, "--disaggregation-mode", "decode"]
            self._flags.append([*flags, *OVER_TCP, *mode])
            server = ServerProcess(self._flags[-1], **more)
            self.servers.append(server)
            program += ["--prefill", server.url, port] if number < prefills else []
            program += ["--decode", server.url] if number >= prefills else []
        program += ["--prometheus-port", str(free_port())]
        program += ["--disable-circuit-breaker", "--health-check-interval-secs", "1"]
        self._router = ServerProcess(program=program, health="/readiness")
        self.url = self._router.url
        self.prefills, self.decodes = prefills, decodes

    def restart(self, number: int) -> None:
        """Start one of the servers, which was killed, again at the same port."""
        self.servers[number].stop()
        again = ServerProcess(self._flags[number], port=self.servers[number].port, **self._more)
        self.servers[number] = again
        again.start()
        again.wait_until_healthy()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._stop)
            for server in self.servers:
                server.start()
            for server in self.servers:
                server.wait_until_healthy()
            stack.enter_context(self._router)
            self._running = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def _stop(self) -> None:
        """All servers, those that were started again too, even if one cannot be stopped."""
        with ExitStack() as stack:
            for server in self.servers:
                stack.callback(server.stop)
