"""Native kernels are compiled once, by one process, and their lack is said and survived."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sglang.srt.platforms  # noqa: F401 (finds our platform; that cannot be imported before it)

from sglang_hybrid.extensions.cpu.native import build
from sglang_hybrid.extensions.cpu.native.library import library

compiled = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")

BUILD = """
import sys
from pathlib import Path
import torch
from sglang_hybrid.extensions.cpu.native import build
build.SOURCES = Path(sys.argv[2])
print(build.build(Path(sys.argv[1]))[1])
"""


def unbuilt(caplog: pytest.LogCaptureFixture) -> str:
    """The log line where there are no native kernels."""
    with caplog.at_level(logging.INFO):
        assert library.__wrapped__() is None
    (said,) = caplog.messages
    assert "plain torch stands for them" in said
    assert len(said.splitlines()) == 1
    return said


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of caches, and sources that are compiled at once."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "small.cpp").write_text('extern "C" int two() { return 2; }')
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv("SGLANG_HYBRID_NATIVE_KERNELS", raising=False)
    return build.cache_folder()


@compiled
def test_one_of_several_processes_compiles(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "small.cpp").write_text('extern "C" int two() { return 2; }')
    command = [sys.executable, "-c", BUILD, str(tmp_path / "cache"), str(sources)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(process.communicate(timeout=120)[0].strip() for process in started)
    assert said == ["False", "True"]
    assert len(list((tmp_path / "cache").glob("*.so"))) == 1


def test_the_name_depends_on_sources_flags_and_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    openmp = Path("/lib/libgomp.so.1")
    first = build.key(openmp)
    assert build.key(openmp) == first
    for name, value in (
        ("FLAGS", ("-O1",)),
        ("cpu", lambda: "another"),
        ("SOURCES", build.SOURCES.parent),
    ):
        with monkeypatch.context() as changed:
            if name == "SOURCES":
                changed.setattr(Path, "iterdir", lambda self: self.glob("*.cpp"))
                changed.setattr(Path, "read_bytes", lambda self: b"other")
            else:
                changed.setattr(build, name, value)
            assert build.key(openmp) != first, name


def test_without_a_compiler_torch_serves_and_a_line_says_so(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    assert "there is no C++ compiler (no-such-compiler)" in unbuilt(caplog)


@pytest.mark.parametrize("printed", [b"small.cpp:1:1: error: odd", b"\xff\nerror: odd\nmore", b""])
def test_a_compiler_that_fails_is_quoted_in_one_line(
    small: Path,
    printed: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler = tmp_path / "compiler"
    (tmp_path / "printed").write_bytes(printed)
    compiler.write_text(f"#!/bin/sh\ncat {tmp_path / 'printed'} >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "COMPILERS", (str(compiler),))
    said = unbuilt(caplog)
    assert f"{compiler} failed: " in said
    assert ("error: odd" if printed else "status 3") in said
    assert not list(small.glob("*.so"))


def test_a_process_that_never_ends_to_compile_is_not_waited_for(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "SECONDS", 0.2)
    small.mkdir(parents=True)
    name = small / f"kernels-{build.key(build.openmp_library())}.lock"
    with open(name, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert f"another process has held {name} for 0.2 s" in unbuilt(caplog)


@compiled
def test_a_library_without_the_functions_is_not_used(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert "undefined symbol: hybrid_" in unbuilt(caplog)


@compiled
@pytest.mark.parametrize("damage", ["cut off", "empty", "zeros", "text"])
def test_a_damaged_library_is_compiled_again(small: Path, damage: str) -> None:
    library, _ = build.build()
    assert build.build() == (library, False)
    whole = library.read_bytes()
    damaged = {
        "cut off": whole[: len(whole) // 2],
        "empty": b"",
        "zeros": whole[:4096] + bytes(len(whole) - 4096),
        "text": b"no library",
    }[damage]
    library.write_bytes(damaged)
    assert build.build() == (library, True)
    assert library.read_bytes() == whole
    assert {path.suffix for path in small.iterdir()} == {".so", ".lock"}


@compiled
def test_what_another_user_may_write_is_not_loaded(small: Path) -> None:
    library, _ = build.build()
    library.chmod(0o777)
    with pytest.raises(build.NotBuilt, match="another user may write"):
        build.build()
    library.unlink()
    small.chmod(0o777)
    with pytest.raises(build.NotBuilt, match="another user may write"):
        build.build()
    assert not library.exists()


def test_a_folder_that_cannot_be_made(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    small.parents[1].write_text("a file where the folder of caches should be")
    assert f"Not a directory: '{small}'" in unbuilt(caplog)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    small.mkdir(parents=True)
    small.chmod(0o500)
    assert "Permission denied" in unbuilt(caplog)


def test_the_flag_turns_them_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_NATIVE_KERNELS", "off")
    with caplog.at_level(logging.INFO):
        assert library.__wrapped__() is None
    assert caplog.messages == [
        "sglang_hybrid: native kernels are off; plain torch stands for them."
    ]


@compiled
def test_torch_and_the_kernels_share_their_threads() -> None:
    names = [
        line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()
    ]
    loaded = {name for name in names if Path(name).name.startswith(build.OPENMP)}
    assert len(loaded) == 1
