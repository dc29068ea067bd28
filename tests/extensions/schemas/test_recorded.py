"""Findings of the linter about recorded prompts: each fault is found where it is, with what it
costs.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.cpu.models.tokenizer import build_tokenizer
from sglang_hybrid.extensions.lab.simulation.prefill_time import PAPER
from sglang_hybrid.extensions.lab.simulation.traces.line_formats import write_recorded
from sglang_hybrid.extensions.schemas.linter.alignment import Aligner
from sglang_hybrid.extensions.schemas.linter.recorded import (
    TenantReport,
    analyse,
    sentences,
    short_branches,
)

Make = Callable[[int], str]
COUNT = 20


def words(name: str, count: int) -> str:
    return " ".join(f"{name}{number * 7 % 31} keeps room {number}." for number in range(count))


RULES, STORY = words("rule", 60), words("story", 60)
TOOLS = [words(name, 20) for name in ("read", "write", "search", "run", "ask", "list")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


def requests(tokenizer: Tokenizer, make: Make, tenant: str = "") -> list[Request]:
    found = []
    for number in range(COUNT):
        ids = tokenizer.encode(make(number), add_special_tokens=False).ids
        tokens = np.array([*ids, 7, 8], np.int32)
        found.append(Request(number, 0, float(number), tokens, len(ids), tenant=tenant))
    return found


def reports(tokenizer: Tokenizer, made: Iterable[Request]) -> list[TenantReport]:
    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode([*ids]))

    return analyse(made, PAPER, decode)


def shuffled(number: int) -> list[str]:
    return random.Random(number).sample(TOOLS, len(TOOLS))


def question(number: int) -> str:
    return f"\nWhat of {number * 101}?"


FAULTS: dict[str, tuple[Make, float]] = {
    "changing-text": (lambda n: f"On 2026-11-{n + 1:02d}.\n{RULES}{question(n)}", 0.9),
    "early-parameter": (lambda n: f"For client {n * 37}.\n{RULES}{question(n)}", 0.9),
    "early-choice": (lambda n: f"Case: {words(f'case{n}', 20)}\n{RULES}{question(n)}", 0.5),
    "changing-order": (
        lambda n: "Tools:\n" + "\n".join(shuffled(n)) + RULES + question(n),
        0.5,
    ),
}


@pytest.mark.parametrize("rule", FAULTS)
def test_a_fault_is_found_with_what_it_costs(tokenizer: Tokenizer, rule: str) -> None:
    make, share = FAULTS[rule]
    (report,) = reports(tokenizer, requests(tokenizer, make))
    change = report.changes[0]
    assert change.rule == rule
    assert change.requests <= COUNT - 1
    assert share * report.prompt_tokens < change.tokens + report.hit_tokens < report.prompt_tokens
    assert change.seconds == pytest.approx(5.2964e-5 * change.tokens, rel=1e-3)
    line = next(sentences(report, None, 0))
    assert line.startswith(f"{rule}: at token ") and line.endswith(" s saved per request.")


def test_what_varies_is_shown_to_whoever_has_the_model(tokenizer: Tokenizer) -> None:
    make, _ = FAULTS["changing-text"]
    (report,) = reports(tokenizer, requests(tokenizer, make))
    (line,) = sentences(report, lambda ids: str(tokenizer.decode([*ids])), 0)
    (bare,) = sentences(report, None, 0)
    assert ", as in 'On 2026-11-0" in line and ", as in" not in bare


def test_line_and_message_of_what_varies_are_named(tokenizer: Tokenizer) -> None:
    made = requests(tokenizer, lambda n: f"Rules:\nAnswer.\nAt {n * 37}.\n{RULES}{question(n)}")
    made = [replace(request, message_starts=(0, request.input_len - 4)) for request in made]
    (report,) = reports(tokenizer, made)
    (line,) = sentences(report, lambda ids: str(tokenizer.decode([*ids])), 0)
    (bare,) = sentences(report, None, 0)
    assert " (line 3, message 1), in " in line and " (message 1), in " in bare


@pytest.mark.parametrize(
    "make",
    [
        lambda n: f"{RULES}\nOn 2026-11-{n + 1:02d}.{question(n)}",
        lambda n: words(f"nothing{n}", 60),
        lambda n: RULES + "".join(question(turn) for turn in range(n + 1)),
    ],
)
def test_prompts_in_good_order_need_no_change(tokenizer: Tokenizer, make: Make) -> None:
    (report,) = reports(tokenizer, requests(tokenizer, make))
    assert report.changes == []


def test_what_saves_most_comes_first(tokenizer: Tokenizer) -> None:
    def make(number: int) -> str:
        head = f"Client {number * 37}.\n{' '.join(RULES.split()[:60])}"
        return f"{head}\nId {number * 12345 + 10**9}.\n{STORY}{question(number)}"

    (report,) = reports(tokenizer, requests(tokenizer, make))
    assert [change.rule for change in report.changes] == ["changing-text", "early-parameter"]
    assert report.changes[0].tokens > 2 * report.changes[1].tokens


def test_tenants_are_compared_with_themselves_only(tokenizer: Tokenizer) -> None:
    """Prompts of several tenants that would be faults of one."""
    make, _ = FAULTS["changing-text"]
    one = requests(tokenizer, make)
    apart = [
        Request(r.session, 0, r.arrival, r.tokens, r.input_len, tenant=f"t{number}")
        for number, r in enumerate(one)
    ]
    assert all(report.hit_tokens == 0 for report in reports(tokenizer, apart))
    assert not any(report.changes for report in reports(tokenizer, apart))
    both = reports(tokenizer, [*requests(tokenizer, make, "a"), *requests(tokenizer, make, "b")])
    assert [report.tenant for report in both] == ["a", "b"]
    assert both[0].changes[0].tokens == both[1].changes[0].tokens


def test_places_closer_than_a_state_is_worth_are_counted() -> None:
    def prompt(*parts: tuple[int, int]) -> np.ndarray:
        return np.array([token for token, count in parts for _ in range(count)], np.int32)

    prompts = [prompt((1, 50), (2, 5), (number, 9)) for number in (3, 4, 5)]
    prompts += [prompt((1, 50), (number, 9)) for number in (6, 7, 8)]
    assert short_branches(prompts, 20) == (1, 3)  # 5 tokens behind the place at 50
    assert short_branches(prompts, 60) == (2, 9)
    assert short_branches(prompts, 5) == (0, 0)


def test_blocks_are_found_wherever_they_stand() -> None:
    source = np.random.default_rng(0)
    parts = [source.integers(1, 30_000, 200).astype(np.int32) for _ in range(4)]
    a, b, c, d = parts
    aligner, none = Aligner(), np.zeros(0, np.int32)
    assert aligner.add(np.concatenate([a, b, c, d]), none).blocks == ()
    found = aligner.add(np.concatenate([a, d, source.integers(1, 9, 50), b]), none)
    assert found.shared == 200
    assert [(one.here, one.there, one.length) for one in found.blocks] == [
        (200, 600, 200),
        (450, 200, 200),
    ]


def test_the_command_names_tenants_as_the_trace_does(tokenizer: Tokenizer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    make, _ = FAULTS["changing-text"]
    write_recorded(trace, [*requests(tokenizer, make, "0a"), *requests(tokenizer, make, "0b")])

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sglang_hybrid.prompts", "lint", "--recorded", str(trace)]
        return subprocess.run([*command, *more], capture_output=True, text=True, timeout=120)

    found = run()
    assert found.returncode == 1, found.stderr
    lines = found.stdout.splitlines()
    assert lines[1].startswith(f"{trace}: tenant '0a': 20 requests, ")
    assert lines[2].startswith(f"{trace}: early-parameter: ")  # no text without the model
    assert lines[3].startswith(f"{trace}: tenant '0b': ")
    trace.write_text("nothing")
    broken = run()
    assert broken.returncode == 2 and "like none of the formats" in broken.stderr
