"""SGLang and what it needs as one archive, for a machine that reaches no package index.

    python -m scripts.gpu_check.portable --python 3.12 --without regex tokenizers -o site.tar.xz

There: unpack it, name its folder and a checkout of this repository in PYTHONPATH, and run
scripts/gpu_check.sh. It has what requirements/cpu.lock pins but torch and Triton, which that
machine must have for its GPU, and what ``--without`` names; of this package it has the entry
points, by which SGLang finds the checkout. SGLang's CUDA packages are not in it (stand_ins/).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ON_THE_GPU = ("torch", "triton")
PLATFORMS = ("2_39", "2_35", "2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5")
"""Versions of glibc that a wheel may ask for; pip takes each by its name only."""
OLDER = ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64")
LEFT_OUT = (
    *("bin", "sglang_hybrid", "sglang/multimodal_gen", "sglang/srt/rust_extensions/_bench*"),
    *("mistral_common/data", "pycountry/locales", "zstandard/_cffi*"),
)
"""Files that are large and that no server of gpu_check imports, and the code that the checkout has.
"""


def pins(lock: str, without: Iterable[str]) -> list[str]:
    """`name==version` of each package of a lock file, but for these, without their hashes."""
    names = {normal(name) for name in (*ON_THE_GPU, *without)}
    found = re.findall(r"^([^\s#]+)==(\S+)", lock, re.MULTILINE)
    return [f"{name}=={version}" for name, version in found if normal(name) not in names]


def normal(name: str) -> str:
    """A package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    subprocess.run(command, check=True)


def collect(site: Path, python: str, wanted: Sequence[str]) -> None:
    """Packages for that version of Python on Linux (x86-64), and this one's entry points, in the
    folder.
    """
    platforms = (*(f"manylinux_{version}_x86_64" for version in PLATFORMS), *OLDER)
    foreign = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:"]
    foreign += [f"--platform={name}" for name in platforms]
    pip("install", "--no-deps", "--no-compile", *foreign, "--target", str(site), *wanted)
    with tempfile.TemporaryDirectory() as build:
        copy = shutil.copytree(
            ROOT, Path(build) / "source", ignore=shutil.ignore_patterns(".*", "build")
        )
        pip("install", "--no-deps", "--no-compile", "--target", str(site), str(copy))
    for pattern in LEFT_OUT:
        for found in site.glob(pattern):
            shutil.rmtree(found) if found.is_dir() else found.unlink()


def pack(site: Path, output: Path) -> None:
    with tarfile.open(output, "w:xz") as archive:
        for entry in sorted(site.iterdir()):
            archive.add(entry, entry.name)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="3.12", help="of that machine, default: %(default)s")
    parser.add_argument("--without", nargs="*", default=(), metavar="PACKAGE")
    parser.add_argument("-o", "--output", type=Path, default=Path("site.tar.xz"))
    options = parser.parse_args(arguments)
    wanted = pins((ROOT / "requirements" / "cpu.lock").read_text(), options.without)
    with tempfile.TemporaryDirectory(prefix="portable-") as folder:
        site = Path(folder)
        collect(site, options.python, wanted)
        pack(site, options.output)
    print(f"{options.output}: {options.output.stat().st_size / 1e6:.0f} MB, {len(wanted)} packages")


if __name__ == "__main__":
    main()
