"""`scripts/bench.py pools`: what a half of a trace chooses, and what is said of all rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scripts.bench.pools import REUSE, Half, Rates, conclude, learnt_split
from sglang_hybrid.core.server_settings import Serving, Split
from sglang_hybrid.core.traffic.recorder import RequestWindow
from sglang_hybrid.extensions.lab.simulation.tuner.splits import replay_apart
from tests.extensions.lab.simulation.tuner.traffic import COST, conversations, requests

FEW_SLOTS = Split(5_000, 2)


def test_a_half_replays_as_a_worker_does() -> None:
    """The window need not be its beginning."""
    half = Half(requests(conversations(60)), COST)
    budgets = [FEW_SLOTS, Split(1_506, 8), FEW_SLOTS.bytes(COST)]
    for begin, end in ((0, 40), (10, 60)):
        window = RequestWindow(
            half.requests[begin:end], COST, FEW_SLOTS, (end - begin) // 2, 16, Serving()
        )
        apart = replay_apart(window, REUSE, budgets)
        for mine, theirs in zip(half.replay(window, REUSE, budgets), apart, strict=True):
            assert np.array_equal(mine, theirs)
        assert sum(map(np.sum, apart)) > 0


def test_the_first_half_chooses(tmp_path: Path) -> None:
    half = Half(requests(conversations(200)), COST)
    learnt = learnt_split(half, FEW_SLOTS, 600, tmp_path)
    assert learnt.slots > FEW_SLOTS.slots
    assert half.hit_rate(learnt) > half.hit_rate(FEW_SLOTS)
    few = Half(half.requests[:100], COST)
    assert learnt_split(few, FEW_SLOTS, 600, tmp_path / "few") == FEW_SLOTS


def test_what_is_said_of_all_rows() -> None:
    """Rows without a distance count in the means, and as losses."""
    found = {
        ("a", 1.0): Rates(50, 55, 56, 60, 60, 20),
        ("b", 2.0): Rates(70, 69.5, 68, 70, 70.5, 20),
        ("c", 4.0): Rates(80, 84, 84, 84, 85, 20),
    }
    means, closed, losses = conclude(found)[:5], conclude(found)[5:7], conclude(found)[7:]
    assert means == ["66.7", "69.5", "69.3", "71.3", "71.8"]
    assert closed == ["55", "52"]
    assert losses == ["0 of 3, -0.5 (b, 2 GB)", "1 of 3, -2.0 (b, 2 GB)"]
