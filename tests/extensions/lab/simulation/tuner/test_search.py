"""Windows of requests, and what candidates find on them in worker processes."""

from __future__ import annotations

import dataclasses

import pytest

from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.core.traffic.recorder import make_window
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.simulation.traces.declared_hints import with_hints
from sglang_hybrid.extensions.lab.simulation.tuner.candidates import CANDIDATES, replay, search
from sglang_hybrid.extensions.lab.simulation.workers import Limits, packed, unpack
from tests.extensions.lab.simulation.tuner.traffic import COST, fashions, records, templates, window

FEW = CANDIDATES[:3]
MIX = window(templates(40))


def test_a_window_has_what_was_recorded() -> None:
    first, second = records(templates(2))
    said = {"tenant": "a", "message_starts": (3, 9), "reply_start": 11, "hint": Hint.ENDS}
    second = dataclasses.replace(second, **said)
    made = make_window([first, second], 1, COST, 16, None, has_states=True)
    seconds = second.arrival - first.arrival
    assert made.requests == [
        Request(0, 0, 0.0, first.tokens, first.input_len),
        Request(1, 0, seconds, second.tokens, second.input_len, **said),
    ]


def test_a_window_arrives_as_it_left() -> None:
    requests = [
        dataclasses.replace(request, kept=request.tokens.copy(), tenant=("", "a")[number % 2])
        for number, request in enumerate(with_hints(MIX.requests, "both"))
    ]
    left = dataclasses.replace(MIX, requests=requests)
    with packed(left) as descriptor:
        there = unpack(descriptor)
    for field in ("cost", "budget", "counted", "min_branch_tokens", "serving"):
        assert getattr(there, field) == getattr(left, field)
    for mine, its in zip(left.requests, there.requests, strict=True):
        assert its.tokens.tolist() == mine.tokens.tolist()
        assert not its.tokens.flags.owndata, "it is not copied"
        assert dataclasses.replace(its, kept=mine.kept) == mine


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_find_what_a_replay_here_finds(workers: int) -> None:
    found = search(MIX, CANDIDATES, Limits(workers=workers))
    assert found.failures == []
    assert list(found.hits) == list(CANDIDATES)
    for spec, hits in found.hits.items():
        assert hits.tolist() == [o.hit_len for o in replay(MIX, spec)[MIX.counted_from :]]
    assert found.counted_tokens == sum(r.input_len for r in MIX.requests[20:])


def test_templates_are_for_reuse_and_fashions_for_recency() -> None:
    """The assumption of all other tests of decisions."""
    shares = []
    for phase in (templates, fashions):
        hits = search(window(phase(100)), FEW, Limits()).hits
        shares.append(hits[FEW[1]].sum() / hits[FEW[0]].sum())
    assert shares[0] < 0.7 and shares[1] >= 1
