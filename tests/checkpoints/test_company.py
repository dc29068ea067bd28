"""Company is expected of those who had it lately, a tenant at a time."""

from __future__ import annotations

import pytest

from sglang_hybrid.checkpoints import company
from sglang_hybrid.checkpoints.company import Company

ONE, OTHER = ("one", None), ("other", None)
LEAST, MOST = 0.003, 0.012
LONE = [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("arrivals", "seconds"),
    [
        ([], LEAST),
        ([1.0], LEAST),
        (LONE[:4], LEAST),
        (LONE, 0.0),
        ([*LONE, 5.001], LEAST),
        ([*LONE, 5.002], 0.006),
        ([*LONE, 5.002, 5.003], 0.006),
        ([*LONE, 5.002, 6.0], 0.0054),
        ([*LONE, 5.01], MOST),
        ([*LONE, 5.013], 0.0),
        ([*LONE, 5.004, 6.0, 7.0, 8.0, 9.0], 0.0),
        ([1.002, 1.0], 0.006),
    ],
)
def test_patience_after(arrivals: list[float], seconds: float) -> None:
    known = Company(LEAST)
    for at in arrivals:
        known.on_arrival(ONE, at, MOST)
    assert known.patience(ONE, MOST) == pytest.approx(seconds)


def test_no_prompt_waits_longer_than_it_may() -> None:
    known = Company(LEAST)
    known.on_arrival(ONE, 1.0, MOST)
    known.on_arrival(ONE, 1.01, MOST)
    assert known.patience(ONE, LEAST / 2) == known.patience(OTHER, LEAST / 2) == LEAST / 2


def test_a_tenant_is_known_by_its_own_prompts() -> None:
    known = Company(LEAST)
    for at in LONE:
        known.on_arrival(ONE, at, MOST)
        known.on_arrival(OTHER, at + 0.001, MOST)
    assert known.patience(ONE, MOST) == known.patience(OTHER, MOST) == 0.0
    assert known.patience(None, MOST) == LEAST


def test_tenants_unseen_for_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(company, "TENANTS", 2)
    known = Company(LEAST)
    for at in LONE:
        known.on_arrival(ONE, at, MOST)
        known.on_arrival(OTHER, at, MOST)
    known.on_arrival(("third", None), 9.0, MOST)
    assert known.patience(ONE, MOST) == LEAST
    assert known.patience(OTHER, MOST) == 0.0
