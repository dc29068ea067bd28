"""Settings that are no flags: environment variables for measurements and tests, and old flags.

On no trace does another value of a variable gain a point (docs/tried.md), or only measurements set
it. A variable is called SGLANG_ and the name of its field of `HybridConfig` in capitals.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from sglang_hybrid.serving.flag_values import (
    NativeKernels,
    alpha,
    count,
    flag_name,
    links,
    nonnegative,
    one_of,
    share,
)

PREFIX = "SGLANG_"

VARIABLES: dict[str, Callable[[str], Any]] = {
    "hybrid_min_branch_tokens": count,
    "hybrid_slots_per_request": count,
    "hybrid_history_mb": count,
    "hybrid_answers_mb": count,
    "hybrid_drain_seconds": nonnegative,
    "hybrid_tuner_window": count,
    "hybrid_offload_watermark": share,
    "hybrid_simulate_bandwidth": links,
    "hybrid_native_kernels": one_of(NativeKernels),
}
"""By the field of `HybridConfig`, what reads the variable's text."""

PARTS: dict[str, tuple[Callable[[str], Any], str]] = {
    "hybrid_alpha": (alpha, "--hybrid-eviction marconi:{}"),
    "hybrid_schedule_window": (count, "--hybrid-schedule window:size={}"),
    "hybrid_schedule_overtaken": (count, "--hybrid-schedule window:overtaken={}"),
    "hybrid_schedule_seconds": (nonnegative, "--hybrid-schedule window:seconds={}"),
    "hybrid_tier_error": (nonnegative, "--hybrid-tier-codec auto:{}"),
}
"""Fields that another flag says now: what reads their text, and that flag for it."""


def variable(field: str) -> str:
    """The environment variable of a field."""
    return PREFIX + field.upper()


OLD_FLAGS: dict[str, str] = {
    **{field: f"{variable(field)}={{}} in the environment" for field in VARIABLES},
    **{field: becomes for field, (_, becomes) in PARTS.items()},
}
"""By an old flag's field, what replaces it, with {} for its value. They work for one release."""


def add_old_flags(parser: argparse.ArgumentParser) -> None:
    """Add the old flags, which `--help` does not show. One that is not given sets nothing."""
    for field in OLD_FLAGS:
        read = VARIABLES[field] if field in VARIABLES else PARTS[field][0]
        parser.add_argument(
            flag_name(field), type=read, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )


def old_flag_notes(argv: Sequence[str]) -> list[str]:
    """A sentence for each old flag of a command line, which says what replaces it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for field in OLD_FLAGS:
        parser.add_argument(flag_name(field), default=argparse.SUPPRESS)
    given = vars(parser.parse_known_args(list(argv))[0])
    return [
        f"{flag_name(field)} goes with the next release; "
        f"instead give {OLD_FLAGS[field].format(text)}."
        for field, text in given.items()
    ]
