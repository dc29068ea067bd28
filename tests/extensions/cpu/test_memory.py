"""Memory of the machine, or of the container if that has less."""

import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from sglang_hybrid.serving import host_memory as memory

GIB = 2**30


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cgroup directory on a machine of 16 GiB, of which 10 are available."""
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    machine = SimpleNamespace(total=16 * GIB, available=10 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    return tmp_path


def numbers() -> tuple[float, float, float]:
    """Limit, used, available in GiB."""
    found = memory.memory_limit(), memory.memory_used(), memory.memory_available()
    return tuple(size / GIB for size in found)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("limit", "current", "found"),
    [
        (None, 0, (16, 6, 10)),
        ("max", 5, (16, 6, 10)),
        (8, 3, (8, 3, 5)),
        (14, 1, (14, 4, 10)),
        (64, 3, (16, 6, 10)),
        (2, 3, (2, 2, 0)),
    ],
    ids=["no container", "no limit", "less", "more than is left", "above the machine", "over it"],
)
def test_what_a_container_may_take(
    cgroup: Path, limit: int | str | None, current: int, found: tuple[int, int, int]
) -> None:
    """limit, current: of the container, in GiB."""
    if limit is not None:
        text = limit if isinstance(limit, str) else str(limit * GIB)
        (cgroup / "memory.max").write_text(text + "\n")
        (cgroup / "memory.current").write_text(f"{current * GIB}\n")
    assert numbers() == found


FAULTS = """
import resource, sys, torch
from sglang_hybrid.serving.host_memory import keep_freed_memory
keep_freed_memory()
def touch(): torch.ones(16 << 20).sum()
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touch()
for _ in range(12):
    before = faults()
    for _ in range(10): touch()
    print(faults() - before)
    if faults() - before < int(sys.argv[1]): break
"""


def test_freed_memory_is_used_again() -> None:
    """Ten tensors of 64 MiB, one after another, do not map their pages ten times. They are counted
    up to twelve times: a machine short of memory takes pages back now and then.
    """
    few = 3 * (64 << 20) // resource.getpagesize()
    command = [sys.executable, "-c", FAULTS, str(few)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert min(map(int, done.stdout.split())) < few


COMPILED = """
import ctypes, torch
numbers = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in numbers]
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo2
def used():
    found = mallinfo2()
    return found.uordblks + found.hblkhd
product = torch.ops.mkldnn._linear_pointwise.default
weight, x = torch.randn(768, 256), torch.randn(400, 256)
product(x, weight, None, "none", [], "")
before = used()
for rows in range(20, 320): product(x[:rows], weight, None, "none", [], "")
print((used() - before) >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or platform.libc_ver()[0] != "glibc",
    reason="about oneDNN, and counted by glibc",
)
def test_kernels_for_each_length_are_kept_up_to_the_size_of_two_caches() -> None:
    """The claim of docs/robustness.md about the memory of a scheduler."""
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    grown = []
    for capacity in ("1024", "16"):
        environment = os.environ | dict.fromkeys(names, capacity)
        command = [sys.executable, "-c", COMPILED]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        grown.append(int(done.stdout))
    assert grown[1] < grown[0] / 4, grown
