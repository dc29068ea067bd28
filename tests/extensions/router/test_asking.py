"""Answers of servers are bounded in size and time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from sglang_hybrid.extensions.router import asking
from sglang_hybrid.extensions.router.asking import Asking
from sglang_hybrid.extensions.router.wire import Malformed
from tests.extensions.router.liars import ANSWERS, Liars, Lie, http

PATIENCE = 0.2


@pytest.fixture
def answers() -> Iterator[Liars]:
    told = [Lie("info", what, content, is_raw=True) for what, content in ANSWERS.items()]
    told.append(Lie("info", "a long one", bytes(2_000)))
    with closing(Liars(told)) as liars:
        yield liars


def get(url: str) -> bytes:
    with closing(Asking(url, "a key", PATIENCE)) as server:
        return server.get("/server_info")


@pytest.mark.parametrize("what", [*ANSWERS, "a long one"])
def test_an_answer_that_is_none_is_an_error(
    answers: Liars, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "MOST_ANSWER", 1_000)
    number = next(n for n, told in enumerate(answers.told) if told.what == what)
    if what in ("no length", "no compression"):  # a server may say nothing of either
        assert get(answers.urls[number]) == b"{}"
        return
    with pytest.raises((httpx.HTTPError, Malformed)):
        get(answers.urls[number])


def test_each_question_has_a_connection_of_its_own() -> None:
    """A server that has closed its port is away, though it still answers on old connections."""
    answer = http(b"{}")

    def serve(listener: socket.socket, connections: list[socket.socket]) -> None:
        connection, _ = listener.accept()
        connections.append(connection)
        listener.close()
        while connection.recv(10_000):
            connection.sendall(answer)

    listener, connections = socket.create_server(("127.0.0.1", 0)), []
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=serve, args=(listener, connections))
    thread.start()
    with closing(Asking(url, None, PATIENCE)) as server:
        assert server.get("/server_info") == b"{}"
        with pytest.raises(httpx.ConnectError):
            server.get("/server_info")
    thread.join()
    connections[0].close()
