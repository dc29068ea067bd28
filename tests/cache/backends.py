"""Options and costs that cache tests and benchmarks share."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import Admission, Eviction
from sglang_hybrid.storage.codecs import in_use
from sglang_hybrid.storage.codecs.codecs import Codec
from sglang_hybrid.storage.codecs.coded_rows import CodecPlan

POLICIES = ("reuse", "marconi", "sglang-lru", "seglen", "gdsf")

COST = CostModel(linear=1_000, quadratic=3, windows=(), kv_bytes_per_token=8, state_bytes=4_096)
"""A hit twice as long saves more than twice the work."""


def options(policy: str, admission: str = "judicious", **more: Any) -> HybridConfig:
    return HybridConfig(
        hybrid_eviction=Eviction(policy), hybrid_admission=Admission(admission), **more
    )


def match_prefix(cache: Any, tokens: list[int]) -> MatchResult:
    """A look-up that no request makes."""
    return cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))


@contextmanager
def coding(codec: Codec) -> Iterator[None]:
    """Caches that are built meanwhile keep entries coded by `codec` on the device."""
    in_use.set_codecs(CodecPlan(), CodecPlan.uniform(codec))
    try:
        yield
    finally:
        in_use.set_codecs(CodecPlan())
