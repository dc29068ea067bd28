"""Native kernels are compiled once, by one process, and their lack is said and survived."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sglang.srt.platforms  # noqa: F401 (finds our platform; that cannot be imported before it)

from sglang_hybrid.platforms.native import build
from sglang_hybrid.platforms.native.library import library

compiled = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")

BUILD = """
import sys
from pathlib import Path
import torch
from sglang_hybrid.platforms.native import build
build.SOURCES = Path(sys.argv[2])
print(build.build(Path(sys.argv[1]))[1])
"""


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SGLANG_HYBRID_NATIVE_KERNELS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    with caplog.at_level(logging.WARNING):
        assert library.__wrapped__() is None
    (said,) = caplog.messages
    assert "there is no C++ compiler (no-such-compiler)" in said


@compiled
def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong.cpp").write_text("int two() { return; }")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(build.NotBuilt, match=r"wrong.cpp.*error"):
        build.build(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


@compiled
def test_what_another_user_may_write_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "small.cpp").write_text('extern "C" int two() { return 2; }')
    monkeypatch.setattr(build, "SOURCES", sources)
    library, _ = build.build(tmp_path / "cache")
    assert build.build(tmp_path / "cache") == (library, False)
    library.chmod(0o777)
    with pytest.raises(build.NotBuilt, match="another user may write"):
        build.build(tmp_path / "cache")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(build.NotBuilt):
        build.build(tmp_path / "cache")


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
