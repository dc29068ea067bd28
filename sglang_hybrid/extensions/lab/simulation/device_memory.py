"""The content of a replayed cache on its device, and its evictions when the device runs short."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.coded_edges import CodedEdges
from sglang_hybrid.core.records.nodes import Clock, Node
from sglang_hybrid.core.server_settings import Budget, Split
from sglang_hybrid.core.victims.eviction import Policy
from sglang_hybrid.core.victims.pool import Pool, Scarce
from sglang_hybrid.extensions.lab.simulation.token_tree import TokenTree

AnyPool = TypeVar("AnyPool", bound=Pool)


class DeviceMemory:
    """Memory of `budget`: a number of bytes that KV and states share, two pools, or None, which is
    never short.

    pool, state_pool: candidates for eviction among KV and among states; one pool for both where
    they share all bytes. kv_in_use, slots_in_use: tokens and states of running requests that are
    not cached, but take room. has_evicted: whether anything was evicted so far.
    """

    def __init__(
        self, tree: TokenTree, cost: CostModel, budget: Budget, pools: tuple[Pool, Pool]
    ) -> None:
        self.tree = tree
        self.cost = cost
        self.budget = budget
        self.kv_in_use = 0
        self.slots_in_use = 0
        self.has_evicted = False
        self._kv = 0
        self._states = 0
        self._coded_states = 0
        self._coded: CodedEdges[range] | None = None
        if cost.coded:
            tree.codes = True
            per_slot = cost.kv_bytes_per_token // max(1, cost.coded[0])
            self._coded = tree.coded = CodedEdges(max(1, per_slot))
        self.pool, self.state_pool = pools
        for pool in dict.fromkeys(pools):
            tree.listen(pool)

    def use(self, pools: tuple[Pool, Pool]) -> None:
        """Choose victims from `pools` from now on, for KV and for states."""
        for pool in dict.fromkeys((self.pool, self.state_pool)):
            self.tree.unlisten(pool)
        self.pool, self.state_pool = pools
        for pool in dict.fromkeys(pools):
            self.tree.listen(pool)

    @property
    def kv_used(self) -> int:
        """Tokens of KV for which what is cached takes the room."""
        return self._kv + (0 if self._coded is None else self._coded.slots)

    @property
    def states_used(self) -> int:
        """States for which what is cached takes the room."""
        coded = self._coded_states
        if coded:
            coded = -(-coded * self.cost.state_bytes_of(coded=True) // self.cost.state_bytes)
        return self._states + coded

    @property
    def used(self) -> int:
        """Bytes that are cached or in use by running requests."""
        return self.bytes_of(self.kv_used + self.kv_in_use, self.states_used + self.slots_in_use)

    @property
    def free_states(self) -> int:
        """States for which there is room now, in a memory that has an end."""
        if isinstance(self.budget, Split):
            return self._free_slots(self.budget)
        assert self.budget is not None
        return (self.budget - self.used) // max(1, self.cost.state_bytes)

    def _free_slots(self, budget: Split) -> int:
        """Slots that a new state can have: free ones, and those of states that can be spilled."""
        states, kv = self.states_used + self.slots_in_use, self.kv_used + self.kv_in_use
        free = max(0, budget.slots - states)
        parked = max(0, kv - budget.kv_tokens)
        if parked and budget.parked:
            return free - -(-parked // budget.parked)
        if budget.spilled:
            room = min(budget.kv_tokens, _kv_room(budget, states)) - kv
            free += min(self.states_in_slots, room // budget.spilled)
        return free

    @property
    def states_in_slots(self) -> int:
        """States that are cached and have a slot, in pools of which states spill."""
        assert isinstance(self.budget, Split)
        return min(self.states_used, self.budget.slots - self.slots_in_use)

    def bytes_of(self, kv: int, states: int) -> int:
        """Bytes of so many tokens of KV and states."""
        return kv * self.cost.kv_bytes_per_token + states * self.cost.state_bytes

    def could_hold(self, kv: int, states: int) -> bool:
        """True if so many tokens and states fit if nothing else is there."""
        if isinstance(self.budget, Split):
            return kv <= self.budget.kv_tokens and states <= self.budget.slots
        return self.budget is None or self.bytes_of(kv, states) <= self.budget

    def short_of(self, kv: int, states: int) -> Pool | None:
        """The pool that must evict before so many tokens and states fit, None if they do."""
        if self.budget is None:
            return None
        if isinstance(self.budget, Split):
            states += self.slots_in_use
            if states + (0 if self.budget.spilled else self.states_used) > self.budget.slots:
                return self.state_pool
            kv += self.kv_used + self.kv_in_use
            room = _kv_room(self.budget, self.states_used + states)
            return self.pool if kv > room else None
        return self.pool if self.used + self.bytes_of(kv, states) > self.budget else None

    def make_room(self, kv: int, states: int, path: list[Node]) -> bool:
        """Evict until so many tokens and states fit; False if they cannot. `path` stays."""
        if self.short_of(kv, states) is None:
            return True
        if not self._could_fit(kv, states, path):
            return False
        at_risk = [node for node in path if node.has_state or node is path[-1]]
        held = [node for node in at_risk if not node.state_locked]
        for node in held:
            self.tree.lock(node, kv=True, state=True)
        while pool := self.short_of(kv, states):
            if not self.evict_one(pool):
                break
        for node in held:
            self.tree.lock(node, kv=False, state=False)
        return self.short_of(kv, states) is None

    def evict_one(self, pool: Pool, *, spare_forks: bool = True) -> bool:
        """Evict the next victim of `pool`; False if nothing may go. spare_forks: states with
        several children are evicted only where nothing else is left.
        """
        victim = pool.victim() if spare_forks else None
        victim = victim or pool.victim(last_resort=True)
        if victim is None:
            return False
        self.evict(pool, victim)
        return True

    def evict(self, pool: Pool, node: Node) -> None:
        """`node`, a victim of `pool`, is coded; if nothing of it can be, it gives up its state if
        it has children, and otherwise all.
        """
        coded = pool.codable(node)
        if coded is not None:
            for each in coded.kv:
                self.code_kv(each, True)
            if coded.state:
                self.code_state(node, True)
            return
        self.has_evicted = True
        if node.has_state:
            self._count_states(node.coded_state, -1)
        if node.children:
            self.tree.drop_state(node)
        else:
            if self._coded is not None and node.coded_kv:
                self._coded.drop(node.id)
            else:
                self._kv -= node.tokens
            self.tree.remove(node)

    def code_kv(self, node: Node, coded: bool) -> None:
        """The KV of `node` is coded, or decoded."""
        assert self._coded is not None
        if coded:
            self._coded.code(node.id, range(node.tokens))
        else:
            self._coded.drop(node.id, [child.id for child in node.children.values()])
        self._kv += -node.tokens if coded else node.tokens
        self.tree.code_kv(node, coded)

    def code_state(self, node: Node, coded: bool) -> None:
        """The state of `node` is coded, or decoded."""
        self._count_states(node.coded_state, -1)
        self._count_states(coded, 1)
        self.tree.code_state(node, coded)

    def _count_states(self, coded: bool, states: int) -> None:
        if coded:
            self._coded_states += states
        else:
            self._states += states

    def add(self, kv: int, states: int) -> None:
        """Count tokens and states that were cached."""
        self._kv += kv
        self._states += states

    def _could_fit(self, kv: int, states: int, path: list[Node]) -> bool:
        """True if it would fit beside nothing but `path` and what running requests compute."""
        kv += self.kv_in_use + (path[-1].depth if path else 0)
        states += self.slots_in_use + sum(node.has_state for node in path)
        return self.could_hold(kv, states)


def _kv_room(budget: Split, states: int) -> int:
    """Tokens of KV for which there is room beside so many states: without those in whose place
    states lie for which there is no slot, or with those that can lie in slots without a state.
    """
    beside = budget.slots - states
    return budget.kv_tokens + beside * (budget.parked if beside > 0 else budget.spilled)


def pools_of(
    budget: Budget,
    make: Callable[[Scarce, Policy], AnyPool],
    policy: Policy,
    state_policy: Policy | None,
) -> tuple[AnyPool, AnyPool]:
    """Pools of KV and of states for `budget`, one for both where they share bytes. Raises
    ValueError for a split budget without `state_policy`.
    """
    if not isinstance(budget, Split) or budget.spilled:
        shared = make(Scarce.SHARED, policy)
        return shared, shared
    if state_policy is None:
        raise ValueError("a split budget needs a policy for its state slots")
    return make(Scarce.KV, policy), make(Scarce.STATES, state_policy)


def device_pools(
    budget: Budget, cost: CostModel, clock: Clock, policy: Policy, state_policy: Policy | None
) -> tuple[Pool, Pool]:
    """`pools_of` a device without tiers below it."""
    return pools_of(
        budget,
        lambda scarce, its_policy: Pool(scarce, cost, its_policy, clock),
        policy,
        state_policy,
    )
