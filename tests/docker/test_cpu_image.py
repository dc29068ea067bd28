"""docker/Dockerfile.cpu is built, and its server does what the README says."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from sglang_hybrid.serving.server_process import free_port
from tests.docker.conftest import Start
from tests.docker.container import Container
from tests.docker.images import Images

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(900)]

NAME = "a name of its own"
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]}
SAID = {
    "User": "10001:10001",
    "StopSignal": "SIGTERM",
    "Volumes": "/cache",
    "ExposedPorts": "30000/tcp",
    "Labels/org.opencontainers.image.revision": "0123abc",
}
"""The settings of the image by which it is run, by their places in Docker's `Config`."""


@pytest.fixture(scope="module")
def root(images: Images, cpu_image: str) -> Path:
    """The image's root directory."""
    return images.mount(cpu_image)


@pytest.fixture(scope="module")
def served(start: Start, cpu_image: str) -> Iterator[tuple[Container, str]]:
    """A running container and the address of its server."""
    port = str(free_port())
    arguments = ["--port", port, "--served-model-name", NAME]
    with start(cpu_image, *arguments, PORT=port) as container:
        container.wait_until_healthy()
        yield container, f"http://127.0.0.1:{port}"


def test_size(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(["du", "-sxB1", root], capture_output=True, text=True, check=True)
    size = int(done.stdout.split()[0])
    with capfd.disabled():  # a worker process of xdist has only its standard error for us
        print(f"docker/Dockerfile.cpu: {size / 1e9:.2f} GB", file=sys.stderr, flush=True)
    assert size < 4e9


def test_neither_compilers_nor_caches(root: Path) -> None:
    programs = {path.name for path in root.rglob("bin/*")}
    assert {"python", "tini"} <= programs
    assert not programs & {"cc", "gcc", "g++", "clang", "ld", "make", "nvcc", "ptxas"}
    for place in ("root/.cache", "var/cache/apt/archives", "var/lib/apt/lists", "tmp"):
        files = [path for path in (root / place).rglob("*") if path.is_file()]
        assert not [path for path in files if path.stat().st_size]


@pytest.mark.parametrize(("field", "value"), SAID.items())
def test_what_it_says_about_itself(images: Images, cpu_image: str, field: str, value: str) -> None:
    found: Any = images.config(cpu_image)
    for name in field.split("/"):
        found = found[name]
    assert value == (found if isinstance(found, str) else ",".join(found))


def test_a_sigterm_ends_a_server_that_is_still_starting(start: Start, cpu_image: str) -> None:
    """Process 1 has no handler yet, and to a process 1 without one the kernel sends nothing."""
    with start(cpu_image, "--port", str(free_port())) as container:
        while "python" not in {process.name() for process in container.processes()}:
            time.sleep(0.05)
        container.processes()[0].send_signal(signal.SIGTERM)
        assert container.process.wait(10) == 128 + signal.SIGTERM


def test_a_chat_completion(served: tuple[Container, str]) -> None:
    body = {**CHAT, "max_tokens": 4}
    answer = requests.post(served[1] + "/v1/chat/completions", json=body, timeout=120).json()
    assert answer["model"] == NAME
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["message"]["content"]


def test_nothing_runs_as_root(served: tuple[Container, str]) -> None:
    processes = served[0].processes()
    assert len(processes) > 3
    assert {process.uids().effective for process in processes} == {10001}


def test_the_model_is_in_the_volume(served: tuple[Container, str]) -> None:
    (model,) = (served[0].volume / "sglang_hybrid" / "models").iterdir()
    assert (model / "config.json").stat().st_uid == 10001


def test_a_sigterm_ends_a_stream_and_everything_that_runs(served: tuple[Container, str]) -> None:
    container, url = served
    processes = container.processes()
    body = {**CHAT, "max_tokens": 4_000, "stream": True, "ignore_eos": True}
    with requests.post(url + "/v1/chat/completions", json=body, stream=True, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        processes[0].send_signal(signal.SIGTERM)
        assert container.process.wait(10) == 0
        assert any(b"shutting down" in line for line in lines)
    assert not any(map(psutil.Process.is_running, processes))
