"""The worth of a copy in a lower tier before it is written, and the cost of writing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.nodes import Clock, Node
from sglang_hybrid.core.tiers.places import (
    ALL_TIERS,
    Placement,
    copies_of,
    slower_tiers,
    was_refused,
)
from sglang_hybrid.core.tiers.rates import Speeds, Tier
from sglang_hybrid.core.tiers.tier_pool import SpeedsInForce, TierPool
from sglang_hybrid.core.victims.pool import Scarce

WRITE_PRICE = 0.1
"""Seconds that others lose for each second of writing to a lower tier. Writing goes on beside the
prefill, so it costs only what it takes from loads and kernels that want the same link or memory.
Replayed, a tenth halves the bytes that are written where most requests are cold, and costs no hits;
the whole second costs up to 5 percent of the hits (docs/benchmarks.md)."""


def mark_refused(node: Node) -> None:
    """Note that a copy of `node` below the device was not worth its writing."""
    copies_of(node).refused = node.last_used


def copy_savings(
    node: Node, tier: Tier, cost: CostModel, speeds: Speeds, counted: int = ALL_TIERS
) -> float:
    """Seconds that copies in `tier` of the state of `node` and of the KV on the path to it save a
    request that returns to `node` after faster tiers have evicted both. They are compared with
    resuming from the next state above that `tier` or a slower one has. Below 0 where computing is
    faster than loading. counted: a mask of tiers; states in others are left out.
    """
    anchor = 0
    above = node.parent
    while above is not None and above.parent is not None:
        if slower_tiers(copies_of(above).state & counted, Tier(tier - 1)):
            anchor = above.depth
            break
        above = above.parent
    computed = speeds.compute(cost.savings(node.depth, anchor))
    loaded = cost.bytes_in(tier, node.depth - anchor, 1)
    return computed - speeds.loads[tier].seconds(loaded)


def write_pays(size: int, saves: float, returns: float, tier: Tier, speeds: Speeds) -> bool:
    """True if a copy of `size` bytes is worth its writing to `tier`: it saves `saves` seconds for
    each of `returns` expected returns, and costs WRITE_PRICE of the seconds of its transfer.
    """
    return returns * saves > WRITE_PRICE * speeds.writes[tier].seconds(size)


class HostPools(Protocol):
    """The pools of KV and of states on the host of a server. They are other objects after another
    policy has come into force.

    has_states: False for a model without recurrent state; its nodes are resumed from by their KV.
    """

    cost: CostModel
    has_states: bool

    @property
    def speeds(self) -> SpeedsInForce: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def placement(self) -> Placement: ...
    @property
    def host_kv_pool(self) -> TierPool: ...
    @property
    def host_state_pool(self) -> TierPool: ...


class CopyJudge:
    """Decides for the cache of a server, running or replayed, what is copied to the host.

    How likely a copy serves a return is what the reuse index says of its class and age. Policies
    without an index know only how many returns copies have served on average.

    Args:
        pools: of the host.
        room: free tokens (KV) or states (STATES) of the host's pool of a kind.
        average_returns: requests that resumed from the host for each copy that was left there.
    """

    def __init__(
        self,
        pools: HostPools,
        room: Callable[[Scarce], int],
        average_returns: Callable[[], float],
    ) -> None:
        self._pools = pools
        self._room = room
        self._average_returns = average_returns

    def can_judge(self, node: Node, uses: int, least_uses: int) -> bool:
        """True if `accepts` is to be asked of `node`, which `uses` requests have passed: not if KV
        that the host lacks was passed by fewer than `least_uses`, nor if a copy was refused since
        the last use.
        """
        seldom = not copies_of(node).has_kv(Tier.HOST) and uses < least_uses
        return not seldom and not was_refused(node)

    def accepts(self, node: Node) -> bool:
        """True if `node` should be copied, with the KV that it needs above it. If not, that is
        noted: `can_judge` is False until the next use.

        Where nothing can be resumed from `node`, its KV is copied only with something below.
        """
        copies = copies_of(node)
        if copies.kv_children[Tier.HOST] and not copies.has_kv(Tier.HOST):
            return True  # what the host has below it would be lost
        resumable = copies.has_state(Tier.DEVICE) or not self._pools.has_states
        if resumable and self.is_resume_worth(node):
            return True
        mark_refused(node)
        return False

    def is_resume_worth(self, node: Node) -> bool:
        """True if what is resumed from at `node`, its state or without states its KV, should be
        copied, with what the host lacks of the path to it.
        """
        return self._pays(node) and self._is_worth_host_room(node)

    def _pays(self, node: Node) -> bool:
        pools, speeds = self._pools, self._pools.speeds.speeds
        returns = pools.host_state_pool.policy.return_probability(node, pools.clock)
        if returns is None:
            returns = self._average_returns()
        counted = pools.host_state_pool.counted
        saves = copy_savings(node, Tier.HOST, pools.cost, speeds, counted)
        return write_pays(self._missing(node), saves, returns, Tier.HOST, speeds)

    def _is_worth_host_room(self, node: Node) -> bool:
        """True if there is room for the copy, or it is worth more than those it would replace; not
        if the path to it is longer than the host, which would be emptied in vain.
        """
        pools, cost = self._pools, self._pools.cost
        if node.depth > self._room(Scarce.KV) + pools.placement.kv_tokens[Tier.HOST]:
            return False
        kinds = [
            (Scarce.KV, pools.host_kv_pool, missing_tokens(node), cost.kv_bytes_per_token),
            (Scarce.STATES, pools.host_state_pool, int(pools.has_states), cost.state_bytes),
        ]
        for kind, pool, needed, size in kinds:
            lacking = needed - self._room(kind) if needed else 0
            if lacking <= 0:
                continue
            if not pool.outranks_pushed_out(node, lacking * size):
                return False
        return True

    def _missing(self, node: Node) -> int:
        """Bytes that the host has not, of the path to `node` and of its state."""
        cost = self._pools.cost
        state = 0 if copies_of(node).has_state(Tier.HOST) else cost.state_bytes
        return missing_tokens(node) * cost.kv_bytes_per_token + state


LEAST_RETURNS = 0.05
"""Returns that a copy is expected to serve at least: one that is not made cannot show its use."""

COPIES_REMEMBERED = 1_024
"""Copies after which what earlier ones served counts half."""


class AverageReturns:
    """Requests that resumed from the host for each state that the device evicted and the host kept.
    Old ones count less and less; both begin at one.

    Args:
        totals: how many such requests and such states there ever were.
    """

    def __init__(self, totals: Callable[[], tuple[int, int]]) -> None:
        self._totals = totals
        self._counted = (0, 0)
        self._loads = self._kept = 1.0

    def now(self) -> float:
        """The average returns of the latest states."""
        loads, kept = self._totals()
        self._loads += loads - self._counted[0]
        self._kept += kept - self._counted[1]
        self._counted = loads, kept
        while self._kept >= 2 * COPIES_REMEMBERED:
            self._loads /= 2
            self._kept /= 2
        return max(LEAST_RETURNS, self._loads / self._kept)


def missing_tokens(node: Node) -> int:
    """Tokens of the path to `node` whose KV the host has not."""
    tokens = 0
    above: Node | None = node
    while above is not None and above.parent is not None:
        if copies_of(above).has_kv(Tier.HOST):
            break
        tokens += above.tokens
        above = above.parent
    return tokens
