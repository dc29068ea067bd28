"""Generated traffic: repeatable, and shaped as its parameters say."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.edges import common_prefix
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.core.victims.eviction import Lru
from sglang_hybrid.extensions.lab.simulation.simulator import Simulator, hit_rate
from sglang_hybrid.extensions.lab.simulation.traces import generators
from sglang_hybrid.extensions.lab.simulation.traces.arrivals import Azure, Draw
from sglang_hybrid.extensions.lab.simulation.traces.declared_hints import with_hints
from sglang_hybrid.extensions.lab.simulation.traces.generators import (
    KINDS,
    generate,
    retime,
    traffic,
)
from sglang_hybrid.extensions.lab.simulation.traces.lines import Room, TraceError
from sglang_hybrid.extensions.lab.simulation.traces.workflows import (
    CALL_TOKENS,
    ROLES,
    SECONDS_PER_TOKEN,
    TASK,
    TOOLS,
    AgentRequest,
)


def fingerprint(kind: str, seed: int) -> list[tuple[float, int, int]]:
    requests = generate(kind, traffic(kind, sessions=20), seed)
    return [(r.arrival, r.input_len, int(r.tokens.sum())) for r in requests]


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_is_a_trace(kind: str) -> None:
    assert fingerprint(kind, 1) == fingerprint(kind, 1) != fingerprint(kind, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_are_in_order_and_within_bounds(kind: str) -> None:
    requests = generate(kind, traffic(kind, sessions=20, max_input=9_000), 3)
    arrivals = [r.arrival for r in requests]
    assert arrivals == sorted(arrivals) and len(arrivals) >= 20
    assert all(0 < r.input_len <= 9_000 for r in requests)
    assert all(r.tokens.min() >= 0 and r.tokens.max() < 32_000 for r in requests)
    assert all(list(r.message_starts) == sorted(r.message_starts) for r in requests)


def test_a_chat_goes_on_from_what_was_said() -> None:
    requests = generate("chat", traffic("chat", sessions=8), 0)
    last: dict[int, np.ndarray] = {}
    for r in requests:
        if r.turn:
            assert np.array_equal(r.tokens[: len(last[r.session])], last[r.session])
        last[r.session] = r.tokens
    assert len({r.tokens[:300].tobytes() for r in requests}) == 1


def test_the_last_answer_of_a_session_may_be_told_from_others() -> None:
    closing = generate("agent", traffic("agent", sessions=20, closing=8), 3)
    last = {request.session: request for request in closing}
    ends = [request.tokens[-8:].tolist() for request in last.values()]
    assert len(last) == 20
    (most, times), *_ = Counter(map(tuple, ends)).most_common(1)
    assert times >= 15, "but for sessions that ended at the longest prompt"
    others = [request for request in closing if request is not last[request.session]]
    assert all(tuple(request.tokens[-8:].tolist()) != most for request in others)


def test_few_shot_prompts_share_templates() -> None:
    requests = generate("few-shot", traffic("few-shot", templates=3, sessions=60), 0)
    beginnings = [r.tokens[:100].tobytes() for r in requests]
    counts = sorted((beginnings.count(b) for b in set(beginnings)), reverse=True)
    assert len(counts) == 3 and counts[0] > 60 / 3


def test_a_fan_out_asks_about_one_document_at_once() -> None:
    changes = {"shared": Draw("const", 500), "think": Draw("const", 0), "turns": Draw("const", 5)}
    requests = generate("fan-out", traffic("fan-out", sessions=4, **changes), 0)
    assert len(requests) == 20 == len({r.session for r in requests})
    for first in range(0, 20, 5):
        group = requests[first : first + 5]
        assert len({r.arrival for r in group}) == 1
        assert all(common_prefix(group[0].tokens, r.tokens) == 500 for r in group[1:])
    assert common_prefix(requests[0].tokens, requests[5].tokens) < 5


def test_a_transcript_grows_and_is_asked_about_at_every_stage() -> None:
    how = traffic(
        "transcript", templates=1, turns=Draw("const", 3), think=Draw("const", 0), max_input=6_000
    )
    requests = generate("transcript", how, 0)
    stages = [requests[at : at + 3] for at in range(0, len(requests), 3)]
    assert len(stages) == how.sessions
    grown = begun = 0
    before = stages[0][0].tokens[:0]
    for stage in stages:
        said = [request.tokens[: request.message_starts[-1]] for request in stage]
        assert all(np.array_equal(said[0], other) for other in said)
        if len(said[0]) > len(before) and np.array_equal(said[0][: len(before)], before):
            grown += 1
        else:
            begun += 1
        before = said[0]
    assert grown > 0.8 * len(stages) and begun > 5


WORKFLOWS = traffic("workflow", sessions=12)


def steps(requests: list[Request]) -> list[AgentRequest]:
    found = [request for request in requests if isinstance(request, AgentRequest)]
    assert len(found) == len(requests)
    return found


def test_a_session_goes_on_when_the_last_of_its_calls_is_done() -> None:
    """The work of other agents in between is a call of the planner's too."""
    before: dict[int, AgentRequest] = {}
    several = 0
    for request in steps(generate("workflow", WORKFLOWS, 0)):
        last = before.get(request.session)
        if last is not None:
            assert np.array_equal(request.tokens[: len(last.tokens)], last.tokens)
            written = SECONDS_PER_TOKEN * (len(last.tokens) - last.input_len)
            took = max((call.seconds for call in last.step.calls), default=0.0)
            due = last.arrival + written + took
            assert request.arrival >= due - 1e-6
            if last.step.calls:
                assert request.arrival == pytest.approx(due)
            several += len(last.step.calls) > 1
        before[request.session] = request
    assert several > 20


def test_a_workflow_is_of_several_agents_and_ends_once() -> None:
    requests = steps(generate("workflow", WORKFLOWS, 0))
    workflows = {number: [r for r in requests if r.step.workflow == number] for number in range(12)}
    for of in workflows.values():
        assert {r.step.agent for r in of} == set(ROLES)
        assert [r.step.last for r in of] == [False] * (len(of) - 1) + [True]
    agents = {(r.session, r.step.agent, r.step.workflow) for r in requests}
    assert len(agents) == len({r.session for r in requests}), "a session is one agent's"
    beginnings = {(r.step.agent, r.tokens[:3_000].tobytes()) for r in requests}
    assert len(beginnings) == len(ROLES) == len({tokens for _, tokens in beginnings})
    together = [r for r in requests if [call.name for call in r.step.calls][:2] == ["Task"] * 2]
    assert together, "coders work side by side"


def test_tools_take_as_long_as_was_counted() -> None:
    """TraceLab: 70 % below a second, 4.9 % above a minute, 16.8 s on the mean."""
    calls = [c for r in steps(generate("workflow", traffic("workflow"), 0)) for c in r.step.calls]
    seconds = np.array([call.seconds for call in calls])
    assert 0.65 < (seconds < 1).mean() < 0.8
    assert 0.03 < (seconds > 60).mean() < 0.07
    assert 8 < seconds.mean() < 25
    assert {call.name for call in calls} == {*TOOLS, TASK}


def test_a_server_sees_of_a_call_only_the_text_of_the_answer() -> None:
    requests = steps(generate("workflow", WORKFLOWS, 0))
    ends: dict[str, set[bytes]] = {}
    for request in requests:
        last = request.step.calls[-1].name if request.step.calls else ""
        ends.setdefault(last, set()).add(request.tokens[-CALL_TOKENS:].tobytes())
    assert all(len(end) == 1 for end in ends.values())
    assert len(set.union(*ends.values())) == len(ends)


def test_steps_stay_with_requests_that_are_changed() -> None:
    requests = steps(generate("workflow", WORKFLOWS, 0))
    for changed in (retime(list(requests), 2.0, 1.0), with_hints(requests, "true")):
        found = {(r.session, r.turn): r.step for r in steps(changed)}
        assert found == {(r.session, r.turn): r.step for r in requests}


def test_reuse_differs_by_kind() -> None:
    def rate(kind: str) -> float:
        simulator = Simulator(CostModel.paper_7b(), None, Lru())
        return hit_rate(simulator.run(generate(kind, traffic(kind, sessions=40), 0)))

    assert rate("agent") > 0.9 and rate("chat") > 0.9
    assert 0.5 > rate("few-shot") > 0.1  # forty requests for 25 templates
    assert 0.9 > rate("fan-out") > 0.5  # the second of eight still misses


def test_azure_supplies_arrivals_and_lengths() -> None:
    azure = Azure([0.0, 3.0, 3.5], [100, 200, 300], [1, 2, 3])
    how = traffic("few-shot", azure=azure, shared=Draw("const", 10))
    requests = generate("few-shot", how, 0)
    assert [r.arrival for r in requests] == [0.0, 3.0, 3.5]
    for r in requests:
        assert (r.input_len - 10) / (len(r.tokens) - r.input_len) == 100


def test_retiming_moves_sessions_and_pauses_apart() -> None:
    requests = generate("chat", traffic("chat", sessions=10), 0)
    moved = retime(requests, session_rate=2, think=3)
    begins = {r.session: r.arrival for r in requests if not r.turn}
    for r in moved:
        (old,) = (o for o in requests if (o.session, o.turn) == (r.session, r.turn))
        begin = begins[r.session]
        assert r.arrival == pytest.approx(begin / 2 + 3 * (old.arrival - begin))
    assert [r.arrival for r in moved] == sorted(r.arrival for r in moved)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("talk", {}, "unknown workload 'talk'; known are chat, agent, few-shot, fan-out"),
        ("chat", {"sessions": 0}, "sessions must be 1 or more, not 0"),
        ("chat", {"templates": -1}, "templates must be 0"),
    ],
)
def test_what_cannot_be_generated(kind: str, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        traffic(kind, **changes)


def test_a_rate_of_nothing() -> None:
    with pytest.raises(ValueError, match="sessions a second must be more than 0, not 0"):
        generate("chat", traffic("chat", session_rate=0.0), 0)


def test_azure_reads_no_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    with pytest.raises(ValueError, match="holds no request"):
        Azure.read(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("name", "draw", "message"),
    [
        ("shared", "const:900000000", "const:9e\\+08 drew 900,000,000; 16,777,216 is the most"),
        ("turns", "const:100001", "const:100001 drew 100,001; 100,000 is the most"),
        ("question", "lognormal:1:1000", "lognormal:1:1000 drew"),
        ("think", "lognormal:1:100000", "lognormal:1:100000 drew a number that is too large"),
    ],
)
@pytest.mark.parametrize("kind", ["chat", "fan-out", "transcript", "workflow"])
def test_what_is_drawn_has_a_bound(kind: str, name: str, draw: str, message: str) -> None:
    how = traffic(kind, sessions=20, **{name: Draw.parse(draw)})
    with pytest.raises(ValueError, match=message):
        generate(kind, how, 0)


def test_all_that_is_generated_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "Room", lambda: Room(400_000))
    assert generate("chat", traffic("chat", sessions=2), 0)
    with pytest.raises(TraceError, match="the requests take more than"):
        generate("chat", traffic("chat", sessions=1_000), 0)
    shared = {"templates": 10, "shared": Draw.parse("const:50000")}
    with pytest.raises(TraceError, match="the requests take more than"):
        generate("chat", traffic("chat", sessions=1, **shared), 0)
