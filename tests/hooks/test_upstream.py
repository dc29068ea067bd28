"""Texts of patches/upstream/ for SGLang itself: each program fails on the released SGLang, without
anything of ours, and does not with the text's change.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sglang

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

UPSTREAM = Path(__file__).parents[2] / "patches" / "upstream"
TEXTS = sorted(path.stem for path in UPSTREAM.glob("*.md") if path.name != "README.md")
RELEASED = Path(sglang.__file__).parent
WITHOUT_TORCHVISION = """
import sys
from unittest.mock import MagicMock
from transformers.utils import import_utils
import_utils.is_torchvision_available()  # it asks once
for name in ("", ".io", ".transforms", ".transforms.functional"):
    sys.modules["torchvision" + name] = MagicMock(__spec__=None, __path__=[])
"""
"""SGLang's own imports of torchvision, which has no build beside a CPU torch."""


def run(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The program of a text, with the SGLang that is in a folder, where there is one."""
    (program,) = re.findall(r"```python\n(.*?)```", (UPSTREAM / f"{name}.md").read_text(), re.S)
    program = WITHOUT_TORCHVISION + program
    # SGLang finds plugins by their entry points; it shall find none of ours.
    environment = {**os.environ, "SGLANG_PLUGINS": "none", "PROGRAM": program}
    environment["PYTHONPATH"] = str(folder)
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)


@pytest.mark.parametrize("name", TEXTS)
def test_the_program_fails_and_the_change_mends_it(name: str, tmp_path: Path) -> None:
    found = run(name, tmp_path)
    assert found.returncode == 1 and re.search("(Assertion|Timeout)Error", found.stderr), (
        found.stderr
    )
    link = shutil.copytree(RELEASED, tmp_path / "sglang", copy_function=os.symlink)
    (diff,) = re.findall(r"```diff\n(.*?)```", (UPSTREAM / f"{name}.md").read_text(), re.S)
    for path in re.findall(r"^--- a/sglang/(\S+)$", diff, re.M):
        (Path(link) / path).unlink()
        shutil.copy(RELEASED / path, Path(link) / path)
    applied = subprocess.run(
        ["git", "apply", "-"], input=diff, capture_output=True, text=True, cwd=tmp_path
    )
    assert applied.returncode == 0, applied.stdout + applied.stderr
    found = run(name, tmp_path)
    assert found.returncode == 0, found.stderr
