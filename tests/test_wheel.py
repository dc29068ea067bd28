"""The package as a user of an index has it: built, checked, and installed where SGLang is, outside
of the repository. Nothing else of that environment changes, and it serves.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from sglang_hybrid.serving.server_process import ServerProcess

ROOT = Path(__file__).parents[1]
OURS = ("defusedxml", "google-re2", "whatthepatch", "wrapt")
"""Dependencies of ours that SGLang has not; pip has to find them."""

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(1200)]


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command, without what the tests add to an environment."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the wheel and the sdist, made of a copy of this checkout."""
    scratch = tmp_path_factory.mktemp("built")
    left = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "site")
    shutil.copytree(ROOT, scratch / "source", symlinks=True, ignore=left)
    run(
        *(sys.executable, "-m", "build", "--no-isolation", "--outdir", scratch / "dist"),
        cwd=scratch / "source",
    )
    return scratch / "dist"


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """A new environment with SGLang, in which the wheel was installed as users do it; and what it
    had before.
    """
    folder = tmp_path_factory.mktemp("fresh")
    made, (wheel,) = folder / "venv", built.glob("*.whl")
    run(sys.executable, "-m", "venv", made, cwd=folder)
    script = f"""
source {ROOT}/scripts/env.sh
VENV={made}
install_packages "${{LOCKED[@]}}" "$LOCKS/cpu.lock"
install_torch
"""
    run("bash", "-euc", script, cwd=folder)
    pip = (made / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    run(*pip, "uninstall", "--yes", *OURS, cwd=folder)
    before = run(*pip, "freeze", "--all", cwd=folder)
    run(*pip, "install", wheel, cwd=folder)
    return made, set(before.splitlines())


@pytest.fixture(scope="module")
def server(
    environment: tuple[Path, set[str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """README's first server, with the page."""
    program = [str(environment[0] / "bin" / "sglang-hybrid"), "serve"]
    folder = tmp_path_factory.mktemp("elsewhere")
    flags = [
        "--enable-cache-report",
        "--hybrid-ui",
        "text",
        "--hybrid-record",
        str(folder / "trace"),
    ]
    clean = {"PYTHONPATH": "", "TEST_SERVERS": "spawn"}
    with ServerProcess(flags, program=program, environment=clean, directory=folder) as started:
        yield started


def test_twine_takes_both(built: Path) -> None:
    files = sorted(built.iterdir())
    assert [file.suffix for file in files] == [".whl", ".gz"]
    run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=built)


def test_the_sdist_is_the_package_and_nothing_else(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.split("/")[1:] for name in archive.getnames()]
    top = {parts[0] for parts in names if parts}
    assert top == {
        *("sglang_hybrid", "sglang_hybrid.egg-info", "pyproject.toml", "setup.py", "setup.cfg"),
        *("MANIFEST.in", "README.md", "LICENSE", "PKG-INFO"),
    }


def test_nothing_else_changes(environment: tuple[Path, set[str]]) -> None:
    made, before = environment
    python = made / "bin" / "python"
    after = set(run(python, "-m", "pip", "freeze", "--all", cwd=made).splitlines())
    added = {re.split("==| @ ", line)[0] for line in after - before}
    assert before <= after and added == {"sglang-hybrid", *OURS}
    from_wheel = "import sglang_hybrid; print(sglang_hybrid.__file__)"
    assert run(python, "-c", from_wheel, cwd=made).startswith(str(made))


def test_it_serves(server: ServerProcess) -> None:
    body = {
        "text": "Question: What does math.sqrt do?\nAnswer:",
        "sampling_params": {"max_new_tokens": 40, "temperature": 0},
    }
    first, again = (
        requests.post(f"{server.url}/generate", json=body, timeout=120).json() for _ in range(2)
    )
    assert "square root" in first["text"] and again["text"] == first["text"]
    meta = again["meta_info"]
    assert meta["cached_tokens"] == meta["prompt_tokens"] - 1 == meta["hybrid_cache"]["hit_tokens"]


def test_it_has_the_page(server: ServerProcess) -> None:
    page = requests.get(f"{server.url}/hybrid_cache/", timeout=30)
    assert page.ok and "<html" in page.text
    for path in re.findall(r'(?:src|href)="(?!data:|https?:)([^"#]+)"', page.text):
        assert requests.get(f"{server.url}/hybrid_cache/{path}", timeout=30).ok, path


def test_it_replays(environment: tuple[Path, set[str]], tmp_path: Path) -> None:
    command = str(environment[0] / "bin" / "sglang-hybrid")
    flags = ["--generate", "chat", "--policy", "lru,reuse", "--cache", "100MB"]
    said = run(command, "replay", *flags, cwd=tmp_path)
    assert "lru" in said and "reuse" in said
