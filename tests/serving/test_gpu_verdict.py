"""Verdicts on one memory: which one counts, and files that are none."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from sglang_hybrid.serving import gpu_verdict
from sglang_hybrid.serving.gpu_verdict import (
    MOST_BYTES,
    SHIPPED,
    Row,
    Verdict,
    find_verdict,
    own_file,
    read_verdicts,
    write_verdict,
)

PASSED = Verdict("GPU A", "1.0", "0.5.23", "2.14", True, {"hits": Row(True, "all")})
FAILED = msgspec.structs.replace(PASSED, passed=False, rows={"hits": Row(False, "none")})


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return own_file()


def test_no_gpu_has_passed_that_none_ran() -> None:
    assert read_verdicts(SHIPPED) == []


def test_a_verdict_is_of_one_gpu_and_one_sglang(own: Path) -> None:
    assert find_verdict("GPU A", "0.5.23") is None
    write_verdict(own, PASSED)
    write_verdict(own, msgspec.structs.replace(PASSED, gpu="GPU B", passed=False))
    assert find_verdict("GPU A", "0.5.23") == PASSED
    assert find_verdict("GPU A", "0.5.24") is None
    assert find_verdict("GPU C", "0.5.23") is None


def test_a_later_check_takes_the_place_of_an_earlier_one(own: Path) -> None:
    for verdict in (PASSED, FAILED):
        write_verdict(own, verdict)
    assert read_verdicts(own) == [FAILED]
    assert FAILED.wrong == ["hits"]


def test_this_machines_verdict_comes_before_what_ships(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped.json"
    monkeypatch.setattr(gpu_verdict, "SHIPPED", shipped)
    write_verdict(shipped, PASSED)
    assert find_verdict("GPU A", "0.5.23") == PASSED
    write_verdict(own, FAILED)
    assert find_verdict("GPU A", "0.5.23") == FAILED


@pytest.mark.parametrize(
    "content", [b"", b"[", b"{}", b'[{"gpu": "GPU A"}]', b"\xff", b" " * MOST_BYTES + b"[]"]
)
def test_a_file_that_is_none_is_said_and_ignored(
    own: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    own.parent.mkdir()
    own.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert find_verdict("GPU A", "0.5.23") is None
    assert f"the GPU verdicts in {own} are not used" in caplog.text
    write_verdict(own, PASSED)
    assert find_verdict("GPU A", "0.5.23") == PASSED


def test_who_has_no_home_has_what_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(gpu_verdict, "own_caches", homeless)
    assert find_verdict("GPU A", "0.5.23") is None
