"""`replay FILE --follow` hits, token by token, what a replay of the whole recording hits."""

from __future__ import annotations

import io
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

from sglang_hybrid.core.programs import UsageError
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab import shadow
from sglang_hybrid.extensions.lab.command_line import jobs_of, parser
from sglang_hybrid.extensions.lab.runner import Runner
from sglang_hybrid.extensions.lab.simulation.traces.formats import read_trace, write_trace
from sglang_hybrid.extensions.lab.simulation.traces.generators import generate, traffic
from sglang_hybrid.extensions.lab.simulation.traces.line_formats import RecordedLine

OPTIONS = ["--cache", "300MB", "--rules", "served", "--instant", "--policy", "sglang,lru,reuse"]


def jobs(*options: str) -> list[Any]:
    return jobs_of(parser().parse_args(["recording", *(options or OPTIONS)]), "live")


def chats() -> list[Request]:
    return list(generate("chat", traffic("chat", sessions=12), 1))


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Lines come in the order in which requests end, which is not that of their arrival."""
    path = tmp_path / "requests.jsonl"
    write_trace(path, chats(), "recorded")
    lines = path.read_bytes().splitlines(keepends=True)
    for at in range(0, len(lines) - 1, 5):
        lines[at], lines[at + 1] = lines[at + 1], lines[at]
    path.write_bytes(b"".join(lines))
    return path


def followed(path: Path, console: Console, **more: Any) -> list[shadow.Shadow]:
    return shadow.follow(path, jobs(), None, console, **more)


@pytest.mark.parametrize("more", [[], ["--device-codec", "int8"]])
def test_a_shadow_hits_what_a_replay_hits(more: list[str], recording: Path) -> None:
    asked, quiet = jobs(*OPTIONS, *more), Console(quiet=True)
    results = Runner({"live": read_trace(recording)}).run_all(asked)
    *shadows, served = shadow.follow(recording, asked, None, quiet, going_on=lambda: False)
    assert [each.hit for each in shadows] == [result.hit_tokens for result in results]
    assert (served.name, served.requests) == ("served", 0), "the recording does not tell"
    assert {each.requests for each in shadows} == {len(results[0].input_len)}
    assert len({each.hit for each in shadows}) > 1


def test_lines_that_come_later_are_served_too(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first half of a line may come before the other."""
    monkeypatch.setattr(shadow, "STEP_SECONDS", 0.001)
    content, growing = recording.read_bytes(), tmp_path / "growing.jsonl"
    parts = [content[: len(content) // 3], content[len(content) // 3 :]]
    growing.write_bytes(parts.pop(0))

    def going_on() -> bool:
        if parts:
            with growing.open("ab") as file:
                file.write(parts.pop(0))
            return True
        return False

    quiet = Console(quiet=True)
    whole = followed(recording, quiet, going_on=lambda: False)
    assert [each.hit for each in followed(growing, quiet, going_on=going_on)] == [
        each.hit for each in whole
    ]


def test_each_day_has_a_line(recording: Path) -> None:
    days = iter([date(2026, 1, 1) + timedelta(days=number // 20) for number in range(10_000)])
    console = Console(record=True, file=io.StringIO(), width=200)
    (first, *_) = followed(recording, console, going_on=lambda: False, today=lambda: next(days))
    lines = console.export_text().splitlines()
    assert len(lines) > 2 and lines[0].startswith("2026-01-01: ")
    tokens = sum(int(line.split()[1].replace(",", "")) for line in lines)
    assert tokens == first.tokens


def test_what_the_server_hit_is_beside_it(recording: Path) -> None:
    """The lines tell it, as those of a server do."""
    lines = [msgspec.json.decode(line, type=RecordedLine) for line in recording.open("rb")]
    for number, line in enumerate(lines[2:]):
        line.hit = number % 7
    recording.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    console = Console(record=True, file=io.StringIO(), width=200)
    *_, served = followed(recording, console, going_on=lambda: False)
    assert served.requests == len(lines) - 2
    assert served.hit == sum(number % 7 for number in range(len(lines) - 2))
    share = 100 * served.hit / served.tokens
    assert console.export_text().endswith(f", served {share:.1f} %\n")


def test_prometheus_reads_the_sums(recording: Path) -> None:
    shadows = followed(recording, Console(quiet=True), going_on=lambda: False)
    registry = CollectorRegistry()
    registry.register(shadow.ShadowMetrics(shadows))
    for each in shadows:
        labels = {"policy": each.name}
        assert registry.get_sample_value(shadow.PREFIX + "hit_tokens_total", labels) == each.hit


@pytest.mark.parametrize("policy", ["clairvoyant", "whether", "when", "oracle", "marconi-best"])
def test_who_must_know_the_future_is_refused(policy: str, recording: Path) -> None:
    options = [*OPTIONS[:-1], policy]
    with pytest.raises(UsageError, match=policy):
        shadow.follow(recording, jobs(*options), None, Console(quiet=True))


def test_what_is_no_recording_is_left_out(
    recording: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = followed(recording, Console(quiet=True), going_on=lambda: False)
    with recording.open("ab") as file:
        file.write(b'{"t": -1}\nnothing\n')
    again = followed(recording, Console(quiet=True), going_on=lambda: False)
    assert [each.hit for each in again] == [each.hit for each in good]
    assert caplog.text.count("is no line of a recording") == 2
