"""SGLang's data-parallel controller sends a prompt where its prefix is, if ours can say where."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.data_parallel_controller import LoadBalanceMethod
from sglang.srt.managers.load_snapshot import LoadSnapshot

from sglang_hybrid.serving.data_parallel import choose_rank, ignores_prefixes

PROMPT = list(range(1_000))


class Controller:
    """SGLang's controller as far as it is read, with idle ranks."""

    def __init__(self, method: LoadBalanceMethod = LoadBalanceMethod.ROUND_ROBIN, **flags: Any):
        given = {
            "radix_cache_backend": "hybrid",
            "disable_radix_cache": False,
            "disaggregation_mode": "null",
        }
        self.server_args = SimpleNamespace(**(given | flags))
        self.load_balance_method = method
        self.max_dp_size = 2
        self._active_workers = [0, 1]
        self.status = [True, True]
        self.load_snapshot_reader = SimpleNamespace(read_all=lambda: self.told)
        self.told: list[LoadSnapshot] = []

    def choose(self, prompt: list[int] | None = PROMPT, **fields: Any) -> int | None:
        given = {"rid": "r", "lora_id": None, "routed_dp_rank": None, "extra_key": None}
        return choose_rank(self, SimpleNamespace(input_ids=prompt, **(given | fields)))


def test_the_same_prompt_goes_to_the_same_rank() -> None:
    it = Controller()
    home = it.choose()
    assert home is not None
    assert [it.choose([*PROMPT, at]) for at in range(6)] == [home] * 6


def test_a_rank_tells_of_its_load() -> None:
    it = Controller()
    home = it.choose()
    assert home is not None
    it.told = [
        LoadSnapshot(timestamp=1e12, dp_rank=home, num_waiting_uncached_tokens=9_000),
        LoadSnapshot(timestamp=1e12, dp_rank=1 - home),
    ]
    assert it.choose() == 1 - home


def test_only_ranks_that_run_get_prompts() -> None:
    it = Controller()
    home = it.choose()
    assert home is not None
    it.status[home] = False
    assert it.choose() == 1 - home
    it._active_workers = [home]
    assert it.choose() is None


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ({"radix_cache_backend": None}, {}),
        ({"disable_radix_cache": True}, {}),
        ({"disaggregation_mode": "prefill"}, {}),
        ({"method": LoadBalanceMethod.TOTAL_TOKENS}, {}),
        ({}, {"routed_dp_rank": 1}),
        ({}, {"prompt": None}),
        ({}, {"rid": "HEALTH_CHECK_1"}),
    ],
)
def test_sglang_chooses(flags: dict[str, Any], fields: dict[str, Any]) -> None:
    assert Controller(**flags).choose(**fields) is None


@pytest.mark.parametrize(
    ("method", "ranks", "mode", "said"),
    [
        ("round_robin", 2, "null", ""),
        ("total_tokens", 2, "null", "total_tokens"),
        ("total_tokens", 1, "null", ""),
        ("follow_bootstrap_room", 2, "prefill", ""),
    ],
)
def test_a_method_without_prefixes_is_known(method: str, ranks: int, mode: str, said: str) -> None:
    flags = {"load_balance_method": method, "dp_size": ranks, "disaggregation_mode": mode}
    assert ignores_prefixes(SimpleNamespace(**flags)) == said


def test_requests_of_a_session_stay_together() -> None:
    it = Controller()
    found = [
        {it.choose([at], session_params=SimpleNamespace(id=f"s{name}")) for at in range(5)}
        for name in range(20)
    ]
    assert all(len(ranks) == 1 for ranks in found)
    assert set.union(*found) == {0, 1}  # type: ignore[arg-type]


def test_what_fails_is_left_to_sglang(caplog: pytest.LogCaptureFixture) -> None:
    it = Controller()
    it.told = [LoadSnapshot(timestamp=1e12, dp_rank=7)]
    assert it.choose() is None
    assert "SGLang chooses the rank" in caplog.text
