"""The end of a server: running requests end, in time or with an error, and nothing stays behind."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import alive, random_prompt, until

pytestmark = pytest.mark.usefixtures("spawned")  # as users' processes start

LIMIT = 10
"""Seconds within which everything is gone after SIGTERM, and at worst after Ctrl-C."""

ENDLESS = 4_000
"""Tokens of a request that takes longer than a server that ends may."""

CUT = "The server is shutting down."
DIED = "A process of the server has ended, so it cannot go on."
PROCESS_DIED = 70
SHARED_MEMORY = Path("/dev/shm")


class Ending:
    """A server, started before, with requests under way that gets a signal."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server

    def begin(self, stream: str, tokens: int) -> Future[list[str]]:
        """Send a streaming request to /generate or the chat; its events, once it has started."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        bodies: dict[str, dict[str, Any]] = {
            "/generate": {"input_ids": random_prompt(50, seed=1), "sampling_params": sampling},
            "/v1/chat/completions": {
                "model": "default",
                "messages": [{"role": "user", "content": "Who keeps the archive?"}],
                "max_tokens": tokens,
                "ignore_eos": True,
            },
        }
        body = bodies[stream] | {"stream": True}
        response = requests.post(self.server.url + stream, json=body, stream=True, timeout=60)
        response.raise_for_status()
        lines = response.iter_lines()
        first = next(lines)

        def rest() -> list[str]:
            return [line.decode() for line in (first, *lines) if line]

        return self._threads.submit(rest)

    def kill(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the first process, or as a terminal does to all of the group."""
        self._remember()
        assert self.server.process is not None
        (os.killpg if group else os.kill)(self.server.process.pid, number)

    def kill_child(self, title: str) -> None:
        """SIGKILL to one of SGLang's processes."""
        self._remember()
        (child,) = [one for one in self.processes if title in one.cmdline()[0]]
        child.kill()

    def flush(self) -> None:
        """Ask for an empty cache."""
        self._remember()
        self._threads.submit(requests.post, self.server.url + "/flush_cache", timeout=60)

    def _remember(self) -> None:
        self.processes = self.server.processes()
        self._memory = {number for process in self.processes for number in shared_by(process)}
        (self._report,) = {
            path
            for process in self.processes[1:]
            if (path := process.environ().get("SGLANG_HYBRID_FAILURE"))
        }
        self._since = time.monotonic()

    def wait(self, limit: float = LIMIT) -> int:
        """Status of the first process, after every process has gone within `limit` seconds."""
        assert self.server.process is not None
        while any(map(alive, self.processes)) and time.monotonic() < self._since + limit:
            self.server.process.poll()
            time.sleep(0.05)
        assert not any(map(alive, self.processes))
        return self.server.process.wait(1)

    def left_in_shared_memory(self) -> list[Path]:
        assert self._memory, "it had some"
        return [Path(entry) for entry in os.scandir(SHARED_MEMORY) if entry.inode() in self._memory]

    def left_in_temporary_files(self) -> bool:
        return Path(self._report).parent.exists()

    @contextmanager
    def running(self) -> Iterator[None]:
        self.server.wait_until_healthy()
        with ThreadPoolExecutor(4) as self._threads:
            yield


def shared_by(process: psutil.Process) -> list[int]:
    """Inodes of the shared memory that a process has mapped."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return [int(line.split()[4]) for line in lines if f" {SHARED_MEMORY}/" in line]


@contextmanager
def ending(*flags: str, **more: Any) -> Iterator[Ending]:
    server = ServerProcess(flags, **{"environment": patient(3), **more})
    server.start()
    it = Ending(server)
    try:
        with it.running():
            yield it
    finally:
        server.stop()


def patient(seconds: int) -> dict[str, str]:
    """The variable of a server whose running requests may go on for so long."""
    return {"SGLANG_HYBRID_DRAIN_SECONDS": str(seconds)}


def error_of_generate(events: list[str]) -> dict[str, Any]:
    assert events[-1] == "data: [DONE]"
    reason: dict[str, Any] = json.loads(events[-2].removeprefix("data: "))["meta_info"][
        "finish_reason"
    ]
    return reason


def error_of_chat(events: list[str]) -> dict[str, Any]:
    assert events[-1] == "data: [DONE]"
    error: dict[str, Any] = json.loads(events[-2].removeprefix("data: "))["error"]
    return error


def ends_on_sigterm(it: Ending) -> str:
    """Sent to every process, as shells, `timeout` and systemd do; only the first acts on it.
    Streams end with an error, and nothing is left. Returns what the log says from then on.
    """
    generate, chat = it.begin("/generate", ENDLESS), it.begin("/v1/chat/completions", ENDLESS)
    before = it.server.log.stat().st_size
    it.kill(signal.SIGTERM, group=True)
    while requests.get(it.server.url + "/health", timeout=5).status_code != 503:
        time.sleep(0.05)  # it ends with a connection error if that is never said
    assert it.wait() == 0
    assert it.left_in_shared_memory() == []
    assert not it.left_in_temporary_files()
    cut = error_of_generate(generate.result(5))
    error = error_of_chat(chat.result(5))
    assert (cut["type"], cut["message"], cut["status_code"]) == ("abort", CUT, 503)
    assert (error["message"], error["code"]) == (CUT, 503)
    return it.server.log.read_bytes()[before:].decode(errors="replace")


def ended_quietly(log: str) -> bool:
    return not any(words in log for words in ("Traceback", "leaked", "state was deleted"))


def test_sigterm_ends_streams_with_an_error(default_process_to_end: ServerProcess) -> None:
    """The last test of the server that all files share."""
    it = Ending(default_process_to_end)
    with it.running():
        assert ended_quietly(ends_on_sigterm(it))


@pytest.mark.slow
def test_sigterm_ends_a_fresh_server_without_a_word() -> None:
    with ending() as it:
        said = it.server.log.read_text()
        assert ended_quietly(ends_on_sigterm(it))
    assert said.count("the embedded trained model is served; it knows one sentence") == 1
    assert ended_quietly(it.server.log.read_text(errors="replace"))


@pytest.mark.slow
def test_several_tokenizer_processes_end_quietly() -> None:
    """SGLang's own ways end them, which wait up to five seconds for a signal, and five more."""
    server = ServerProcess(["--tokenizer-worker-num", "2"])
    server.start()
    it = Ending(server)
    with it.running():
        it.kill(signal.SIGTERM)
        assert it.wait() == 0
    log = it.server.log.read_text(errors="replace")
    assert "Traceback" not in log and "leaked" not in log and "KeyError" not in log
    assert not it.left_in_shared_memory()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_lets_a_request_end_that_ends_in_time(number: signal.Signals, status: int) -> None:
    """A terminal sends it to every process; only the first one may act on it."""
    with ending(environment=patient(60)) as it:
        generate = it.begin("/generate", 40)
        segment = next(path for path in SHARED_MEMORY.glob("sglang_loads_*") if mapped(path, it))
        with segment.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
            it.kill(number, group=True)
            assert it.wait() == status
            assert it.left_in_shared_memory() == [segment], "somebody else looks at this one"
        segment.unlink()
        events = generate.result(5)
    assert error_of_generate(events)["type"] == "length"
    assert len(events) > 2, "it is a stream"
    assert "Traceback" not in it.server.log.read_text(errors="replace")


class Load:
    """Clients of a server, each of which sends one request and reads its whole answer."""

    RUNNING, TOKENS = 2, 200

    def __init__(self, url: str, pool: ThreadPoolExecutor) -> None:
        self._url, self._pool = url, pool
        self.answers: list[Future[int]] = []

    def begin(self, count: int) -> None:
        """Half of them are streams."""
        for number in range(count):
            self.answers.append(self._pool.submit(self._ask, number, bool(number % 2)))

    def has_arrived(self) -> bool:
        """True once the server has every request; one that comes later than SIGTERM is refused."""
        ended = sum(answer.done() for answer in self.answers)
        return ended + in_server(self._url) >= len(self.answers)

    def _ask(self, seed: int, stream: bool) -> int:
        """Tokens of a whole answer; 0 for one that was cut, in whatever way."""
        sampling = {"temperature": 0, "max_new_tokens": self.TOKENS, "ignore_eos": True}
        body = {"input_ids": random_prompt(50, seed), "sampling_params": sampling, "stream": stream}
        try:
            answer = requests.post(self._url + "/generate", json=body, timeout=300)
        except requests.RequestException:
            return 0
        lines = answer.text.split("\n\n")
        said = json.loads(lines[-3].removeprefix("data: ") if stream else answer.text)
        about = said.get("meta_info", {"finish_reason": {"type": "error"}})
        return about["completion_tokens"] if about["finish_reason"]["type"] == "length" else 0


@pytest.mark.slow
def test_a_rolling_update_cuts_nobody() -> None:
    """Kubernetes ends a server by SIGTERM, here while some requests run and others wait."""
    flags = ["--max-running-requests", str(Load.RUNNING)]
    with (
        ending(*flags, environment=patient(300)) as it,
        ThreadPoolExecutor(12) as pool,
        requests.Session() as kept,
    ):
        url = it.server.url
        assert kept.get(url + "/health", timeout=60).ok
        load = Load(url, pool)
        load.begin(12)
        until(lambda: load.has_arrived() and waiting(url) > 0, 60)
        it.kill(signal.SIGTERM)
        until(lambda: kept.get(url + "/health", timeout=60).status_code == 503, 60)
        assert not all(answer.done() for answer in load.answers), "the test is too late"
        for path in ("/health", "/health_generate", "/v1/models", "/server_info"):
            probed = requests.get(url + path, timeout=60)
            assert (probed.status_code, probed.headers["retry-after"]) == (503, "1"), path
        refused = kept.post(url + "/generate", json={"text": "a" * 100_000}, timeout=60)
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert refused.json() == {"error": {"message": CUT, "code": 503}}
        assert requests.post(url + "/abort_request", json={"rid": "x"}, timeout=60).ok
        cut = [answer for answer in load.answers if answer.result(300) != Load.TOKENS]
        assert len(cut) == 0
        assert it.wait(300 + LIMIT) == 0
        log = it.server.log.read_text(errors="replace")
        assert "requests have 300 seconds to end" in log and ended_quietly(log)


def words(value: str | list[str]) -> str:
    """A part of a test's name."""
    return value if isinstance(value, str) else " ".join(value) or "one rank"


def waiting(url: str) -> int:
    """Requests in the queue of a server."""
    return _in_state(url, "waiting")


def in_server(url: str) -> int:
    """Requests that a server runs, and those in its queue."""
    return _in_state(url, "running", "waiting")


def _in_state(url: str, *states: str) -> int:
    loads = requests.get(url + "/v1/loads", timeout=60).json()["loads"]
    return int(sum(each[f"num_{state}_reqs"] for each in loads for state in states))


@pytest.mark.slow
def test_a_process_that_dies_ends_requests_and_the_server() -> None:
    with ending() as it:
        generate, chat = it.begin("/generate", ENDLESS), it.begin("/v1/chat/completions", ENDLESS)
        it.kill_child("detokenizer")
        assert it.wait() == PROCESS_DIED
        assert it.left_in_shared_memory() == []
        assert not it.left_in_temporary_files()
        cut, error = error_of_generate(generate.result(5)), error_of_chat(chat.result(5))
        log = it.server.log.read_text(errors="replace")
    assert (cut["type"], cut["message"], cut["status_code"]) == ("abort", DIED, 503)
    assert (error["message"], error["code"]) == (DIED, 503)
    assert "Traceback" not in log
    assert "sglang_hybrid: detokenizer (process" in log and "2 running requests" in log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        pytest.param([], "AssertionError: a slot has two owners", id="an invariant"),
        pytest.param(
            ["--tp-size", "2"],
            "FlushCacheReqInput failed on some ranks and was done on others",
            id="one of two ranks",
        ),
    ],
)
def test_a_request_that_shows_what_is_broken_ends_the_server(flags: list[str], said: str) -> None:
    with ending(*flags, module="tests.server.broken") as it:
        generate = it.begin("/generate", ENDLESS)
        it.flush()
        assert it.wait() == PROCESS_DIED
        assert it.left_in_shared_memory() == []
        cut = error_of_generate(generate.result(5))
        log = it.server.log.read_text(errors="replace")
    assert (cut["type"], cut["message"], cut["status_code"]) == ("abort", DIED, 503)
    assert said in log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "victim"),
    [
        ([], "sglang::scheduler"),
        (["--tp-size", "2"], "TP0"),
        (["--tp-size", "2"], "TP1"),
        (["--tp-size", "2"], "detokenizer"),
    ],
    ids=words,
)
def test_every_other_process_that_dies(flags: list[str], victim: str) -> None:
    with ending(*flags) as it:
        generate = it.begin("/generate", ENDLESS)
        it.kill_child(victim)
        assert it.wait() == PROCESS_DIED
        assert it.left_in_shared_memory() == []
        assert error_of_generate(generate.result(5))["message"] == DIED


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--tp-size", "2"]], ids=words)
def test_when_the_first_process_is_killed_nothing_stays(flags: list[str]) -> None:
    with ending(*flags) as it:
        it.begin("/generate", ENDLESS)
        it.kill(signal.SIGKILL)
        assert it.wait() == -signal.SIGKILL
        # Python's resource tracker outlives all others.
        until(lambda: it.left_in_shared_memory() == [], LIMIT)


def mapped(path: Path, it: Ending) -> bool:
    inode = path.stat().st_ino
    return any(inode in shared_by(process) for process in it.server.processes())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "seconds", "signals", "status"),
    [
        (["--tp-size", "2"], 3, [signal.SIGTERM], 0),
        ([], 60, [signal.SIGINT, signal.SIGINT], 130),
        ([], 60, [signal.SIGTERM, signal.SIGTERM], 143),
        ([], 0, [signal.SIGTERM], 0),
    ],
)
def test_every_other_way(
    flags: list[str], seconds: int, signals: list[signal.Signals], status: int
) -> None:
    with ending(*flags, environment=patient(seconds)) as it:
        generate = it.begin("/generate", ENDLESS)
        for number in signals:
            it.kill(number)
            time.sleep(0.5)
        assert it.wait() == status
        assert it.left_in_shared_memory() == []
        if len(signals) == 1:
            assert error_of_generate(generate.result(5))["message"] == CUT
        else:
            assert generate.exception(5) is not None, "it was cut off without a word"


@pytest.mark.slow
def test_a_client_that_does_not_read_holds_nothing_up() -> None:
    """Its connection cannot close: what was sent is still in the system's buffers."""
    with ending() as it:
        body = {
            "input_ids": random_prompt(3_000, seed=1),
            "sampling_params": {"max_new_tokens": 1_000, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,  # makes every event a long one
            "stream": True,
        }
        with requests.post(it.server.url + "/generate", json=body, stream=True, timeout=60):
            time.sleep(20)
            it.kill(signal.SIGTERM)
            assert it.wait() == 0
            assert it.left_in_shared_memory() == []
        assert "connections are still open" in it.server.log.read_text(errors="replace")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "status"),
    [
        ("shutdown", 0),
        ("exit", 0),
        ("sglang::scheduler", PROCESS_DIED),
        ("sglang::detokenizer", PROCESS_DIED),
    ],
)
def test_an_engine_leaves_nothing(
    way: str, status: int, model_directory: Callable[[str], Path]
) -> None:
    command = ["-m", "tests.server.engine_ends", str(model_directory("nemotron-h")), way]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == status, done.stderr[-3000:]
    memory = json.loads(next(line for line in done.stdout.splitlines() if line[:1] == "["))
    assert memory
    until(lambda: not remaining(memory), LIMIT)  # Python's resource tracker outlives all others


def remaining(inodes: list[int]) -> list[str]:
    return [entry.name for entry in os.scandir(SHARED_MEMORY) if entry.inode() in inodes]
