"""The worked examples of the pages show what their command prints."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.documented import ROOT


@pytest.mark.parametrize("example", ["reuse-index", "tuner", "explain"])
def test_a_page_shows_what_its_command_prints(example: str) -> None:
    page = (ROOT / "docs" / f"{example}.md").read_text()
    command = f"python scripts/examples.py {example}"
    done = subprocess.run(
        [sys.executable, *command.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert f"$ {command}\n{done.stdout}```" in page
