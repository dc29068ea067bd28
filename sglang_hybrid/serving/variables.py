"""Settings that are no flags: environment variables that few will set.

On no trace does another value of a variable gain a point (docs/tried.md), or only measurements set
it, or few want another value. A variable is called SGLANG_ and the name of its field of
`HybridConfig` in capitals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_hybrid.serving.flag_values import (
    ClientLines,
    NativeKernels,
    count,
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
    "hybrid_client_lines": one_of(ClientLines),
}
"""By the field of `HybridConfig`, what reads the variable's text."""

PARTS: frozenset[str] = frozenset(
    (
        "hybrid_alpha",
        *("hybrid_schedule_window", "hybrid_schedule_overtaken", "hybrid_schedule_seconds"),
    )
)
"""Fields that the value of another flag sets, as `--hybrid-eviction marconi:0.7`."""


def variable(field: str) -> str:
    """The environment variable of a field."""
    return PREFIX + field.upper()
