"""Requests that nobody would send: none ends a process, hangs, changes an answer or is answered
with an error of the server's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

from sglang_hybrid.serving.server_process import ServerProcess, event_flags
from tests.server import fuzz
from tests.server.client import ask, flush, random_prompt, width_of
from tests.server.sweep import (
    Right,
    Swept,
    admin_requests,
    cases,
    client_requests,
    fields_of,
    prepare,
    sample,
    sweep,
)

CASES = int(os.environ.get("FUZZ_CASES", "300"))
SEED = int(os.environ.get("FUZZ_SEED", "13"))
QUICK_CASES = 300
SOME = {"count": 10_000, "seed": SEED}
"""Cases for servers that differ from the default one, to which all can be sent."""

FLAGS = ("--enable-cache-report", "--enable-metrics", "--enable-response-store")
SHORT = ("--context-length", "512")
"""A short context, since a request may ask for an answer that fills it."""

DEFAULT = (*FLAGS, "--hybrid-ui", "text", *event_flags(), *SHORT)

OTHERS = {
    "transformer": ("--hybrid-default-model", "transformer", *FLAGS),
    "embeddings": (*FLAGS, "--enable-return-hidden-states", "--disable-radix-cache"),
    "images": ("--hybrid-default-model", "qwen3.5-vl", *FLAGS),
}

PROMPT = random_prompt(40, seed=1)


def processes(server: ServerProcess) -> set[tuple[int, float]]:
    return {(one.pid, one.create_time()) for one in server.processes()}


def looks_the_same(url: str) -> Callable[[], None]:
    """A function that asks for a usual answer again, and asserts that it is the same."""
    first = ask(url, PROMPT, 8)["output_ids"]

    def check() -> None:
        assert ask(url, PROMPT, 8)["output_ids"] == first, "a usual answer is another one"

    return check


def all_cases(url: str, rights: Sequence[Right]) -> Any:
    return cases(rights, fields_of(requests.get(url + "/openapi.json", timeout=60).json()))


def assert_unharmed(server: ServerProcess, before: set[tuple[int, float]], found: Swept) -> None:
    print(found.summary())
    assert processes(server) == before
    assert not found.mistakes, found.summary()


def test_a_sample_of_the_cases(default_process: ServerProcess, url: str) -> None:
    """FUZZ_SEED asks for others."""
    before, check = processes(default_process), looks_the_same(url)
    prepare(url)
    chosen = sample(all_cases(url, client_requests(width_of(url))), QUICK_CASES, SEED)
    try:
        assert_unharmed(default_process, before, sweep(url, chosen, check))
    finally:
        flush(url)


def withstands(flags: Sequence[str], directory: Path, **few: int) -> None:
    """directory: where the server runs. few: as `sample` takes them; all cases by default."""
    with ServerProcess(flags, directory=directory) as server:
        before, check = processes(server), looks_the_same(server.url)
        prepare(server.url)
        chosen = all_cases(server.url, client_requests(width_of(server.url)))
        if few:
            chosen = sample(chosen, **few)
        assert_unharmed(server, before, sweep(server.url, chosen, check))
    assert list(directory.iterdir()) == [], "a request made a file"


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("some", [{}, SOME], ids=["all", "some"])
def test_odd_values_in_every_field(some: dict[str, int], tmp_path: Path) -> None:
    withstands(DEFAULT, tmp_path, **some)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("flags", OTHERS.values(), ids=OTHERS)
def test_odd_values_on_other_servers(flags: Sequence[str], tmp_path: Path) -> None:
    withstands([*flags, *SHORT], tmp_path, **SOME)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_odd_value_of_an_operator(tmp_path: Path) -> None:
    """One after another: they act on the whole server."""
    with ServerProcess(DEFAULT, directory=tmp_path) as server:
        before, check = processes(server), looks_the_same(server.url)
        every = all_cases(server.url, admin_requests())
        assert_unharmed(server, before, sweep(server.url, every, check, threads=1))


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("operations", [None, 10], ids=["all", "some"])
def test_what_the_schema_allows_and_forbids(operations: int | None, tmp_path: Path) -> None:
    """FUZZ_CASES and FUZZ_SEED ask for others; `-s` shows the summary."""
    found = Swept()
    with ServerProcess([*FLAGS, *SHORT], directory=tmp_path) as server:
        before, check = processes(server), looks_the_same(server.url)
        schema = requests.get(server.url + "/openapi.json", timeout=60).json()

        @seed(SEED)
        @settings(
            max_examples=CASES,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(fuzz.cases(schema, operations, SEED))
        def attack(case: schemathesis.Case) -> None:
            name = f"{case.method} {case.operation.path}"
            status, seconds, text = fuzz.send(server.url, case)
            found.note(name, f"{name}: {case.body!r}", status, seconds, text)
            assert status <= HTTPStatus.NOT_IMPLEMENTED, (case, status, text)
            check()

        attack()
        assert_unharmed(server, before, found)
    assert sum(found.statuses.values()) >= CASES
    assert list(tmp_path.iterdir()) == [], "a request made a file"
