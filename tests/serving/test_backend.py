"""The cache that serves, decided from the command line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.serving import backend
from sglang_hybrid.serving.backend import REFUSED, check_disk, choose_backend, choose_schedule
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import CodecChoice, Eviction, Memory, Schedule
from sglang_hybrid.serving.startup import StartupError

OURS = ["--radix-cache-backend", "hybrid"]
HYBRID = {
    "model_type": "mamba2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "state_size": 16,
    "expand": 2,
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 1,
    "conv_kernel": 4,
}
ATTENTION = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def model(directory: Path, config: dict[str, Any]) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def flags(model_path: str, **given: Any) -> argparse.Namespace:
    values = {"radix_cache_backend": None, "disable_radix_cache": False}
    values |= {"enable_hierarchical_cache": False, "enable_unified_memory": False}
    values |= {"speculative_algorithm": None, "disaggregation_mode": "null"}
    values |= {"pp_size": 1, "dcp_size": 1, **given}
    return argparse.Namespace(model_path=model_path, **values)


def asked(policy: str) -> HybridConfig:
    return HybridConfig(hybrid_eviction=Eviction(policy))


def test_a_model_with_states_gets_our_cache(tmp_path: Path) -> None:
    assert choose_backend(flags(model(tmp_path, HYBRID)), HybridConfig()) == OURS


def test_a_model_without_states_keeps_sglangs_unless_a_policy_was_asked_for(tmp_path: Path) -> None:
    path = model(tmp_path, ATTENTION)
    assert choose_backend(flags(path), HybridConfig()) == []
    assert choose_backend(flags(path), asked("marconi")) == OURS


def test_sglangs_own_order_of_eviction_is_said_to_do_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = flags(model(tmp_path, HYBRID), radix_eviction_policy="lfu")
    assert choose_backend(given, HybridConfig()) == OURS
    said = capsys.readouterr().out
    assert "--radix-eviction-policy lfu does nothing with --hybrid-eviction auto; leave" in said
    choose_backend(given, asked("sglang-lru"))
    given.radix_eviction_policy = "lru"
    choose_backend(given, HybridConfig())
    assert capsys.readouterr().out == ""


def test_settings_that_only_our_cache_reads_are_said_to_do_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = HybridConfig(hybrid_record="trace.jsonl", hybrid_tuner_workers=2)
    path = model(tmp_path, ATTENTION)
    assert choose_backend(flags(path), options) == []
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" does nothing")[0] for line in lines] == [
        "sglang_hybrid: --hybrid-tuner-workers 2",
        "sglang_hybrid: --hybrid-record trace.jsonl",
    ]
    assert choose_backend(flags(path), HybridConfig()) == []
    choose_backend(flags(path, radix_cache_backend="hybrid"), options)
    assert capsys.readouterr().out == ""


def test_a_model_that_is_not_at_hand_may_have_states() -> None:
    assert choose_backend(flags("someone/some-model"), HybridConfig()) == OURS


@pytest.fixture
def unified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another backend that SGLang knows."""
    monkeypatch.setattr(backend, "registered_backends", lambda: ["hybrid", "unified"])


def test_a_backend_that_sglang_does_not_know(tmp_path: Path, unified: None) -> None:
    given = flags(model(tmp_path, HYBRID), radix_cache_backend="unifid")
    with pytest.raises(StartupError, match="unifid is not known; known are hybrid, unified"):
        choose_backend(given, HybridConfig())


def test_what_was_said_stands(tmp_path: Path, unified: None) -> None:
    path = model(tmp_path, HYBRID)
    assert choose_backend(flags(path, radix_cache_backend="hybrid"), HybridConfig()) == []
    assert choose_backend(flags(path, radix_cache_backend="unified"), HybridConfig()) == []
    assert choose_backend(flags(path, disable_radix_cache=True), HybridConfig()) == []


def test_a_policy_needs_our_cache(tmp_path: Path, unified: None) -> None:
    given = flags(model(tmp_path, HYBRID), radix_cache_backend="unified")
    with pytest.raises(
        StartupError, match=r"^--hybrid-eviction sglang-lru needs .*, not unified\.$"
    ):
        choose_backend(given, asked("sglang-lru"))


@pytest.mark.parametrize(
    ("name", "value"),
    [*((name, True) for name in REFUSED), ("hicache_host_memory_mode", "buffer_only")],
)
def test_what_the_cache_cannot_honour(
    name: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {name: value}
    path = model(tmp_path, HYBRID)
    flag = "--" + name.replace("_", "-") + (f" {value}" if value is not True else "")
    assert choose_backend(flags(path, **given), HybridConfig()) == []
    assert f"{flag} is served by SGLang's own prefix cache" in capsys.readouterr().out
    for how in (
        lambda: choose_backend(flags(path, **given), asked("reuse")),
        lambda: choose_backend(flags(path, radix_cache_backend="hybrid", **given), HybridConfig()),
    ):
        with pytest.raises(StartupError, match=f"^{flag} cannot be combined") as caught:
            how()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculative_algorithm", "NGRAM"),
        ("disaggregation_mode", "prefill"),
        ("pp_size", 2),
        ("dcp_size", 2),
    ],
)
def test_what_goes_not_with_sglangs_unified_pool(
    name: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model(tmp_path, HYBRID)
    both = "--enable-unified-memory with --" + name.replace("_", "-")
    both += f" {value}" if value == "NGRAM" else ""
    assert choose_backend(flags(path, enable_unified_memory=True), asked("reuse")) == OURS
    assert choose_backend(flags(path, **{name: value}), asked("reuse")) == OURS
    given = flags(path, enable_unified_memory=True, **{name: value})
    assert choose_backend(given, HybridConfig()) == []
    assert f"{both} is served by SGLang's own prefix cache" in capsys.readouterr().out
    with pytest.raises(StartupError, match=f"^{both} cannot be combined"):
        choose_backend(given, asked("reuse"))


def test_one_pool_and_two_contradict_each_other(tmp_path: Path) -> None:
    given = flags(model(tmp_path, HYBRID), enable_unified_memory=True)
    with pytest.raises(StartupError, match="--hybrid-memory split contradict each other"):
        choose_backend(given, HybridConfig(hybrid_memory=Memory.SPLIT))
    assert choose_backend(given, HybridConfig(hybrid_memory=Memory.ONE)) == OURS


def test_smaller_copies_need_a_cache_that_marks_them(tmp_path: Path) -> None:
    smaller = HybridConfig(hybrid_tier_codec=CodecChoice("int8"))
    with pytest.raises(StartupError, match="--hybrid-tier-codec int8 needs the hybrid cache"):
        choose_backend(flags(model(tmp_path, HYBRID)), smaller)
    with pytest.raises(StartupError, match="needs the hybrid cache"):
        choose_backend(flags(model(tmp_path, ATTENTION), enable_hierarchical_cache=True), smaller)


@pytest.mark.parametrize(
    ("name", "value"),
    [("hybrid_disk_folder", "/var/cache/x"), ("hybrid_disk_mb", 100), ("hybrid_warm_start", 64)],
)
def test_flags_of_the_disk_need_a_disk(name: str, value: Any) -> None:
    given = HybridConfig(**{name: value})
    said = f"^--{name.replace('_', '-')} {value} means nothing without"
    disk = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}
    check_disk(flags("m", **disk), given)
    for lack in ({"enable_hierarchical_cache": False}, {"hicache_storage_backend": None}):
        with pytest.raises(StartupError, match=said):
            check_disk(flags("m", **(disk | lack)), given)
        check_disk(flags("m", **(disk | lack)), HybridConfig())


@pytest.mark.parametrize("name", ["hybrid_disk_mb", "hybrid_warm_start"])
def test_a_shared_store_has_neither_budget_nor_files(name: str) -> None:
    tiers = flags("m", enable_hierarchical_cache=True, hicache_storage_backend="file")
    store = "mooncake://master:50051"
    check_disk(tiers, HybridConfig(hybrid_disk_folder=store))
    said = f"^--{name.replace('_', '-')} means nothing with .*{store}"
    with pytest.raises(StartupError, match=said):
        check_disk(tiers, HybridConfig(hybrid_disk_folder=store, **{name: 64}))


def test_a_storage_backend_below_no_host_is_said_to_do_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    alone = flags("m", hicache_storage_backend="file")
    check_disk(alone, HybridConfig())
    assert "file does nothing without --enable-hierarchical-cache" in capsys.readouterr().out
    alone.disaggregation_decode_enable_offload_kvcache = True
    check_disk(alone, HybridConfig())
    check_disk(flags("m", hicache_storage_backend=None), HybridConfig())
    assert capsys.readouterr().out == ""


def test_a_schedule_of_ours_asks_for_our_cache(tmp_path: Path) -> None:
    window = HybridConfig(hybrid_schedule=Schedule.WINDOW)
    path = model(tmp_path, ATTENTION)
    assert choose_backend(flags(path), window) == ["--radix-cache-backend", "hybrid"]
    with pytest.raises(StartupError, match=r"^--hybrid-schedule window .* --disable-radix-cache"):
        choose_backend(flags(path, disable_radix_cache=True), window)


@pytest.mark.parametrize(
    ("schedule", "asked_for", "policy"),
    [
        (Schedule.SGLANG, "lpm", None),
        (Schedule.WINDOW, "fcfs", "fcfs"),
        (Schedule.CAR, "fcfs", "fcfs"),
        (Schedule.LPM, "fcfs", "lpm"),
        (Schedule.LPM, "lpm", "lpm"),
        (Schedule.FCFS, "fcfs", "fcfs"),
    ],
)
def test_a_schedule_as_sglang_knows_it(
    tmp_path: Path, schedule: Schedule, asked_for: str, policy: str | None
) -> None:
    given = flags(model(tmp_path, HYBRID), schedule_policy=asked_for)
    wanted = [] if policy is None else ["--schedule-policy", policy]
    assert choose_schedule(given, HybridConfig(hybrid_schedule=schedule)) == wanted


def test_two_schedules_contradict_each_other(tmp_path: Path) -> None:
    given = flags(model(tmp_path, HYBRID), schedule_policy="lof")
    with pytest.raises(StartupError, match=r"^--hybrid-schedule window and --schedule-policy lof"):
        choose_schedule(given, HybridConfig(hybrid_schedule=Schedule.WINDOW))


@pytest.mark.parametrize(
    ("given", "policy", "said"),
    [
        ({"enable_hierarchical_cache": True}, "auto", "--enable-hierarchical-cache: what the devi"),
        ({"speculative_algorithm": "NGRAM"}, "auto", "--speculative-algorithm: the KV of drafts"),
        ({}, "sglang-lru", "needs a --hybrid-eviction of its own"),
    ],
)
def test_what_entries_cannot_be_coded_beside(
    given: dict[str, Any], policy: str, said: str, tmp_path: Path
) -> None:
    config = model(tmp_path, HYBRID)
    coded = HybridConfig(hybrid_eviction=Eviction(policy), hybrid_device_codec=CodecChoice("int8"))
    with pytest.raises(StartupError, match=f"--hybrid-device-codec int8 .*{said}"):
        choose_backend(flags(config, **given), coded)
    if given:
        choose_backend(flags(config, **given), asked(policy))


def test_entries_can_be_coded_where_our_cache_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    coded = HybridConfig(hybrid_device_codec=CodecChoice("int8"))
    assert choose_backend(flags(model(tmp_path, HYBRID)), coded) == OURS
    assert choose_backend(flags(model(tmp_path, ATTENTION)), coded) == []
    assert "--hybrid-device-codec int8 does nothing without" in capsys.readouterr().out
