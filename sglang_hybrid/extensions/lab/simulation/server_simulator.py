"""The cache as it is served: SGLang's pools, our checkpoints, in the server's own order.

Request after request it hits what `HybridRadixCache` on SGLang's pools hits, token by token
(tests/extensions/lab/simulation/test_parity.py). States are planned by
`core.checkpoints.checkpoint_plan`, as there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang_hybrid.core.checkpoints.admission import Prefill, SlotBudget
from sglang_hybrid.core.checkpoints.checkpoint_plan import (
    CheckpointPlan,
    CheckpointRequest,
    PendingCheckpoint,
    plan_checkpoints,
    slot_budget_for,
)
from sglang_hybrid.core.costs.cost import MIN_BRANCH_TOKENS, CostModel
from sglang_hybrid.core.records.nodes import Kind, Node
from sglang_hybrid.core.records.pins import PinRoom, Pins
from sglang_hybrid.core.server_settings import Serving, Split
from sglang_hybrid.core.traffic.requests import Request, TokenArray
from sglang_hybrid.core.victims.eviction import Policy
from sglang_hybrid.extensions.lab.simulation.device_memory import DeviceMemory
from sglang_hybrid.extensions.lab.simulation.policies import SglangLru
from sglang_hybrid.extensions.lab.simulation.simulator import (
    Outcome,
    Simulator,
    Ticket,
    serve_in_steps,
)


@dataclass(slots=True, eq=False)
class Running(Ticket):
    """A request that holds a state slot and KV of its own.

    allocated: length of its KV row. shared: how much of that the tree holds, its own or another's.
    inserted: tokens up to which it has put its KV into the tree. plan: None if the request found no
    room and runs without the cache.
    """

    plan: CheckpointPlan[int] | None = None
    allocated: int = 0
    shared: int = 0
    inserted: int = 0


class SimulatedStateSlots:
    """The state slots of `memory`, as `core.checkpoints.checkpoint_plan` sees them. A slot's number
    means nothing.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory

    def free(self) -> int:
        return self._memory.free_states

    def take(self, request: CheckpointRequest | None = None) -> int | None:
        if not self.make_room():
            return None
        self._memory.slots_in_use += 1
        return self._memory.slots_in_use

    def make_room(self) -> bool:
        """True if a slot is free, evicting if that helps."""
        memory, budget = self._memory, self._memory.budget
        spills = isinstance(budget, Split) and budget.spilled > 0
        while self.free() <= 0:
            if spills and not memory.states_in_slots:
                return False  # requests hold all slots, so no victim frees one
            if not memory.evict_one(memory.state_pool, spare_forks=False):
                return False
        return True

    def give_back(self, slot: int) -> None:
        self._memory.slots_in_use -= 1

    def budget(self, plan: CheckpointPlan[int]) -> SlotBudget:
        pool = self._memory.state_pool
        if isinstance(pool.policy, SglangLru):  # there what is new is worth more than what is old
            return SlotBudget(self.free(), evictable=pool.evictable)
        return slot_budget_for(plan, self.free(), pool)


class ServerSimulator(Simulator):
    """Planned checkpoints and chunked prefill, in two pools or in one memory of so many bytes. What
    a running request has computed beyond the tree takes room too: `memory.kv_in_use`,
    and in `memory.slots_in_use` its own state and those that are not published yet.

    A request that does not fit, alone or beside those that run, is served without the cache; the
    server would refuse it or let it wait. Under `SglangLru` victims are SGLang's own choice.
    """

    def __init__(
        self,
        cost: CostModel,
        budget: Split | int,
        policy: Policy,
        state_policy: Policy,
        min_branch_tokens: int = MIN_BRANCH_TOKENS,
        serving: Serving | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        super().__init__(
            cost, budget, policy, min_branch_tokens, state_policy=state_policy, memory=memory
        )
        self.serving = serving or Serving()
        self._slots = SimulatedStateSlots(self.memory)
        room = PinRoom(budget) if isinstance(budget, int) else _room(budget, self.cost)
        self.tree.pins = Pins(self.cost, room, self.serving.pin_share)
        self.tree.pins.follow(self.tree.clock, self.tree.mark_dirty)

    def serve(self, request: Request) -> Outcome:
        return serve_in_steps(self, request)

    def begin(self, request: Request) -> Running:
        """Look the prompt up, hold what it hit, and take a slot for its own state."""
        if not self.memory.could_hold(computed_tokens(request), states=1):
            return Running(request, Outcome(request.input_len, 0, 0), {})
        hit, kv_len = self._match(request)
        self.tree.clock.advance(request.arrival or None)  # 0 is no stamp for the server
        self.tree.pins.expire()
        for pool in dict.fromkeys((self.memory.pool, self.memory.state_pool)):
            pool.on_arrival()
        if hit is not self.tree.root:
            self.tree.hit(hit)
        hit = self._load(request, hit)
        exact = not any(node.inexact for node in way_to(hit))
        outcome = Outcome(request.input_len, hit.depth, kv_len, exact)
        running = Running(request, outcome, {}, allocated=hit.depth, shared=hit.depth)
        if hit is not self.tree.root:
            self._lock(running, hit)
        history_match = self._match_history(request)
        starts = request.message_starts
        prefill = Prefill(
            request.input_len,
            hit.depth,
            kv_len,
            known_branch=0 if history_match is None else history_match.branch,
            next_branch=0 if history_match is None else history_match.next_branch(starts),
            message_starts=starts,
            reply_start=request.reply_start,
            declared=[pin.position for pin in request.pins],
        )
        plan: CheckpointPlan[int]
        plan, _ = plan_checkpoints(prefill, history_match, self.min_branch_tokens)
        if self._slots.take() is None:
            self._lock(running, None)
        else:
            running.plan = plan
        return running

    def end_prefill(self, ticket: Ticket) -> None:
        """Forward by forward: KV, slots for the states that are passed, then both into the tree."""
        assert isinstance(ticket, Running)
        start, end = ticket.outcome.hit_len, ticket.request.input_len
        while start < end and ticket.plan is not None:
            stop = min(start + self.serving.chunk, end)
            if not self._grow(ticket, stop):
                return
            grid, least = self.serving.grid, self.min_branch_tokens
            ticket.plan.take_in_prefill(self._slots, start, stop, grid, least)
            ready = ticket.plan.take_ready(stop)
            if ready:
                self._publish_states(ticket, ready)
            self._pin(ticket)
            start = stop

    def finish(self, ticket: Ticket) -> None:
        """The answer but for its last token, which is never computed, and the live state."""
        assert isinstance(ticket, Running)
        request = ticket.request
        length = computed_tokens(request)
        if ticket.plan is None or not self._grow(ticket, length):
            return
        ready = [PendingCheckpoint(length, Kind.TAIL, 0), *self._answer_state(ticket, length)]
        self._publish_states(ticket, ready)
        self._pin(ticket)
        self._learn(ticket, request.tokens[:length])
        self._lock(ticket, None)
        ticket.plan = None

    def _answer_state(self, running: Running, length: int) -> list[PendingCheckpoint[int]]:
        """The state that an answer which ends at `length` leaves on its way."""
        plan = running.plan
        grid = 0 if plan is None else plan.answer_grid(self.serving.grid)
        if plan is None or not grid:
            return []
        first = (running.request.input_len // grid + 1) * grid
        for position in range(first, length, grid):
            plan.take_in_answer(self._slots, position)
        return plan.take_answer_state(self._slots, length)

    def _match(self, request: Request) -> tuple[Node, int]:
        """The node to resume from, and how far KV alone reaches."""
        path, matched = self._find(request)
        at = next((i for i in range(len(path), 0, -1) if path[i - 1].has_state), 0)
        if not at:
            return self.tree.root, matched
        hit = path[at - 1]
        self._touch(path[:at])
        self._touch_state(hit)
        resumable = self._decode(hit) and self._room_beside(hit)
        return (hit if resumable else self.tree.root), matched

    def _find(self, request: Request) -> tuple[list[Node], int]:
        """Nodes that the prompt passes, and how many of its tokens are stored; an edge that it
        leaves, or ends on, is cut there.
        """
        prompt = request.tokens[: request.input_len - 1]
        path, matched = self.tree.find(prompt, tenant=request.tenant)
        if matched > (path[-1].depth if path else 0):
            below = self.tree.beyond(path, matched, prompt, request.tenant)[-1]
            path = [*path, self._cut(below, matched)]
        self._on_path(request, path)
        return path, matched

    def _load(self, request: Request, hit: Node) -> Node:
        """Load for `request` what `hit` needs, and return the node that it resumes from; without
        tiers there is nothing to load.
        """
        return hit

    def _decode(self, hit: Node) -> bool:
        """Decode the KV up to `hit`, which a request resumes from, node after node, so that each
        takes the room that the ones above gave back. False if there is no room for one of them. The
        state is decoded into the request's own slot.
        """
        path = [node for node in way_to(hit) if node.coded_kv]
        hit.inexact |= hit.coded_state
        if not path:
            return True
        held = [node for node in way_to(hit) if not node.kv_locked]
        states = {node: node.state_locked for node in held}
        for node in held:
            self.tree.lock(node, kv=True, state=states[node] or node is hit)
        fits = True
        for node in reversed(path):
            fits = fits and self._make_room_to_decode(node.tokens)
            if fits:
                self.memory.code_kv(node, False)
                node.inexact = True
        for node in held:
            self.tree.lock(node, kv=False, state=states[node])
        return fits

    def _make_room_to_decode(self, tokens: int) -> bool:
        memory = self.memory
        while memory.short_of(tokens, 0) is not None:
            if not memory.evict_one(memory.pool, spare_forks=False):
                return False
        return True

    def _room_beside(self, source: Node) -> bool:
        """True if a request can have a slot beside the state that it copies."""
        if not self.memory.could_hold(source.depth, states=2):
            return False
        if self._slots.free() > 0:
            return True
        held = source.state_locked
        self.tree.lock(source, kv=True, state=True)
        had = self._slots.make_room()
        if not held:
            self.tree.lock(source, kv=False, state=False)
        return had

    def _grow(self, running: Running, length: int) -> bool:
        """KV of its own up to `length`, evicting what it takes; False, and it holds nothing any
        more, if there is none.
        """
        needed = length - running.allocated
        memory = self.memory
        while memory.short_of(needed, 0) is not None:
            if not memory.evict_one(memory.pool, spare_forks=False):
                self._give_up(running)
                return False
        memory.kv_in_use += needed
        running.allocated = length
        return True

    def _give_up(self, running: Running) -> None:
        self.memory.kv_in_use -= running.allocated - running.shared
        self.memory.slots_in_use -= 1
        running.plan = None
        self._lock(running, None)

    def _publish_states(self, running: Running, ready: list[PendingCheckpoint[int]]) -> None:
        """Put states and the KV up to the deepest one, which comes first, into the tree, and hold
        that. KV that the tree has already is given back.
        """
        end = ready[0].position
        tokens, tenant = running.request.tokens[:end], running.request.tenant
        path, matched = self.tree.find(tokens, running.locked_node, tenant)
        self._touch(path)
        deepest = path[-1] if path else self.tree.root
        if matched > deepest.depth:
            below = self.tree.beyond(path, matched, tokens, tenant)[-1]
            self._touch([below])
            deepest = self._cut(below, matched)
        if matched < end:
            deepest = self.tree.grow(deepest, tokens[matched:], tenant)
        self._touch([deepest])
        self._take_kv(running, deepest, end - matched)
        self.memory.kv_in_use -= end - running.shared
        running.shared = running.inserted = end
        self._give_state(deepest, ready[0].kind)
        self._lock(running, deepest)
        for checkpoint in ready[1:]:
            self._give_state(self._node_above(deepest, checkpoint.position), checkpoint.kind)
        self._on_publish(running)

    def _take_kv(self, running: Running, deepest: Node, new: int) -> None:
        """`running` gives the tree the KV of the path to `deepest`, of which `new` tokens are not
        stored yet, and others coded.
        """
        self.memory.add(new, 0)
        if self.cost.coded:
            for node in reversed(list(way_to(deepest))):
                if node.coded_kv:
                    self.memory.code_kv(node, False)

    def _on_publish(self, running: Running) -> None:
        """The way to what `running` holds has new nodes: for caches that note them."""

    def _node_above(self, deepest: Node, position: int) -> Node:
        """The node at `position` on the way to `deepest`."""
        way = list(way_to(deepest))
        passed = [node for node in reversed(way) if node.depth <= position]
        self._touch(passed)
        node = passed[-1] if passed else self.tree.root
        if node.depth < position:
            below = way[len(way) - 1 - len(passed)]
            self._touch([below])
            node = self._cut(below, position)
        self._touch([node])
        return node

    def _give_state(self, node: Node, kind: Kind) -> None:
        """A slot in use becomes the tree's, or is given back if the tree has this state."""
        self.memory.slots_in_use -= 1
        self._take_state(node, kind)
        self._touch_state(node)

    def _take_state(self, node: Node, kind: Kind) -> None:
        if node.coded_state:
            self.memory.code_state(node, False)
        elif not node.has_state:
            self.memory.add(0, 1)
            self.tree.give_state(node, kind)

    def _pin(self, running: Running) -> None:
        """Pin what the request declared, as far as it is in the tree."""
        request = running.request
        if request.pins:
            at = {node.depth: node for node in way_to(running.locked_node) if node.has_state}
            for asked in sorted(request.pins, key=lambda pin: -pin.position):
                if asked.position in at:
                    self.tree.pins.pin(at[asked.position], asked, request.tenant)

    def _learn(self, running: Running, tokens: TokenArray) -> None:
        history = self.policy.history
        if history is None:
            return
        request = running.request
        history_match = None if running.plan is None else running.plan.history_match
        answer_state = 0 if running.plan is None else running.plan.answer_state
        history_path = history.observe(
            tokens,
            request.input_len,
            self.tree.clock,
            (request.reply_start, answer_state),
            history_match,
            request.tenant,
            request.hint,
            request.message_starts,
        )
        for node in way_to(running.locked_node):
            self.tree.link_history(node, history_path.at(node.depth))

    def _cut(self, node: Node, depth: int) -> Node:
        head = self.tree.cut(node, depth)
        self._touch([head, node])
        return head

    def _touch(self, nodes: list[Node]) -> None:
        """SGLang's order of KV: these were used just now, the last one last."""
        if isinstance(self.policy, SglangLru):
            for node in nodes:
                self.policy.touch(node)
                self.memory.pool.mark_dirty(node)

    def _touch_state(self, node: Node) -> None:
        policy = self.memory.state_pool.policy
        if isinstance(policy, SglangLru):
            policy.touch(node)
            self.memory.state_pool.mark_dirty(node)


def way_to(node: Node | None) -> Iterator[Node]:
    """`node` and all above it but the root, deepest first."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent


def _room(pools: Split, cost: CostModel) -> PinRoom:
    kv, states = pools.kv_tokens * cost.kv_bytes_per_token, pools.slots * cost.state_bytes
    return PinRoom(kv + states) if pools.spilled else PinRoom(kv, states)


def computed_tokens(request: Request) -> int:
    """Tokens whose KV is computed: all but the answer's last one, and at least the prompt."""
    return max(len(request.tokens) - 1, request.input_len)
