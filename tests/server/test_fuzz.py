"""A thousand requests that nobody would send: none ends a process, hangs or changes an answer."""

from __future__ import annotations

import os
from http import HTTPStatus
from pathlib import Path

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import ask, random_prompt
from tests.server.fuzz import Findings, cases, send

CASES = int(os.environ.get("FUZZ_CASES", "1000"))
SEED = int(os.environ.get("FUZZ_SEED", "13"))

FLAGS = ("--enable-cache-report", "--enable-metrics", "--context-length", "512")
"""A short context, as a request may ask for an answer that fills it."""

ANSWERS = (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.NOT_IMPLEMENTED)
"""Statuses above 499 that are one: something failed, or this server is not made for it."""


def processes(server: ServerProcess) -> set[tuple[int, float]]:
    return {(one.pid, one.create_time()) for one in server.processes()}


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_no_request_ends_the_server(tmp_path: Path) -> None:
    """FUZZ_CASES and FUZZ_SEED ask for others; `-s` shows the summary."""
    found = Findings()
    prompt = random_prompt(40, seed=1)
    with ServerProcess(FLAGS, directory=tmp_path) as server:
        first = ask(server.url, prompt, 8)["output_ids"]
        before = processes(server)
        schema = requests.get(server.url + "/openapi.json", timeout=60).json()

        @seed(SEED)
        @settings(
            max_examples=CASES,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(cases(schema))
        def attack(case: schemathesis.Case) -> None:
            status, seconds, text = send(server.url, case)
            found.note(case, status, seconds, text)
            assert status < 500 or status in ANSWERS, (case, status, text)
            assert ask(server.url, prompt, 8)["output_ids"] == first

        attack()
        assert processes(server) == before
        log = server.log.read_text(errors="replace")
    print(found.summary())
    assert "hit an exception" not in log
    assert sum(found.endpoints.values()) >= CASES
    assert list(tmp_path.iterdir()) == [], "a request made a file"
