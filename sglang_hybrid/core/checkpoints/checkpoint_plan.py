"""States that a running prefill takes: from the request for a checkpoint to its slot.

The server and the simulator run these same objects. Each defines itself what a slot is, and how one
is freed (`StateSlots`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from sglang_hybrid.core.checkpoints.admission import (
    Checkpoint,
    Prefill,
    Skip,
    SlotBudget,
    judicious,
    last_boundary,
    screen_positions,
    skip_reason,
)
from sglang_hybrid.core.records.nodes import Clock, Kind, Node
from sglang_hybrid.core.returns.history import HistoryMatch
from sglang_hybrid.core.victims.pool import Pool, VictimComparison

Slot = TypeVar("Slot")

MOST_ANSWER_STATES = 2


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """A state that a prefill wants.

    request_id: whose prefill it is, and tenant: whose request that is. comparison: how it compared
    with the cheapest victim, None if that was not asked.
    """

    position: int
    kind: Kind
    request_id: str = ""
    comparison: VictimComparison | None = None
    tenant: Hashable = None


@dataclass
class PendingCheckpoint(Generic[Slot]):
    """A state under way: its slot is the prefill's until the state is published."""

    position: int
    kind: Kind
    slot: Slot


class StateSlots(Protocol[Slot]):
    """A pool of state slots, as a plan uses it."""

    def free(self) -> int:
        """The number of free slots."""

    def take(self, request: CheckpointRequest | None = None) -> Slot | None:
        """A slot for `request`, pushing out the cheapest victim if none is free; None if nothing
        may go.
        """

    def give_back(self, slot: Slot) -> None:
        """Return a slot that `take` gave and that holds nothing yet."""

    def budget(self, plan: CheckpointPlan[Slot]) -> SlotBudget:
        """The competitors of a state of `plan`."""


@dataclass
class CheckpointPlan(Generic[Slot]):
    """The states that one request's prefill should save.

    prompt_len: tokens to prefill, the hit included. wanted: kind by position, none of them passed
    yet. placed: positions of all states on the way. answer_states: those under way in the answer,
    the deepest last; answer_state: position of the one that was handed over. request_id, tenant:
    names for the request and for its sender. comparison: of the last position that was weighed
    against a victim.
    """

    prompt_len: int
    hit_len: int
    wanted: dict[int, Kind]
    history_match: HistoryMatch | None
    pending_checkpoints: list[PendingCheckpoint[Slot]] = field(default_factory=list)
    placed: list[int] = field(default_factory=list)
    answer_states: list[PendingCheckpoint[Slot]] = field(default_factory=list)
    answer_state: int = 0
    request_id: str = ""
    comparison: VictimComparison | None = None
    tenant: Hashable = None

    @property
    def open_positions(self) -> list[int]:
        """Positions whose states are wanted or under way, in no order."""
        return [*self.wanted, *(checkpoint.position for checkpoint in self.pending_checkpoints)]

    @property
    def is_open(self) -> bool:
        """True if states are wanted or under way."""
        return bool(self.wanted or self.pending_checkpoints)

    def first_open(self, least: int) -> int | None:
        """The shallowest of the open positions from `least` on."""
        first = None
        for at in self.wanted:
            if at >= least and (first is None or at < first):
                first = at
        for checkpoint in self.pending_checkpoints:
            at = checkpoint.position
            if at >= least and (first is None or at < first):
                first = at
        return first

    def anchor_of(self, position: int) -> int:
        """The deepest state on the way before `position`."""
        return max((at for at in self.placed if at < position), default=self.hit_len)

    def want_branches(
        self, lengths: Sequence[int], start: int, page_size: int, min_branch_tokens: int
    ) -> None:
        """Want states at `lengths` (ascending), too, where other prompts leave this one: of those
        behind `start`, which is where the next forward begins. As at admission, deeper ones come
        first, and none is close to another branch, to a declared position or to what is placed.
        """
        firm = (at for at, kind in self.wanted.items() if kind in (Kind.BRANCH, Kind.DECLARED))
        taken = [self.hit_len, *self.placed, *firm]
        for length in reversed(lengths):
            at = length - length % page_size
            if not start < at < self.prompt_len or at in self.wanted:
                continue
            if all(abs(at - other) >= min_branch_tokens for other in taken):
                self.wanted[at] = Kind.BRANCH
                taken.append(at)

    def take_in_prefill(
        self, slots: StateSlots[Slot], start: int, end: int, grid: int, min_branch_tokens: int
    ) -> tuple[list[PendingCheckpoint[Slot]], list[tuple[CheckpointRequest, Skip]]]:
        """Called before a forward of tokens [start, end). Returns the states that it will save,
        each with its slot, and the wanted ones that it will not save, each with the reason.
        """
        self._want_chunk_boundary(start, end, grid, min_branch_tokens)
        return self.take(slots, [at for at in self.wanted if start < at <= end], end)

    def take(
        self, slots: StateSlots[Slot], positions: Iterable[int], passed: int
    ) -> tuple[list[PendingCheckpoint[Slot]], list[tuple[CheckpointRequest, Skip]]]:
        """Take a slot for each of `positions` that is worth one. Returns these, and the others with
        the reason. Positions up to `passed` are wanted no more.
        """
        taken: list[PendingCheckpoint[Slot]] = []
        skipped: list[tuple[CheckpointRequest, Skip]] = []
        for position in positions:
            checkpoint, request, skip = self._take_one(slots, position, self.wanted[position])
            if checkpoint is None:
                skipped.append((request, skip))
            else:
                taken.append(checkpoint)
        self.wanted = {at: kind for at, kind in self.wanted.items() if at > passed}
        self.pending_checkpoints += taken
        return taken, skipped

    def answer_grid(self, grid: int) -> int:
        """Tokens between two states that a decode leaves in the answer, a multiple of `grid`; 0 if
        it leaves none: the last answer came back whole. The last two of them reach far enough above
        the answer's end for a prompt that leaves the answer where the last one was left.
        """
        return -(-self._answer_lost // grid) * grid

    def take_in_answer(
        self, slots: StateSlots[Slot], position: int
    ) -> PendingCheckpoint[Slot] | None:
        """A slot for the state at `position` in the answer: a new one while there are fewer than
        MOST_ANSWER_STATES, if it is worth one, else that of the shallowest. None if there is none.
        """
        checkpoint = None
        if len(self.answer_states) < MOST_ANSWER_STATES:
            checkpoint, _, _ = self._take_one(slots, position, Kind.TAIL)
        if checkpoint is None:
            if not self.answer_states:
                return None
            checkpoint = self.answer_states.pop(0)
            checkpoint.position = position
        self.answer_states.append(checkpoint)
        return checkpoint

    def take_answer_state(
        self, slots: StateSlots[Slot], up_to: int
    ) -> list[PendingCheckpoint[Slot]]:
        """Hand over the state in an answer that ends at `up_to` from which the next prompt may
        resume, if there is one, and give the slots of the others back.
        """
        kept: list[PendingCheckpoint[Slot]] = []
        for state in reversed(self.answer_states):
            if kept or state.position > up_to - self._answer_lost:
                slots.give_back(state.slot)
            else:
                kept.append(state)
        self.answer_states = []
        self.answer_state = kept[0].position if kept else 0
        return kept

    @property
    def _answer_lost(self) -> int:
        return 0 if self.history_match is None else self.history_match.answer_lost

    def _take_one(
        self, slots: StateSlots[Slot], position: int, kind: Kind
    ) -> tuple[PendingCheckpoint[Slot] | None, CheckpointRequest, Skip]:
        """The state at `position` with its slot, if it is worth one, and the request for it. The
        reason counts where there is no state.
        """
        skip = self.comparison = None
        if slots.free() <= 0:
            skip = skip_reason(position, kind, slots.budget(self))
        request = CheckpointRequest(position, kind, self.request_id, self.comparison, self.tenant)
        slot = slots.take(request) if skip is None else None
        if slot is None:
            return None, request, skip or Skip.NO_SLOT
        self.placed.append(position)
        return PendingCheckpoint(position, kind, slot), request, Skip.NO_SLOT

    def take_ready(self, up_to: int) -> list[PendingCheckpoint[Slot]]:
        """Hand over the pending states up to position `up_to`, the deepest first."""
        ready = [
            checkpoint for checkpoint in self.pending_checkpoints if checkpoint.position <= up_to
        ]
        if ready:
            self.pending_checkpoints = [
                checkpoint for checkpoint in self.pending_checkpoints if checkpoint.position > up_to
            ]
        return sorted(ready, key=lambda checkpoint: -checkpoint.position)

    def _want_chunk_boundary(self, start: int, end: int, grid: int, min_branch_tokens: int) -> None:
        boundary = last_boundary(start, end, grid)
        if boundary is not None and boundary < self.prompt_len:
            near = any(abs(boundary - at) < min_branch_tokens for at in self.open_positions)
            if not near:
                self.wanted.setdefault(boundary, Kind.CHUNK)


def plan_checkpoints(
    prefill: Prefill, history_match: HistoryMatch | None, min_branch_tokens: int
) -> tuple[CheckpointPlan[Slot], list[Checkpoint]]:
    """The plan of a prefill, and those of its branch points that gain too few tokens, each once:
    the stored KV and a waiting request may name the same position. history_match: what the prompt
    has in common with the history, None without a history.
    """
    wanted: dict[int, Kind] = {}
    micro_branches: dict[Checkpoint, None] = {}
    for checkpoint in screen_positions(judicious(prefill), prefill, min_branch_tokens):
        if checkpoint.admitted:
            wanted[checkpoint.position] = checkpoint.kind
        elif checkpoint.skip is Skip.MICRO_BRANCH and checkpoint.kind is Kind.BRANCH:
            micro_branches[checkpoint] = None
    plan: CheckpointPlan[Slot] = CheckpointPlan(
        prefill.prompt_len, prefill.hit_len, wanted, history_match
    )
    return plan, list(micro_branches)


def slot_budget_for(plan: CheckpointPlan[Slot], free_slots: int, pool: Pool) -> SlotBudget:
    """The competitors of a state of `plan` in the `pool` of state slots. States that the policy
    spares are no victims here.
    """

    def beats_victim(position: int, kind: Kind) -> bool:
        anchor = plan.anchor_of(position)
        new = hypothetical_node(position, kind, anchor, plan.history_match, pool.clock)
        plan.comparison = pool.compare_with_victim(new)
        return plan.comparison is None or plan.comparison.beats_victim

    return SlotBudget(free_slots, pool.evictable, beats_victim, pool.policy.knows_returns)


def hypothetical_node(
    position: int, kind: Kind, anchor_depth: int, history_match: HistoryMatch | None, clock: Clock
) -> Node:
    """The node that a new state at `position` would be, with the next state above it at
    `anchor_depth`.
    """
    node = Node(0, None, 0, clock)
    node.depth, node.anchor_depth = position, anchor_depth
    node.has_state, node.kind = True, kind
    if history_match is not None:
        node.history_node, node.turn = (
            history_match.path.exactly(position),
            history_match.path.turn_at(position),
        )
    children = 2 if kind is Kind.BRANCH else 1
    if history_match is not None and history_match.only_continues:
        end = history_match.reused
        if end is not None and end.depth == position:
            node.history_node, children = end.continued(), 1
    node.children = dict.fromkeys(range(children), node)
    return node
