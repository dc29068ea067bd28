"""What can be said of the Dockerfiles without building them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_hybrid

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile*"))


def defaults(dockerfile: Path) -> dict[str, str]:
    """The defaults of its build arguments."""
    return dict(re.findall(r"^ARG (\w+)=(\S+)$", dockerfile.read_text(), re.MULTILINE))


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_lint(dockerfile: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, dockerfile], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_versions(dockerfile: Path) -> None:
    assert defaults(dockerfile)["VERSION"] == sglang_hybrid.__version__
    assert f'sglang.version="{sglang_hybrid.SGLANG_VERSION}"' in dockerfile.read_text()


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_no_index_is_written_down(dockerfile: Path) -> None:
    hosts = set(re.findall(r"https?://([\w.-]+)", dockerfile.read_text()))
    assert hosts == {"127.0.0.1"}


def test_the_cuda_base_is_the_release_that_we_extend() -> None:
    base = defaults(ROOT / "docker" / "Dockerfile")["BASE"]
    assert base == f"lmsysorg/sglang:v{sglang_hybrid.SGLANG_VERSION}"


def test_torch_is_that_of_the_cpu_environment() -> None:
    (torch,) = re.findall(r"^TORCH=(\S+)$", (ROOT / "scripts" / "env.sh").read_text(), re.MULTILINE)
    assert f" {torch} " in (ROOT / "docker" / "Dockerfile.cpu").read_text()
