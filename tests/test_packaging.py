"""A wheel holds what the package needs at run time, from rooms that lie beside it in a checkout.
Its description is true on a package index, too.
"""

import email
import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sglang_hybrid import __version__

ROOT = Path(__file__).parents[1]
RELATIVE = re.compile(r"\]\((?![a-z]+:|#)([^)]+)\)")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy of what git would check out, so that nothing is left in the tree."""
    scratch = tmp_path_factory.mktemp("wheel")
    source = scratch / "source"
    for name in ("sglang_hybrid", "kernels", "patches"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
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


@pytest.mark.parametrize(
    "pattern", ["**/*.py", "hooks/*.sha256", "serving/*.json", "**/*.safetensors"]
)
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


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_string(wheel.read(name).decode())


def test_the_licence_is_named(metadata: email.message.Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"


def test_an_index_shows_no_link_that_leads_nowhere(metadata: email.message.Message) -> None:
    """An index knows no files beside the description."""
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = metadata.get_payload()
    assert "## Two commands" in description
    assert not RELATIVE.findall(description)


def test_links_lead_to_the_repository_where_it_is_known() -> None:
    readme = (ROOT / "README.md").read_text()
    description = runpy.run_path(str(ROOT / "setup.py"), run_name="read")["description"]
    text = description(readme, "https://index.test/owner/name/", __version__)
    assert not RELATIVE.findall(text)
    links = re.findall(r"(!?)\[[^\]]*\]\(https://index\.test/owner/name/(.*?)\)", text)
    assert len(links) == len(RELATIVE.findall(readme)) and "!" in dict(links)
    for picture, path in links:
        kind, version, file = path.split("/", 2)
        assert (kind, version) == ("raw" if picture else "blob", f"v{__version__}")
        assert (ROOT / file.partition("#")[0]).exists()


def test_the_cpu_lock_has_what_its_packages_ask_for() -> None:
    """All but torch, which SGLang wants in the version of its CUDA packages."""
    text = (ROOT / "requirements" / "cpu.lock").read_text()
    pins = {
        canonicalize_name(name): version
        for name, version in re.findall(r"^(\S+)==(\S+)", text, re.M)
    }
    (pins[canonicalize_name("torch")],) = re.findall(
        r"^TORCH=torch==(\S+)$", (ROOT / "scripts/env.sh").read_text(), re.M
    )
    broken = []
    for name in pins:
        for line in importlib.metadata.requires(name) or ():
            wanted = Requirement(line)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            version = pins.get(canonicalize_name(wanted.name))
            if version is not None and not wanted.specifier.contains(version, prereleases=True):
                broken.append((name, wanted.name))
    assert broken == [("sglang", "torch")]
