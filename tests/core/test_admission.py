"""Positions that deserve a checkpoint: one row per rule."""

from __future__ import annotations

import pytest

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
from sglang_hybrid.core.records.nodes import Kind

MICRO, DUPLICATE, NOT_COMPUTED = Skip.MICRO_BRANCH, Skip.DUPLICATE, Skip.NOT_COMPUTED
END = (999, Kind.PROMPT_END, None)

Wanted = tuple[int, Kind, Skip | None]


@pytest.mark.parametrize(
    ("prefill", "expected"),
    [
        pytest.param(
            Prefill(1000, hit_len=100, kv_len=400, message_starts=[50, 600, 900]),
            [(400, Kind.BRANCH, None), (900, Kind.MESSAGE, None), END],
            id="branch, last message and prompt end",
        ),
        pytest.param(
            Prefill(1000, hit_len=100, kv_len=400, message_starts=[905], declared=[105, 395, 900]),
            [
                *((at, Kind.DECLARED, None) for at in (900, 395, 105)),
                (400, Kind.BRANCH, MICRO),
                (905, Kind.MESSAGE, MICRO),
                END,
            ],
            id="declared positions come first and may be close to others",
        ),
        pytest.param(
            Prefill(1000, hit_len=0, kv_len=300, known_branch=800),
            [(800, Kind.BRANCH, None), (300, Kind.BRANCH, None), END],
            id="others share KV to 300; only its own session returns to 800, whose KV is gone",
        ),
        *(
            pytest.param(
                Prefill(1000, hit_len=100, kv_len=kv_len),
                [(min(kv_len, 999), Kind.BRANCH, skip), END],
                id=f"a branch must gain enough tokens: {kv_len - 100}",
            )
            for kv_len, skip in ((100, DUPLICATE), (115, MICRO), (116, None))
        ),
        pytest.param(
            Prefill(1000, hit_len=0, kv_len=999, message_starts=[999]),
            [
                (999, Kind.BRANCH, None),
                (999, Kind.MESSAGE, DUPLICATE),
                (999, Kind.PROMPT_END, DUPLICATE),
            ],
            id="a position is taken once",
        ),
        pytest.param(
            Prefill(1000, hit_len=500, kv_len=500, message_starts=[300]),
            [(500, Kind.BRANCH, DUPLICATE), (300, Kind.MESSAGE, NOT_COMPUTED), END],
            id="what the prefill does not pass cannot be taken",
        ),
        pytest.param(
            Prefill(1000, hit_len=64, kv_len=411, message_starts=[70], page_size=16),
            [
                (400, Kind.BRANCH, None),
                (64, Kind.MESSAGE, DUPLICATE),
                (992, Kind.PROMPT_END, None),
            ],
            id="positions fall on pages",
        ),
        pytest.param(
            Prefill(1000, hit_len=100, kv_len=400, next_branch=700, message_starts=[900]),
            [(400, Kind.BRANCH, None), (700, Kind.BRANCH, None), (900, Kind.MESSAGE, None), END],
            id="where the next prompt is expected to branch",
        ),
        pytest.param(
            Prefill(1000, hit_len=0, kv_len=0, shared=[300, 310, 700]),
            [
                (700, Kind.BRANCH, None),
                (310, Kind.BRANCH, None),
                (300, Kind.BRANCH, MICRO),
                END,
            ],
            id="what waits is a branch too",
        ),
        pytest.param(
            Prefill(1000, hit_len=100, kv_len=400, message_starts=[700], reply_start=994),
            [
                (994, Kind.MESSAGE, None),
                (400, Kind.BRANCH, None),
                (700, Kind.MESSAGE, None),
            ],
            id="the next turn leaves the prompt where the reply begins",
        ),
        pytest.param(
            Prefill(1000, hit_len=994, kv_len=999, reply_start=994),
            [(994, Kind.MESSAGE, DUPLICATE), (999, Kind.BRANCH, MICRO)],
            id="the same prompt again computes what follows the reply's opener",
        ),
        pytest.param(
            Prefill(1000, hit_len=0, kv_len=0, shared=[999], reply_start=994),
            [(994, Kind.MESSAGE, None), (999, Kind.BRANCH, MICRO)],
            id="samples of one prompt share it up to the reply",
        ),
    ],
)
def test_positions_are_taken_or_skipped(prefill: Prefill, expected: list[Wanted]) -> None:
    assert screen_positions(judicious(prefill), prefill) == [Checkpoint(*one) for one in expected]


def test_the_end_of_the_prompt_is_always_computed() -> None:
    prefill = Prefill(1000, hit_len=500, kv_len=500)
    assert screen_positions([(1000, Kind.PROMPT_END)], prefill)[0].skip is NOT_COMPUTED


def test_behind_a_prompt_that_was_asked_before_a_state_is_wanted() -> None:
    again = Prefill(1000, hit_len=994, kv_len=1000, reply_start=994, is_repeated=True)
    assert [each for each in screen_positions(judicious(again), again) if each.admitted] == [
        Checkpoint(1000, Kind.PROMPT_END)
    ]


def test_the_history_knows_a_branch_whose_kv_is_gone() -> None:
    assert Prefill(1000, hit_len=100, kv_len=150, known_branch=400).branch_points() == [400, 150]
    assert Prefill(1000, hit_len=100, kv_len=600, known_branch=400).branch_points() == [600, 400]
    assert Prefill(1000, hit_len=100, kv_len=1000).branch_points() == [999]


@pytest.mark.parametrize(
    ("kind", "evictable", "beats_victim", "knows_returns", "skip"),
    [
        (Kind.BRANCH, True, True, True, None),
        (Kind.BRANCH, True, False, True, Skip.NOT_WORTH),
        (Kind.BRANCH, True, None, False, None),  # as with LRU, where what is new is worth more
        (Kind.BRANCH, False, True, True, Skip.NO_SLOT),
        (Kind.DECLARED, True, False, True, None),  # the client said that it comes back
        (Kind.DECLARED, False, True, True, Skip.NO_SLOT),
        (Kind.PROMPT_END, True, True, True, None),
        (Kind.PROMPT_END, True, True, False, Skip.NOT_WORTH),  # nobody knows how often
        (Kind.CHUNK, True, True, True, Skip.NOT_WORTH),
    ],
)
def test_a_full_pool_takes_what_is_worth_more_than_it_pushes_out(
    kind: Kind, evictable: bool, beats_victim: bool | None, knows_returns: bool, skip: Skip | None
) -> None:
    def beats(position: int, kind: Kind) -> bool:
        assert position == 400
        return bool(beats_victim)

    how = None if beats_victim is None else beats
    assert skip_reason(400, kind, SlotBudget(0, evictable, how, knows_returns)) is skip


@pytest.mark.parametrize(
    ("start", "end", "boundary"),
    [(0, 1000, 960), (900, 1000, 964), (960, 1000, None), (300, 600, 556), (100, 164, 164)],
)
def test_the_boundary_that_sglang_would_keep(start: int, end: int, boundary: int | None) -> None:
    assert last_boundary(start, end, grid=64) == boundary
