"""The programs and requests of the pages, against a server: only its address is another one."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documented import commands, python_blocks

ADDRESS = re.compile(r"(?:http://)?(?:localhost|127\.0\.0\.1):30000")
REQUESTS = [one for one in commands() if one.startswith("curl ")]
EXPLAIN = [one for one in commands() if one.startswith("python -m sglang_hybrid.explain ")]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", REQUESTS)
def test_a_request(url: str, command: str) -> None:
    done = subprocess.run(
        shlex.split(ADDRESS.sub(url, command)), capture_output=True, check=True, timeout=60
    )
    (tokens,) = re.findall(r'"max_new_tokens": (\d+)', command)  # random weights use them all
    assert json.loads(done.stdout)["meta_info"]["completion_tokens"] == int(tokens)


PROGRAMS = [
    pytest.param(page, number, marks=[] if (page, number) == ("README.md", 0) else pytest.mark.slow)
    for page in ("README.md", "docs/prompts.md")
    for number in range(len(python_blocks(page)))
]


@pytest.mark.parametrize(("page", "number"), PROGRAMS)
def test_a_program(url: str, page: str, number: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"  # the frontend language reads a function's source
    program.write_text(ADDRESS.sub(url, python_blocks(page)[number]))
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


@pytest.mark.parametrize("command", EXPLAIN)
def test_an_explanation(url: str, command: str, tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text("The keeper of the archive wrote a story. " * 20)
    words = shlex.split(ADDRESS.sub(url, command))
    done = subprocess.run(
        [sys.executable, *words[1:]], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "to compute" in done.stdout
