"""Programs and hostile input: whatever files and numbers their options are given, they end soon, in
one sentence and with a status, and print nothing that steers a terminal.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from scripts.fit_prefill import main as fit_prefill
from scripts.make_tiny_model import main as make_tiny_model
from sglang_hybrid.__main__ import main as commands
from sglang_hybrid.explain.__main__ import main as explain
from sglang_hybrid.extensions.cpu.models import tokenizer
from sglang_hybrid.extensions.lab.program import main as replay
from sglang_hybrid.extensions.lab.simulation.traces.formats import FORMATS
from sglang_hybrid.extensions.router.program import main as replicas
from sglang_hybrid.prompts.__main__ import main as prompts
from tests.hostile import GOOD, NUMBERS, Ended, make_files, run_apart

Main = Callable[[Sequence[str]], int]
Capture = pytest.CaptureFixture[str]

COMMANDS_OF_USERS = ("serve", "replay", "explain", "prompts", "replicas", "kernels")

CACHE = ("--cache", "1GB", "--policy", "lru")
CHAT = ("--generate", "chat", "--sessions", "2")
NOBODY = ("--url", "http://127.0.0.1:9")
FILE, TRACE, FOLDER = "FILE", "TRACE", "FOLDER"
"""Parts of arguments that stand for a hostile file, a good trace, a folder with a tokenizer."""

READ: dict[str, tuple[Main, Sequence[str]]] = {
    "trace": (replay, (FILE, *CACHE)),
    "skip bad": (replay, (FILE, *CACHE, "--skip-bad")),
    **{
        name: (
            replay,
            (FILE, *CACHE, "--format", name)
            + (("--tokenizer", FOLDER) if "tokenizer" in known.options else ()),
        )
        for name, known in FORMATS.items()
    },
    "model": (replay, (TRACE, *CACHE, "--model", FILE)),
    "prefill": (replay, (TRACE, *CACHE, "--prefill", FILE)),
    "azure of chat": (replay, (*CHAT, *CACHE, "--azure", FILE)),
    "tokenizer": (replay, (TRACE, *CACHE, "--format", "openai", "--tokenizer", FILE)),
    "schema": (prompts, ("lint", FILE)),
    "lint": (prompts, ("lint", "--recorded", FILE)),
    "lint model": (prompts, ("lint", "--recorded", TRACE, "--model", FILE)),
    "lint prefill": (prompts, ("lint", "--recorded", TRACE, "--prefill", FILE)),
    "prompt": (explain, (*NOBODY, "--prompt-file", FILE)),
    "messages": (explain, (*NOBODY, "--messages", FILE)),
    "ids": (explain, (*NOBODY, "--input-ids", f"@{FILE}")),
}
"""Programs that read a file that a user names."""

WRITTEN: dict[str, tuple[Main, Sequence[str]]] = {
    "json": (replay, (*CHAT, *CACHE, "--instant", "--json", FILE)),
    "record": (replay, (*CHAT, "--record", FILE)),
    "model": (make_tiny_model, ("--scale", "8b", "--output", f"{FILE}/x")),
}
"""Programs that write one."""

NUMBERED: dict[str, tuple[Main, Sequence[str]]] = {
    **{
        option: (replay, (*CHAT, *CACHE, "--instant", f"--{option}=NUMBER"))
        for option in (
            *("limit", "max-input", "seed", "sessions", "session-rate", "templates", "shared"),
            *("turns", "question", "answer", "think", "cache", "tiers", "min-branch-tokens"),
            *("replicas", "late", "workers", "policy"),
        )
    },
    "pools": (replay, (*CHAT, "--policy", "lru", "--pools", "NUMBER:NUMBER")),
    "a tier": (replay, (*CHAT, "--tiers", "device=1GB,host=NUMBER@NUMBER/s")),
    "a store": (replay, (*CHAT, *CACHE, "--replicas", "2", "--store", "NUMBER@NUMBER/s")),
    "an alpha": (replay, (*CHAT, "--cache", "1GB", "--policy", "marconi:NUMBER")),
    **{
        kind: (replay, (*CHAT, *CACHE, "--instant", "--turns", "const:2", "--shared", text))
        for kind in ("const", "exp", "poisson", "lognormal", "uniform")
        for text in [f"{kind}:NUMBER" + ":NUMBER" * (kind in ("lognormal", "uniform"))]
    },
    **{
        option: (replay, (*CHAT, *CACHE, "--rules", "served", f"--{option}=NUMBER"))
        for option in ("chunk", "grid")
    },
    "avmp": (replay, ("avmp", "--seeds", "NUMBER", "--workers", "0")),
    "lint limit": (prompts, ("lint", "--recorded", TRACE, "--limit=NUMBER")),
    "ids": (explain, (*NOBODY, "--input-ids=NUMBER")),
    **{
        option: (fit_prefill, (*NOBODY, "--out", "/nowhere/x", f"--{option}=NUMBER"))
        for option in ("lengths", "hits", "repeats", "seed")
    },
    "tiny seed": (make_tiny_model, ("--scale", "8b", "--output", f"{TRACE}/x", "--seed=NUMBER")),
    **{
        option: (replicas, ("pick", "notaurl", f"--{option}=NUMBER"))
        for option in ("port", "metrics-port")
    },
    "servers": (replicas, ("serve", "--host", "/", "--n=NUMBER")),
}
"""Programs that take a number."""

SLOW_FILES = ("hole",)
"""Small files that take seconds."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(made / "tokenizer.json"))
    (made / "trace.jsonl").write_bytes(GOOD * 3)
    return made


@pytest.fixture(autouse=True)
def one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "build_tokenizer", build_once)


build_once = cache(tokenizer.build_tokenizer)


def filled(arguments: Sequence[str], folder: Path, **words: object) -> list[str]:
    words |= {TRACE: folder / "trace.jsonl", FOLDER: folder}
    found = list(arguments)
    for word, text in words.items():
        found = [argument.replace(word, str(text)) for argument in found]
    return found


def run(main: Main, arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> Ended:
    status = main(arguments)
    return Ended(status, *capsys.readouterr())


@pytest.mark.parametrize("option", READ)
def test_whatever_is_in_a_file_a_program_ends_in_a_sentence(
    option: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, arguments = READ[option]
    for name, file in make_files(tmp_path).items():
        if name not in SLOW_FILES:
            run(main, filled(arguments, folder, FILE=file), capsys).check()


@pytest.mark.parametrize("option", WRITTEN)
def test_what_is_no_file_is_not_written(
    option: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, arguments = WRITTEN[option]
    files = make_files(tmp_path)
    for name in ("zero", "null", "pipe", "named"):
        before = files[name].lstat().st_mode
        ended = run(main, filled(arguments, folder, FILE=files[name]), capsys)
        ended.check()
        assert files[name].lstat().st_mode == before
        assert ended.status or name == "named"
    assert Path("/dev/null").is_char_device() and Path("/dev/zero").is_char_device()


def test_a_name_steers_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = make_files(tmp_path)["no name"]
    for arguments in ((*CHAT, "--record", named), (named, *CACHE)):
        ended = run(replay, [*map(str, arguments)], capsys)
        ended.check()
        assert "\\x1b[31mred" in ended.out and "[bold]x[" in ended.out


@pytest.mark.parametrize("option", NUMBERED)
def test_whatever_number_is_given_a_program_ends_in_a_sentence(
    option: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, arguments = NUMBERED[option]
    for number in NUMBERS:
        run(main, filled(arguments, folder, NUMBER=number), capsys).check()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    files = make_files(tmp_path_factory.mktemp("large"), large=True)
    yield files
    for file in files.values():
        if file.is_file():
            file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("option", READ)
def test_within_bounds_of_memory_and_time(
    option: str, folder: Path, large: dict[str, Path]
) -> None:
    main, arguments = READ[option]
    for file in large.values():
        run_apart(main, filled(arguments, folder, FILE=file)).check()


@pytest.mark.slow
@pytest.mark.parametrize("option", NUMBERED)
def test_a_number_within_bounds_of_memory_and_time(option: str, folder: Path) -> None:
    main, arguments = NUMBERED[option]
    for number in NUMBERS:
        run_apart(main, filled(arguments, folder, NUMBER=number)).check()


COMMANDS = """
import contextlib, io, json, sys
from sglang_hybrid.__main__ import main
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    loaded = [name for name in ("torch", "sglang", "numpy") if name in sys.modules]
    print(json.dumps([status, out.getvalue(), err.getvalue(), loaded]))
"""


def told(*command_lines: list[str]) -> list[tuple[int, str, str]]:
    """Status, stdout and stderr of `sglang-hybrid` for each command line, none of which loads
    anything heavy.
    """
    command = [sys.executable, "-c", COMMANDS, json.dumps(command_lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [loaded for *_, loaded in answers] == [[]] * len(command_lines)
    return [(status, out, err) for status, out, err, _ in answers]


def test_without_a_command_the_commands_are_listed_and_nothing_starts() -> None:
    nothing, asked, versions = told([], ["--help"], ["--version"])
    assert nothing == asked
    status, out, err = nothing
    assert (status, err) == (0, "") and len(out.splitlines()) < 24
    assert {*COMMANDS_OF_USERS, "--version"} <= set(out.split())
    assert versions[0] == 0 and versions[1].startswith("sglang_hybrid 0.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serv"], "error: 'serv' is no command (did you mean serve?); sglang-hybrid --help"),
        (["launch-server"], "did you mean serve?"),
        (["qqq"], "error: 'qqq' is no command; sglang-hybrid --help lists all commands\n"),
        (["--model-path", "X"], "to start a server, write sglang-hybrid serve --model-path ..."),
        (["--api-key=secret\x1b[2J"], "write sglang-hybrid serve --api-key ..."),
        (["\x1b[2J"], "error: '\\x1b[2J' is no command"),
    ],
)
def test_what_is_no_command(arguments: list[str], said: str, capsys: Capture) -> None:
    status = commands(arguments)
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert said in err and "secret" not in err and err[:-1].isprintable()


@pytest.mark.parametrize("command", COMMANDS_OF_USERS)
def test_a_command_is_its_module(
    command: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its arguments, and is the main module, which processes that it spawns import again."""
    module = {"serve": "launch_server", "kernels": "kernels.compare"}.get(command, command)
    seen = {}

    def run_module(name: str, **how: object) -> None:
        seen.update(name=name, argv=sys.argv[1:], **how)

    monkeypatch.setattr(sys, "argv", ["sglang-hybrid", command, "--x", "y"])
    monkeypatch.setattr("runpy.run_module", run_module)
    assert commands() == 0
    assert seen.pop("name") == f"sglang_hybrid.{module}"
    assert seen == {"argv": ["--x", "y"], "run_name": "__main__", "alter_sys": True}


def test_a_command_ends_as_its_module_does() -> None:
    run = [sys.executable, "-m", "sglang_hybrid", "explain", "--nope"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: ")


@pytest.mark.parametrize(("module", "extra"), [("replay", "lab"), ("replicas", "router")])
def test_a_program_names_the_extra_that_it_lacks(module: str, extra: str) -> None:
    code = f"""
import runpy, sys
sys.modules["rich.console"] = None
sys.argv[1:] = ["--help"]
runpy.run_module("sglang_hybrid.{module}", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"error: rich.console is not installed; install 'sglang-hybrid[{extra}]', with all that "
        "this command needs."
    )
