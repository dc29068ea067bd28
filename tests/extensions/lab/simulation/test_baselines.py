"""Baselines and offline policies: worked examples, plain twins, SGLang's own cache, and the
independent numbers of marconi-notes.md section 8.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.checkpoints.checkpoint_plan import hypothetical_node
from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.nodes import NEVER, Clock, Kind, Node
from sglang_hybrid.core.server_settings import LEAST_SLOTS, Serving, Split
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.simulation.baselines import (
    SGLANG_RUNNING_STATES,
    ClairvoyantCache,
    NoCache,
    SglangPlus,
    SglangSimulator,
)
from sglang_hybrid.extensions.lab.simulation.block_cache import BlockCache
from sglang_hybrid.extensions.lab.simulation.future import NextUses, Oracle
from sglang_hybrid.extensions.lab.simulation.policies import TailLru
from sglang_hybrid.extensions.lab.simulation.simulator import Cache, Outcome, Simulator, hit_rate
from sglang_hybrid.extensions.lab.simulation.system_names import ORACLES, build_system, parse_spec
from sglang_hybrid.extensions.lab.simulation.token_tree import TokenTree
from sglang_hybrid.extensions.lab.simulation.traces.formats import read_trace
from sglang_hybrid.extensions.lab.simulation.traces.lines import Reading
from sglang_hybrid.extensions.lab.systems import Setting, Spec, systems
from tests.examples import examples
from tests.extensions.lab.simulation.interleaved import interleaved
from tests.traces import TRACES

PAPER = CostModel.paper_7b()
SYSTEMS = systems(tiered=False)
GB = 10**9
BLOCK = 32 * PAPER.kv_bytes_per_token + PAPER.state_bytes


@cache
def trace(name: str, limit: int | None = None) -> list[Request]:
    path = TRACES / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"../shared/traces/{path.name} is not here")
    return read_trace(path, Reading(limit))


def request(prompt: list[int], answer: list[int], arrival: float = 0.0) -> Request:
    return Request(0, 0, arrival, np.array(prompt + answer, dtype=np.int32), len(prompt))


def numbers(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def hits(cache: Cache, *requests: Request) -> list[int]:
    return [cache.serve(one).hit_len for one in requests]


def traffic(seed: int, count: int = 60, longest: int = 40) -> list[Request]:
    """Sequences over four tokens that grow out of one another."""
    rng = random.Random(seed)
    sequences: list[list[int]] = [[]]
    requests = []
    for step in range(count):
        base = rng.choice(sequences)
        prompt = base[: rng.randrange(len(base) + 1)]
        prompt = prompt + [rng.randrange(4) for _ in range(rng.randrange(1, longest))]
        answer = [rng.randrange(4) for _ in range(rng.randrange(1, 8))]
        requests.append(request(prompt, answer, float(step)))
        sequences.append(prompt + answer)
    return requests


# No cache, blocks.


def test_without_a_cache_nothing_is_hit() -> None:
    one = request(numbers(0, 50), [1])
    assert hits(NoCache(), one, one) == [0, 0]


def test_blocks_are_hit_whole_and_never_the_last_token() -> None:
    cache = BlockCache(PAPER, None)
    assert hits(cache, request(numbers(0, 96), numbers(100, 40))) == [0]
    assert hits(cache, request(numbers(0, 96), [])) == [64]
    assert hits(cache, request(numbers(0, 97), [])) == [96]
    assert hits(cache, request([*numbers(0, 96), *numbers(100, 40), 7], [])) == [128]


def test_a_block_budget_is_strict_and_the_oldest_ends_go_first() -> None:
    cache = BlockCache(PAPER, 4 * BLOCK + BLOCK // 2)
    old, new = numbers(0, 97), numbers(1000, 65)
    hits(cache, request(old, []), request(new, []))
    assert cache.used == 4 * BLOCK
    assert hits(cache, request(old, []), request(new, [])) == [64, 32]
    huge = numbers(5000, 10 * 32 + 1)
    assert hits(cache, request(huge, []), request(huge, [])) == [0, 4 * 32]
    assert cache.used == 4 * BLOCK


def test_blocks_count_what_was_reused() -> None:
    cache = BlockCache(PAPER, None)
    hits(cache, request(numbers(0, 97), []), request(numbers(0, 97), []))
    assert (cache.stored, cache.kv_reused, cache.state_reused) == (3, 3, 1)


@examples(20)
@given(st.integers(0, 10**9))
def test_blocks_are_a_plain_prefix_cache(seed: int) -> None:
    """Unbounded, against every earlier sequence compared token by token."""
    requests = traffic(seed)
    cache = BlockCache(PAPER, None, block=4)
    seen: list[np.ndarray] = []
    for one in requests:
        longest = 0
        for other in seen:
            same = 0
            while same < min(len(other) // 4 * 4, one.input_len - 1):
                if one.tokens[same] != other[same]:
                    break
                same += 1
            longest = max(longest, same // 4 * 4)
        assert cache.serve(one).hit_len == longest
        seen.append(one.tokens)


# SGLang+ and SGLang.


def test_sglang_plus_keeps_a_path_alive_by_its_uses() -> None:
    """Under LRU a shared prefix's own state ages; with SGLang+ each use of a leaf refreshes it."""
    first = numbers(0, 100)
    longer = first + numbers(500, 100)
    budget = 3 * PAPER.state_bytes + 420 * PAPER.kv_bytes_per_token
    asked = [
        request(first, [1]),
        request([*first, 1, *longer], [2]),
        request(numbers(9000, 60), [3]),
        request([*first, 1, *longer, 2, 5], [4]),
    ]
    assert hits(SglangPlus(PAPER, budget), *asked)[-1] > 0


def test_sglang_needs_three_requests_and_a_grid() -> None:
    """marconi-notes: the third request with a shared prefix hits, at the grid below the branch."""
    shared = numbers(0, 200)
    asked = [request(shared + numbers(1000 * i, 100), [1, 2]) for i in (1, 2, 3)]
    assert hits(SglangSimulator(PAPER, None), *asked) == [0, 0, 192]


def test_sglang_loses_a_short_answer_and_keeps_a_long_one() -> None:
    prompt = numbers(0, 200)
    for answer, hit in ((40, 192), (400, 512)):
        first = prompt + numbers(5000, answer)
        cache = SglangSimulator(PAPER, None)
        assert hits(cache, request(prompt, first[200:]), request([*first, 1, 2], [])) == [0, hit]


@pytest.mark.parametrize(("kv", "states"), [(60_000, 48), (20_000, 12)])
def test_sglang_is_sglang(kv: int, states: int) -> None:
    """Hit by hit what SGLang's own cache does on its own pools, without decode tracking, which the
    driver leaves out. A running request has three slots.
    """
    pytest.importorskip("sglang")
    from tests.cache.backends import COST
    from tests.cache.driver import Server, Sizes, build_cache

    requests = trace("sharegpt_55", 200)
    context = max(len(one.tokens) for one in requests) + 64
    sizes = Sizes(kv, states, page=16, extra_buffer=True, grid=64, rows=4, context=context)
    sizes = replace(sizes, kv=sizes.kv // 16 * 16)
    theirs = Server(build_cache(sizes, None), sizes, 2_048).play(requests)
    ours = SglangSimulator(COST, Split(sizes.kv, states - 3), chunk=2_048, interval=0, page=16)
    assert [ours.serve(one).hit_len for one in requests] == theirs
    assert sum(theirs) > 0
    slots = Split(sizes.kv, states)
    with_running = SglangSimulator(COST, slots, 64, 2_048, 0, page=16, running_states=3)
    assert [with_running.serve(one).hit_len for one in requests] == theirs


# Budgets that running requests share.


def with_running(budget: int) -> list[BlockCache | SglangPlus | SglangSimulator]:
    split = Split.of(budget, PAPER, 0.9)
    return [
        BlockCache(PAPER, budget, with_running=True),
        SglangPlus(PAPER, budget, running_states=1),
        SglangSimulator(PAPER, split, running_states=SGLANG_RUNNING_STATES),
    ]


@pytest.mark.parametrize("system", range(3))
@examples(15)
@given(st.integers(0, 10**9), st.integers(20, 200))
def test_running_requests_are_in_the_budget(system: int, seed: int, states: int) -> None:
    """Requests overlap; what all hold together never exceeds the budget, and nothing is left of
    those that ended.
    """
    budget = states * PAPER.state_bytes
    cache = with_running(budget)[system]
    for _ in interleaved(cache, traffic(seed, 40, 400), random.Random(seed)):
        assert cache.used <= budget
    if isinstance(cache, BlockCache):
        assert cache.used == len(cache._blocks) * cache.used_by_block
        assert not any(block.held for block in cache._blocks.values())
    else:
        assert (cache.memory.kv_in_use, cache.memory.slots_in_use, cache._running) == (0, 0, {})


@pytest.mark.parametrize("system", range(3))
def test_a_running_request_takes_room_from_what_is_cached(system: int) -> None:
    """A small prompt is cached and found; while one that needs all the memory runs, it is not, and
    one that needs more than all runs beside the cache and takes nothing.
    """
    cache = with_running(20 * PAPER.state_bytes)[system]
    small = request(numbers(0, 200), [1])
    again = request([*small.tokens.tolist(), 2, 3], [4])
    hits(cache, small, again)
    assert hits(cache, again)[0] > 100
    before = cache.used
    huge = cache.begin(request(numbers(10_000, 1_000_000), [1]))
    assert huge.apart
    assert cache.used == before
    cache.end_prefill(huge)
    cache.finish(huge)
    assert hits(cache, again)[0] > 100
    kv = (18 * 32, 7_700, 4_480)[system]
    big = cache.begin(request(numbers(10_000, kv), [1]))
    assert not big.apart
    assert cache.serve(again).hit_len == 0


# The future.


@examples(15)
@given(st.integers(0, 10**9))
def test_the_oracle_is_right_about_every_position(seed: int) -> None:
    requests = traffic(seed, 25, 12)
    oracle = Oracle(requests)
    for tick, one in enumerate(requests, start=1):
        assert oracle.tick(one) == tick
        for now in (tick, min(tick + 4, len(requests))):
            for depth in range(1, len(one.tokens) + 1):
                expected = NEVER
                for later in range(len(requests), now, -1):
                    other = requests[later - 1]
                    if depth < other.input_len and np.array_equal(
                        other.tokens[:depth], one.tokens[:depth]
                    ):
                        expected = float(later)
                if now == tick or expected == NEVER:
                    assert oracle.next_use(one, depth, now) == expected
                else:
                    assert oracle.next_use(one, depth, now) in (expected, NEVER)


def test_the_clairvoyant_keeps_what_comes_back() -> None:
    a, b, c = (request(numbers(1000 * i, 100), [1], float(i)) for i in (1, 2, 3))
    again = request([*numbers(1000, 100), 1, 9], [1], 9.0)
    asked = [a, b, c, again]
    budget = 2 * PAPER.state_bytes + 210 * PAPER.kv_bytes_per_token
    assert hits(ClairvoyantCache(PAPER, budget, Oracle(asked)), *asked) == [0, 0, 0, 101]
    assert hits(Simulator(PAPER, budget, TailLru(0, 0)), *asked) == [0, 0, 0, 0]


BOTH = 2 * PAPER.state_bytes + 210 * PAPER.kv_bytes_per_token
"""Room for two prompts of 100 tokens and their answers."""


@pytest.mark.parametrize("name", ["whether", "when", "clairvoyant"])
def test_what_never_returns_goes_first_however_new_it_is(name: str) -> None:
    old, new, other = (request(numbers(1000 * i, 100), [1], float(i)) for i in (1, 2, 3))
    again = request([*numbers(1000, 100), 1, 9], [1], 9.0)
    asked = [old, new, other, again]
    assert hits(build_system(Spec(name), Setting(PAPER, BOTH, asked)), *asked) == [0, 0, 0, 101]
    assert hits(build_system(Spec("lru"), Setting(PAPER, BOTH, asked)), *asked) == [0, 0, 0, 0]


@pytest.mark.parametrize(("name", "kept"), [("when", [101, 0, 101]), ("lru", [0, 101, 101])])
def test_when_knows_which_of_two_returns_first(name: str, kept: list[int]) -> None:
    """The third one takes the room of that which returns later, and not of the older one."""
    first = [request(numbers(1000 * i, 100), [1], float(i)) for i in (1, 2, 3)]
    back = [request([*one.tokens.tolist(), 9], [1], 9.0) for one in first]
    cache = build_system(Spec(name), Setting(PAPER, BOTH, [*first, *back]))
    assert hits(cache, *first) == [0, 0, 0]
    assert [cache.peek(one) for one in back] == kept


def test_a_state_that_could_be_taken_is_known_by_the_request_that_could_leave_it() -> None:
    """Its node is in no tree yet."""
    long, short = request(numbers(0, 100), [1], 1.0), request(numbers(5000, 50), [1], 2.0)
    asked = [long, short, request(numbers(0, 60), [1], 3.0)]
    uses = NextUses(Oracle(asked))
    uses.on_request(long)
    assert [uses.of(hypothetical(depth)) for depth in (59, 60)] == [3.0, NEVER]
    uses.on_request(short)
    assert uses.of(hypothetical(40)) == NEVER


def test_next_uses_are_those_of_the_latest_request_on_the_path() -> None:
    asked = [request(numbers(0, 100), [1], float(i)) for i in (1, 2, 3)]
    uses, tree = NextUses(Oracle(asked)), TokenTree()
    node = tree.grow(tree.root, asked[0].tokens[:50])
    for one, after in zip(asked, (2.0, 3.0, NEVER), strict=True):
        assert list(uses.on_path(one, [node])) == [node]
        assert uses.of(node) == after
    uses.forget(node)
    assert uses.of(node) == NEVER


def hypothetical(depth: int) -> Node:
    return hypothetical_node(depth, Kind.BRANCH, 0, None, Clock())


# T-LRU.


def test_tlru_lets_go_of_what_is_quick_to_compute() -> None:
    long, short = request(numbers(0, 300), [1]), request(numbers(5000, 50), [1])
    other = request(numbers(9000, 50), [1])
    resumed = request([*numbers(0, 300), 1, 5], [1])
    budget = 2 * PAPER.state_bytes + 360 * PAPER.kv_bytes_per_token
    asked = [long, short, other, resumed]
    assert hits(Simulator(PAPER, budget, TailLru(200, 10)), *asked)[-1] == 301
    assert hits(Simulator(PAPER, budget, TailLru(0, 10)), *asked)[-1] == 0


# All of them.


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", SYSTEMS)
@examples(5)
@given(seed=st.integers(0, 10**9), split=st.booleans())
def test_the_budget_is_strict_and_the_account_exact(
    name: str, overlap: bool, seed: int, split: bool
) -> None:
    """One after another and in any interleaving; in the end nobody holds anything."""
    rng = random.Random(seed)
    states = rng.randrange(1, 12)
    budget = Split(rng.randrange(20, 400), states) if split else states * PAPER.state_bytes
    requests = traffic(seed)
    cache = build_system(Spec(name), Setting(PAPER, budget, requests, min_branch_tokens=3))
    steps = interleaved(cache, requests, rng) if overlap else map(cache.serve, requests)
    for step in steps:
        assert overlap or 0 <= step.hit_len <= step.kv_len < step.input_len
        if isinstance(cache, Simulator):
            check(cache)
    if isinstance(cache, Simulator):
        assert not any(node.kv_locked or node.state_locked for node in cache.tree.walk())


def check(cache: Simulator) -> None:
    nodes = list(cache.tree.walk())
    assert cache.memory.kv_used == sum(node.tokens for node in nodes)
    assert cache.memory.states_used == sum(node.has_state for node in nodes)
    if isinstance(cache.budget, Split):
        assert cache.memory.kv_used <= cache.budget.kv_tokens
        assert cache.memory.states_used <= cache.budget.slots
    elif cache.budget is not None:
        assert cache.used <= cache.budget
    for pool in {cache.memory.pool, cache.memory.state_pool}:
        assert not pool.check(nodes)


def test_a_state_exists_only_once_its_prefill_has_run() -> None:
    cache = build_system(Spec("lru"), Setting(PAPER, None, []))
    one, again = request(numbers(0, 100), [1, 2]), request(numbers(0, 100), [1, 2])
    first = cache.begin(one)
    assert cache.begin(again).outcome == Outcome(100, 0, 0)
    cache.end_prefill(first)
    assert cache.begin(again).outcome == Outcome(100, 0, 99)
    cache.finish(first)
    longer = request([*numbers(0, 100), 1, 2, 3], [])
    assert cache.begin(longer).outcome.hit_len == 102


def test_a_split_as_sglang_makes_it() -> None:
    budget = Split.of(19 * GB, PAPER, 0.9)
    assert budget.slots == 9 * GB // PAPER.state_bytes
    for_kv = 19 * GB - budget.slots * PAPER.state_bytes  # what is left of a slot is KV
    assert budget.kv_tokens == for_kv // PAPER.kv_bytes_per_token
    attention = replace(PAPER, state_bytes=0)
    assert Split.of(GB, attention, 0.9).kv_tokens == GB // PAPER.kv_bytes_per_token
    assert Split.of(GB, attention).kv_tokens == GB // PAPER.kv_bytes_per_token
    few = Split.of(4 * PAPER.state_bytes, PAPER, 0.1, spills=True)
    assert few.slots == LEAST_SLOTS  # with one no state could be taken inside a prefill
    assert few.kv_tokens == 2 * PAPER.state_bytes // PAPER.kv_bytes_per_token


def test_a_split_as_we_default_it() -> None:
    """A state per 1,000 tokens where states are small; of large ones fewer, and a bound."""
    tokens = PAPER.state_bytes / PAPER.kv_bytes_per_token
    small = replace(PAPER, state_bytes=PAPER.state_bytes // 4)
    budget = Split.of(10 * GB, small)
    assert budget.kv_tokens / budget.slots == pytest.approx(1_000, rel=1e-2)
    budget = Split.of(10 * GB, PAPER)
    assert budget.slots / budget.kv_tokens * tokens == pytest.approx(0.2 + tokens / 5_500, rel=1e-2)
    large = replace(PAPER, state_bytes=100 * PAPER.state_bytes)
    assert Split.of(1_000 * GB, large).slots == 600 * GB // large.state_bytes


def test_two_pools_that_learn_share_one_history() -> None:
    cache = build_system(Spec("reuse"), Setting(PAPER, Split(100, 4), []))
    assert isinstance(cache, Simulator)
    assert cache.memory.pool.policy is not cache.memory.state_pool.policy
    assert cache.memory.pool.policy.history is cache.memory.state_pool.policy.history is not None


ATTENTION = replace(PAPER, state_bytes=0)


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("name", [n for n in SYSTEMS if n != "none"])
def test_tenants_share_nothing(name: str, served: bool) -> None:
    """A conversation goes on from its own turns, and is new to every other tenant."""
    turns = [request(numbers(0, 600 * n), numbers(600 * n, 300)) for n in (1, 2, 3)]
    requests = [
        replace(turns[turn], arrival=float(at), tenant=tenant)
        for at, (tenant, turn) in enumerate(
            [("a", 0), ("a", 1), ("b", 1), ("", 1), ("a", 2), ("b", 2)], start=1
        )
    ]
    setting = Setting(PAPER, 2**40, requests, serving=Serving() if served else None)
    found = [outcome.hit_len for outcome in map(build_system(Spec(name), setting).serve, requests)]
    assert [hit > 0 for hit in found] == [False, True, False, False, True, True]


@pytest.mark.parametrize("name", [n for n in SYSTEMS if n not in ("none", "vllm+", "vllm")])
def test_a_model_without_state_resumes_wherever_its_kv_reaches(name: str) -> None:
    asked = [request(numbers(0, 100), [1]), request([*numbers(0, 70), 1], [1])]
    cache = build_system(Spec(name), Setting(ATTENTION, None, asked))
    assert hits(cache, *asked) == [0, 70]
    again = build_system(Spec(name), Setting(ATTENTION, None, asked))
    tickets = [again.begin(one) for one in asked]
    for ticket in tickets:
        again.end_prefill(ticket)
        again.finish(ticket)
    assert [ticket.outcome.hit_len for ticket in tickets] == [0, 0]


# Names.


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("lru", "lru"),
        ("marconi:alpha=0.3", "marconi 0.3"),
        ("marconi:2", "marconi 2"),
        ("tlru:100,next_prompt=5", "tlru threshold=100 next_prompt=5"),
    ],
)
def test_a_spec_is_read_and_shown(text: str, shown: str) -> None:
    assert str(parse_spec(text)) == shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("belady", "unknown policy 'belady'; known are none, vllm\\+, sglang\\+, sglang, lru"),
        ("lru:3", "policy 'lru' has no option '3'; it has none"),
        ("marconi:beta=3", "policy 'marconi' has no option 'beta'; its options are alpha"),
        ("marconi:x", "'x' is no number for alpha of 'marconi'"),
        ("marconi:-1", "alpha must be 0 or more, not -1"),
    ],
)
def test_a_spec_that_is_none(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_spec(text)


# marconi-notes.md section 8. Its clairvoyant forgets branch points with their KV (remember=False).
# Two rows differ. BBH at 1 GB (37.0): the notes' own tables say 39.5 and 36.1. Mooncake: the notes
# inferred which request goes on from which answer; without that, as the trace is published, at most
# 14.8 % can be hit instead of their 21.2 %.
SECTION_8 = [
    ("sharegpt_55", 2, "clairvoyant:remember=0", 74.6),
    ("sharegpt_55", 4, "clairvoyant:remember=0", 85.3),
    ("taubench_airline", 5, "clairvoyant:remember=0", 78.5),
    ("taubench_airline", 10, "clairvoyant:remember=0", 91.2),
    ("claude_code_64k", 20, "lru", 35.0),
    ("claude_code_64k", 20, "clairvoyant:remember=0", 62.4),
    ("claude_code_64k", 40, "marconi:0.3", 67.4),
    ("claude_code_64k", 40, "marconi:1", 67.6),
    ("claude_code_64k", 40, "clairvoyant:remember=0", 82.4),
    ("claude_code_64k", 80, "unbounded", 91.3),
    ("sharegpt_55", 4, "unbounded", 87.2),
    ("bbh_fewshot", 2, "clairvoyant:remember=0", 69.6),
    ("bbh_fewshot", 4, "clairvoyant:remember=0", 74.2),
    ("bbh_fewshot", 4, "unbounded", 74.2),
]


@pytest.mark.parametrize(("name", "budget", "spec", "expected"), SECTION_8)
def test_independent_numbers(name: str, budget: int, spec: str, expected: float) -> None:
    requests = trace(name)
    cache = build_system(parse_spec(spec), Setting(PAPER, budget * GB, requests))
    rate = 100 * hit_rate([cache.serve(one) for one in requests])
    assert rate == pytest.approx(expected, abs=1.0)


def test_density_is_no_worse_than_in_the_notes() -> None:
    """LRU has 50.2 and 80.6 there."""
    for name, budget, notes in (("sharegpt_55", 2, 50.8), ("taubench_airline", 10, 87.0)):
        requests = trace(name)
        cache = build_system(Spec("density"), Setting(PAPER, budget * GB, requests))
        assert 100 * hit_rate([cache.serve(one) for one in requests]) >= notes


@pytest.mark.slow
def test_knowing_the_future_beats_every_other_policy() -> None:
    requests = trace("bbh_fewshot")
    oracle_rate = 0.0
    for name in ("clairvoyant", *(n for n in SYSTEMS if n not in (*ORACLES, "unbounded"))):
        cache = build_system(Spec(name), Setting(PAPER, 2 * GB, requests))
        rate = hit_rate([cache.serve(one) for one in requests])
        oracle_rate = oracle_rate or rate
        assert rate <= oracle_rate, name
