"""Policies of research on agents: what each learns, and what it gives up first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.nodes import NEVER
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.core.victims.table import Table
from sglang_hybrid.extensions.lab.simulation.agent_policies import (
    AgentKnowledge,
    CacheScout,
    Durations,
    Invocations,
    Pbkv,
    Transitions,
)
from sglang_hybrid.extensions.lab.simulation.simulator import Cache
from sglang_hybrid.extensions.lab.simulation.token_tree import TokenTree
from sglang_hybrid.extensions.lab.simulation.traces.workflows import (
    Step,
    ToolCall,
    with_step,
)
from sglang_hybrid.extensions.lab.systems import Setting, Spec, build_system

COST = CostModel.paper_7b().with_sizes(kv_bytes_per_token=10, state_bytes=480)
ROLES = {"planner": 1, "coder": 2, "tester": 3}
ANCHOR, OWN = 100, 20


def request(
    agent: str,
    session: int = 0,
    workflow: int = 0,
    arrival: float = 0.0,
    tools: Sequence[tuple[str, float]] = (),
    last: bool = False,
    turns: int = 1,
) -> Request:
    """A prompt of `agent`: what all of its prompts begin with, then its session's own."""
    anchor = np.arange(ANCHOR) + 10_000 * ROLES[agent]
    own = np.arange(OWN * turns) + 1_000_000 * (session + 1)
    tokens = np.concatenate([anchor, own]).astype(np.int32)
    calls = tuple(ToolCall(*call) for call in tools)
    plain = Request(session, turns - 1, arrival, tokens, len(tokens))
    return with_step(plain, Step(workflow, agent, calls, last))


def build(name: str, budget: int) -> Cache:
    cache: Cache = build_system(Spec(name), Setting(COST, budget, [], min_branch_tokens=1))
    return cache


def hit(cache: Cache, one: Request) -> int:
    return cache.peek(one)


def seen(knowledge: AgentKnowledge, *requests: Request) -> None:
    for one in requests:
        knowledge.on_path(one, [])


def test_a_request_counts_once_however_often_it_is_told_of() -> None:
    knowledge = Transitions()
    one, other = request("planner"), request("planner", turns=2)
    for each in (one, one, other, one):
        seen(knowledge, each)
    assert knowledge.tick == 3, "the last one is taken for a new one"


# CacheScout.


def test_agents_that_follow_survive_by_their_distance() -> None:
    knowledge = Transitions()
    seen(
        knowledge,
        *[
            request(agent, session)
            for session, agent in enumerate(["planner", "coder", "tester"] * 3)
        ],
    )
    planner, coder, tester = 0, 1, 2
    assert knowledge.survival[tester] == 1
    assert knowledge.survival[planner] == 1 - 1 / Transitions.HORIZON
    assert knowledge.survival[coder] == 1 - 2 / Transitions.HORIZON


def test_workflows_side_by_side_are_not_taken_for_transitions() -> None:
    knowledge = Transitions()
    for turn in range(4):
        for workflow, agent in enumerate(["planner", "tester"]):
            one = request(agent, session=10 * workflow + turn, workflow=workflow)
            seen(knowledge, one)
    assert knowledge.survival.tolist() == [0.5, 0.5], "half of the workflows are at each"


def test_cachescout_weighs_survival_and_recency_of_what_several_sessions_passed() -> None:
    knowledge, tree = Transitions(), TokenTree()
    nodes = {
        agent: tree.grow(tree.root, np.arange(10, dtype=np.int32) + 100 * number)
        for agent, number in ROLES.items()
    }
    own = tree.grow(nodes["tester"], np.arange(10, dtype=np.int32) + 900)
    called = ["planner", "coder", "planner", "coder", "planner", "tester", "tester", "planner"]
    for session, agent in enumerate(called):
        path = [nodes[agent], own] if session == 6 else [nodes[agent]]
        knowledge.on_path(request(agent, session), path)
    policy, table = CacheScout(knowledge), Table(CacheScout.columns)
    for node in (nodes["coder"], nodes["tester"], own):
        table.put(node, policy.describe(node, 1.0, 1))
    _, tester, tail = policy.scores(table, tree.clock).tolist()
    assert tail < tester, "no other session passed it"
    before, knowledge.survival = knowledge.survival, np.ones(3)
    _, recent, _ = policy.scores(table, tree.clock).tolist()
    assert before.tolist() == [1, 0.75, 0.75] and tester == pytest.approx(recent * 0.76 / 1.01)
    policy.forget(nodes["coder"])
    assert not knowledge.is_anchor(nodes["coder"])


# PBKV.


def test_the_next_agents_are_expected_by_the_last_two() -> None:
    knowledge = Invocations()
    loop = ["planner", "coder", "tester"]
    seen(knowledge, *[request(loop[n % 3], session=n) for n in range(9)])
    seen(knowledge, request("planner", session=10, workflow=1))
    seen(knowledge, request("coder", session=11, workflow=1))
    expected = knowledge._expected["", 1]
    ordered = sorted(loop, key=lambda agent: -expected[agent])
    assert ordered == ["tester", "planner", "coder"]
    gamma = Invocations.GAMMA
    assert [expected[agent] for agent in ordered] == pytest.approx([1, gamma, gamma**2])


def test_what_only_ended_workflows_passed_is_worth_nothing() -> None:
    knowledge, tree = Invocations(), TokenTree()
    shared = tree.grow(tree.root, np.arange(10, dtype=np.int32))
    own = tree.grow(shared, np.arange(10, 20, dtype=np.int32))
    knowledge.on_path(request("coder", 0, workflow=0), [shared, own])
    knowledge.on_path(request("coder", 1, workflow=1), [shared])
    policy = Pbkv(knowledge)
    assert policy.describe(own, 1.0, 1)[0] >= 0
    changed = list(knowledge.on_path(request("coder", 0, workflow=0, last=True), []))
    assert changed == [shared, own]
    assert policy.describe(own, 1.0, 1)[0] == own.last_used - NEVER
    assert policy.describe(shared, 1.0, 1)[0] >= 0, "another workflow goes on"
    policy.forget(own)
    assert own.id not in knowledge._nodes["", 0]


def test_pbkv_gives_up_a_workflow_that_has_ended_first() -> None:
    cache = build("pbkv", 2 * (10 * (ANCHOR + OWN) + 480) + 300)
    cache.serve(request("planner", 0, workflow=0))
    cache.serve(request("coder", 1, workflow=1, last=True))
    cache.serve(request("tester", 2, workflow=2))
    assert hit(cache, request("planner", 0, turns=2)) == ANCHOR + OWN
    assert hit(cache, request("coder", 1, turns=2)) == 0


# CacheWise.


def test_a_wait_is_what_longer_calls_of_the_tool_still_took() -> None:
    knowledge = Durations()
    for number, seconds in enumerate((1.0, 2.0, 10.0, 20.0)):
        seen(
            knowledge,
            request("coder", number, arrival=0.0, tools=[("Bash", seconds)]),
            request("coder", number, arrival=seconds, tools=[("Bash", 1.0)], turns=2),
        )
    waiting = request("coder", 9, arrival=100.0, tools=[("Bash", 5.0)])
    seen(knowledge, waiting)
    assert knowledge.left(100.0)[-1] == pytest.approx((1 + 2 + 10 + 20) / 4)
    assert knowledge.left(105.0)[-1] == pytest.approx((10 + 20) / 2 - 5)
    assert knowledge.left(130.0)[-1] == pytest.approx(30), "none took so long: as long again"


def test_of_calls_side_by_side_the_longest_counts() -> None:
    knowledge = Durations()
    seen(
        knowledge,
        request("coder", 0, tools=[("Read", 1.0), ("run_tests", 60.0)]),
        request("coder", 0, arrival=60.0, tools=[("Read", 1.0), ("run_tests", 60.0)], turns=2),
    )
    assert knowledge.left(60.0)[0] == pytest.approx(60)


def test_without_names_of_tools_pauses_are_learnt() -> None:
    knowledge = Durations()
    plain = [
        Request(0, turn, arrival, np.arange(9, dtype=np.int32), 9)
        for turn, arrival in enumerate((0.0, 4.0, 12.0))
    ]
    seen(knowledge, *plain)
    assert knowledge.left(12.0)[0] == pytest.approx(6)


def test_cachewise_gives_up_the_session_that_is_expected_back_last() -> None:
    """The one that waits for tests was used later than the one that reads a file."""
    cache = build("cachewise", 3 * (10 * (ANCHOR + OWN) + 480))
    for session, (tool, seconds) in enumerate([("Read", 0.1), ("run_tests", 60.0)]):
        calls = [(tool, seconds)]
        cache.serve(request("planner", session, arrival=0.0, tools=calls))
        cache.serve(request("planner", session, arrival=seconds, tools=calls, turns=2))
    for session, tool in ((2, "Read"), (3, "run_tests")):
        cache.serve(request("coder", session, arrival=100.0, tools=[(tool, 1.0)]))
    for session in (4, 5):
        cache.serve(request("tester", session, arrival=100.0, tools=[("Read", 1.0)]))
    assert hit(cache, request("coder", 2, turns=2)) == ANCHOR + OWN
    assert hit(cache, request("coder", 3, turns=2)) <= ANCHOR
