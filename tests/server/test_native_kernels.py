"""Servers that compile native kernels, or cannot: one line says it, and answers are the same."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import Serve, ask, random_prompt, said, same
from tests.server.conftest import SPAWNED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMPILER = re.compile(r"(.*-)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+)(-[0-9.]+)?")
PROMPT = random_prompt(150, seed=1)


def programs_without_compilers(folder: Path) -> Path:
    """Links to all that is on the PATH but C and C++ compilers."""
    folder.mkdir()
    for directory in reversed(os.get_exec_path()):
        for program in Path(directory).iterdir() if Path(directory).is_dir() else ():
            if not COMPILER.fullmatch(program.name):
                link = folder / program.name
                link.unlink(missing_ok=True)
                link.symlink_to(program)
    return folder


def compiler_that_fails(folder: Path) -> Path:
    folder.mkdir()
    compiler = folder / "g++"
    compiler.write_text("#!/bin/sh\necho 'attention.cpp:1: error: out of luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    return folder


def a_file(path: Path) -> Path:
    path.write_text("no folder")
    return path


def lines_of(server: ServerProcess) -> list[str]:
    """The lines of the log about native kernels."""
    return [line for line in said(server).splitlines() if "native kernels" in line]


@pytest.fixture(scope="module")
def right(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The answer of two servers that started at once, of which one compiled for both."""
    # What a server is forked from has loaded them.
    environment = {**SPAWNED, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("caches"))}
    servers = [serve(environment=environment) for _ in range(2)]
    lines, answers = [], []
    with ExitStack() as stack:
        for server in servers:
            server.start()
            stack.callback(server.stop)
        for server in servers:
            server.wait_until_healthy()
            answers.append(ask(server.url, PROMPT))
            lines += lines_of(server)
    how = [re.search("native kernels (compiled|loaded)", line) for line in lines]
    assert sorted(found[1] for found in how if found) == ["compiled", "loaded"]
    assert len(lines) == 2
    assert same(*answers)
    return answers[0]


def lacking(lack: str, folder: Path) -> tuple[dict[str, str], str]:
    """Variables of a server that lacks something, and what its log says of that."""
    caches = {"XDG_CACHE_HOME": str(folder / "caches")}
    if lack == "a compiler":
        programs = programs_without_compilers(folder / "programs")
        return caches | {"PATH": str(programs)}, "there is no C++ compiler"
    if lack == "a compiler that works":
        programs = compiler_that_fails(folder / "programs")
        return caches | {"PATH": f"{programs}:{os.environ['PATH']}"}, "error: out of luck"
    return {"XDG_CACHE_HOME": str(a_file(folder / "caches"))}, "Not a directory"


@pytest.mark.parametrize("lack", ["a compiler", "a compiler that works", "a folder of caches"])
def test_without_them_a_server_works_and_says_why(
    tmp_path: Path, lack: str, serve: Serve, right: dict
) -> None:
    environment, reason = lacking(lack, tmp_path)
    with serve(environment=SPAWNED | environment) as server:
        assert same(ask(server.url, PROMPT), right)
        (line,) = lines_of(server)
    assert "plain torch stands for them" in line and reason in line
