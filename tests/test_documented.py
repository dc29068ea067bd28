"""Every command that README and the other pages show is accepted as it is shown.

Commands that start a server or take minutes are parsed by their own program only; everything
else runs. tests/server/test_documented.py runs what needs a server.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import sglang

from sglang_hybrid.core.records.nodes import Kind
from sglang_hybrid.extensions.cpu.models import ensure_tiny_model
from sglang_hybrid.extensions.lab import shadow
from sglang_hybrid.extensions.lab.program import main as replay
from sglang_hybrid.hooks.patching import load_patches
from sglang_hybrid.serving.config import VARIABLES, HybridConfig
from sglang_hybrid.serving.flag_values import variable_name
from sglang_hybrid.serving.telemetry.stats import Missed
from tests.documented import PAGES, ROOT, commands

COMMANDS = sorted(commands())
LAUNCHER, REPLAY = "python -m sglang_hybrid.launch_server", "python -m sglang_hybrid.replay"
OVERVIEW = "python -m sglang_hybrid"
TESTS = "python -m pytest"
REHEARSAL = "python -m tests.rehearsal"
TRAIN = "python -m scripts.train"
PORTABLE = "python -m scripts.gpu_check.portable"
EXPLAIN = "python -m sglang_hybrid.explain"
PROMPTS = "python -m sglang_hybrid.prompts"
REPLICAS = "python -m sglang_hybrid.replicas"
FLAGS = (ROOT / "docs" / "flags.md").read_text()
REPORTS = (ROOT / "docs" / "reports.md").read_text()
GPU_PAGE = (ROOT / "docs" / "gpu.md").read_text()


def words(command: str) -> list[str]:
    """The words of a command, without the variables that it sets."""
    return [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]


def of(prefix: str) -> list[str]:
    """The commands that begin so, and say more than that; without the variables that they set."""
    return [command for each in COMMANDS if (command := bare(each)).startswith(prefix + " ")]


def bare(command: str) -> str:
    """A command without the variables that it sets."""
    return re.sub(r"^(?:[A-Z_]+=\S+ )+", "", command)


def is_script(command: str) -> bool:
    return words(command)[words(command)[0].startswith("python")].startswith("scripts/")


def is_known(command: str) -> bool:
    kinds = (
        LAUNCHER,
        REPLAY,
        EXPLAIN,
        PROMPTS,
        REPLICAS,
        TESTS,
        REHEARSAL,
        TRAIN,
        PORTABLE,
        "pip install -e ",
        "python -m build",
        "pip uninstall ",
        "python -m sglang.launch_server",
        "python -m sglang_router.launch_router",
        "docker",
        "curl ",
        "source .venv/bin/activate",
    )
    return bare(command).startswith(kinds) or command == OVERVIEW or is_script(command)


def test_no_command_is_left_out() -> None:
    assert len(COMMANDS) > 30
    assert [command for command in COMMANDS if not is_known(command)] == []


class Parsed(Exception):
    """A program has accepted its arguments."""


@pytest.fixture
def stops_when_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, parse_known = (
        argparse.ArgumentParser.parse_args,
        argparse.ArgumentParser.parse_known_args,
    )

    def parse_and_stop(self: argparse.ArgumentParser, *arguments: Any) -> None:
        with monkeypatch.context() as inside:
            inside.setattr(argparse.ArgumentParser, "parse_known_args", parse_known)
            parse(self, *arguments)
        raise Parsed

    def parse_known_and_stop(self: argparse.ArgumentParser, *arguments: Any) -> None:
        parse_known(self, *arguments)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_and_stop)


@pytest.mark.parametrize("command", of(LAUNCHER))
def test_a_server_takes_its_flags(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_hybrid import launcher

    flags = words(command.removeprefix(LAUNCHER))
    stop = SystemExit if "--help" in flags else Parsed
    parse = launcher._Parser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *arguments: Any) -> None:
        parse(self, *arguments)
        raise Parsed

    monkeypatch.setattr(launcher._Parser, "parse_args", parse_and_stop)
    monkeypatch.setattr(
        launcher, "_with_default_model", lambda argv: (["--model-path", "default", *argv], "")
    )
    if stop is Parsed:  # by the parser of all flags; what they name need not exist
        monkeypatch.setattr(launcher, "_check_early", lambda argv: None)
    with pytest.raises(stop) as stopped:
        launcher.prepare(flags)
    assert not getattr(stopped.value, "code", 0)


@pytest.mark.parametrize("flags", re.findall(r"`(--[^`]+)` \|", GPU_PAGE))
def test_a_server_takes_what_turns_something_off(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_a_server_takes_its_flags(f"{LAUNCHER} {flags}", monkeypatch)


def replays() -> list[Any]:
    """The commands of the replay. Those that play the paper's workloads in full, or draw all plots,
    are slow ones.
    """
    long = ("replay avmp", "--report")
    slow = {
        command: pytest.mark.slow
        for command in of(REPLAY)
        if any(words in command for words in long)
    }
    return [pytest.param(command, marks=slow.get(command, ())) for command in of(REPLAY)]


@pytest.mark.parametrize("command", replays())
def test_a_replay_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = {"t": 0.5, "input_ids": list(range(300, 400)), "output_ids": [1, 2, 3]}
    for name in ("TRACE", "requests.jsonl"):
        lines = (json.dumps(line | {"t": float(t)}) + "\n" for t in range(5))
        (tmp_path / name).write_text("".join(lines))
    (tmp_path / "DIR").symlink_to(ensure_tiny_model())
    follow = shadow.follow

    def follow_to_the_end(path: Path, jobs: Any, port: int | None, console: Any) -> Any:
        return follow(path, jobs, None, console, going_on=lambda: False)

    monkeypatch.setattr(shadow, "follow", follow_to_the_end)
    assert replay(words(command.removeprefix(REPLAY))) == 0


@pytest.mark.parametrize(
    "command",
    [*of(EXPLAIN), *of(PROMPTS), *of(REPLICAS), *of(REHEARSAL), *of(TRAIN), *of(PORTABLE)],
)
def test_a_module_takes_its_arguments(
    command: str, stops_when_parsed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", words(command)[2:])
    with pytest.raises(Parsed):
        runpy.run_module(words(command)[2], run_name="__main__")


@pytest.mark.parametrize(
    "command", [one for one in COMMANDS if is_script(one) and one.split()[0] == "python"]
)
def test_a_script_takes_its_arguments(
    command: str, stops_when_parsed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, script, *arguments = words(command)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    with pytest.raises(Parsed):
        runpy.run_path(str(ROOT / script), run_name="__main__")


@pytest.mark.parametrize(
    "command", [one for one in COMMANDS if is_script(one) and one.split()[0] != "python"]
)
def test_a_script_is_there_and_takes_its_arguments(
    command: str, stops_when_parsed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, *arguments = words(command)
    path = ROOT / script
    assert path.exists()
    if path.suffix == ".sh":
        assert os.access(path, os.X_OK)
        subprocess.run(["bash", "-n", str(path)], check=True)
    elif arguments:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        monkeypatch.syspath_prepend(str(ROOT / "scripts"))
        with pytest.raises(Parsed):
            runpy.run_path(str(path), run_name="__main__")


def test_patches_are_applied_to_a_checkout(tmp_path: Path) -> None:
    """`scripts/apply_patches.sh DIR`, on copies of the files that patches change."""
    assert "scripts/apply_patches.sh DIR" in COMMANDS
    released = Path(sglang.__file__).parents[1]
    paths = load_patches()
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(released / path, tmp_path / path)
    script = ROOT / "scripts/apply_patches.sh"
    subprocess.run([script, tmp_path], check=True, stdout=subprocess.DEVNULL)
    for path, patch in paths.items():
        assert (tmp_path / path).read_text() == patch.apply((released / path).read_bytes())


def test_the_optional_dependencies_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {name for one in of("pip install") for name in re.findall(r"\[(\w+)\]", one)}
    assert named and named <= extras["optional-dependencies"].keys()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """They lead to files that are there, and to headings of theirs."""
    folder = (ROOT / page).parent
    links = re.findall(r"\]\((?!https?:|mailto:)([^)#]*)(?:#([^)]*))?\)", (ROOT / page).read_text())
    for path, heading in links:
        target = folder / path if path else ROOT / page
        assert target.exists(), path
        assert not heading or heading in headings(target), f"{path}#{heading}"


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_tests_are_there() -> None:
    files = [word for one in of(TESTS) for word in words(one) if word.endswith(".py")]
    assert files and all((ROOT / name).exists() for name in files)


def test_docker_commands_name_files_that_are_there() -> None:
    files = {name for one in of("docker") for name in re.findall(r"-f (\S+)", one)}
    assert files and all((ROOT / name).exists() for name in files)


def test_the_table_of_flags_is_complete() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    HybridConfig.add_flags(parser)
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    flags = {action.option_strings[0] for action in shown}
    assert set(re.findall(r"^\| `(--hybrid-[\w-]+)` \|", FLAGS, re.MULTILINE)) == flags


def test_the_table_of_variables_is_complete() -> None:
    told = set(re.findall(r"^\| `(SGLANG_\w+)` \|", FLAGS, re.MULTILINE))
    assert told == {variable_name(name) for name in VARIABLES}


def test_every_word_of_a_report_is_explained() -> None:
    rows = set(re.findall(r"^\| `(\w+)` \|", REPORTS, re.MULTILINE))
    assert {one.value for kind in (Missed, Kind) for one in kind} <= rows
