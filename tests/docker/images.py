"""Images built by `buildah`, without a container engine and without pulling anything.

Their base is a Debian that `debootstrap` makes; package indexes are those of this machine.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BASE = "localhost/base"
CPU_IMAGE = "localhost/sglang-hybrid:cpu"
_INDEX_OPTIONS = ("index-url", "extra-index-url", "find-links", "cert")


def why_not() -> str:
    """The reason why no images can be built here, or ""."""
    if os.geteuid() != 0:
        return "building an image without a container engine takes root"
    missing = [name for name in ("buildah", "debootstrap", "unshare") if not shutil.which(name)]
    if missing:
        return f"{', '.join(missing)} not installed (apt-get install buildah debootstrap)"
    if subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], check=False).returncode:
        return "namespaces cannot be made here"
    if not apt_mirror():
        return "apt knows no mirror of Debian bookworm; set APT_MIRROR"
    return ""


def apt_mirror() -> str:
    """A shadow tree of Debian bookworm: $APT_MIRROR, or the one that apt uses here."""
    if shadow_tree := os.environ.get("APT_MIRROR"):
        return shadow_tree
    if not shutil.which("apt-get"):
        return ""
    fields = ["Created-By: Packages", "Codename: bookworm", "Component: main"]
    found = _output("apt-get", "indextargets", "--format", "$(REPO_URI)", *fields)
    return next(iter(found.splitlines()), "")


class Images:
    """A storage of images of our own in `directory`; `close` removes it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "tmp").mkdir(parents=True)

    def buildah(self, *arguments: str) -> str:
        """Run `buildah`; returns what it printed. An error ends the test with its last lines."""
        stores = ["--root", str(self.directory / "root"), "--runroot", str(self.directory / "run")]
        return _output(
            *("buildah", *stores, "--storage-driver", "overlay", *arguments),
            environment={"TMPDIR": str(self.directory / "tmp")},  # cache mounts go there, too
        )

    def make_base(self) -> None:
        """Make a minimal Debian bookworm and call it `BASE`."""
        container = self.buildah("from", "scratch")
        root = self.buildah("mount", container)
        _output("debootstrap", "--variant=minbase", "bookworm", root, apt_mirror())
        self.buildah("commit", "--quiet", "--rm", container, BASE)

    def build(self, dockerfile: str | Path, name: str, **arguments: str) -> None:
        """Build a Dockerfile of the repository with this machine's package indexes."""
        options = ["--isolation", "chroot", "--network", "host", "--format", "docker"]
        for option, value in _index_options(options).items():
            options += ["--build-arg", f"{option}={value}"]
        for option, value in arguments.items():
            options += ["--build-arg", f"{option}={value}"]
        self.buildah("bud", *options, "--file", str(dockerfile), "--tag", name, str(ROOT))

    def config(self, name: str) -> dict[str, Any]:
        """The settings of an image by which it is run (Docker's `Config`)."""
        found: dict[str, Any] = json.loads(self.buildah("inspect", "--type", "image", name))
        config: dict[str, Any] = found["Docker"]["config"]
        return config

    def mount(self, name: str) -> Path:
        """The root directory of a new container of an image."""
        return Path(self.buildah("mount", self.buildah("from", name)))

    def close(self) -> None:
        """Remove all containers and images."""
        self.buildah("rm", "--all")
        shutil.rmtree(self.directory)


def _index_options(volumes: list[str]) -> dict[str, str]:
    """Build arguments with pip's indexes on this machine.

    What lies in a local directory is mounted into the build: `--volume` is added to `volumes`.
    """
    found: dict[str, str] = {}
    for line in _output(sys.executable, "-m", "pip", "config", "list").splitlines():
        key, _, value = line.partition("=")  # the environment's come first
        found.setdefault(key.rpartition(".")[2], ast.literal_eval(value))
    options = {}
    for name in _INDEX_OPTIONS:
        values = [value for value in found.get(name, "").split() if "file:" not in value]
        for i, value in enumerate(values):
            if Path(value).exists():
                values[i] = f"/host{value}"
                volumes += ["--volume", f"{value}:{values[i]}:ro"]
        if values:
            options["PIP_" + name.upper().replace("-", "_")] = " ".join(values)
    if url := os.environ.get("TORCH_INDEX_URL"):
        options["TORCH_INDEX_URL"] = url
    return options


def _output(*command: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **(environment or {})}
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()
