"""Our flags: defaults, checks, and the way through the environment."""

from __future__ import annotations

import argparse

import pytest

from sglang_hybrid.serving.config import Admission, Eviction, HybridConfig, Schedule
from sglang_hybrid.serving.flag_values import TIER_CODECS


def parse(*argv: str) -> HybridConfig:
    return HybridConfig.split(argv)[0]


def test_auto_is_the_reuse_index() -> None:
    assert HybridConfig().hybrid_eviction is Eviction.AUTO
    assert HybridConfig().policy is Eviction.REUSE
    assert HybridConfig().alpha is None


def test_alpha_belongs_to_marconi() -> None:
    assert parse("--hybrid-eviction", "marconi", "--hybrid-alpha", "0.5").alpha == 0.5


def test_an_alpha_pins_marconi() -> None:
    config = parse("--hybrid-alpha", "0.7")
    assert (config.policy, config.alpha, config.pinned) == (Eviction.MARCONI, 0.7, True)
    auto = parse("--hybrid-eviction", "marconi", "--hybrid-alpha", "auto")
    assert (auto.alpha, auto.pinned) == (1.0, True)


def test_what_is_not_pinned_is_tuned() -> None:
    workers = ("--hybrid-tuner-workers", "1")
    assert parse(*workers).tuned and parse(*workers, "--hybrid-alpha", "auto").tuned
    assert not parse().tuned
    assert not parse(*workers, "--hybrid-eviction", "reuse").tuned
    assert not parse(*workers, "--hybrid-alpha", "0").tuned


def test_marconi_without_an_alpha_is_tuned_from_0_on() -> None:
    tuned = parse("--hybrid-tuner-workers", "1", "--hybrid-eviction", "marconi")
    assert (tuned.policy, tuned.alpha, tuned.tuned) == (Eviction.MARCONI, 0.0, True)
    assert parse("--hybrid-eviction", "marconi").alpha == 1.0


def test_our_flags_are_taken_and_the_rest_is_sglangs() -> None:
    config, rest = HybridConfig.split(
        ["--model-path", "m", "--hybrid-admission", "all", "--hybrid-min-branch-tokens=3", "--x"]
    )
    assert config.hybrid_admission is Admission.ALL
    assert config.hybrid_min_branch_tokens == 3
    assert rest == ["--model-path", "m", "--x"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--hybrid-alpha", "-1"],
        ["--hybrid-alpha", "nan"],
        ["--hybrid-alpha", "inf"],
        ["--hybrid-alpha", "much"],
        ["--hybrid-eviction", "fifo"],
        ["--hybrid-admission", "some"],
        ["--hybrid-min-branch-tokens", "-3"],
        ["--hybrid-min-branch-tokens", "1.5"],
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
    assert argv[0] in said and argv[1] in said


def test_everything_survives_the_environment() -> None:
    config = parse(
        *("--hybrid-eviction", "marconi", "--hybrid-alpha", "0.125"),
        *("--hybrid-admission", "all", "--hybrid-min-branch-tokens", "7"),
        *("--hybrid-tuner-window", "9", "--hybrid-record", "a b.jsonl"),
    )
    environment = {"PATH": "/bin"}
    config.to_environment(environment)
    assert environment["SGLANG_HYBRID_EVICTION"] == "marconi"
    assert HybridConfig.from_environment(environment) == config


def test_an_empty_environment_means_defaults() -> None:
    assert HybridConfig.from_environment({}) == HybridConfig()
    environment: dict[str, str] = {}
    HybridConfig().to_environment(environment)
    assert HybridConfig.from_environment(environment) == HybridConfig()


@pytest.mark.parametrize(
    "name, value", [("SGLANG_HYBRID_ALPHA", "-1"), ("SGLANG_HYBRID_EVICTION", "fifo")]
)
def test_a_bad_value_in_the_environment_is_one_sentence(name: str, value: str) -> None:
    with pytest.raises(ValueError) as caught:
        HybridConfig.from_environment({name: value})
    assert value in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("policy", ["lru", "sglang-lru", "reuse", "gdsf", "seglen"])
def test_an_alpha_that_means_nothing_is_refused(policy: str) -> None:
    said = rf"--hybrid-alpha 0.7 belongs to --hybrid-eviction marconi .* {policy}"
    with pytest.raises(ValueError, match=said):
        parse("--hybrid-eviction", policy, "--hybrid-alpha", "0.7")
    with pytest.raises(ValueError, match=said):
        HybridConfig.from_environment(
            {"SGLANG_HYBRID_EVICTION": policy, "SGLANG_HYBRID_ALPHA": "0.7"}
        )
    assert parse("--hybrid-eviction", policy, "--hybrid-alpha", "auto").alpha is None


def test_codecs_are_those_of_the_tiers() -> None:
    from sglang_hybrid.storage.codecs.codecs import Codec

    assert tuple(codec.value for codec in Codec) == TIER_CODECS


def test_a_window_has_room_for_a_request() -> None:
    assert parse("--hybrid-schedule", "window").hybrid_schedule is Schedule.WINDOW
    with pytest.raises(ValueError, match="--hybrid-schedule-window 0 leaves nothing to choose"):
        parse("--hybrid-schedule-window", "0")


def test_variables_that_say_something_else_are_found() -> None:
    environment = {"SGLANG_HYBRID_EVICTION": "marconi", "SGLANG_HYBRID_ADMISSION": "judicious"}
    assert parse().overrides({"PATH": "/bin"}) == []
    assert parse().overrides(environment) == ["SGLANG_HYBRID_EVICTION"]
    assert parse("--hybrid-eviction", "marconi").overrides(environment) == []
