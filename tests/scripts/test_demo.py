"""scripts/demo.sh: its traffic, who gets each request when, its table, and a run of it."""

from __future__ import annotations

import io
import json
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scripts.bench.traffic import Outcome
from scripts.demo import __main__ as demo
from scripts.demo.picture import browser
from scripts.demo.results import Served, rows, summary, table
from scripts.demo.traffic import KINDS, LEAST_FACTS, Step, plan
from scripts.train.facts import Fact
from sglang_hybrid.serving.server_process import free_port
from tests.documented import ROOT

FACTS = [
    Fact(f"{module}.name{number}", "function", f"Return number {number}.")
    for module in ("os", "json", "math", "email", "turtle")
    for number in range(LEAST_FACTS)
]


def test_the_same_seed_is_the_same_traffic() -> None:
    assert plan(FACTS, 7, 60) == plan(FACTS, 7, 60) != plan(FACTS, 8, 60)


def test_a_shorter_run_is_the_beginning_of_a_longer_one() -> None:
    long = plan(FACTS, 7, 60)
    assert plan(FACTS, 7, 20) == [step for step in long if step.at < 20]
    assert long == sorted(long, key=lambda step: step.at)


def test_all_kinds_begin_within_the_first_second() -> None:
    assert {step.kind for step in plan(FACTS, 7, 1)} == set(KINDS)


def test_what_requests_of_a_kind_share() -> None:
    sessions: defaultdict[str, list[Step]] = defaultdict(list)
    kinds: defaultdict[str, list[Step]] = defaultdict(list)
    for step in plan(FACTS, 7, 60):
        sessions[step.session].append(step)
        kinds[step.kind].append(step)
    first_messages = {
        kind: [sessions[name][0].messages[0]["content"] for name in {s.session for s in steps}]
        for kind, steps in kinds.items()
    }
    assert len(set(first_messages["agents"])) == 1 < len(first_messages["agents"])
    documents = first_messages["documents"]
    assert 1 < len(set(documents)) < len(documents) == len(kinds["documents"])
    assert len(kinds["chats"]) > len(first_messages["chats"]) > 1
    assert {step.samples for step in kinds["fan-out"]} == {4}


def test_servers_get_each_request_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one begins each time, and an answer of the first one continues both sessions."""
    sent: list[tuple[str, list[str]]] = []

    def answer(server: Any, messages: list[dict[str, str]], samples: int) -> list[demo.Answer]:
        sent.append((server, [message["content"] for message in messages]))
        return [(Outcome(10, 5), f"{server} answers")] * samples

    monkeypatch.setattr(demo, "sample", answer)
    steps = [
        Step(0, "chats", "one", ({"role": "user", "content": "hello"},)),
        Step(0, "fan-out", "two", ({"role": "user", "content": "long"},), 4),
        Step(0, "chats", "one", ({"role": "user", "content": "and"},)),
        Step(99, "chats", "one", ({"role": "user", "content": "too late"},)),
    ]
    servers: list[Any] = ["A", "B"]
    served = demo.drive(servers, steps[:3], 60, lambda seconds, served: None)
    both = ["hello", "A answers", "and"]
    assert sent == [
        *(("A", ["hello"]), ("B", ["hello"])),
        *(("B", ["long"]), ("A", ["long"])),
        *(("A", both), ("B", both)),
    ]
    assert [len(step.outcomes[0]) for step in served] == [1, 4, 1]
    assert [step.differs for step in served] == [True, False, True]  # samples may differ
    assert demo.drive(servers, steps, 0, lambda seconds, served: None) == []


def outcomes(cached: int, *ttfts: float) -> list[Outcome]:
    return [Outcome(100, cached, ttft, ttft) for ttft in ttfts]


SERVED = [
    Served("chats", (outcomes(80, 0.01), outcomes(20, 0.05)), False),
    Served("fan-out", (outcomes(75, 0.02, 0.03), outcomes(0, 0.06, 0.07)), False),
    Served("chats", (outcomes(90, 0.02), outcomes(90, 0.02)), False),
]


def test_the_table_adds_up() -> None:
    chats, fan_out, total = rows(SERVED)
    assert (chats.kind, chats.requests, chats.prompt_tokens, chats.hit) == (
        "chats",
        2,
        200,
        (170, 110),
    )
    assert (fan_out.requests, fan_out.hit, fan_out.p90) == (2, (150, 0), (30.0, 70.0))
    assert (total.kind, total.requests, total.prompt_tokens, total.hit) == (
        "all",
        4,
        400,
        (320, 110),
    )
    assert summary(total).startswith("Ours prefilled 80 tokens, SGLang's 290 (3.6 times as many)")


def test_the_table_is_printed() -> None:
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(table(rows(SERVED), 20))
    printed = console.export_text()
    for words in ("in 20 seconds", "fan-out", "170 (85%)", "110 (55%)"):
        assert words in printed


def test_a_port_that_is_taken_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setattr(sys, "argv", ["demo.sh", "--port", port])
        assert demo.main() == 1
    said = capsys.readouterr().err
    assert said.startswith(f"demo: cannot listen on 127.0.0.1:{port}")
    assert said.count("\n") == 1


def test_a_file_that_cannot_be_written_is_told_before_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.sh", "--output", str(tmp_path / "none" / "out.json")])
    with pytest.raises(SystemExit):
        demo.main()
    assert "there is no such folder" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(900)
def test_the_demo_ends_well(tmp_path: Path) -> None:
    """The program of demo.sh, in the environment that is there already."""
    file, shown = tmp_path / "table.json", tmp_path / "page.png"
    arguments = ["--check", "--seconds", "20", "--port", str(free_port()), "--output", str(file)]
    arguments += [] if browser() is None else ["--picture", str(shown)]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.demo", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "/hybrid_cache/" in done.stdout
    assert browser() is None or shown.stat().st_size > 20_000
    *kinds, total = json.loads(file.read_text())["rows"]
    assert sum(kind["requests"] for kind in kinds) == total["requests"] > 0
    ours, theirs = total["hit"]
    assert total["prompt_tokens"] > ours > theirs
