"""`python -m sglang_hybrid.replicas serve`: servers, picker and Envoy as a user starts them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import requests

from sglang_hybrid.extensions.cpu.models import build_tiny_model
from sglang_hybrid.extensions.cpu.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.extensions.router import Replicas, Resumable
from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import greedy, random_prompt, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KEY = "the admin key"
SERVE = "sglang_hybrid.replicas"


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fleet's temporary files."""
    return tmp_path_factory.mktemp("tmp")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, temporary: Path) -> Iterator[ServerProcess]:
    model = build_tiny_model(DEFAULT_ARCHITECTURE, tmp_path_factory.mktemp("model") / "it")
    flags = ["--model-path", str(model), "--admin-api-key", KEY, "--enable-cache-report"]
    with ServerProcess(
        flags,
        program=[sys.executable, "-m", SERVE, "serve", "--n", "2"],
        health="/health",
        environment={"TMPDIR": str(temporary)},
    ) as running:
        yield running


def servers(fleet: ServerProcess) -> dict[str, psutil.Process]:
    """The servers that run, by address."""
    found = {}
    for process in fleet.processes():
        command = process.cmdline()
        if "sglang_hybrid.launch_server" in command:
            found[f"http://127.0.0.1:{command[command.index('--port') + 1]}"] = process
    return found


def hits(url: str, prompt: list[int]) -> int:
    answer = requests.post(url + "/generate", json=greedy(prompt, 4), timeout=120)
    assert answer.ok, answer.text
    return int(answer.json()["meta_info"]["cached_tokens"])


def furthest(replicas: Replicas, prompt: list[int]) -> Resumable:
    """The replica that can resume a prompt and one more token furthest, and its position."""
    return max(replicas.resume([*prompt, 1]), key=lambda one: one.position)


def is_held(replicas: Replicas, prompt: list[int]) -> bool:
    return furthest(replicas, prompt).position >= len(prompt) - 1


def test_turns_find_their_server_and_a_dead_one_is_started_again(fleet: ServerProcess) -> None:
    urls = sorted(servers(fleet))
    assert len(urls) == 2
    replicas = Replicas(urls, KEY)
    until(lambda: len(replicas.followers) == 2)
    sessions = [random_prompt(400, seed) for seed in range(6)]
    assert [hits(fleet.url, prompt) for prompt in sessions] == [0] * 6
    for prompt in sessions:
        until(partial(is_held, replicas, prompt))
    holders = [furthest(replicas, prompt) for prompt in sessions]
    assert {one.replica for one in holders} == set(urls)
    assert [hits(fleet.url, [*prompt, 5, 6]) for prompt in sessions] == [
        one.position for one in holders
    ]
    victim = holders[0].replica
    servers(fleet)[victim].send_signal(signal.SIGKILL)
    for prompt in sessions:  # answered by the other one
        hits(fleet.url, [*prompt, 7])
    replicas.close()


def test_chats_are_hit_and_streams_come_in_parts(fleet: ServerProcess) -> None:
    system = {"role": "system", "content": "You answer in one word. " * 20}
    for number in range(2):
        user = {"role": "user", "content": f"Question {number}"}
        body = {"model": "default", "messages": [system, user], "max_tokens": 4}
        answer = requests.post(fleet.url + "/v1/chat/completions", json=body, timeout=120).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 50
    streamed = {**body, "stream": True}
    with requests.post(
        fleet.url + "/v1/chat/completions", json=streamed, timeout=120, stream=True
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == b"data: [DONE]" and len(lines) > 3


def test_nothing_is_left_after_the_end(fleet: ServerProcess, temporary: Path) -> None:
    processes = fleet.processes()
    assert len(processes) > 4
    assert fleet.process is not None
    fleet.process.send_signal(signal.SIGTERM)
    fleet.process.wait(60)
    _, left = psutil.wait_procs(processes, timeout=10)
    assert left == []
    assert list(temporary.iterdir()) == []
