"""Requests with a common prefix wait for the checkpoint of the first one, which is computed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from sglang_hybrid.checkpoints.planner import Planner
from sglang_hybrid.checkpoints.prefix_wait import LONGEST_WAIT, PrefixWait
from sglang_hybrid.core.checkpoints.admission import SlotBudget
from sglang_hybrid.serving.telemetry.stats import CacheStats


@dataclass(eq=False)
class Waiting:
    """A request, as far as the planner and the family read it."""

    rid: str
    origin_input_ids: list[int]
    prefix_len: int = 0
    extend_end: int = 0
    extra_key: str | None = None
    cache_salt: str | None = None
    host_hit_length: int = 0


@dataclass
class Batch:
    reqs: list[Waiting]
    state_tracks: Any = None
    mamba_cow_src_indices: Any = None
    mamba_cow_dst_indices: Any = None


@dataclass
class Slots:
    """A pool of so many free slots and nothing to push out."""

    left: int
    given_back: list[int] = field(default_factory=list)

    def free(self) -> int:
        return self.left

    def take(self, request: Any = None) -> torch.Tensor | None:
        if not self.left:
            return None
        self.left -= 1
        return torch.tensor([self.left])

    def give_back(self, slot: torch.Tensor) -> None:
        self.left += 1
        self.given_back.append(int(slot))

    def budget(self, plan: Any) -> SlotBudget:
        return SlotBudget(self.left)


class House:
    """A planner and a family on a pool of `slots`."""

    def __init__(self, slots: int = 8, grid: int = 4_096) -> None:
        self.slots = Slots(slots)
        self.stats = CacheStats()
        self.planner = Planner(
            self.slots,
            Counter(),
            page_size=1,
            min_branch_tokens=16,
            grid=grid,
            one_pass=True,
        )
        self.prefix_wait = PrefixWait(self.planner, self.stats, min_branch_tokens=16)

    def admit(self, req: Any) -> None:
        prompt = len(req.origin_input_ids)
        self.planner.plan_request(
            req, prompt, req.prefix_len, 0, shared=self.prefix_wait.shared(req)
        )
        self.prefix_wait.on_admission(req)

    def forward(self, req: Any, end: int | None = None) -> None:
        req.extend_end = len(req.origin_input_ids) if end is None else end
        self.planner.assign_slots(Batch([req]))
        req.prefix_len = req.extend_end

    def publish(self, req: Any) -> list[int]:
        return [checkpoint.position for checkpoint in self.planner.take_ready(req, req.extend_end)]


def siblings(count: int, shared: int = 300, own: int = 40) -> list[Any]:
    return [
        Waiting(str(k), [*range(shared), *(10_000 * (k + 1) + i for i in range(own))])
        for k in range(count)
    ]


def test_siblings_wait_until_the_first_has_laid_their_checkpoint() -> None:
    house, (first, *others) = House(), siblings(3)
    house.prefix_wait.update_waiting([first, *others])
    assert not house.prefix_wait.waits_for_prefix(first)
    house.admit(first)
    assert all(house.prefix_wait.waits_for_prefix(other) for other in others)
    house.forward(first)
    assert all(house.prefix_wait.waits_for_prefix(other) for other in others)
    assert house.publish(first) == [339, 300]
    assert not any(house.prefix_wait.waits_for_prefix(other) for other in others)
    assert house.stats.waited == 2


def test_a_chunk_that_has_not_come_to_the_branch_lets_them_wait() -> None:
    house, (first, other) = House(), siblings(2)
    house.prefix_wait.update_waiting([first, other])
    house.admit(first)
    house.forward(first, 200)
    assert house.publish(first) == []
    assert house.prefix_wait.waits_for_prefix(other)
    house.forward(first)
    assert house.publish(first) == [339, 300]
    assert not house.prefix_wait.waits_for_prefix(other)


@pytest.mark.parametrize("computed, kept", [(200, [339, 300]), (300, [339]), (320, [339])])
def test_a_sibling_that_comes_during_a_prefill_gets_its_branch_from_the_next_chunk(
    computed: int, kept: list[int]
) -> None:
    """A branch that is not computed yet becomes a checkpoint."""
    house, (first, late) = House(), siblings(2)
    house.prefix_wait.update_waiting([first])
    house.admit(first)
    house.forward(first, computed)
    house.prefix_wait.update_waiting([late])
    house.planner.want_branches(first, house.prefix_wait.shared(first))
    assert house.prefix_wait.waits_for_prefix(late) is (computed < 300)
    house.forward(first)
    assert house.publish(first) == kept
    assert not house.prefix_wait.waits_for_prefix(late)


def test_late_branches_keep_their_distance_and_those_of_before_their_kind() -> None:
    house, first = House(), siblings(1)[0]
    house.planner.plan_request(first, 340, 0, 0, declared=[200])
    house.forward(first, 100)
    house.planner.want_branches(first, [190, 199, 200, 230, 300, 305, 339, 340, 900])
    plan = house.planner.in_flight()[0][1]
    assert {at: kind.name for at, kind in plan.wanted.items()} == {
        200: "DECLARED",
        230: "BRANCH",
        305: "BRANCH",
        339: "PROMPT_END",
    }


def test_nobody_waits_for_a_checkpoint_without_a_slot() -> None:
    house, (first, other) = House(slots=0), siblings(2)
    house.prefix_wait.update_waiting([first, other])
    house.admit(first)
    assert house.prefix_wait.waits_for_prefix(other)
    house.forward(first)
    assert not house.prefix_wait.waits_for_prefix(other)


def test_nobody_waits_for_one_that_went_away() -> None:
    house, (first, other) = House(), siblings(2)
    house.prefix_wait.update_waiting([first, other])
    house.admit(first)
    house.forward(first)
    house.planner.drop(first)
    assert not house.prefix_wait.waits_for_prefix(other)
    assert house.slots.left == 8


@pytest.mark.parametrize("shared, waits", [(40, False), (80, True)])
def test_waiting_must_save_a_step(shared: int, waits: bool) -> None:
    house, (first, other) = House(), siblings(2, shared)
    house.prefix_wait.update_waiting([first, other])
    house.admit(first)
    assert house.prefix_wait.waits_for_prefix(other) is waits


def test_nobody_waits_for_what_is_cached_already() -> None:
    house, (first, other) = House(), siblings(2)
    house.prefix_wait.update_waiting([first, other])
    house.admit(first)
    other.prefix_len = 290
    assert not house.prefix_wait.waits_for_prefix(other)


def test_the_same_prompt_waits_for_its_twins_end() -> None:
    house, (first, _) = House(), siblings(2)
    twin = Waiting("twin", first.origin_input_ids)
    house.prefix_wait.update_waiting([first, twin])
    house.admit(first)
    assert house.prefix_wait.waits_for_prefix(twin)


def test_nobody_waits_for_a_state_in_what_a_retracted_request_has_decoded() -> None:
    """Its prefill covers its prompt and its output, and its plan wants states behind the prompt."""
    house, (first, _) = House(), siblings(2)
    longer = Waiting("longer", [*first.origin_input_ids, *range(500)])
    house.planner.plan_request(first, len(first.origin_input_ids) + 100, 0, 0)
    (plan,) = (plan for _, plan in house.planner.in_flight())
    assert plan.first_open(0) == len(first.origin_input_ids) + 100 - 1
    assert not house.prefix_wait.waits_for_prefix(longer)


def test_other_salts_share_nothing() -> None:
    house, (first, other) = House(), siblings(2)
    other.cache_salt = "theirs"
    house.prefix_wait.update_waiting([first, other])
    house.admit(first)
    assert not house.prefix_wait.waits_for_prefix(other)


@pytest.mark.parametrize("salts", [("a", "b"), ("a", None), (None, "b")])
def test_the_same_prompt_of_another_tenant_is_not_waited_for(
    salts: tuple[str | None, str | None],
) -> None:
    house, (first, _) = House(), siblings(2)
    twin = Waiting("twin", first.origin_input_ids)
    first.cache_salt, twin.cache_salt = salts
    house.prefix_wait.update_waiting([first, twin])
    house.admit(first)
    assert not house.prefix_wait.waits_for_prefix(twin)


def test_no_wait_is_for_ever() -> None:
    house, (first, other) = House(), siblings(2)
    house.prefix_wait.update_waiting([first, other])
    house.admit(first)
    waits = [house.prefix_wait.waits_for_prefix(other) for _ in range(LONGEST_WAIT + 2)]
    assert waits == [True] * LONGEST_WAIT + [False] * 2


def test_who_joined_a_batch_is_no_sibling() -> None:
    house, (first, other) = House(), siblings(2)
    house.prefix_wait.update_waiting([first, other])
    assert house.prefix_wait.shared(other) == [300]
    house.admit(first)
    assert house.prefix_wait.shared(other) == [] and house.prefix_wait.has_waiting
    house.admit(other)
    assert not house.prefix_wait.has_waiting


def test_who_left_the_queue_is_no_sibling() -> None:
    house, (first, other) = House(), siblings(2)
    house.prefix_wait.update_waiting([first, other])
    house.prefix_wait.update_waiting([first])
    assert house.prefix_wait.shared(first) == []
