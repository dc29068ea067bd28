"""States that a prefill gets of those that it wants, and reports of the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.checkpoints.admission import Checkpoint, Prefill, Skip, SlotBudget
from sglang_hybrid.core.checkpoints.checkpoint_plan import (
    CheckpointPlan,
    CheckpointRequest,
    PendingCheckpoint,
    plan_checkpoints,
    slot_budget_for,
)
from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.node_tree import NodeTree
from sglang_hybrid.core.records.nodes import Kind
from sglang_hybrid.core.victims.eviction import make_policy
from sglang_hybrid.core.victims.pool import Pool, Scarce


@dataclass
class Slots:
    """A full pool of states; a slot that is given up can be had once."""

    pool: Pool
    wishes: list[CheckpointRequest | None] = field(default_factory=list)

    def free(self) -> int:
        return 0

    def take(self, request: CheckpointRequest | None = None) -> int | None:
        self.wishes.append(request)
        return len(self.wishes)

    def give_back(self, slot: int) -> None:
        raise AssertionError("nothing is given back")

    def budget(self, plan: CheckpointPlan[int]) -> SlotBudget:
        return slot_budget_for(plan, self.free(), self.pool)


positions = st.sets(st.integers(1, 50), max_size=4)


@given(positions, positions, st.integers(0, 55))
def test_the_first_open_position_is_the_least_of_them(
    wanted: set[int], under_way: set[int], least: int
) -> None:
    plan: CheckpointPlan[int] = CheckpointPlan(
        50, 0, dict.fromkeys(sorted(wanted, reverse=True), Kind.BRANCH), None
    )
    plan.pending_checkpoints = [PendingCheckpoint(at, Kind.BRANCH, at) for at in under_way]
    assert plan.first_open(least) == min(
        (at for at in plan.open_positions if at >= least), default=None
    )
    assert plan.is_open == bool(plan.open_positions)


def test_a_wish_tells_what_it_is_for_and_how_it_compared() -> None:
    tree = NodeTree()
    pool = Pool(Scarce.STATES, CostModel.paper_7b(), make_policy("seglen"), tree.clock)
    tree.listen(pool)
    tree.give_state(tree.add(tree.root, 1, 300), Kind.TAIL)
    slots = Slots(pool)
    wanted = {400: Kind.BRANCH, 500: Kind.MESSAGE, 1_000: Kind.CHUNK}
    plan: CheckpointPlan[int] = CheckpointPlan(1_001, 0, wanted, None, request_id="someone")
    taken, skipped = plan.take(slots, list(wanted), 1_001)
    assert [checkpoint.position for checkpoint in taken] == [400]
    (request,) = slots.wishes
    assert request is not None and request.comparison is not None
    assert (request.position, request.kind, request.request_id) == (400, Kind.BRANCH, "someone")
    assert (
        request.comparison.new,
        request.comparison.cheapest,
        request.comparison.beats_victim,
    ) == (400.0, 300.0, True)
    (refused, skip), (never_weighed, other_skip) = skipped
    assert (refused.position, skip, other_skip) == (500, Skip.NOT_WORTH, Skip.NOT_WORTH)
    assert refused.comparison is not None  # from the state at 400 on, it would save 100 tokens
    assert (refused.comparison.new, refused.comparison.beats_victim) == (100.0, False)
    assert (never_weighed.position, never_weighed.comparison) == (1_000, None)


def test_a_micro_branch_is_told_once() -> None:
    """The stored KV and two prompts that wait all leave this one right behind its hit."""
    prefill = Prefill(100, hit_len=63, kv_len=64, shared=[64, 66])
    plan: CheckpointPlan[int]
    plan, micro_branches = plan_checkpoints(prefill, None, 16)
    assert micro_branches == [
        Checkpoint(64, Kind.BRANCH, Skip.MICRO_BRANCH),
        Checkpoint(66, Kind.BRANCH, Skip.MICRO_BRANCH),
    ]
    assert plan.wanted == {99: Kind.PROMPT_END}


@pytest.mark.parametrize(("hit_len", "is_worth_it"), [(0, True), (99, True), (101, False)])
def test_a_state_saves_what_lies_behind_the_hit(hit_len: int, is_worth_it: bool) -> None:
    """Against a victim that saves 300 tokens."""
    tree = NodeTree()
    pool = Pool(Scarce.STATES, CostModel.paper_7b(), make_policy("seglen"), tree.clock)
    tree.listen(pool)
    tree.give_state(tree.add(tree.root, 1, 300), Kind.TAIL)
    plan: CheckpointPlan[int] = CheckpointPlan(500, hit_len, {400: Kind.BRANCH}, None)
    taken, _ = plan.take(Slots(pool), [400], 500)
    assert bool(taken) is is_worth_it
