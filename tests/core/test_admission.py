"""Which positions deserve a checkpoint: one example per rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_hybrid.core.checkpoints.admission import (
    Checkpoint,
    Prefill,
    Skip,
    SlotBudget,
    decide,
    judicious,
    last_boundary,
)
from sglang_hybrid.core.records.nodes import Kind

PLENTY = SlotBudget(free_slots=10)


def skips(decided: list[Checkpoint]) -> dict[Kind, Skip | None]:
    return {checkpoint.kind: checkpoint.skip for checkpoint in decided}


def test_judicious_takes_branch_last_message_and_prompt_end() -> None:
    prefill = Prefill(1000, hit_len=100, kv_len=400, message_starts=[50, 600, 900])
    assert decide(judicious(prefill), prefill, PLENTY) == [
        Checkpoint(400, Kind.BRANCH),
        Checkpoint(900, Kind.MESSAGE),
        Checkpoint(999, Kind.PROMPT_END),
    ]


def test_declared_positions_come_first_and_may_be_close_to_others() -> None:
    prefill = Prefill(1000, hit_len=100, kv_len=400, message_starts=[905], declared=[105, 395, 900])
    assert decide(judicious(prefill), prefill, PLENTY) == [
        Checkpoint(900, Kind.DECLARED),
        Checkpoint(395, Kind.DECLARED),
        Checkpoint(105, Kind.DECLARED),
        Checkpoint(400, Kind.BRANCH, Skip.MICRO_BRANCH),
        Checkpoint(905, Kind.MESSAGE, Skip.MICRO_BRANCH),
        Checkpoint(999, Kind.PROMPT_END),
    ]


def test_a_declared_position_is_worth_the_cheapest_victim() -> None:
    prefill = Prefill(1000, hit_len=0, kv_len=0, declared=[400])
    full = SlotBudget(0, evictable=True, beats_victim=lambda position, kind: False)
    assert skips(decide(judicious(prefill), prefill, full))[Kind.DECLARED] is None
    locked = SlotBudget(0, evictable=False)
    assert skips(decide(judicious(prefill), prefill, locked))[Kind.DECLARED] is Skip.NO_SLOT


def test_the_history_knows_a_branch_whose_kv_is_gone() -> None:
    assert Prefill(1000, hit_len=100, kv_len=150, known_branch=400).branch_points() == [400, 150]
    assert Prefill(1000, hit_len=100, kv_len=600, known_branch=400).branch_points() == [600, 400]
    assert Prefill(1000, hit_len=100, kv_len=1000).branch_points() == [999]


def test_the_branch_of_the_stored_kv_is_wanted_beside_that_of_the_history() -> None:
    """Others share the KV up to 300; only its own session comes back to 800, whose KV is gone."""
    prefill = Prefill(1000, hit_len=0, kv_len=300, known_branch=800)
    assert [c.position for c in decide(judicious(prefill), prefill, PLENTY)] == [800, 300, 999]


@pytest.mark.parametrize(
    ("kv_len", "skip"),
    [(100, Skip.DUPLICATE), (115, Skip.MICRO_BRANCH), (116, None), (999, None)],
)
def test_a_branch_must_gain_enough_tokens(kv_len: int, skip: Skip | None) -> None:
    prefill = Prefill(1000, hit_len=100, kv_len=kv_len)
    assert skips(decide(judicious(prefill), prefill, PLENTY))[Kind.BRANCH] is skip


def test_a_position_is_taken_once() -> None:
    prefill = Prefill(1000, hit_len=0, kv_len=999, message_starts=[999])
    decided = decide(judicious(prefill), prefill, PLENTY)
    assert [c.skip for c in decided] == [None, Skip.DUPLICATE, Skip.DUPLICATE]


def test_what_the_prefill_does_not_pass_cannot_be_taken() -> None:
    prefill = Prefill(1000, hit_len=500, kv_len=500, message_starts=[300])
    assert skips(decide(judicious(prefill), prefill, PLENTY))[Kind.MESSAGE] is Skip.NOT_COMPUTED
    after = decide([(1000, Kind.PROMPT_END)], prefill, PLENTY)
    assert after[0].skip is Skip.NOT_COMPUTED


def test_positions_fall_on_pages() -> None:
    prefill = Prefill(1000, hit_len=64, kv_len=411, message_starts=[70], page_size=16)
    assert decide(judicious(prefill), prefill, PLENTY) == [
        Checkpoint(400, Kind.BRANCH),
        Checkpoint(64, Kind.MESSAGE, Skip.DUPLICATE),
        Checkpoint(992, Kind.PROMPT_END),
    ]


def test_the_first_wish_takes_the_last_free_slot() -> None:
    prefill = Prefill(1000, hit_len=0, kv_len=400)
    decided = decide(judicious(prefill), prefill, SlotBudget(free_slots=1))
    assert skips(decided) == {Kind.BRANCH: None, Kind.PROMPT_END: Skip.NO_SLOT}


def test_a_full_pool_takes_what_is_worth_more_than_it_pushes_out() -> None:
    prefill = Prefill(1000, hit_len=0, kv_len=400)

    def beats_victim(position: int, kind: Kind) -> bool:
        return kind is Kind.BRANCH

    slot_budget = SlotBudget(
        free_slots=0, evictable=True, beats_victim=beats_victim, knows_returns=True
    )
    decided = decide(judicious(prefill), prefill, slot_budget)
    assert skips(decided) == {Kind.BRANCH: None, Kind.PROMPT_END: Skip.NOT_WORTH}
    cheap = replace(slot_budget, beats_victim=lambda position, kind: True)
    assert all(checkpoint.admitted for checkpoint in decide(judicious(prefill), prefill, cheap))


def test_where_returns_are_not_known_a_prompts_end_takes_a_free_slot_only() -> None:
    prefill = Prefill(1000, hit_len=0, kv_len=400)
    untold = SlotBudget(free_slots=0, evictable=True)
    decided = decide(judicious(prefill), prefill, untold)
    assert skips(decided) == {Kind.BRANCH: None, Kind.PROMPT_END: Skip.NOT_WORTH}
    assert all(c.admitted for c in decide(judicious(prefill), prefill, PLENTY))


def every_chunk(prefill: Prefill, chunk: int) -> list[tuple[int, Kind]]:
    """Admission `all`, SGLang's own: every chunk end, counted from where the prefill starts, and
    the prompt's end.
    """
    ends = range(prefill.hit_len + chunk, prefill.prompt_len - 1, chunk)
    return [*((end, Kind.CHUNK) for end in ends), (prefill.prompt_len - 1, Kind.PROMPT_END)]


def test_all_takes_every_chunk_end() -> None:
    prefill = Prefill(1000, hit_len=100, kv_len=400)
    decided = decide(every_chunk(prefill, 256), prefill, PLENTY)
    assert [(c.position, c.kind) for c in decided] == [
        (356, Kind.CHUNK),
        (612, Kind.CHUNK),
        (868, Kind.CHUNK),
        (999, Kind.PROMPT_END),
    ]
    assert all(checkpoint.admitted for checkpoint in decided)


def test_what_waits_is_a_branch_too() -> None:
    prefill = Prefill(1000, hit_len=0, kv_len=0, shared=[300, 310, 700])
    decided = decide(judicious(prefill), prefill, PLENTY)
    assert [(c.position, c.skip) for c in decided] == [
        (700, None),
        (310, None),
        (300, Skip.MICRO_BRANCH),
        (999, None),
    ]


def test_a_chunks_end_is_worth_a_free_slot_only() -> None:
    prefill = Prefill(1000, hit_len=0, kv_len=0)
    asked = [(512, Kind.CHUNK)]
    assert decide(asked, prefill, PLENTY)[0].admitted
    full = SlotBudget(free_slots=0, evictable=True, beats_victim=lambda position, kind: True)
    assert decide(asked, prefill, full)[0].skip is Skip.NOT_WORTH


@pytest.mark.parametrize(
    ("start", "end", "boundary"),
    [(0, 1000, 960), (900, 1000, 964), (960, 1000, None), (300, 600, 556), (100, 164, 164)],
)
def test_the_boundary_that_sglang_would_keep(start: int, end: int, boundary: int | None) -> None:
    assert last_boundary(start, end, grid=64) == boundary
