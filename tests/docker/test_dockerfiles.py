"""Checks of the Dockerfiles without building them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_hybrid import SGLANG_VERSION, __version__

ROOT = Path(__file__).parents[2]
CUDA, CPU = ROOT / "docker" / "Dockerfile", ROOT / "docker" / "Dockerfile.cpu"
ENVIRONMENT = (ROOT / "scripts" / "env.sh").read_text()
(TORCH,) = re.findall(r"^TORCH=(\S+)$", ENVIRONMENT, re.MULTILINE)
SAID = [
    *((file, f"ARG VERSION={__version__}\n") for file in (CUDA, CPU)),
    *((file, f'sglang.version="{SGLANG_VERSION}"') for file in (CUDA, CPU)),
    (CUDA, f"ARG BASE=lmsysorg/sglang:v{SGLANG_VERSION}\n"),
    (CPU, f' "{TORCH}$'),
]
"""Versions in a Dockerfile: ours, that of SGLang, its base, and what scripts install."""


@pytest.mark.parametrize(("dockerfile", "text"), SAID, ids=lambda value: Path(value).name)
def test_versions(dockerfile: Path, text: str) -> None:
    assert text in dockerfile.read_text()


@pytest.mark.parametrize(
    "dockerfile", sorted(CUDA.parent.glob("Dockerfile*")), ids=lambda path: path.name
)
def test_a_lock_is_installed_with_its_hashes(dockerfile: Path) -> None:
    """Our package is built with the tools of a lock, not with what its index has today."""
    commands = dockerfile.read_text().replace("\\\n", " ").split("&&")
    locks = [command for command in commands if ".lock" in command and " -r " in command]
    assert locks and all("--require-hashes" in command for command in locks)
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!requirements/{name}" for name in re.findall(r"\w+\.lock", " ".join(locks))} <= {
        *sent
    }
    assert {"!pyproject.toml", "!setup.py", "!README.md", "!LICENSE"} <= {*sent}  # of our package
    built = [command for command in commands if re.search(r"pip wheel|/src *$", command)]
    assert built and all("--no-build-isolation" in command for command in built)


@pytest.mark.parametrize(
    "dockerfile", sorted(CUDA.parent.glob("Dockerfile*")), ids=lambda path: path.name
)
def test_lint_and_no_index_is_written_down(dockerfile: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, dockerfile], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    hosts = set(re.findall(r"https?://([\w.-]+)", dockerfile.read_text()))
    assert hosts == {"127.0.0.1"}
