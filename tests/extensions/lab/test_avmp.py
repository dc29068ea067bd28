"""The AVMP paper's simulator: its own numbers, and what one memory makes of the same requests."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from sglang_hybrid.core.memory.account import MemoryKind
from sglang_hybrid.extensions.lab.avmp.compare import (
    ALLOCATORS,
    QUEUES,
    SGLANGS_SHARE,
    compare,
    compare_queues,
)
from sglang_hybrid.extensions.lab.avmp.harness import Counts, run
from sglang_hybrid.extensions.lab.avmp.memory import MODELS, Ids, ModelBytes
from sglang_hybrid.extensions.lab.avmp.paged import Padded, TwoPools
from sglang_hybrid.extensions.lab.avmp.queueing import Capacity, queue
from sglang_hybrid.extensions.lab.avmp.requests import IN_TOTALS, WORKLOADS, LiveRequest, pages_of
from sglang_hybrid.extensions.lab.avmp.shared import OneWayDonor, PlainShared, SharedByValue
from sglang_hybrid.extensions.lab.program import main

SMALL = ModelBytes("small", page=10, state=40, kv_layers=1, state_layers=1)
OURS = "one memory (ours)"
PLAIN = "plain shared pool"

# Workloads.


def test_workloads_are_those_of_the_paper() -> None:
    """Lengths within the paper's ranges; the same seed, the same requests."""
    ranges = {
        "uniform_short": (512, 128, 1_024, 64, 256),
        "mixed_long": (256, 512, 65_536, 128, 512),
        "agentic_burst": (256, 64, 65_536, 64, 256),
        "sharegpt_replay": (512, 16, 4_096, 32, 2_048),
    }
    for name, (count, shortest, longest, least, most) in ranges.items():
        requests = WORKLOADS[name].requests(0)
        assert len(requests) == count
        assert all(shortest <= r.prompt <= longest and least <= r.answer <= most for r in requests)
        assert WORKLOADS[name].requests(0) == requests != WORKLOADS[name].requests(1)
        assert [r.arrival for r in requests] == sorted(r.arrival for r in requests)
    long = [r.prompt > 4_096 for r in WORKLOADS["mixed_long"].requests(0)]
    assert 0.1 < sum(long) / len(long) < 0.3
    burst = WORKLOADS["agentic_burst"].requests(0)
    assert len(burst) / burst[-1].arrival == pytest.approx(10, rel=0.2)


def test_a_page_is_taken_when_a_token_needs_it() -> None:
    request = LiveRequest(0, prompt=30, answer=20, arrival=5)
    assert (request.pages, request.pages_at_its_end, request.end) == (2, 4, 55)
    assert list(request.page_ticks()) == [5 + 30 + 3, 5 + 30 + 19]
    assert [pages_of(n) for n in (0, 1, 16, 17)] == [1, 1, 1, 2]


# Allocators.


def test_ids_come_back_last_in_first_out() -> None:
    ids = Ids(5)
    assert ids.take(3) == [0, 1, 2]
    ids.give([0, 2])
    assert ids.take(1) == [2]
    assert ids.take(4) is None
    assert ids.take_one_by_one(4) is None  # and now 0, 3 and 4 are in the other order
    assert ids.take(3) == [4, 3, 0]


def test_a_pool_shrinks_at_its_end_only() -> None:
    ids = Ids(4)
    assert ids.take(3) == [0, 1, 2]
    assert not ids.resize(2)
    assert ids.resize(3)
    assert ids.take(1) is None
    assert ids.resize(5)
    assert ids.take(2) == [4, 3]


def test_a_pool_evicts_one_request_of_its_own() -> None:
    pools = TwoPools(SMALL, 200, share=0.4)  # 12 pages and 2 states
    for number in range(2):
        assert pools.take(MemoryKind.KV, number, 2)
        assert pools.take(MemoryKind.STATES, number, 1)
    assert pools.take(MemoryKind.STATES, 2, 1)
    assert pools.evicted == {0}
    assert not pools.take(MemoryKind.KV, 2, 11), (
        "evicting the two pages of one request is not enough"
    )
    assert pools.evicted == {0}
    assert pools.take(MemoryKind.KV, 2, 11)
    assert pools.evicted == {0, 1}


def test_pages_move_when_an_eviction_was_not_enough() -> None:
    pools = TwoPools(SMALL, 400, share=0.5, batch=2)  # 20 pages and 5 states
    assert pools.take(MemoryKind.KV, 0, 12)
    assert pools.take(MemoryKind.KV, 1, 6)
    assert not TwoPools(SMALL, 400, share=0.5).take(MemoryKind.KV, 2, 21)
    assert pools.take(MemoryKind.STATES, 0, 1)
    assert pools.take(MemoryKind.KV, 2, 22)  # 12 of request 0, 2 free, 8 from two states
    assert (pools.evicted, pools.moves) == ({0}, 1)


def test_the_donors_last_pages_may_be_in_use() -> None:
    pools = TwoPools(SMALL, 400, share=0.5, batch=4)
    for number in range(5):
        assert pools.take(MemoryKind.STATES, number, 1)
    pools.end(0)
    assert not pools.take(MemoryKind.KV, 5, 21)
    assert pools.moves == 0


def test_a_padded_page_is_as_large_as_a_state() -> None:
    padded = Padded(SMALL, 200)  # 5 pages of 40
    assert padded.take(MemoryKind.KV, 0, 3)
    assert padded.take(MemoryKind.STATES, 1, 1)
    assert padded.take(MemoryKind.KV, 2, 4)
    assert padded.evicted == {0}
    padded.end(0)  # gives back what is request 2's by now, as there
    assert padded.take(MemoryKind.KV, 3, 3)
    assert padded.evicted == {0}


def test_a_plain_pool_evicts_the_oldest_and_once() -> None:
    plain = PlainShared(SMALL, 200)
    assert plain.take(MemoryKind.STATES, 0, 1)
    assert plain.take(MemoryKind.KV, 1, 15)
    assert not plain.take(MemoryKind.KV, 2, 10)
    assert (plain.evicted, plain.free) == ({0}, 50)


def test_a_donor_gives_kv_to_states_and_never_back() -> None:
    donor = OneWayDonor(SMALL, 200)
    assert donor.take(MemoryKind.KV, 0, 20)
    assert donor.take(MemoryKind.STATES, 1, 5)
    assert donor.evicted == {0}
    assert not donor.take(MemoryKind.KV, 2, 1)
    assert donor.evicted == {0}


def test_one_memory_evicts_what_is_worth_least_until_it_suffices() -> None:
    ours = SharedByValue(SMALL, 200)
    assert ours.take(MemoryKind.KV, 0, 6)
    assert ours.take(MemoryKind.KV, 1, 8)
    assert ours.take(MemoryKind.STATES, 2, 1)
    assert ours.take(MemoryKind.KV, 3, 10)
    assert ours.evicted == {1}, "the largest one"
    assert ours.take(MemoryKind.STATES, 4, 1)
    assert ours.evicted == {1, 3}
    assert ours.take(MemoryKind.KV, 3, 2), "there is room"
    assert ours.take(MemoryKind.STATES, 5, 2)
    assert ours.evicted == {1, 3, 0}, "what is lost already first, and then the largest"
    assert ours.bytes_of(3) == 0
    assert not ours.take(MemoryKind.KV, 0, 21), "more than there is"


def test_a_lost_request_takes_nothing_from_others() -> None:
    ours = SharedByValue(SMALL, 100)
    assert ours.take(MemoryKind.KV, 0, 10)
    assert ours.take(MemoryKind.KV, 1, 10)
    assert ours.evicted == {0}
    assert not ours.take(MemoryKind.KV, 0, 1)
    assert ours.evicted == {0}


@pytest.mark.parametrize("make", ALLOCATORS.values(), ids=ALLOCATORS)
def test_nothing_is_left_when_all_have_ended(make: Any) -> None:
    """Random programs: in the end everything can be had, but for what a move lost by rounding."""
    rng = random.Random(3)
    memory = make(SMALL, 2_000)
    running: set[int] = set()
    for number in range(300):
        memory.take(rng.choice(list(MemoryKind)), number, rng.randrange(1, 30))
        running.add(number)
        if rng.random() < 0.5:
            memory.end(running.pop())
    for number in running:
        memory.end(number)
    before = set(memory.evicted)
    assert memory.take(MemoryKind.KV, 1_000, 5)
    assert memory.take(MemoryKind.STATES, 1_000, 2)
    assert memory.evicted == before


# Counting.


def test_calls_and_requests_are_counted() -> None:
    """A request of one page and then three, in two layers, and a state of 40 bytes."""
    model = ModelBytes("two layers", page=10, state=40, kv_layers=2, state_layers=1)
    requests = [LiveRequest(0, 16, 32, 0)]
    expected = {
        100: Counts(1, out_of_memory=0, completed=1, evicted=0, unharmed=1),
        60: Counts(1, out_of_memory=0, completed=1, evicted=1, unharmed=0),  # by its own pages
        30: Counts(1, out_of_memory=1, completed=0, evicted=1, unharmed=0),  # no room for the state
    }
    for total, counts in expected.items():
        assert run(PlainShared(model, total), model, requests) == counts


PAPER = {
    "padded unified": (482.7, 573.0, 512.0),
    "two pools, 0.5 for states": (7.3, 387.3, 157.3),
    "two pools, 0.9 for states": (522.0, 492.0, 207.3),
    "dynamic AVMP, batch 128, from 0.5": (9.0, 364.3, 136.7),
}
"""Table 1: calls that were out of memory, by workload."""


@pytest.mark.slow
def test_the_papers_table_and_one_memory() -> None:
    rows = compare(IN_TOTALS, [*PAPER, PLAIN, OURS], seeds=3, workers=2)
    for allocator, calls in PAPER.items():
        seen = [round(rows[allocator, workload].out_of_memory, 1) for workload in IN_TOTALS]
        assert tuple(seen) == calls
    assert sum(rows[OURS, workload].out_of_memory for workload in IN_TOTALS) < 495
    for workload in IN_TOTALS:
        ours = rows[OURS, workload]
        assert ours.evicted <= rows[PLAIN, workload].evicted
        assert ours.unharmed > max(rows[other, workload].unharmed for other in (*PAPER, PLAIN))


# Queues.


def test_requests_wait_for_all_that_they_will_hold() -> None:
    requests = [LiveRequest(n, 16, 16, n) for n in range(3)]  # 2 pages and a state: 60 bytes
    queued = queue(Capacity(SMALL, 130), requests)
    assert [request.arrival for request in queued.started] == [0, 1, 32]
    assert (queued.makespan, queued.waited, queued.refused) == (64, 30, [])
    split = Capacity(SMALL, 130, share=0.4)  # one state
    assert [request.arrival for request in queue(split, requests).started] == [0, 32, 64]
    large = LiveRequest(3, 400, 1, 3)
    assert queue(Capacity(SMALL, 130), [large]).refused == [large]


@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(name, marks=[] if name == "agentic_burst" else pytest.mark.slow)
        for name in WORKLOADS
    ],
)
def test_with_a_queue_nobody_is_harmed_and_all_is_done_sooner(workload: str) -> None:
    rows = compare_queues(workload, seeds=1)
    assert set(rows) == set(QUEUES)
    ours, sglangs = rows[OURS], rows[f"two pools, {SGLANGS_SHARE:.3g} for states"]
    assert (ours.out_of_memory, ours.evicted) == (0, 0)
    assert ours.makespan < sglangs.makespan
    assert ours.refused <= sglangs.refused


@pytest.mark.slow
def test_the_command_prints_both_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, workload in WORKLOADS.items():
        monkeypatch.setitem(WORKLOADS, name, replace(workload, count=20))
    assert main(["avmp", "--seeds", "1"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(ALLOCATORS) + 1 + len(WORKLOADS) * len(QUEUES)
    assert rows[len(ALLOCATORS)].startswith(f"| {OURS} |")


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["avmp", "--seeds", "0"]) == 2
    assert "--seeds: '0' is not a whole number from 1" in capsys.readouterr().err
    assert MODELS[0].peak(LiveRequest(0, 16, 16, 0)) == {MemoryKind.KV: 8, MemoryKind.STATES: 28}
