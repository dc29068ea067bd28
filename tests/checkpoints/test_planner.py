"""The planner tells a forward which states to leave, and owns their slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.checkpoints.tracks import StateTracks
from sglang_hybrid.core.records.nodes import Clock
from sglang_hybrid.core.returns.history import History
from tests.checkpoints.test_prefix_wait import Batch, House, Waiting


def begun(
    house: House,
    *declared: list[int],
    start: int = 0,
    one_pass: bool = True,
    copies: tuple[torch.Tensor, ...] = (),
) -> Batch:
    """A batch with a forward of tokens [start, 500) for each list of declared positions. copies:
    slots from which and into which SGLang copies states before it.
    """
    house.planner.one_pass = one_pass
    batch = Batch([], None, *copies)
    for row, positions in enumerate(declared):
        req: Any = Waiting(str(row), [*range(500)], start, 500)
        req.kv = SimpleNamespace(mamba_pool_idx=torch.tensor(100 + row))
        house.planner.plan_request(req, 500, 0, 0, declared=positions)
        batch.reqs.append(req)
    house.planner.assign_slots(batch)
    return batch


def test_a_forward_writes_the_states_that_are_published_after_it() -> None:
    """Row by row: the same positions and slots."""
    house = House()
    batch = begun(house, [100, 300], [], [200])
    tracks = batch.state_tracks
    assert isinstance(tracks, StateTracks)
    written = set(zip(tracks.rows, tracks.positions, tracks.slots.tolist(), strict=True))
    published = {
        (row, checkpoint.position, int(checkpoint.slot))
        for row, req in enumerate(batch.reqs)
        for checkpoint in house.planner.take_ready(req, 500)
    }
    assert written == published
    assert {(row, position) for row, position, _ in published} == {
        *((0, 100), (0, 300), (0, 499)),
        *((1, 499), (2, 200), (2, 499)),
    }


def test_a_decode_step_copies_the_states_of_answers_that_come_back_shortened() -> None:
    """Into two slots by turns; one of them is published, and the other is free again."""
    house, clock, earlier = House(grid=64), Clock(), [*range(700)]
    history = History()
    clock.advance(None)
    history.observe(earlier, 400, clock)
    reqs: list[Any] = []
    for row, prompt in enumerate(([*earlier[:697], *range(900, 1_000)], earlier)):
        req: Any = Waiting(str(row), prompt, 0, len(prompt))
        req.kv = SimpleNamespace(mamba_pool_idx=torch.tensor(100 + row))
        match = history.match(prompt)
        house.planner.plan_request(req, len(prompt), 0, 0, history_match=match)
        reqs.append(req)
    free, copies = house.slots.free(), []
    for length in range(798, 1_000):  # the step that reads a token begins with the one before it
        batch: Any = SimpleNamespace(reqs=reqs, seq_lens_cpu=torch.tensor([length, length - 97]))
        house.planner.plan_decode(batch)
        if batch.state_copies is not None:
            sources, targets = batch.state_copies
            assert sources.tolist() == [100]
            copies.append((length - 1, int(targets)))
    assert [position for position, _ in copies] == [832, 896, 960]
    assert copies[0][1] == copies[2][1] != copies[1][1]
    assert house.slots.free() == free - 2
    (kept,) = house.planner.take_ready(reqs[0], 962)  # of the last answer three tokens were lost
    assert (kept.position, int(kept.slot)) == copies[1]
    assert house.planner.answer_state(reqs[0]) == 896
    assert house.slots.free() == free - 1


def test_a_forward_that_cannot_write_states_begins_with_copies_of_live_ones() -> None:
    """Each to a slot of its own, after the copies that SGLang makes."""
    house = House()
    copies = torch.tensor([50]), torch.tensor([101])
    batch = begun(house, [100], [100, 300], start=100, one_pass=False, copies=copies)
    assert batch.state_tracks is None
    slots = [int(house.planner.take_ready(req, 500)[0].slot) for req in batch.reqs]
    assert batch.mamba_cow_src_indices.tolist() == [50, 100, 101]
    assert batch.mamba_cow_dst_indices.tolist() == [101, *slots]


@pytest.mark.parametrize("times", [1, 2])
def test_slots_under_way_come_back_once(times: int) -> None:
    """A request may be dropped when it is released, and again when it is not admitted."""
    house = House()
    (req,) = begun(house, [100, 300]).reqs
    assert house.slots.left == 5
    for _ in range(times):
        house.planner.drop(req)
    assert sorted(house.slots.given_back) == [5, 6, 7]
    assert house.slots.left == 8
