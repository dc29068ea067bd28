"""The number of random examples that a test runs: few in every run of the quick suite, which draws
others each time, and a hundred times as many with SGLANG_HYBRID_DEEP=1.
"""

from __future__ import annotations

import os

from hypothesis import settings

DEEP = 100 if os.environ.get("SGLANG_HYBRID_DEEP") else 1


def examples(number: int) -> settings:
    """Settings of a test that runs so many examples of hypothesis."""
    return settings(max_examples=number * DEEP, deadline=None)


def seeds(number: int) -> range:
    """Seeds of a test that runs so many examples of its own."""
    return range(number * DEEP)
