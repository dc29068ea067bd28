"""A mistake in a command line is said before SGLang is imported, by SGLang's own names of flags."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_hybrid.serving.command_line import (
    CHECKED,
    RENAMED,
    SWITCHES,
    add_checked_flags,
    misspelt,
    sglang_flags,
)
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.server_process import free_port

THEIRS = ["--model-path", "--port", "--enable-trace", "--tf32"]
OURS = ["--hybrid-eviction", "--hybrid-ui", "--hybrid-disk-mb", "--hybrid-disk-folder"]


@pytest.fixture(scope="module")
def sglang() -> dict[str, argparse.Action]:
    """The flags of SGLang by their names."""
    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    return dict(parser._option_string_actions)


def test_every_flag_of_sglang_is_known(sglang: dict[str, argparse.Action]) -> None:
    known = sglang_flags()
    assert len(known) > 400
    assert misspelt(sglang, [], known) is None
    assert len(known) < len(sglang) + 60


def test_checked_flags_are_declared_as_sglang_declares_them(
    sglang: dict[str, argparse.Action],
) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_checked_flags(parser)
    for name, ours in parser._option_string_actions.items():
        theirs = sglang[name]
        assert (ours.dest, ours.default, ours.nargs) == (theirs.dest, theirs.default, theirs.nargs)
    for read, flags in CHECKED.items():
        for names in flags:
            theirs = sglang[names.split()[0]]
            assert set(names.split()) == set(theirs.option_strings)
            if read in (int, float, str):
                assert theirs.type is read
    for names in SWITCHES:
        assert set(names.split()) == set(sglang[names.split()[0]].option_strings)


def test_numbers_with_units_are_left_to_sglang() -> None:
    parser = argparse.ArgumentParser()
    add_checked_flags(parser)
    read = parser.parse_args(["--max-total-tokens", "64k", "--max-prefill-tokens", "4096"])
    assert (read.max_total_tokens, read.max_prefill_tokens) == (None, 4096)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--enable-trcae"], "--enable-trcae (did you mean --enable-trace?)"),
        (["--port", "3", "--modle-path=x"], "--modle-path (did you mean --model-path?)"),
        (["--hybrid-evicton", "lru"], "--hybrid-evicton (did you mean --hybrid-eviction?)"),
        (["--hybrid-evict=lru"], "--hybrid-evict (did you mean --hybrid-eviction?)"),
        (["--hybrid-e"], "--hybrid-e (did you mean --hybrid-eviction?)"),
        (
            ["--hybrid-disk", "3"],
            "--hybrid-disk (did you mean --hybrid-disk-folder or --hybrid-disk-mb?)",
        ),
        (["--zzz"], "--zzz"),
        (
            ["--mamba-scheduler-strategy", "extra_buffer"],
            "--mamba-scheduler-strategy (it is --mamba-radix-cache-strategy now)",
        ),
        (["--model", "x", "--no-tf32", "-x", "--", "--a b", "--hybrid-eviction=lru"], None),
    ],
)
def test_a_misspelt_flag(argv: list[str], said: str | None) -> None:
    """SGLang's may be cut short, as in `--tp 2`; ours may not."""
    assert misspelt(argv, OURS, THEIRS) == said


def test_flags_that_sglang_has_renamed(sglang: dict[str, argparse.Action]) -> None:
    assert not RENAMED.keys() & sglang.keys()
    assert {*RENAMED.values()} <= sglang.keys()


def test_no_flag_of_sglang_is_read_as_a_checked_one_cut_short(
    sglang: dict[str, argparse.Action],
) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_checked_flags(parser)
    HybridConfig.add_flags(parser)
    checked = set(parser._option_string_actions)
    longer = {
        name: [each for each in checked if each.startswith(name)] for name in {*sglang} - checked
    }
    assert {name: found for name, found in longer.items() if found and name != "-h"} == {}


MISTAKES = {
    "--enable-trcae": "unrecognized arguments: --enable-trcae (did you mean --enable-trace?);",
    "--hybrid-evict lru": "--hybrid-evict (did you mean --hybrid-eviction?); --help all lists",
    "--tp 0": "--tp-size 0: give 1 or more",
    "--hybrid-eviction lru:3": "only marconi takes an alpha",
    "--hybrid-eviction reus": "is none of auto, marconi, reuse, sglang-lru, lru, seglen, gdsf (did",
    "--hybrid-default-model qwen3-nxt": "choice: 'qwen3-nxt' (did you mean qwen3-next?); --help",
    "--help al": "argument -h/--help: invalid choice: 'al' (did you mean all?)",
    "--hybrid-record /nowhere/trace": "--hybrid-record: there is no directory /nowhere",
    "--port 99999": "--port 99999: give 65535 at most",
    "--port many": "argument --port: invalid int value: 'many'",
    "--model-path /no/such/model": "'/no/such/model' does not exist",
    "--context-length 0": "--context-length 0: give 1 or more",
    "--max-total-tokens 1": "--max-total-tokens 1 is too small for any request",
    "--version": "sglang_hybrid 0.",
}

EARLY = """
import contextlib, io, json, sys
from sglang_hybrid import launch_server
port, every_flag = sys.argv[1:]
for flags in json.loads(every_flag):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            launch_server.main(["--port", port, *flags.split()])
        except SystemExit:
            pass
    imported = [name for name in ("torch", "sglang") if name in sys.modules]
    print(json.dumps([said.getvalue(), imported]))
"""


def test_a_mistake_and_our_help_are_said_before_sglang_and_torch_are_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EARLY, str(free_port()), json.dumps([*MISTAKES, "--help"])],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    *answers, (help_of_ours, imported) = answers
    assert imported == [] and "--hybrid-eviction POLICY" in help_of_ours
    assert "--help all" in help_of_ours and len(help_of_ours.splitlines()) < 50
    for (said, imported), part in zip(answers, MISTAKES.values(), strict=True):
        assert part in said and said.count("\n") == 1
        assert imported == []


HELP = """
import sys
from sglang_hybrid import launch_server
try:
    launch_server.main(["--help", "all"])
finally:
    assert "transformers" not in sys.modules
"""


@pytest.mark.slow
def test_help_all_names_every_flag_without_importing_most_of_sglang(
    sglang: dict[str, argparse.Action],
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP], capture_output=True, text=True, timeout=120, check=True
    )
    words = set(done.stdout.replace(",", " ").replace("[", " ").split())
    missing = {
        name
        for name, action in sglang.items()
        if action.help != argparse.SUPPRESS and name not in words
    }
    assert not missing
    assert "--hybrid-eviction" in words and "--version" in words
