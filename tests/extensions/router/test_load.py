"""Work that waits at a replica before a prompt that is sent now."""

from __future__ import annotations

from array import array

import pytest

from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.extensions.router import load as load_module
from sglang_hybrid.extensions.router.load import ASSUMED_RATE, FORGOTTEN, ReplicaLoad
from sglang_hybrid.extensions.router.resumable import Resumable


def prompt(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


@pytest.fixture
def load() -> ReplicaLoad:
    one = ReplicaLoad()
    one.on_status(0, 100.0)
    return one


def test_what_was_sent_and_is_not_answered_comes_first(load: ReplicaLoad) -> None:
    load.on_choice(1, "", prompt(1, 2, 3), 3)
    load.on_choice(2, "", prompt(4, 5), 2)
    assert load.seconds(10) == pytest.approx(0.15)
    load.on_answer(1)
    assert load.seconds(10) == pytest.approx(0.12)
    load.on_answer(2)
    load.on_answer(2)
    assert load.seconds(10) == pytest.approx(0.1)


def test_requests_of_others_count_as_typical_ones(load: ReplicaLoad) -> None:
    load.on_choice(1, "", prompt(*range(20)), 20)
    load.on_status(3, 100.0)  # one of them is our own
    assert load.seconds(10) == pytest.approx((20 + 2 * 20 + 10) / 100)


def test_without_a_measured_rate_one_is_assumed() -> None:
    assert ReplicaLoad().seconds(10) == 10 / ASSUMED_RATE


def test_a_prompt_on_its_way_is_shared_by_its_tenant_only(load: ReplicaLoad) -> None:
    load.on_choice(1, "one", prompt(1, 2, 3, 4), 4)
    load.on_choice(2, "one", prompt(1, 2, 9), 3)
    assert load.on_its_way("one", prompt(1, 2, 3, 5, 6)) == 3
    assert load.on_its_way("one", prompt(1, 2, 3)) == 3
    assert load.on_its_way("one", prompt(7)) == 0
    assert load.on_its_way("", prompt(1, 2, 3, 4)) == 0
    load.on_answer(1)
    assert load.on_its_way("one", prompt(1, 2, 3, 5, 6)) == 2


def test_prompts_on_their_way_take_a_bounded_memory(
    load: ReplicaLoad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_module, "MOST_BYTES", len(prompt(1, 2, 3)))
    load.on_choice(1, "", prompt(1, 2), 2)
    load.on_choice(2, "", prompt(3, 4), 2)  # one too many
    load.on_choice(3, "", prompt(5), 1)
    assert [load.on_its_way("", prompt(one, 2)) for one in (1, 3, 5)] == [2, 0, 1]
    assert load.seconds(0) == pytest.approx(0.05)
    load.on_answer(1)
    load.on_choice(4, "", prompt(3, 4), 2)
    assert load.on_its_way("", prompt(3, 4)) == 2


def test_what_is_computed_sooner_is_not_loaded(load: ReplicaLoad) -> None:
    """A state takes 0.2 s and a token's KV 0.001 s from the host; 100 are computed in 1 s."""
    load.on_status(0, 100.0, loads={Tier.HOST: (0.2, 0.001)})
    assert load.way(Resumable("a", 500, Tier.HOST, 400)) == pytest.approx((500, 0.3))
    assert load.way(Resumable("a", 500, Tier.HOST, 480)) == (480, 0.0)
    assert load.way(Resumable("a", 500, Tier.DEVICE, 500)) == (500, 0.0)
    assert load.way(Resumable("a", 500, Tier.DISK, 400)) == (500, 0.0), "nobody knows"


def test_what_nobody_speaks_of_any_more_is_forgotten() -> None:
    now = [0.0]
    load = ReplicaLoad(lambda: now[0])
    load.on_status(0, 100.0)
    load.on_choice(1, "", prompt(1, 2), 2)
    now[0] = FORGOTTEN + 1
    load.on_choice(2, "", prompt(3), 1)
    assert load.seconds(1) == pytest.approx(0.02)


def test_a_prefill_displaces_what_it_finds_no_room_beside(load: ReplicaLoad) -> None:
    assert load.displaces(1), "nobody knows"
    load.on_status(0, 100.0, room=10)
    assert [load.displaces(left) for left in (10, 11)] == [False, True]
    load.on_choice(1, "", prompt(1, 2, 3, 4), 4)
    assert [load.displaces(left) for left in (6, 7)] == [False, True]
    load.on_answer(1)
    assert not load.displaces(10)
