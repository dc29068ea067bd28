"""A prompt that was asked twice is found as a whole the third time, on the real tree with real
pools. What a forward leaves is played by the driver.
"""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.checkpoints.last_hidden import Answers, HiddenCapture
from tests.cache.backends import options
from tests.cache.driver import ONE_MEMORY, Server, Sizes
from tests.cache.test_rules import node, run

PROMPT = run(40)


def server(
    policy: str = "reuse", chunk: int = 0, *, full_hits: bool = True, **sizes: Any
) -> Server:
    return Server.on(Sizes(**sizes), options(policy), chunk, full_hits=full_hits)


def asked_twice(it: Server, **more: Any) -> None:
    for _ in range(2):
        it.serve(PROMPT, [7], **more)
    assert isinstance(it.last_hidden, HiddenCapture)


def kept(it: Server) -> int:
    info = it.cache.plans.full_hits.info()
    assert info is not None
    return int(info["kept"])


@pytest.mark.parametrize("memory", [{}, {"one_memory": True}, ONE_MEMORY])
@pytest.mark.parametrize("extra_buffer", [False, True])
def test_the_third_time_needs_no_forward(memory: dict[str, Any], extra_buffer: bool) -> None:
    it = server(extra_buffer=extra_buffer, grid=64 if extra_buffer else 1, **memory)
    it.serve(PROMPT, [7])
    assert it.last_hidden is None and kept(it) == 0
    it.serve(PROMPT, [7])
    assert isinstance(it.last_hidden, HiddenCapture) and kept(it) == 1
    req = it.arrive(PROMPT)
    assert it.admit(req) and req.prefix_len == len(PROMPT) - 1
    assert it.prefill_step(req)
    assert isinstance(it.last_hidden, Answers)
    assert req.kv.cache_protected_len == len(PROMPT), "its last token has the tree's KV"
    assert it.cache.lookups.report(req).as_dict()["full_hit"] is True
    it.check()
    it.decode(req, [7, 8, 9])
    it.finish(req)
    it.check()
    assert it.cache.plans.full_hits.answered == 1
    assert it.probe([*PROMPT, 7, 8, 5]) == len(PROMPT) + 2


def test_it_is_off_unless_asked_for() -> None:
    it = server(full_hits=False)
    for _ in range(3):
        it.serve(PROMPT, [7])
        assert it.last_hidden is None
    assert it.cache.plans.full_hits is None


@pytest.mark.parametrize("policy", ["lru", "marconi"])
def test_every_policy_of_ours_knows_them(policy: str) -> None:
    it = server(policy)
    asked_twice(it)
    it.serve(PROMPT, [7])
    assert isinstance(it.last_hidden, Answers)


def test_under_sglangs_own_order_there_are_none() -> None:
    it = server("sglang-lru")
    for _ in range(3):
        it.serve(PROMPT, [7])
    assert it.last_hidden is None


def test_another_tenant_has_another_prompt() -> None:
    it = server()
    asked_twice(it, cache_salt="a")
    it.serve(PROMPT, [7], cache_salt="b")
    assert it.last_hidden is None
    it.serve(PROMPT, [7], cache_salt="a")
    assert isinstance(it.last_hidden, Answers)


@pytest.mark.parametrize(
    ("wish", "hit"),
    [({"return_hidden_states": True}, 0), ({"multimodal_inputs": object()}, len(PROMPT) - 1)],
)
def test_who_wants_more_is_computed(wish: dict[str, Any], hit: int) -> None:
    it = server()
    asked_twice(it)
    req = it.arrive(PROMPT)
    vars(req).update(wish)
    assert it.admit(req) and req.prefix_len == hit
    assert it.prefill_step(req) and it.last_hidden is None
    it.finish(req)
    it.check()


@pytest.mark.parametrize("log_probabilities", [False, True])
def test_a_retracted_request_goes_on_behind_its_answer(log_probabilities: bool) -> None:
    """A request that wants log probabilities from its prompt's last token on may resume there only:
    no kept state answers it, and it leaves none.
    """
    it = server()
    asked_twice(it)
    req = it.begin(PROMPT)
    req.return_logprob, req.logprob_start_len = log_probabilities, len(PROMPT) - 1
    it.prefill(req)
    it.decode(req, [7, 8, 9])
    it.retract(req)
    assert it.admit(req)
    assert req.prefix_len == len(PROMPT) - log_probabilities
    it.prefill(req)
    assert it.last_hidden is None
    it.decode(req, [5, 6])
    it.finish(req)
    it.check()
    assert it.probe([*PROMPT, 7, 8, 9, 5, 1]) == len(PROMPT) + 4


def test_what_was_evicted_is_computed() -> None:
    it = server()
    asked_twice(it)
    it.cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=100))
    it.serve(PROMPT, [7])
    assert it.last_hidden is None
    it.check()


def test_a_flush_forgets_them() -> None:
    it = server()
    asked_twice(it)
    it.flush()
    assert kept(it) == 0
    it.serve(PROMPT, [7])
    assert it.last_hidden is None


def test_a_state_before_the_end_is_not_needed() -> None:
    """The state of the whole prompt and its KV suffice."""
    it = server("lru")
    asked_twice(it)
    it.serve(PROMPT, [7])
    before_the_last = node(it, PROMPT[:-1]).component_data[ComponentType.MAMBA]
    while before_the_last.value is not None:
        it.cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
    assert it.cache.mamba_evictable_size() > 0
    req = it.arrive(PROMPT)
    assert it.admit(req) and it.prefill_step(req)
    assert isinstance(it.last_hidden, Answers)
    it.finish(req)
    it.check()


def test_a_batch_is_of_full_hits_or_of_others() -> None:
    it = server(rows=4)
    asked_twice(it)
    full, again, other = it.arrive(PROMPT), it.arrive(PROMPT), it.arrive(run(30, 2))
    adder = it.adder([full, other, again])
    assert it.cache.plans.full_hits.info()["answered"] == 0
    joined = []
    for req in (full, other, again):
        it.look_up(req)
        said = adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
        assert said is AddReqResult.CONTINUE
        joined.append(req in adder.can_run_list)
    assert joined == [True, False, True]
    assert not other.kv.holds_mamba
    for req in (full, again):
        it.running.append(req)
        assert it.prefill_step(req) and isinstance(it.last_hidden, Answers)
        it.finish(req)
    adder = it.adder([other, full])
    late = it.arrive(PROMPT)
    for req in (other, late):
        it.look_up(req)
        adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
        it.running.append(req)
    assert adder.can_run_list == [other, late]
    assert not it.cache.plans.full_hits.is_full_hit(late), "it is computed beside the other"
    for req in (other, late):
        assert it.prefill_step(req) and not isinstance(it.last_hidden, Answers)
        it.finish(req)
    it.check()


def test_no_more_are_kept_than_there_are_states() -> None:
    it = server(states=4, rows=2)
    for start in range(8):
        for _ in range(2):
            it.serve(run(40, start), [7])
    assert 0 < kept(it) <= 4
    it.check()


def test_the_last_token_comes_back_where_its_kv_lies_in_a_slot() -> None:
    """It was used least recently, since nothing resumes behind it."""
    it = server(spills=True, state_tokens=10, states=40, kv=150)
    asked_twice(it)
    for start in range(1, 5):
        it.serve(run(40, start), [9])
    assert it.cache.parked.tokens >= len(PROMPT)
    req = it.arrive(PROMPT)
    assert it.admit(req) and req.prefix_len == len(PROMPT) - 1
    assert it.prefill_step(req)
    assert isinstance(it.last_hidden, Answers)
    it.check()
