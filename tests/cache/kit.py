"""Our backend where SGLang's kit for its unified radix cache builds its own."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.mem_cache.unified_cache import tree_core_registry
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.unified_tree_core_inspector import (
    UnifiedTreeCoreInspector,
)

from sglang_hybrid.cache.radix_cache import HybridRadixCache
from sglang_hybrid.cache.tree.tree_core import HybridTreeCore
from sglang_hybrid.serving.config import BACKEND
from tests.cache.backends import COST, options


class HybridInspector(HybridTreeCore, UnifiedTreeCoreInspector):
    """Our tree with the kit's windows into it."""


def _inspected(params: Any, components: Any) -> HybridInspector:
    return HybridInspector(params, components, next(iter(components.values())).cache.shadow_tree)


def use_policy(
    monkeypatch: pytest.MonkeyPatch, policy: str | None, admission: str = "judicious"
) -> None:
    """Have the kit build `HybridRadixCache` under `policy`, or SGLang's own cache for None."""

    def build(params: Any) -> UnifiedRadixCache:
        return HybridRadixCache(params, options(policy, admission), COST)

    if policy is None:
        return
    monkeypatch.setattr(fixtures, "UnifiedRadixCache", build)
    monkeypatch.setitem(tree_core_registry._TREE_CORE_REGISTRY, BACKEND, _inspected)
    if policy != "sglang-lru":  # there SGLang's own tree does
        monkeypatch.setattr(fixtures, "TREE_CORE_TEST_BACKEND", BACKEND)
