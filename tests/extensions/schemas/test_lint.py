"""Findings of the linter about a schema, one example per rule, and none about a good one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sglang_hybrid.extensions.schemas.declared.schema import read_schema
from sglang_hybrid.extensions.schemas.linter.lint import lint
from sglang_hybrid.prompts.__main__ import main

LONG = "word " * 100


def rules(markup: str, **known: object) -> list[tuple[int, str]]:
    found = lint(read_schema(markup), len, **known)  # type: ignore[arg-type]
    for finding in found:
        assert finding.sentence.endswith(".") and "\n" not in finding.sentence
    return [(finding.line, finding.rule) for finding in found]


def test_a_parameter_before_much_text_is_found() -> None:
    early = '<module name="a">x\n<parameter name="p" length="5"/></module>'
    assert rules(f'<schema name="s">{early}{LONG}</schema>') == [(2, "early-parameter")]
    assert rules(f'<schema name="s">{LONG}{early}</schema>') == []


def test_a_module_shorter_than_a_state_is_found() -> None:
    modules = f'<module name="b">{LONG}</module>\n<module name="a">short</module>'
    markup = f'<schema name="s">\n{modules}</schema>'
    assert rules(markup, state_tokens=50, counts={("a",): 9, ("b",): 9}, requests=9) == [
        (3, "short-module")
    ]


@pytest.mark.parametrize("text", ["2026-11-22", "at 12:30", "5f0c3a52-0000-4000-8000-1234567890ab"])
def test_a_date_or_an_id_near_the_beginning_is_found(text: str) -> None:
    assert rules(f'<schema name="s">Today: {text}.\n<module name="a">{LONG}</module></schema>') == [
        (0, "changing-text")
    ]
    assert rules(f'<schema name="s">{LONG}\n<module name="a">{text}</module></schema>') == []


def test_a_long_id_is_shortened() -> None:
    markup = f'<schema name="s"><module name="a">{"deadbeef1" * 10_000}</module></schema>'
    (finding,) = lint(read_schema(markup), lambda text: len(text.split()))
    assert finding.rule == "changing-text" and len(finding.sentence) < 250


def test_an_early_choice_that_varies_is_found_by_what_was_imported() -> None:
    rare = '<module name="rare">' + LONG + "</module>"
    often = '<module name="often">' + LONG + "</module>"
    counts = {("rare",): 50, ("often",): 100}
    schema = '<schema name="s">\n{}\n{}</schema>'
    assert rules(schema.format(rare, often), counts=counts, requests=100) == [(2, "early-choice")]
    assert rules(schema.format(often, rare), counts=counts, requests=100) == []


def test_the_command_writes_lines_as_compilers_do(tmp_path: Path) -> None:
    file = tmp_path / "schema.xml"

    def run(markup: str) -> subprocess.CompletedProcess[str]:
        file.write_text(markup)
        command = [sys.executable, "-m", "sglang_hybrid.prompts", "lint", str(file)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    found = run(
        f'<schema name="s"><module name="a">\n<parameter name="p" length="5"/>{LONG}</module>'
        "</schema>"
    )
    assert found.returncode == 1
    assert found.stdout.startswith(f"{file}:2: early-parameter: ")
    fine = run(f'<schema name="s">{LONG}</schema>')
    assert (fine.returncode, fine.stdout) == (0, f"{file}: nothing to change.\n")
    broken = run("<schema")
    assert broken.returncode == 2 and "line 1, column" in broken.stderr


def test_what_is_for_a_trace_is_refused_beside_a_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "schema.xml"
    file.write_text(f'<schema name="s">{LONG}</schema>')
    for option, value in (("--limit", "3"), ("--format", "marconi"), ("--prefill", "x")):
        assert main(["lint", str(file), option, value]) == 2
        assert capsys.readouterr() == ("", f"error: {option} is for --recorded only\n")


def test_the_command_says_if_the_model_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, model = tmp_path / "schema.xml", tmp_path / "model"
    file.write_text(f'<schema name="s">{LONG}</schema>')
    monkeypatch.setattr(sys, "argv", ["lint", "lint", str(file), "--model", str(model)])
    assert main() == 2
    model.mkdir()
    (model / "config.json").write_text("{")
    assert main() == 2
    (model / "config.json").write_text('{"num_hidden_layers": 1}')
    assert main() == 2
    missing, broken, other = capsys.readouterr().err.splitlines()
    assert missing.startswith(f"{model}/config.json cannot be read (No such file")
    assert broken.startswith(f"{model}/config.json is no model's config (")
    assert other.startswith(f"--model {model}: it cannot be read: ")
