"""A router as a user starts it: what it takes of the machine, and that it gives it back."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import requests

from sglang_hybrid.extensions.router import fleet
from sglang_hybrid.extensions.router.fleet import check, envoy_command
from sglang_hybrid.serving.server_process import ServerProcess, free_port
from tests.extensions.router.server import Server, wait_until

SHARED_MEMORY = Path("/dev/shm")


def test_an_address_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=f"a router cannot be at {listen}: Address already"):
            check(listen)
    check(listen)


def test_envoy_ends_with_the_process_that_starts_it_and_leaves_nothing() -> None:
    command = envoy_command({})
    assert "--disable-hot-restart" in command and "--config-path" not in command
    # An Envoy whose router has ended before it was there.
    launcher = [*command[:3], "1", sys.executable, "-c", "print('it runs')"]
    done = subprocess.run(launcher, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "the router has ended\n")


@pytest.fixture
def server_of_fleet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[fleet._Server]:
    """A server that ends at once, may be started again, and has its log in `tmp_path`."""
    ends = [sys.executable, "-c", "print('it ran')"]
    monkeypatch.setattr(fleet, "ServerProcess", partial(ServerProcess, program=ends))
    monkeypatch.setattr(fleet, "PAUSE", 0.0)
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ExitStack() as stack:
        yield fleet._Server(0, 1, [], str(tmp_path), stack)
    assert list(tmp_path.iterdir()) == []


def started(server: fleet._Server) -> subprocess.Popen[bytes]:
    """Its latest process, once that has ended."""
    assert server.process.process is not None
    server.process.process.wait(20)
    return server.process.process


def test_a_server_is_started_again_though_its_log_was_removed(
    server_of_fleet: fleet._Server, capsys: pytest.CaptureFixture[str]
) -> None:
    first = started(server_of_fleet)
    server_of_fleet.process.log.unlink()  # as programs that tidy up /tmp do
    server_of_fleet.keep()
    second = started(server_of_fleet)
    assert second is not first
    server_of_fleet.keep()
    assert started(server_of_fleet) is not second
    assert capsys.readouterr().out.count("it ran") == 1


def test_a_server_that_cannot_be_started_now_is_started_later(
    server_of_fleet: fleet._Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = started(server_of_fleet)
    full = OSError("No space left on device")
    for what in (f"{tempfile.__name__}.mkstemp", "subprocess.Popen"):
        with monkeypatch.context() as now:
            now.setattr(what, Mock(side_effect=full))
            server_of_fleet.keep()
    assert capsys.readouterr().out.count("server 0 cannot be started: No space left") == 2
    server_of_fleet.keep()
    assert started(server_of_fleet) is not first


def test_a_long_log_is_not_read_as_a_whole(server_of_fleet: fleet._Server) -> None:
    started(server_of_fleet)
    with server_of_fleet.process.log.open("ab") as log:
        log.truncate(1 << 40)
        log.seek(0, os.SEEK_END)
        log.write(b"\none\ntwo\n")
    assert server_of_fleet.process.tail(2) == "one\ntwo"


def test_what_has_the_number_of_a_server_that_ended_is_left_alone(
    server_of_fleet: fleet._Server,
) -> None:
    process = started(server_of_fleet)
    process.poll()
    process.pid = os.getpid()  # as if it were given again
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        server_of_fleet.process.stop()
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
        other.kill()


@pytest.fixture
def router(server: Server, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A router in a process of its own, whose temporary files are in `tmp_path`; and its URL."""
    port = str(free_port())
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang_hybrid.replicas", "route", server.url, "--port", port],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return requests.get(url + "/health", timeout=1).ok
        except requests.RequestException:
            return False

    wait_until(answers)
    yield process, url
    process.kill()
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_router(
    router: tuple[subprocess.Popen[bytes], str], tmp_path: Path, number: signal.Signals
) -> None:
    """It may also be killed."""
    process, url = router
    (envoy,) = psutil.Process(process.pid).children(recursive=True)
    mapped = {each.path for each in envoy.memory_maps()}
    assert not any(path.startswith(str(SHARED_MEMORY)) for path in mapped)
    process.send_signal(number)
    process.wait(20)
    psutil.wait_procs([envoy], timeout=20)
    assert not envoy.is_running()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(requests.ConnectionError):
        requests.get(url + "/health", timeout=5)


@pytest.mark.slow
@pytest.mark.parametrize("is_impatient", [False, True])
def test_a_router_lets_a_stream_end(
    router: tuple[subprocess.Popen[bytes], str], server: Server, is_impatient: bool
) -> None:
    """A second signal ends it at once."""
    process, url = router
    stream = requests.post(url + "/stream", b"{}", stream=True, timeout=60)
    parts = stream.iter_content(1)
    assert next(parts) == b"a"
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: requests.get(url + "/health", timeout=5).status_code == 503)
    assert process.poll() is None
    if is_impatient:
        process.send_signal(signal.SIGTERM)
        with pytest.raises(requests.exceptions.ChunkedEncodingError):
            next(parts)
    else:
        server.streams.set()
        assert b"".join(parts) == b"b"
    assert process.wait(20) == 0


@pytest.mark.slow
def test_a_second_router_does_not_share_the_port_of_the_first(
    router: tuple[subprocess.Popen[bytes], str], server: Server
) -> None:
    port = router[1].rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, "-m", "sglang_hybrid.replicas", "route", server.url, "--port", port],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == f"error: a router cannot be at 127.0.0.1:{port}: Address already in use\n"
