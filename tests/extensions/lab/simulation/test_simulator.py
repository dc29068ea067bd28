"""The simulator: worked examples, its byte account, and the independent numbers of the notes."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.core.victims.eviction import POLICIES, Lru, Marconi, Policy, Reuse, make_policy
from sglang_hybrid.extensions.lab.simulation.simulator import Simulator, hit_rate
from sglang_hybrid.extensions.lab.simulation.token_tree import TOKEN_BYTES
from sglang_hybrid.extensions.lab.simulation.traces.formats import read_trace
from tests.core.plain import PaperLru
from tests.traces import TRACES

PAPER = CostModel.paper_7b()
GB = 10**9
FILES = {"bbh": "bbh_fewshot", "sharegpt": "sharegpt_55", "tau": "taubench_airline"}


@cache
def trace(name: str) -> list[Request]:
    path = TRACES / f"{FILES[name]}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"../shared/traces/{path.name} is not here")
    return read_trace(path)


def request(prompt: list[int], answer: list[int], arrival: float = 0.0) -> Request:
    return Request(0, 0, arrival, np.array(prompt + answer, dtype=np.int32), len(prompt))


def hits(simulator: Simulator, *requests: Request) -> list[int]:
    return [outcome.hit_len for outcome in simulator.run(requests)]


def numbers(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def test_a_conversation_resumes_from_its_last_token() -> None:
    first = numbers(0, 100)
    second = first + numbers(500, 30)
    simulator = Simulator(PAPER, None, Lru())
    assert hits(simulator, request(first[:80], first[80:]), request(second, [1])) == [0, 100]


def test_a_shared_prompt_misses_twice_and_then_hits() -> None:
    shared = numbers(0, 50)
    asked = [request(shared + numbers(1000 * i, 10), [7]) for i in (1, 2, 3)]
    assert hits(Simulator(PAPER, None, Lru()), *asked) == [0, 0, 50]


def test_a_branch_that_gains_too_little_gets_no_state() -> None:
    shared = numbers(0, 15)
    asked = [request(shared + numbers(1000 * i, 10), [7]) for i in (1, 2, 3)]
    assert hits(Simulator(PAPER, None, Lru()), *asked) == [0, 0, 0]


def test_the_same_prompt_again_computes_its_last_token() -> None:
    prompt = numbers(0, 50)
    asked = [request(prompt, [i]) for i in (7, 8, 9)]
    assert hits(Simulator(PAPER, None, Lru()), *asked) == [0, 0, 49]


def test_an_answer_that_forks_gets_no_state_there() -> None:
    prompt, answer = numbers(0, 50), numbers(100, 40)
    other = prompt + answer[:20] + numbers(900, 30)
    simulator = Simulator(PAPER, None, Lru())
    hits(simulator, request(prompt, answer), request(prompt, answer[:20] + numbers(900, 30)))
    assert {node.depth for node in simulator.tree.walk() if node.has_state} == {49, 90, 100}
    assert hits(simulator, request([*other, 1, 2], [3])) == [100]


def test_a_sequence_that_cannot_fit_leaves_the_cache_alone() -> None:
    simulator = Simulator(PAPER, PAPER.state_bytes + 200 * PAPER.kv_bytes_per_token, Lru())
    small, huge = numbers(0, 100), numbers(1000, 300)
    hits(simulator, request(small, [1]), request(huge, [1]))
    assert hits(simulator, request([*small, 1, 2], [3])) == [101]


def test_history_restores_a_branch_whose_kv_was_evicted() -> None:
    """Others come between: by KV alone the shared prompt is never recognised."""
    shared = numbers(0, 200)
    asked = [request(shared + numbers(10_000 * i, 50), [7], float(i)) for i in range(1, 9)]
    other = [request(numbers(10**6 * i, 250), [7], i + 0.5) for i in range(1, 9)]
    mixed = [r for pair in zip(asked, other, strict=True) for r in pair]
    budget = 3 * PAPER.state_bytes + 460 * PAPER.kv_bytes_per_token
    assert sum(hits(Simulator(PAPER, budget, Lru()), *mixed)) == 0
    assert sum(hits(Simulator(PAPER, budget, Reuse()), *mixed)) > 0


def held_bytes(simulator: Simulator) -> int:
    nodes = list(simulator.tree.walk())
    kv = sum(node.tokens for node in nodes) * PAPER.kv_bytes_per_token
    return kv + sum(node.has_state for node in nodes) * PAPER.state_bytes


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_the_budget_is_strict_and_the_account_exact(name: str, seed: int) -> None:
    rng = random.Random(seed)
    budget = rng.randrange(1, 12) * PAPER.state_bytes
    simulator = Simulator(PAPER, budget, make_policy(name), min_branch_tokens=3)
    sequences: list[list[int]] = [[]]
    for step in range(60):
        base = rng.choice(sequences)
        prompt = base[: rng.randrange(len(base) + 1)]
        prompt = prompt + [rng.randrange(4) for _ in range(rng.randrange(1, 40))]
        answer = [rng.randrange(4) for _ in range(rng.randrange(1, 8))]
        outcome = simulator.serve(request(prompt, answer, float(step)))
        sequences.append(prompt + answer)
        assert 0 <= outcome.hit_len <= outcome.kv_len < outcome.input_len
        assert simulator.used == held_bytes(simulator) <= budget
        for node in simulator.tree.walk():
            assert TOKEN_BYTES * node.tokens == len(node.payload)
            assert not node.kv_locked


def rate(name: str, budget: float | None, policy: Policy) -> float:
    simulator = Simulator(PAPER, None if budget is None else int(budget * GB), policy)
    return 100 * hit_rate(simulator.run(trace(name)))


# marconi-notes.md section 8: token hit rates of an independent simulator under the same rules.
SECTION_8 = [
    ("sharegpt", 2, PaperLru(), 50.2),
    ("sharegpt", 2, Marconi(1.0), 49.5),
    ("sharegpt", 4, Marconi(2.0), 75.1),
    ("sharegpt", None, PaperLru(), 87.2),
    ("bbh", 1, Marconi(2.0), 14.7),
    ("bbh", 2, PaperLru(), 32.3),
    ("bbh", 2, Marconi(1.0), 34.7),
    ("bbh", 4, Marconi(2.0), 62.7),
    ("bbh", None, PaperLru(), 74.2),
    ("tau", 5, PaperLru(), 54.7),
    ("tau", 10, PaperLru(), 80.6),
    ("tau", 10, Marconi(1.0), 79.7),
]


@pytest.mark.parametrize(("name", "budget", "policy", "expected"), SECTION_8)
def test_independent_numbers(
    name: str, budget: float | None, policy: Policy, expected: float
) -> None:
    assert rate(name, budget, policy) == pytest.approx(expected, abs=0.5)


@pytest.mark.parametrize("name", ["bbh", "sharegpt"])
def test_alpha_zero_serves_as_lru_does_by_the_papers_rule(name: str) -> None:
    runs = [Simulator(PAPER, 2 * GB, p).run(trace(name)) for p in (PaperLru(), Marconi(0.0))]
    assert runs[0] == runs[1]


def test_no_byte_over_budget_on_a_real_trace() -> None:
    simulator = Simulator(PAPER, GB, Reuse())
    for one in trace("bbh"):
        simulator.serve(one)
        assert simulator.used <= GB
    assert simulator.used == held_bytes(simulator)


# marconi-notes.md section 9: what the sketch of the reuse index reached.
@pytest.mark.parametrize(
    ("name", "budget", "sketch"),
    [
        ("bbh", 1, 27.8),
        ("bbh", 2, 66.2),
        ("sharegpt", 2, 59.1),
        ("tau", 5, 65.5),
        ("tau", 10, 88.6),
    ],
)
def test_reuse_is_no_worse_than_its_sketch(name: str, budget: int, sketch: float) -> None:
    reached = rate(name, budget, Reuse())
    assert reached >= sketch
    assert reached > rate(name, budget, Lru()) + 5
