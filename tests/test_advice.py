"""What is advised at start, and that a setting without a flaw gets no advice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_hybrid.advice import ServerSetup, advise
from sglang_hybrid.backend import choose_backend
from sglang_hybrid.config import HybridConfig
from tests.test_backend import flags

DEFAULT = ServerSetup(
    slots=512,
    held=1,
    counted=3,
    running=16,
    asked=16,
    kv_tokens=131_072,
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
            ["let 13 requests", "instead of 48", "--max-mamba-cache-size to 144."],
        ),
        # each of 16 requests holds one of 24 slots
        (
            {"slots": 24, "running": 16},
            ["leave 8 for", "--max-mamba-cache-size to 32", "--max-running-requests to 12."],
        ),
        ({"slots": 16, "running": 16}, ["hold 16 of the 16", "leave 0"]),
        ({"slots": 1, "running": 1, "asked": 1}, ["leave 0", "--max-mamba-cache-size to 2."]),
        # the extra buffer: three slots each
        ({"slots": 60, "held": 3}, ["hold 48 of the 60", "leave 12", "to 64", "to 15."]),
        # 16 free slots for a million tokens; 16 + 1,048 slots are 1,000 tokens for each
        (
            {"slots": 32, "kv_tokens": 1_048_576},
            ["65,536 for each", "--max-mamba-cache-size to 1,064", "--max-total-tokens to 16,000"],
        ),
        # no request reaches farther than 200 tokens, so no checkpoint stands for more
        ({"context": 200}, ["264 for each", "slots run out"]),
        (
            {"kv_tokens": 4_000},
            ["8 for each", "--max-total-tokens to 496,000", "--max-mamba-cache-size to 32."],
        ),
        ({"planned": False}, ["where prompts branch", "strategy extra_buffer"]),
        (
            {"planned": False, "no_buffer_asked": True},
            ["leave out --mamba-radix-cache-strategy no_buffer"],
        ),
        (
            {"planned": False, "all_admitted": True, "no_buffer_asked": True},
            ["--hybrid-admission judicious"],
        ),
        (
            {"page_size": 16, "held": 3, "no_buffer": False},
            ["pages of 16 tokens", "up to 15", "use --page-size 1."],
        ),
        ({"page_size": 64, "pages_needed": True}, ["--attention-backend without pages"]),
        (
            {"tuner_workers": 2, "pinned": "--hybrid-eviction lru"},
            ["--hybrid-tuner-workers 2 does nothing beside --hybrid-eviction lru", "leave out one"],
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


def test_what_is_advised_mends_it() -> None:
    for bad, good in (
        ({"slots": 40, "running": 13, "asked": 48}, {"slots": 144, "running": 48, "asked": 48}),
        ({"slots": 24}, {"slots": 32}),
        ({"slots": 24}, {"slots": 24, "running": 12, "asked": 12, "kv_tokens": 65_536}),
        ({"slots": 32, "kv_tokens": 1_048_576}, {"slots": 1_064, "kv_tokens": 1_048_576}),
        ({"slots": 32, "kv_tokens": 1_048_576}, {"slots": 32, "kv_tokens": 16_000}),
        ({"kv_tokens": 4_000}, {"kv_tokens": 496_000}),
        ({"kv_tokens": 4_000}, {"kv_tokens": 4_000, "slots": 32}),
    ):
        assert advise(replace(DEFAULT, **bad)) != []
        assert advise(replace(DEFAULT, **good)) == []


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
