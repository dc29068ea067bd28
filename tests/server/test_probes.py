"""Probes of docker/kubernetes.yaml, sent as the kubelet sends them to a server and a router with
the manifest's arguments, while these start, work, are stuck and end.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from sglang_hybrid.serving.server_process import ServerProcess, free_port
from tests.server.client import random_prompt, until

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(900)]

MANIFEST = Path(__file__).parents[2] / "docker" / "kubernetes.yaml"
DEFAULTS = {"periodSeconds": 10, "timeoutSeconds": 1, "successThreshold": 1, "failureThreshold": 3}
"""Kubernetes' defaults of fields of a probe."""


def pod(name: str) -> dict[str, Any]:
    """The pod of the manifest whose container is called so."""
    kinds = [
        each for each in yaml.safe_load_all(MANIFEST.read_text()) if "template" in each["spec"]
    ]
    pods = [each["spec"]["template"]["spec"] for each in kinds]
    (found,) = [each for each in pods if each["containers"][0]["name"] == name]
    return dict(found)


class Probe:
    """One probe of a container, sent again and again from a thread, as the kubelet does.

    It has failed or succeeded after so many results of that kind in a row as its thresholds say.

    Args:
        container: the manifest's container.
        kind: the probe's name in it.
        port: where the container's port 30000 is here.
    """

    def __init__(self, container: dict[str, Any], kind: str, port: int) -> None:
        self.spec = DEFAULTS | container[kind]
        self.results: list[bool] = []
        self._port = port
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def once(self) -> bool:
        """One result: a status from 200 to 399, or a connection, in time."""
        seconds = self.spec["timeoutSeconds"]
        try:
            if "tcpSocket" in self.spec:
                socket.create_connection(("127.0.0.1", self._port), seconds).close()
                return True
            url = f"http://127.0.0.1:{self._port}{self.spec['httpGet']['path']}"
            sent = {"User-Agent": "kube-probe/1.37", "Accept": "*/*", "Connection": "close"}
            answer = requests.get(url, headers=sent, timeout=seconds, allow_redirects=False)
            return 200 <= answer.status_code < 400
        except (OSError, requests.RequestException):
            return False

    def last(self, value: bool) -> bool:
        """True if the newest results are `value`, as many as its threshold wants."""
        count = self.spec["successThreshold" if value else "failureThreshold"]
        return len(self.results) >= count and set(self.results[-count:]) == {value}

    def until(self, value: bool) -> None:
        """Wait for `last`, for as long as the thresholds allow."""
        count = self.spec["successThreshold" if value else "failureThreshold"]
        most = (count + 1) * (self.spec["periodSeconds"] + self.spec["timeoutSeconds"])
        until(lambda: self.last(value), most)

    def _run(self) -> None:
        while not self._stopped.is_set():
            begun = time.monotonic()
            self.results.append(self.once())
            self._stopped.wait(max(0.0, begun + self.spec["periodSeconds"] - time.monotonic()))


def arguments(name: str, keys: Path, **changed: str | None) -> list[str]:
    """A container's arguments, with the mounted folder of keys elsewhere; of `changed`, flags with
    another value, or without the flag for None.
    """
    given = [each.replace("/run/keys", str(keys)) for each in pod(name)["containers"][0]["args"]]
    for flag, value in changed.items():
        at = given.index("--" + flag.replace("_", "-"))
        given[at : at + 2] = [] if value is None else [given[at], value]
    return given


@contextmanager
def started(process: ServerProcess, name: str) -> Iterator[tuple[ServerProcess, Probe]]:
    """A container that was started and probed until it had started, and its readiness probe."""
    container = pod(name)["containers"][0]
    process.start()
    try:
        with Probe(container, "startupProbe", process.port) as startup:
            until(lambda: startup.last(True), 300)
        assert len(startup.results) < startup.spec["failureThreshold"]
        with Probe(container, "readinessProbe", process.port) as readiness:
            readiness.until(True)
            yield process, readiness
    finally:
        process.stop()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the manifest mounts at /run/keys."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "admin-key").write_text("an admin key")
    return folder


@pytest.fixture(scope="module")
def server(keys: Path) -> Iterator[tuple[ServerProcess, Probe]]:
    events = f'{{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:{free_port()}"}}'
    flags = arguments("server", keys, model_path=None, kv_events_config=events)
    variables = {
        each["name"]: each.get("value", "secret") for each in pod("server")["containers"][0]["env"]
    }
    variables.pop("HF_TOKEN")
    process = ServerProcess(flags, environment={**variables, "TEST_SERVERS": "spawn"})
    with started(process, "server") as ready:
        yield ready


@pytest.fixture(scope="module")
def router(
    server: tuple[ServerProcess, Probe], keys: Path
) -> Iterator[tuple[ServerProcess, Probe]]:
    action, _, *flags = arguments("router", keys, host=None, metrics_port=str(free_port()))
    program = [sys.executable, "-m", "sglang_hybrid.replicas", action, server[0].url]
    with started(ServerProcess(flags, program=program), "router") as ready:
        yield ready


def ask(url: str, tokens: int) -> requests.Response:
    """A stream of so many tokens."""
    body = {
        "input_ids": random_prompt(2_000, seed=time.monotonic_ns()),
        "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True},
        "stream": True,
    }
    return requests.post(url + "/generate", json=body, stream=True, timeout=300)


def in_threads(count: int, run: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_both_are_ready_and_alive_while_they_work(
    server: tuple[ServerProcess, Probe], router: tuple[ServerProcess, Probe]
) -> None:
    """No probe fails, not even one of those that may."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            assert ask(router[0].url, 100).text.endswith("[DONE]\n\n")

    before = [len(readiness.results) for _, readiness in (server, router)]
    threads = in_threads(8, work)
    probes = [
        Probe(pod(name)["containers"][0], "livenessProbe", process.port)
        for name, process in (("server", server[0]), ("router", router[0]))
    ]
    with probes[0], probes[1]:
        until(lambda: all(len(probe.results) >= 2 for probe in probes), 120)
    stop.set()
    for thread in threads:
        thread.join()
    newest = [
        readiness.results[n:] for (_, readiness), n in zip((server, router), before, strict=True)
    ]
    assert all(len(results) >= 4 for results in newest)
    assert all(map(all, [*newest, *(probe.results for probe in probes)]))


def test_a_server_that_is_stuck_is_neither(server: tuple[ServerProcess, Probe]) -> None:
    """Its scheduler is stopped; it is ready again once that goes on."""
    process, readiness = server
    (scheduler,) = [one for one in process.processes() if "::scheduler" in one.cmdline()[0]]
    liveness = Probe(pod("server")["containers"][0], "livenessProbe", process.port)
    scheduler.suspend()
    try:
        assert not liveness.once()
        readiness.until(False)
    finally:
        scheduler.resume()
    readiness.until(True)
    assert liveness.once()


def test_an_update_ends_what_runs_and_is_ready_for_nothing_new(
    server: tuple[ServerProcess, Probe], router: tuple[ServerProcess, Probe]
) -> None:
    """preStop, SIGTERM, and the end within terminationGracePeriodSeconds."""
    process, readiness = server
    settings = pod("server")
    answer = ask(process.url, 3_000)
    lines = answer.iter_lines()
    next(lines)
    begun = time.monotonic()
    assert readiness.last(True)
    subprocess.run(settings["containers"][0]["lifecycle"]["preStop"]["exec"]["command"], check=True)
    assert readiness.last(True)  # others learn meanwhile that it ends
    assert process.process is not None
    process.process.send_signal(signal.SIGTERM)
    readiness.until(False)
    router[1].until(False)
    assert [line for line in lines if line][-1] == b"data: [DONE]"
    left = settings["terminationGracePeriodSeconds"] - (time.monotonic() - begun)
    assert process.process.wait(left) == 0
