"""A router as a user starts it: what it takes of the machine, and that it gives it back."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests

from sglang_hybrid.extensions.router.fleet import check, envoy_command
from sglang_hybrid.serving.server_process import free_port
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
    """Not even where it is killed."""
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
