"""Advice at the start, of which a setting without a flaw gets none."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.serving.advice import ServerSetup, advise, page_warnings
from sglang_hybrid.serving.backend import choose_backend
from sglang_hybrid.serving.config import HybridConfig
from tests.serving.test_backend import flags

DEFAULT = ServerSetup(
    slots=512,
    held=1,
    counted=3,
    running=16,
    asked=16,
    kv_tokens=131_072,
    state_bytes=100_000,
    kv_bytes=512,
    kv_costs=True,
    one_memory=False,
    context=8_192,
    page_size=1,
    pages_needed=False,
    planned=True,
    all_admitted=False,
    no_buffer=True,
    no_buffer_asked=False,
)
"""The embedded model on a CPU, without any flag."""


def test_the_defaults_get_no_advice() -> None:
    assert advise(DEFAULT) == []


def test_one_memory_has_no_balance() -> None:
    """Pools that would run out one before the other share their bytes."""
    unbalanced = replace(DEFAULT, slots=16, kv_tokens=1_000_000)
    assert advise(unbalanced)
    assert advise(replace(unbalanced, one_memory=True)) == []


def test_an_accelerators_defaults_get_no_advice() -> None:
    """An 8B hybrid on 80 GB: states of 100 MB beside KV of 16 KB a token, shared 0.9 to 1."""
    pools = replace(DEFAULT, slots=280, running=93, asked=None, kv_tokens=1_900_000)
    assert advise(replace(pools, context=131_072)) == []


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        # 40 // 3 run, not 48
        (
            {"slots": 40, "running": 13, "asked": 48},
            [
                *("let 13 requests", "instead of 48", "--max-mamba-cache-size to 144, which"),
                "for 110,759 KV tokens, or lower --max-running-requests to 13.",
            ],
        ),
        # each of 16 requests holds one of 24 slots
        (
            {"slots": 24, "running": 16},
            ["leave 8 for", "--max-mamba-cache-size to 32,", "--max-running-requests to 12."],
        ),
        ({"slots": 16, "running": 16}, ["hold 16 of the 16", "leave 0"]),
        ({"slots": 1, "running": 1, "asked": 1}, ["leave 0", "--max-mamba-cache-size to 2,"]),
        # the extra buffer: three slots each
        ({"slots": 60, "held": 3}, ["hold 48 of the 60", "leave 12", "to 64,", "to 15."]),
        # more slots than the memory has room for are no advice
        (
            {"slots": 24, "running": 16, "state_bytes": 10**9},
            ["leave 8 for", "less than one for each; lower --max-running-requests to 12."],
        ),
        # 16 free slots for a million tokens; 16 + 879 slots are 1,000 tokens for each
        (
            {"slots": 32, "kv_tokens": 1_048_576},
            ["65,536 for each", "--max-mamba-cache-size 895 with --max-total-tokens 879,000,"],
        ),
        # SGLang divides the flag among the ranks of DP attention
        (
            {"slots": 32, "kv_tokens": 1_048_576, "shards": 4},
            ["65,536 for each", "--max-mamba-cache-size 3,580 with --max-total-tokens 879,000,"],
        ),
        # no request reaches farther than 200 tokens, so no checkpoint stands for more
        ({"context": 200}, ["264 for each", "slots run out"]),
        (
            {"kv_tokens": 4_000},
            ["8 for each", "--max-mamba-cache-size 100 with --max-total-tokens 84,000,"],
        ),
        ({"planned": False}, ["where prompts branch", "strategy extra_buffer"]),
        (
            {"planned": False, "no_buffer_asked": True},
            ["leave out --mamba-radix-cache-strategy no_buffer"],
        ),
        (
            {
                **{"planned": False, "unplanned": "two-batch overlap"},
                **{"no_buffer": False, "grid": 64},
            },
            ["with two-batch overlap states are", "grid of 64 tokens", "up to 63 tokens early"],
        ),
        (
            {"planned": False, "all_admitted": True, "no_buffer_asked": True},
            ["--hybrid-admission judicious"],
        ),
        (
            {"page_size": 16, "held": 3, "no_buffer": False},
            [
                *("pages of 16 tokens", "up to 15", "holds 3 state slots instead of 1; use"),
                "--page-size 1.",
            ],
        ),
        ({"page_size": 64, "pages_needed": True}, ["--attention-backend without pages"]),
        (
            {"tuner_workers": 2, "pinned": "--hybrid-eviction lru"},
            ["--hybrid-tuner-workers 2 does nothing beside --hybrid-eviction lru", "leave out one"],
        ),
        (
            {"sent_by": "total_tokens"},
            ["--load-balance-method total_tokens sends prompts to any rank", "leave it out"],
        ),
        # a transformer behind a policy that was asked for
        ({"slots": 0, "page_size": 16, "planned": False}, ["pages of 16 tokens"]),
    ],
)
def test_one_line_says_what_is_wrong_and_what_mends_it(
    changes: dict[str, int], parts: list[str]
) -> None:
    (line,) = advise(replace(DEFAULT, **changes))
    for part in parts:
        assert part in line
    assert "\n" not in line and line.endswith(".")


FLAGS = {
    "slots": r"--max-mamba-cache-size (?:to )?([\d,]+)",
    "kv_tokens": r"--max-total-tokens (?:to )?([\d,]+)",
    "asked": r"--max-running-requests (?:to )?([\d,]+)",
}


def followed(it: ServerSetup, mend: str) -> ServerSetup:
    """The setup of a server with the flags of one sentence: KV gets the memory that is left."""
    found = {name: re.search(flag, mend) for name, flag in FLAGS.items()}
    flags = {name: int(match[1].replace(",", "")) for name, match in found.items() if match}
    assert flags, mend
    slots = flags.get("slots", it.slots)
    most = (it.bytes - slots * it.state_bytes) // it.kv_bytes
    asked = flags.get("asked", it.asked)
    return replace(
        it,
        slots=slots,
        kv_tokens=min(most, flags.get("kv_tokens", most)),
        asked=asked,
        running=min(slots // it.counted, asked or slots),
    )


@settings(max_examples=300)
@given(
    slots=st.integers(1, 3_000),
    kv_tokens=st.integers(1_000, 8_000_000),
    state_bytes=st.sampled_from([200_000, 51_500_000, 102_100_000, 152_800_000]),
    kv_bytes=st.sampled_from([512, 16_384, 65_536]),
    context=st.sampled_from([200, 8_192, 131_072]),
    holds=st.sampled_from([(1, 3), (3, 5)]),
    asked=st.sampled_from([None, 1, 16, 48, 256]),
)
def test_what_is_advised_fits_into_the_memory_and_mends_it(
    holds: tuple[int, int], asked: int | None, slots: int, **sizes: int
) -> None:
    held, counted = holds
    running = min(slots // counted, asked or slots)
    if not running:
        return  # SGLang refuses to start
    setup = {"held": held, "counted": counted, "running": running, "asked": asked, "slots": slots}
    it = replace(DEFAULT, **setup, **sizes)
    for line in advise(it):
        about, _, mends = line.partition("; ")
        for mend in mends.split(", or "):
            better = followed(it, mend)
            assert better.slots * it.state_bytes + better.kv_tokens * it.kv_bytes <= it.bytes
            assert better.kv_tokens > 0, mend
            kind = re.sub(r"[\d,]+", "", about).split(" state slots")[-1]
            again = [other for other in advise(better) if kind in re.sub(r"[\d,]+", "", other)]
            long = better.kv_tokens <= it.context  # the longest request needs all the KV
            assert again == [] or long, (mend, again)


def test_several_flaws_are_several_lines() -> None:
    lines = advise(replace(DEFAULT, slots=20, page_size=16, planned=False))
    assert len(lines) == 3


def test_kv_that_costs_nothing_may_be_left_over() -> None:
    """A model without any attention layer."""
    assert advise(replace(DEFAULT, slots=32, kv_tokens=1_048_576, kv_costs=False)) == []


def test_a_cache_that_is_off_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert choose_backend(flags("m", disable_radix_cache=True), HybridConfig()) == []
    assert "leave out --disable-radix-cache" in capsys.readouterr().out
    choose_backend(flags("m"), HybridConfig())
    assert capsys.readouterr().out == ""


def test_a_page_without_the_admin_key_is_warned_of() -> None:
    (line,) = page_warnings(None, None)
    assert "everybody" in line and line.endswith("--admin-api-key.")
    (line,) = page_warnings("key", None)
    assert "API key" in line
    assert page_warnings("key", "admin") == page_warnings(None, "admin") == []
