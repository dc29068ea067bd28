"""Who waits for whose checkpoint: the first request of a family goes, the others follow it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from sglang_hybrid.checkpoints.family import LONGEST_WAIT, Family
from sglang_hybrid.checkpoints.planner import Planner
from sglang_hybrid.core.admission import Room
from sglang_hybrid.telemetry.stats import CacheStats


@dataclass(eq=False)
class Waiting:
    """What the planner and the family read of a request."""

    rid: str
    origin_input_ids: list[int]
    prefix_len: int = 0
    extend_end: int = 0
    extra_key: str | None = None
    cache_salt: str | None = None


@dataclass
class Batch:
    reqs: list[Waiting]
    state_tracks: Any = None
    mamba_cow_src_indices: Any = None


@dataclass
class Slots:
    """A pool of so many free slots and nothing to push out."""

    left: int
    given_back: list[int] = field(default_factory=list)

    def free(self) -> int:
        return self.left

    def take(self, wish: Any = None) -> torch.Tensor | None:
        if not self.left:
            return None
        self.left -= 1
        return torch.tensor([self.left])

    def give_back(self, slot: torch.Tensor) -> None:
        self.left += 1
        self.given_back.append(int(slot))

    def room(self, intent: Any) -> Room:
        return Room(self.left)


class House:
    """A planner and a family on a pool of `slots`."""

    def __init__(self, slots: int = 8) -> None:
        self.slots = Slots(slots)
        self.stats = CacheStats()
        self.planner = Planner(
            self.slots,
            Counter(),
            page_size=1,
            min_branch_tokens=16,
            grid=4_096,
            one_pass=True,
        )
        self.family = Family(self.planner, self.stats, min_branch_tokens=16)

    def admit(self, req: Any) -> None:
        prompt = len(req.origin_input_ids)
        self.planner.intend(req, prompt, 0, shared=self.family.shared(req))
        self.family.admitted(req)

    def forward(self, req: Any, end: int | None = None) -> None:
        req.extend_end = len(req.origin_input_ids) if end is None else end
        self.planner.plan(Batch([req]))
        req.prefix_len = req.extend_end

    def publish(self, req: Any) -> list[int]:
        return [planned.position for planned in self.planner.due(req, req.extend_end)]


def siblings(count: int, shared: int = 300, own: int = 40) -> list[Any]:
    return [
        Waiting(str(k), [*range(shared), *(10_000 * (k + 1) + i for i in range(own))])
        for k in range(count)
    ]


def test_siblings_wait_until_the_first_has_laid_their_checkpoint() -> None:
    house, (first, *others) = House(), siblings(3)
    house.family.now_waiting([first, *others])
    assert not house.family.waits_for_a_sibling(first)
    house.admit(first)
    assert all(house.family.waits_for_a_sibling(other) for other in others)
    house.forward(first)
    assert all(house.family.waits_for_a_sibling(other) for other in others)
    assert house.publish(first) == [339, 300]
    assert not any(house.family.waits_for_a_sibling(other) for other in others)
    assert house.stats.waited == 2


def test_a_chunk_that_has_not_come_to_the_branch_lets_them_wait() -> None:
    house, (first, other) = House(), siblings(2)
    house.family.now_waiting([first, other])
    house.admit(first)
    house.forward(first, 200)
    assert house.publish(first) == []
    assert house.family.waits_for_a_sibling(other)
    house.forward(first)
    assert house.publish(first) == [339, 300]
    assert not house.family.waits_for_a_sibling(other)


def test_nobody_waits_for_a_checkpoint_without_a_slot() -> None:
    house, (first, other) = House(slots=0), siblings(2)
    house.family.now_waiting([first, other])
    house.admit(first)
    assert house.family.waits_for_a_sibling(other)
    house.forward(first)
    assert not house.family.waits_for_a_sibling(other)


def test_nobody_waits_for_one_that_went_away() -> None:
    house, (first, other) = House(), siblings(2)
    house.family.now_waiting([first, other])
    house.admit(first)
    house.forward(first)
    house.planner.drop(first)
    assert not house.family.waits_for_a_sibling(other)
    assert house.slots.left == 8


@pytest.mark.parametrize("shared, waits", [(40, False), (80, True)])
def test_waiting_must_save_a_step(shared: int, waits: bool) -> None:
    house, (first, other) = House(), siblings(2, shared)
    house.family.now_waiting([first, other])
    house.admit(first)
    assert house.family.waits_for_a_sibling(other) is waits


def test_nobody_waits_for_what_is_cached_already() -> None:
    house, (first, other) = House(), siblings(2)
    house.family.now_waiting([first, other])
    house.admit(first)
    other.prefix_len = 290
    assert not house.family.waits_for_a_sibling(other)


def test_the_same_prompt_waits_for_its_twins_end() -> None:
    house, (first, _) = House(), siblings(2)
    twin = Waiting("twin", first.origin_input_ids)
    house.family.now_waiting([first, twin])
    house.admit(first)
    assert house.family.waits_for_a_sibling(twin)


def test_other_salts_share_nothing() -> None:
    house, (first, other) = House(), siblings(2)
    other.cache_salt = "theirs"
    house.family.now_waiting([first, other])
    house.admit(first)
    assert not house.family.waits_for_a_sibling(other)


def test_no_wait_is_for_ever() -> None:
    house, (first, other) = House(), siblings(2)
    house.family.now_waiting([first, other])
    house.admit(first)
    waits = [house.family.waits_for_a_sibling(other) for _ in range(LONGEST_WAIT + 2)]
    assert waits == [True] * LONGEST_WAIT + [False] * 2


def test_who_left_the_queue_is_no_sibling() -> None:
    house, (first, other) = House(), siblings(2)
    house.family.now_waiting([first, other])
    house.family.now_waiting([first])
    assert house.family.shared(first) == []
