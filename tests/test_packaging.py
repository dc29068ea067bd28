"""A wheel holds what the package needs at run time, from rooms that lie beside it in a checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy of what git would check out, so that nothing is left in the tree."""
    scratch = tmp_path_factory.mktemp("wheel")
    source = scratch / "source"
    for name in ("sglang_hybrid", "kernels", "patches"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--wheel-dir", str(scratch)]
    done = subprocess.run(
        [*command, "--no-deps", "--no-build-isolation", "--no-index"],
        capture_output=True,
        text=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = scratch.glob("sglang_hybrid-*.whl")
    return zipfile.ZipFile(built)


@pytest.mark.parametrize(
    ("room", "pattern"),
    [
        ("kernels", "*.py"),
        ("kernels", "native/*"),
        ("patches", "**/*.patch"),
    ],
)
def test_a_room_beside_the_package_is_in_the_wheel(
    wheel: zipfile.ZipFile, room: str, pattern: str
) -> None:
    expected = {file.relative_to(ROOT).as_posix() for file in (ROOT / room).glob(pattern)}
    assert expected
    assert {f"sglang_hybrid/{name}" for name in expected} <= set(wheel.namelist())


@pytest.mark.parametrize("pattern", ["**/*.py", "hooks/*.sha256", "**/*.safetensors"])
def test_every_file_of_the_package_is_in_the_wheel(wheel: zipfile.ZipFile, pattern: str) -> None:
    found = (ROOT / "sglang_hybrid").glob(pattern)
    expected = {file.relative_to(ROOT).as_posix() for file in found}
    assert expected and expected <= set(wheel.namelist())


def test_no_tests_and_no_top_level_rooms_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    roots = {name.split("/")[0] for name in wheel.namelist()}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"sglang_hybrid"}


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    text = wheel.read(name).decode()
    for group in ("sglang.srt.plugins", "sglang.srt.platforms", "console_scripts"):
        assert f"[{group}]" in text


def test_the_licence_is_named(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    assert "License-Expression: Apache-2.0" in wheel.read(name).decode()
