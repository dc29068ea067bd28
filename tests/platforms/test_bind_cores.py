"""Tensor-parallel ranks share the cores that this process may use."""

import os

import psutil
import pytest
import sglang.srt.platforms  # noqa: F401 (finds our platform; that cannot be imported before it)

from sglang_hybrid.platforms.cpu import bind_cores

VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"


def bound(monkeypatch: pytest.MonkeyPatch, cores: list[int], ranks: int) -> str:
    """What `bind_cores` says on a machine on which this process may use `cores`."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: cores)
    bind_cores(ranks)
    return os.environ[VARIABLE]


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [
        ([0, 1], 2, "0|1"),
        ([0, 1, 2, 3], 2, "0,1|2,3"),
        ([5, 3, 9], 2, "3|5"),
        ([0], 2, "0|0"),
        ([0, 1], 4, "0|1|0|1"),
        ([4, 5, 6, 7], 1, "4,5,6,7"),
    ],
)
def test_each_rank_gets_its_share(
    monkeypatch: pytest.MonkeyPatch, cores: list[int], ranks: int, expected: str
) -> None:
    assert bound(monkeypatch, cores, ranks) == expected


def test_the_users_binding_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "7|8")
    bind_cores(2)
    assert os.environ[VARIABLE] == "7|8"
