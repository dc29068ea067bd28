"""Compiles the C++ kernels into a folder of the user's caches, where later processes find them.

The file's name has a hash of all that the machine code depends on: the sources, the flags, torch's
release (whose OpenMP library it is linked to), the C library and this CPU. So machines may share a
folder. The file ends with a hash of what is before it: a damaged one is compiled again. Nothing of
torch is included, which keeps compiling at about ten seconds and the interface plain C.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from sglang_hybrid.core.own_files import check_owner, lock_within, own_caches

SOURCES = Path(__file__).parents[3] / "kernels" / "native"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-Wno-psabi")
COMPILERS = ("g++", "c++")
OPENMP = ("libgomp", "libiomp5", "libomp")
"""Names of OpenMP's libraries, of which torch has loaded one."""

SECONDS = 300
"""Time after which a compiler, or another process that compiles, is given up."""

DIGEST_BYTES = hashlib.sha256().digest_size
"""Bytes of the digest at the end of a library's file, which the loader does not read."""


class NotBuilt(RuntimeError):
    """Raised where there are no native kernels; the message says why."""


def cache_folder() -> Path:
    """The folder of compiled libraries, in the user's folder of caches."""
    return own_caches() / "native"


def build(folder: Path | None = None) -> tuple[Path, bool]:
    """The library for this machine, and whether it was compiled just now.

    Of several processes that want it at once, one compiles and the others wait. Raises `NotBuilt`
    if there is no compiler, if it fails, or if the folder cannot be written.
    """
    openmp = openmp_library()
    try:
        folder = cache_folder() if folder is None else folder
        library = folder / f"kernels-{key(openmp)}.so"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_owner(folder.resolve())
        if _is_whole(library):
            return library, False
        with open(library.with_suffix(".lock"), "a") as lock:
            if not lock_within(lock, SECONDS):
                raise NotBuilt(f"another process has held {lock.name} for {SECONDS} s")
            if _is_whole(library):
                return library, False
            _compile(library, openmp)
    except (OSError, RuntimeError) as error:
        if isinstance(error, NotBuilt):
            raise
        raise NotBuilt(str(error)) from error
    return library, True


def _is_whole(library: Path) -> bool:
    """True if it is there and as it was compiled, and not cut off by a crash or a full disk: parts
    that are missing would end the process when they are called. Raises PermissionError if another
    user could have written it.
    """
    if not library.exists():
        return False
    check_owner(library.resolve())
    content = library.read_bytes()
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def key(openmp: Path) -> str:
    """A hash of what a library depends on."""
    found = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        found.update(source.name.encode() + b"\0" + source.read_bytes())
    for part in (*FLAGS, torch.__version__, str(openmp), *platform.libc_ver(), cpu()):
        found.update(part.encode() + b"\0")
    return found.hexdigest()[:20]


def cpu() -> str:
    """A text that tells this CPU's instructions: its model and its flags."""
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    seen: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in wanted:
            seen.setdefault(name.strip(), value.strip())
    return "\n".join(f"{name}: {value}" for name, value in seen.items())


def openmp_library() -> Path:
    """OpenMP's library that this process has loaded with torch. A second one would have threads of
    its own, which take the cores from torch's. Raises `NotBuilt` if there is none.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith(OPENMP):
            return path
    raise NotBuilt("torch has loaded no OpenMP library")


def _compile(library: Path, openmp: Path) -> None:
    """Put the library in its place in one step, so that nobody loads half of it."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NotBuilt(f"there is no C++ compiler ({', '.join(COMPILERS)})")
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        sources = sorted(SOURCES.glob("*.cpp"))

        def compiled(source: Path) -> Path:
            made = Path(scratch) / f"{source.stem}.o"
            _run([compiler, *FLAGS, "-c", str(source), "-o", str(made)])
            return made

        with ThreadPoolExecutor(len(sources)) as threads:
            objects = list(threads.map(compiled, sources))
        built = Path(scratch) / library.name
        _run([compiler, "-shared", *map(str, objects), str(openmp), "-o", str(built)])
        with open(built, "ab") as file:
            file.write(hashlib.sha256(built.read_bytes()).digest())
        built.chmod(0o755)
        os.replace(built, library)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=os.environ | {"LC_ALL": "C"},  # its messages, so that an error is found in them
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise NotBuilt(f"{command[0]} took more than {SECONDS} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise NotBuilt(f"{command[0]} failed: {first}")
