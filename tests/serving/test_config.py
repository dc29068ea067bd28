"""Our flags: defaults, checks, and the way through the environment."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace

import pytest

from sglang_hybrid.serving.config import PARTS, VARIABLES, HybridConfig
from sglang_hybrid.serving.flag_values import (
    SMALLER_CODECS,
    Admission,
    CodecChoice,
    Eviction,
    Schedule,
    flag_name,
)


def parse(*argv: str) -> HybridConfig:
    return HybridConfig.split(argv)[0]


def test_auto_is_the_reuse_index() -> None:
    assert HybridConfig().hybrid_eviction is Eviction.AUTO
    assert HybridConfig().policy is Eviction.REUSE
    assert HybridConfig().alpha is None


def test_an_alpha_pins_marconi() -> None:
    config = parse("--hybrid-eviction", "marconi:0.7")
    assert (config.policy, config.alpha, config.is_pinned) == (Eviction.MARCONI, 0.7, True)
    assert config.pinning_flag == "--hybrid-eviction marconi:0.7"
    auto = parse("--hybrid-eviction", "marconi:auto")
    assert (auto.alpha, auto.is_pinned) == (1.0, True)


def test_an_order_has_options() -> None:
    config = parse("--hybrid-schedule", "car:size=32,seconds=1.5")
    assert config.hybrid_schedule is Schedule.CAR
    assert (config.hybrid_schedule_window, config.hybrid_schedule_seconds) == (32, 1.5)
    assert config.hybrid_schedule_overtaken == HybridConfig().hybrid_schedule_overtaken


def test_a_codec_follows_from_a_bound_on_the_error() -> None:
    config = parse("--hybrid-tier-codec", "auto:0.01")
    assert config.hybrid_tier_codec == CodecChoice("exact", 0.01)
    assert config.smaller_copies == "--hybrid-tier-codec auto:0.01"


def test_what_is_not_pinned_is_tuned() -> None:
    workers = ("--hybrid-tuner-workers", "1")
    assert (
        parse(*workers).is_tuned and parse(*workers, "--hybrid-eviction", "marconi:auto").is_tuned
    )
    assert not parse().is_tuned
    assert not parse(*workers, "--hybrid-eviction", "reuse").is_tuned
    assert not parse(*workers, "--hybrid-eviction", "marconi:0").is_tuned


def test_marconi_without_an_alpha_is_tuned_from_0_on() -> None:
    tuned = parse("--hybrid-tuner-workers", "1", "--hybrid-eviction", "marconi")
    assert (tuned.policy, tuned.alpha, tuned.is_tuned) == (Eviction.MARCONI, 0.0, True)
    assert parse("--hybrid-eviction", "marconi").alpha == 1.0


def test_our_flags_are_taken_and_the_rest_is_sglangs() -> None:
    config, rest = HybridConfig.split(
        ["--model-path", "m", "--hybrid-admission", "all", "--hybrid-disk-mb=3", "--x"]
    )
    assert config.hybrid_admission is Admission.ALL
    assert config.hybrid_disk_mb == 3
    assert rest == ["--model-path", "m", "--x"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--hybrid-eviction", "marconi:-1"],
        ["--hybrid-eviction", "marconi:nan"],
        ["--hybrid-eviction", "marconi:inf"],
        ["--hybrid-eviction", "marconi:"],
        ["--hybrid-eviction", "lru:1"],
        ["--hybrid-eviction", "fifo"],
        ["--hybrid-eviction", "fifo:1"],
        ["--hybrid-schedule", "fifo"],
        ["--hybrid-schedule", "fcfs:size=3"],
        ["--hybrid-schedule", "window:length=3"],
        ["--hybrid-schedule", "window:size=some"],
        ["--hybrid-tier-codec", "int4"],
        ["--hybrid-tier-codec", "auto:little"],
        ["--hybrid-admission", "some"],
        ["--hybrid-disk-mb", "-3"],
    ],
)
def test_a_bad_value_is_named_in_one_sentence(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser(prog="launch_server")
    HybridConfig.add_flags(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(argv)
    said = capsys.readouterr().err.splitlines()[-1]
    assert argv[0] in said and argv[1].split(":")[-1].split("=")[-1] in said


def test_everything_survives_the_environment() -> None:
    config = parse(
        *("--hybrid-eviction", "marconi:0.125", "--hybrid-schedule", "car:size=9,seconds=0.5"),
        *("--hybrid-admission", "all", "--hybrid-tier-codec", "auto:0.01"),
        *("--hybrid-record", "a b.jsonl"),
    )
    config = replace(config, hybrid_tuner_window=9)
    environment = {"PATH": "/bin"}
    config.to_environment(environment)
    assert environment["SGLANG_HYBRID_EVICTION"] == "marconi:0.125"
    assert HybridConfig.from_environment(environment) == config


def test_an_empty_environment_means_defaults() -> None:
    assert HybridConfig.from_environment({}) == HybridConfig()
    environment: dict[str, str] = {}
    HybridConfig().to_environment(environment)
    assert HybridConfig.from_environment(environment) == HybridConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SGLANG_HYBRID_EVICTION", "fifo"),
        ("SGLANG_HYBRID_MIN_BRANCH_TOKENS", "1.5"),
        ("SGLANG_HYBRID_NATIVE_KERNELS", "on"),
    ],
)
def test_a_bad_value_in_the_environment_is_one_sentence(name: str, value: str) -> None:
    with pytest.raises(ValueError) as caught:
        HybridConfig.from_environment({name: value})
    assert value in str(caught.value) and "\n" not in str(caught.value)


def test_codecs_are_those_of_the_tiers() -> None:
    from sglang_hybrid.storage.codecs.codecs import Codec

    assert {codec.value for codec in Codec} == {"exact", *SMALLER_CODECS}


def test_a_window_has_room_for_a_request() -> None:
    assert parse("--hybrid-schedule", "window").hybrid_schedule is Schedule.WINDOW
    with pytest.raises(ValueError, match="a window of 0 requests leaves nothing to choose"):
        parse("--hybrid-schedule", "window:size=0")


def test_variables_that_say_something_else_are_found() -> None:
    environment = {"SGLANG_HYBRID_EVICTION": "marconi", "SGLANG_HYBRID_ADMISSION": "judicious"}
    assert parse().overrides({"PATH": "/bin"}) == {}
    assert parse().overrides(environment) == {"SGLANG_HYBRID_EVICTION": "--hybrid-eviction"}
    assert parse("--hybrid-eviction", "marconi").overrides(environment) == {}
    assert parse().overrides({"SGLANG_HYBRID_DRAIN_SECONDS": "0"}) == {}, "the launcher reads it"


def visible(parser: argparse.ArgumentParser) -> list[str]:
    return [one.option_strings[0] for one in parser._actions if one.help != argparse.SUPPRESS]


def test_a_field_is_a_flag_or_a_variable_or_a_part_of_a_flag() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    HybridConfig.add_flags(parser)
    flags = set(visible(parser))
    assert not VARIABLES.keys() & PARTS
    no_flags = VARIABLES.keys() | PARTS
    for field in fields(HybridConfig):
        assert (flag_name(field.name) in flags) != (field.name in no_flags), field.name


def test_a_flag_goes_before_a_variable() -> None:
    environment = {"SGLANG_HYBRID_DRAIN_SECONDS": "5", "SGLANG_HYBRID_EVICTION": "lru"}
    config, _ = HybridConfig.split([], environment)
    assert (config.hybrid_drain_seconds, config.policy) == (5.0, Eviction.REUSE)
