"""Other engines' caches: where states are kept, and what is evicted first."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.server_settings import Serving
from sglang_hybrid.core.specs import Spec
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab import systems  # noqa: F401, it registers them
from sglang_hybrid.extensions.lab.simulation.block_cache import block_names
from sglang_hybrid.extensions.lab.simulation.rivals import LmCache, TensorRtLlm, VllmCache
from sglang_hybrid.extensions.lab.simulation.system_names import Setting, build_system
from sglang_hybrid.extensions.lab.simulation.tiers.tier_budgets import TierBudgets

COST = CostModel.paper_7b().with_sizes(kv_bytes_per_token=10, state_bytes=480)
"""A state is as large as 48 tokens of KV: in vLLM three pages of 16 tokens."""
BLOCK, PAGE = 16, 160


def request(
    prompt: int, answer: int = 0, who: int = 0, shared: int | None = None, session: int = 0
) -> Request:
    """A prompt of sequence `who`, the first `shared` tokens of which all sequences have."""
    tokens = np.arange(prompt + answer, dtype=np.int32) + 10_000 * who
    if shared is not None:
        tokens[:shared] = np.arange(shared)
    return Request(session, 0, 0.0, tokens, prompt)


def test_a_block_of_vllm_is_as_large_as_a_part_of_the_state() -> None:
    cache = VllmCache(COST, None)
    assert (cache.block, cache.state_pages) == (BLOCK, 3)
    assert VllmCache(COST, None, groups=1).block == 48


def test_vllm_resumes_at_the_last_block_boundary_of_an_earlier_prompt() -> None:
    cache = VllmCache(COST, None)
    assert cache.serve(request(70, answer=40)).hit_len == 0
    again = cache.serve(request(110))
    assert (again.hit_len, again.kv_len) == (64, 96), "no state is kept in an answer"
    assert cache.serve(request(110)).hit_len == 96, "it is at 96 now"
    exact = VllmCache(COST, None)
    exact.serve(request(64))
    assert exact.serve(request(64)).hit_len == 48, "a token is left to compute"


def test_vllm_hits_a_shared_prefix_from_the_third_visitor_on() -> None:
    cache = VllmCache(COST, None)
    found = [cache.serve(request(200, who=who, shared=70)) for who in (1, 2, 3)]
    assert [one.hit_len for one in found] == [0, 0, 64]
    assert [one.kv_len for one in found] == [0, 64, 64]


def test_vllm_evicts_the_end_of_the_longest_released_sequence_first() -> None:
    """Each leaves four blocks and a state, of seven pages, and takes a state's while it runs."""
    cache = VllmCache(COST, 20 * PAGE)
    cache.serve(request(65, who=1))
    cache.serve(request(65, who=2))
    cache.serve(request(65, who=3))
    assert cache.used <= 20 * PAGE
    assert cache.peek(request(65, who=3)) == 64
    assert cache.peek(request(65, who=2)) == 64
    assert cache.peek(request(65, who=1)) == 0


@pytest.mark.parametrize("name", ["vllm", "tensorrt-llm"])
def test_what_does_not_fit_leaves_nothing(name: str) -> None:
    for budget in (0, 10, 20 * PAGE):
        setting = Setting(COST, budget, [request(1_000)], serving=Serving())
        cache = build_system(Spec(name), setting)
        for _ in range(2):
            assert cache.serve(request(1_000)).hit_len == 0
        assert cache.used <= budget


@pytest.mark.parametrize("name", ["vllm", "tensorrt-llm"])
def test_what_running_requests_hold_stays(name: str) -> None:
    cache = build_system(Spec(name), Setting(COST, 40 * PAGE, [request(100)], serving=Serving()))
    cache.serve(request(65, answer=1, who=1))
    held = cache.begin(request(100, who=1))
    assert held.outcome.hit_len
    for who in range(2, 9):
        cache.serve(request(65, who=who))
        assert cache.used <= 40 * PAGE
    also = cache.begin(request(100, who=1))
    assert also.outcome.kv_len >= held.outcome.hit_len
    for one in (held, also):
        cache.end_prefill(one)
        cache.finish(one)
    for who in range(12, 30):
        cache.serve(request(65, who=who))
    assert cache.peek(request(100, who=1)) == 0 and cache.used <= 40 * PAGE


def with_host(pages: int, host_pages: int) -> LmCache:
    return LmCache(COST, TierBudgets.of(pages * PAGE, host_pages * PAGE))


def test_lmcache_copies_nothing_before_it_is_about_to_be_evicted() -> None:
    """Each prompt leaves four blocks and a state, of seven pages."""
    cache = with_host(20, 40)
    cache.serve(request(65, who=1))
    cache.serve(request(65, who=2))
    assert not cache._host
    for who in (3, 4, 5):
        cache.serve(request(65, who=who))
    assert cache._host
    on_device = VllmCache(COST, 20 * PAGE)
    for who in range(1, 6):
        on_device.serve(request(65, who=who))
    assert on_device.peek(request(65, who=1)) == 0
    assert cache.peek(request(65, who=1)) == 64
    again = cache.begin(request(65, who=1))
    assert again.outcome.hit_len == 64 and again.load_seconds > 0
    assert cache.used <= 20 * PAGE


def test_lmcache_copies_the_blocks_before_what_is_evicted_too() -> None:
    cache = with_host(12, 40)
    cache.serve(request(129, who=1))
    names = block_names(request(129, who=1), 128, BLOCK)
    assert cache._make_room(12 - cache._used + 4), "its state, and the last of eight blocks"
    assert names[-1] not in cache._cached and names[0] in cache._cached
    assert all(name in cache._host for name in names)


def test_lmcaches_host_evicts_the_least_recently_used() -> None:
    cache = with_host(20, 16)
    for who in range(1, 7):
        cache.serve(request(65, who=who))
        assert cache._host_used == sum(cache._host.values()) <= 16
    assert cache.peek(request(65, who=1)) == 0
    assert cache.peek(request(65, who=3)) == 64
    small = with_host(20, 2)
    for who in range(1, 7):
        small.serve(request(65, who=who))
        assert small._host_used <= 2


def test_lmcache_is_vllm_where_all_fits() -> None:
    roomy, plain = with_host(1_000, 1_000), VllmCache(COST, 1_000 * PAGE)
    for who in (1, 2, 3, 1, 2):
        one = request(200, answer=30, who=who, shared=70)
        assert roomy.serve(one) == plain.serve(one)
    assert roomy.used == plain.used and not roomy._host


def test_tensorrt_llm_keeps_the_states_of_a_conversations_last_turns() -> None:
    cache = TensorRtLlm(COST, None, mean_length=100.0, turns=2)
    for prompt in (100, 200, 300):
        cache.serve(request(prompt, answer=20))
    assert cache.peek(request(400)) == 298, "two tokens before the end of the last prompt"
    assert cache.peek(request(250)) == 198
    assert cache.peek(request(150)) == 0, "the state of the first turn was given up"


def test_tensorrt_llm_keeps_a_state_that_another_conversation_left_too() -> None:
    cache = TensorRtLlm(COST, None, mean_length=100.0, turns=1, offset=0)
    for session in (1, 2):
        cache.serve(request(100, session=session))
    cache.serve(request(200, session=1))
    assert cache.peek(request(150)) == 100
    cache.serve(request(300, session=2))
    assert cache.peek(request(150)) == 0


def test_tensorrt_llms_branch_points_are_whole_blocks() -> None:
    cache = TensorRtLlm(COST, None, mean_length=100.0)
    found = [cache.serve(request(200, who=who, shared=75, session=who)) for who in (1, 2, 3)]
    assert [one.hit_len for one in found] == [0, 0, 64]
