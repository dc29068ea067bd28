"""What `explain/` asks of the cache that it explains."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from sglang_hybrid.core.records.nodes import Clock, Node
from sglang_hybrid.core.returns.history import HistoryMatch
from sglang_hybrid.core.victims.pool import Pool

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.checkpoints.message_boundaries import MessageBoundaries
    from sglang_hybrid.core.costs.cost import CostModel
    from sglang_hybrid.core.memory.account import MemoryAccount
    from sglang_hybrid.core.tiers.places import Way
    from sglang_hybrid.serving.config import HybridConfig


class Records(Protocol):
    """The records of a tree's nodes. asked: the pool that chose the last victim; None before the
    first one.
    """

    clock: Clock
    asked: Pool | None

    def record(self, node: UnifiedTreeNode) -> Node: ...

    def match_history(self, prompt: array[int], tenant: Hashable = None) -> HistoryMatch | None: ...


class Ways(Protocol):
    """How a cache with tiers reaches a point that is stored."""

    def of_node(self, node: UnifiedTreeNode, prompt_len: int) -> tuple[Way, Way, Way]: ...


class ExplainedCache(Protocol):
    """A cache whose decisions are recorded and whose misses are explained. shadow_tree: None where
    SGLang's own order decides what is evicted. ways: None without tiers.
    """

    @property
    def shadow_tree(self) -> Records | None: ...

    @property
    def policy_name(self) -> str: ...

    @property
    def page_size(self) -> int: ...

    @property
    def message_boundaries(self) -> MessageBoundaries: ...

    @property
    def ways(self) -> Ways | None: ...

    @property
    def plans_checkpoints(self) -> bool: ...

    options: HybridConfig
    unplanned: str
    account: MemoryAccount | None
    cost: CostModel
    disable: bool
    components: Mapping[ComponentType, Any]
    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any
    is_mamba_enabled: bool
    tree_core: Any


def grid(cache: Any) -> int:
    """Tokens between the states that SGLang tracks in a cache with states."""
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    return int(cache.components[ComponentType.MAMBA].mamba_checkpoint_grid)
