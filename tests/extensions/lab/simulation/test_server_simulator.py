"""The cache as it is served: what it keeps of a prompt and an answer, its accounts, its bounds."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.server_settings import Serving, Split
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.core.victims.eviction import POLICIES
from sglang_hybrid.extensions.lab.simulation.baselines import ServedClairvoyant
from sglang_hybrid.extensions.lab.simulation.future import NextUses
from sglang_hybrid.extensions.lab.simulation.server_simulator import Running, ServerSimulator
from sglang_hybrid.extensions.lab.simulation.simulator import Simulator, hit_rate
from sglang_hybrid.extensions.lab.simulation.system_names import ORACLES, build_system, parse_spec
from sglang_hybrid.extensions.lab.simulation.told import ToldServer
from sglang_hybrid.extensions.lab.simulation.traces.generators import generate, traffic
from sglang_hybrid.extensions.lab.systems import Setting, Spec
from tests.extensions.lab.simulation.interleaved import interleaved

PAPER = CostModel.paper_7b()
TOLD = [*ORACLES, "cachescout", "pbkv", "cachewise"]
SYSTEMS = [*POLICIES, "density", *TOLD, "unbounded"]
ROOMY = Split(10_000, 50)


def request(
    prompt: list[int], answer: list[int], arrival: float = 0.0, starts: tuple[int, ...] = ()
) -> Request:
    tokens = np.array(prompt + answer, dtype=np.int32)
    return Request(0, 0, arrival, tokens, len(prompt), starts)


def numbers(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def build(
    name: str,
    budget: Split | int,
    requests: list[Request],
    least: int = 16,
    serving: Serving | None = None,
) -> ServerSimulator:
    setting = Setting(PAPER, budget, requests, least, serving or Serving())
    cache = build_system(parse_spec(name), setting)
    assert isinstance(cache, ServerSimulator)
    return cache


def states(cache: ServerSimulator) -> set[int]:
    return {node.depth for node in cache.tree.walk() if node.has_state}


def test_what_a_request_teaches_is_its_tenants() -> None:
    one = replace(request(numbers(0, 250), numbers(500, 40)), tenant="a")
    cache = build("reuse", ROOMY, [one])
    cache.serve(one)
    history = cache.policy.history
    assert history is not None
    assert [history.match(one.tokens, tenant).known_len for tenant in ("a", "b", "")] == [289, 0, 0]


def test_what_a_request_leaves() -> None:
    """The boundary below its prompt's end, the prompt but for a token, all that was computed."""
    one = request(numbers(0, 250), numbers(500, 40))
    cache = build("reuse", ROOMY, [one])
    cache.serve(one)
    assert states(cache) == {192, 249, 289}
    assert cache.serve(one).hit_len == 249


def test_the_last_message_is_where_the_next_prompt_turns_off() -> None:
    one = request(numbers(0, 200), [1, 2], starts=(0, 50, 150))
    again = request(numbers(0, 150) + numbers(900, 40), [1, 2])
    cache = build("lru", ROOMY, [])
    cache.serve(one)
    assert states(cache) == {150, 199, 201}
    assert cache.serve(again).hit_len == 150


def test_a_reply_whose_thoughts_are_left_out_leaves_the_prompt_where_it_begins() -> None:
    """The state is at the reply's opener, and the next turn resumes from it."""
    opener, thought = [7, 8, 9], [5, 6]
    asked = [numbers(1_000 * chat, 300) for chat in range(1, 9)]
    turns = [
        replace(request([*one, *opener, *thought], [4] * 30, turn), reply_start=300)
        for turn, one in enumerate(asked, 1)
    ]
    cache = build("reuse", Split(10_000, 17), turns)
    for one in turns:
        cache.serve(one)
    assert 300 in states(cache)
    later = [*asked[-1], *opener, *[4] * 10, *numbers(90_000, 50), *opener, *thought]
    assert cache.serve(request(later, [4], 9.0)).hit_len == 300


def test_a_part_that_moves_down_leaves_a_state_in_front_of_it() -> None:
    """A note some messages above the end: from the third turn on all that is shared is hit."""
    system, note = numbers(0, 150), numbers(1_000, 30)
    chat = numbers(2_000, 900)
    turns = [
        request([*system, *chat[:at], *note, *chat[at : at + 120]], [1] * 5, arrival=at + 1.0)
        for at in range(0, 700, 100)
    ]
    cache = build("reuse", ROOMY, turns)
    assert [cache.serve(turn).hit_len for turn in turns] == [0, 0, *range(250, 750, 100)]


def test_messages_that_change_one_after_the_other_leave_a_state_in_front_of_the_next() -> None:
    """Results of tools beyond the last three are left out: from the third such turn on, each hits
    all up to the message that it changes.
    """
    turns, expected = [], []
    for turn in range(1, 10):
        tokens, starts = numbers(0, 150), []
        for number in range(turn):
            starts.append(len(tokens))
            tokens += [9, *numbers(1_000 * (number + 1), 100 if number >= turn - 3 else 20)]
        made = request(tokens, [1] * 5, arrival=float(turn))
        turns.append(replace(made, message_starts=tuple(starts)))
        expected.append(150 + 21 * (turn - 4))
    cache = build("reuse", ROOMY, turns)
    assert [cache.serve(turn).hit_len for turn in turns][5:] == expected[5:]


@pytest.mark.parametrize("lost", [3, 100])
def test_answers_that_come_back_shortened_leave_a_state_on_their_way(lost: int) -> None:
    """Little of the last answer is computed again, from the third turn on."""
    prompt, turns = numbers(0, 150), []
    for turn in range(6):
        answer = numbers(10_000 * (turn + 1), 600)
        turns.append(request(prompt, [*answer, 1], arrival=turn + 1.0))
        prompt = [*prompt, *answer[:-lost], *numbers(10_000 * (turn + 1) + 5_000, 20)]
    cache = build("reuse", ROOMY, turns)
    hits = [cache.serve(turn).hit_len for turn in turns]
    again = [turn.input_len - 20 - hit for turn, hit in zip(turns, hits, strict=True)][1:]
    assert again[0] == 600 - lost + 1  # all of it, from the end of its prompt
    assert all(0 <= tokens < 2 * -(-lost // 64) * 64 for tokens in again[1:])
    assert cache.memory.slots_in_use == 0


def test_states_are_taken_forward_by_forward() -> None:
    """Boundaries count from where each forward begins; each finds a free slot here."""
    one = request(numbers(0, 1_000), [1])
    cache = build("lru", ROOMY, [], serving=Serving(chunk=150, grid=64))
    cache.serve(one)
    boundaries = {start + 128 for start in range(0, 900, 150)} | {900 + 64}
    assert states(cache) == boundaries | {999, 1_000}


def test_a_prompt_larger_than_the_pool_is_served_without_it() -> None:
    small, huge = request(numbers(0, 50), [1]), request(numbers(900, 300), [1])
    cache = build("lru", Split(200, 4), [])
    assert [cache.serve(one).hit_len for one in (small, huge, small)] == [0, 0, 49]


def test_one_slot_holds_a_running_request_and_nothing_else() -> None:
    one = request(numbers(0, 50), [1])
    cache = build("lru", Split(200, 1), [])
    assert [cache.serve(one).hit_len for _ in range(3)] == [0, 0, 0]


def traffic_of(rng: random.Random, count: int = 60) -> list[Request]:
    """Sequences over four tokens that grow out of one another."""
    sequences: list[list[int]] = [[]]
    requests = []
    for step in range(count):
        base = rng.choice(sequences)
        prompt = base[: rng.randrange(len(base) + 1)]
        prompt = prompt + [rng.randrange(4) for _ in range(rng.randrange(1, 40))]
        answer = [rng.randrange(4) for _ in range(rng.randrange(8))]
        starts = tuple(sorted(rng.sample(range(len(prompt)), min(2, len(prompt)))))
        requests.append(request(prompt, answer, float(step), starts if step % 3 == 0 else ()))
        sequences.append(prompt + answer)
    return requests


@pytest.mark.parametrize("name", SYSTEMS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_requests_may_overlap(name: str, seed: int) -> None:
    """The account stays exact in any interleaving, and in the end no request holds anything."""
    rng = random.Random(seed)
    requests = traffic_of(rng)
    one_memory = rng.random() < 0.5
    pools = Split(rng.randrange(20, 400), rng.randrange(1, 12))
    memory = pools.kv_tokens * PAPER.kv_bytes_per_token + pools.slots * PAPER.state_bytes
    serving = Serving(rng.randrange(5, 60), rng.randrange(1, 20), one_memory)
    cache = build(name, memory if one_memory else pools, requests, 3, serving)
    for running in interleaved(cache, requests, rng):
        for one in running:
            assert 0 <= one.outcome.hit_len <= one.outcome.kv_len < one.outcome.input_len
        check(cache, running)
    assert cache.memory.kv_in_use == cache.memory.slots_in_use == 0
    assert not any(node.kv_locked or node.state_locked for node in cache.tree.walk())


def check(cache: ServerSimulator, running: list[Running]) -> None:
    nodes = list(cache.tree.walk())
    assert cache.memory.kv_used == sum(node.tokens for node in nodes)
    assert cache.memory.states_used == sum(node.has_state for node in nodes)
    inside = [one for one in running if one.plan is not None]
    assert cache.memory.kv_in_use == sum(one.allocated - one.shared for one in inside)
    assert cache.memory.slots_in_use == len(inside)
    if isinstance(cache.budget, Split):
        assert cache.memory.kv_used + cache.memory.kv_in_use <= cache.budget.kv_tokens
        assert cache.memory.states_used + cache.memory.slots_in_use <= cache.budget.slots
    else:
        assert cache.used <= cache.budget
    for pool in (cache.memory.pool, cache.memory.state_pool):
        assert not pool.check(nodes)


def test_knowing_the_future_beats_every_other_policy() -> None:
    requests = generate("few-shot", traffic("few-shot", sessions=200), 0)
    pools = Split(20_000, 12)
    best = build("clairvoyant", pools, requests)
    assert isinstance(best, ServedClairvoyant)
    bound = hit_rate(best.run(requests))
    for name in (*POLICIES, "density"):
        assert hit_rate(build(name, pools, requests).run(requests)) <= bound, name


def test_what_a_served_request_leaves_is_known_by_its_next_use() -> None:
    one = request(numbers(0, 300), numbers(500, 40), 1.0)
    longer = request([*one.tokens.tolist(), 7, 8], [9], 2.0)
    cache = build("when", ROOMY, [one, longer])
    assert isinstance(cache, ToldServer) and isinstance(cache.knowledge, NextUses)
    cache.serve(one)
    left = [node for node in cache.tree.walk() if node.has_state]
    assert left and all(cache.knowledge.of(node) == 2.0 for node in left)


def test_states_are_compared_by_the_request_whose_prefill_would_leave_them() -> None:
    """Another request began in between."""
    first, second = (request(numbers(1_000 * n, 300), [1], float(n)) for n in (1, 2))
    cache = build("whether", ROOMY, [first, second])
    assert isinstance(cache, ToldServer)
    told: list[Request] = []
    cache.knowledge.on_request = told.append  # type: ignore[method-assign]
    tickets = [cache.begin(one) for one in (first, second)]
    cache.end_prefill(tickets[0])
    assert told == [first, second, first]


def test_a_model_without_state_is_replayed_by_the_papers_rules() -> None:
    attention = CostModel(1, 0, (), 8, 0)
    cache = build_system(Spec("lru"), Setting(attention, 10_000, [], serving=Serving()))
    assert type(cache) is Simulator
