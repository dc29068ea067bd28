"""Tensor-parallel ranks share the cores that this process may use."""

import os
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import sglang.srt.platforms  # noqa: F401 (finds our platform; that cannot be imported before it)

from sglang_hybrid.extensions.cpu import platform as cpu
from sglang_hybrid.extensions.cpu.platform import bind_cores

VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"


def unset_arguments(**given: Any) -> Any:
    """SGLang's server arguments of which a user gave only these."""
    fields = ("sampling_backend", "mem_fraction_static", "max_total_tokens", "lora_backend")
    unset = dict.fromkeys((*fields, "max_mamba_cache_size", "max_running_requests"))
    sizes = dict.fromkeys(("tp_size", "pp_size", "dp_size"), 1)
    model = {"model_path": "owner/name", "dtype": "auto"}
    return SimpleNamespace(**unset | sizes | model | given)


def bound(monkeypatch: pytest.MonkeyPatch, cores: list[int], ranks: int) -> str:
    """The result of `bind_cores` on a machine on which this process may use `cores`."""
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


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ({"dp_size": 2}, 2),
        ({"dp_size": 2, "tp_size": 2}, 4),
        ({"pp_size": 3}, 3),
    ],
)
def test_every_rank_counts(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, int], ranks: int
) -> None:
    asked = []
    monkeypatch.setattr(cpu, "bind_cores", asked.append)
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")  # a default would outlive this test
    args = unset_arguments(**flags)
    cpu.HybridCpuPlatform().apply_server_args_defaults(args)
    assert asked == [ranks]
