"""Turns of streaming sessions (`--enable-streaming-session`): the first one runs on what the tree
has, and its session holds that from then on; the next ones run on what the session has.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import match_kv_cache, release_kv_cache

from sglang_hybrid.extensions.page.messages import WatchReq
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import Schedule, Ui
from sglang_hybrid.storage.codecs.codecs import Codec
from tests.cache.backends import coding, options
from tests.cache.driver import Server, Sizes
from tests.cache.test_rules import run


class SessionServer(Server):
    """Hands a turn's KV to its session where SGLang does: when it has got its row and its tokens,
    before the states of its forward get their slots (allocation.py, alloc_for_extend).
    """

    def begin_forward(self, req: Req) -> None:
        with pytest.MonkeyPatch.context() as patched:
            plan = self.cache.plan_forward

            def handed_over(batch: Any) -> None:
                self.cache.maybe_hand_to_session(req)
                plan(batch)

            patched.setattr(self.cache, "plan_forward", handed_over)
            super().begin_forward(req)
        self.cache.maybe_hand_to_session(req)  # without states nothing is planned

    def turn(self, one: Any, tokens: list[int], **more: Any) -> Req:
        """The next turn of the session `one`, admitted."""
        req = self.arrive(tokens, **more)
        req.session = one
        assert self.admit(req)
        return req

    def check(self) -> None:
        self.cache.sanity_check()  # what a session holds is no running request's


def session() -> Any:
    done = {"finish_req": lambda req: None, "abort_req": lambda: None}
    return SimpleNamespace(session_id="one", streaming=True, **done)


def test_a_first_turn_misses_slots_for_its_states() -> None:
    """A state without a slot is noted under the prompt, though the session has the turn's node."""
    it = SessionServer.on(Sizes(states=9), options("reuse"), chunk=32)
    it.serve(run(40), [7])
    req = it.turn(session(), [*run(40), *run(60, 2)])
    begin, taken = it.cache.plan_forward, []

    def without_slots(batch: Any) -> None:
        allocator = it.pool.mamba_allocator
        it.cache.evict_for_alloc = lambda params: None
        while (slot := allocator.alloc(1)) is not None:
            taken.append(slot)
        begin(batch)

    it.cache.plan_forward = without_slots
    it.prefill(req)
    assert taken and it.cache.stats.skipped["no_slot"]
    log = it.cache.decision_log.decisions.of(None)
    assert [at for at, _ in log.along(req.origin_input_ids)]


def test_a_first_turn_that_is_aborted_leaves_nothing() -> None:
    """A short prompt has no state that the tree could name, if there are pages."""
    it = SessionServer.on(Sizes(states=20, page=16, extra_buffer=True, grid=16), options("reuse"))
    free = it.free()
    req = it.turn(session(), run(5))
    it.prefill(req)
    it.abort(req, keep=True)
    assert it.free() == free
    it.check()


def test_turns_say_that_they_come_from_smaller_copies() -> None:
    with coding(Codec.INT8):
        it = SessionServer.on(Sizes(kv=200, states=12, row=32), options("reuse"))
        for start in range(3):
            it.serve(run(60, start), [7])
        it.cache.evict(EvictParams(num_tokens=60))
        assert it.cache.parts.coded.as_dict()["now"]["kv"]
        for tokens, exact in (run(61), False), (run(61, 9), True):
            one = session()
            req = it.turn(one, tokens)
            it.prefill(req)
            assert it.cache.lookups.report(req).exact is exact
            it.decode(req, [7, 8])
            it.finish(req)
            again = it.arrive([*tokens, 7, 8, 9])
            again.session = one
            assert it.look_up(again) >= 61
            assert it.cache.lookups.report(again).exact is exact
            it.cache.release_session("one")
            it.check()


@pytest.mark.parametrize("schedule", [Schedule.WINDOW, Schedule.CAR])
def test_a_turn_waits_in_a_queue_of_ours(schedule: Schedule) -> None:
    it = SessionServer.on(Sizes(), HybridConfig(hybrid_schedule=schedule))
    one = session()
    req = it.turn(one, run(60))
    it.complete(req, [7, 8])
    again = it.arrive([*run(60), 7, 8, 9])
    again.session = one
    it.adder([again])
    assert again.prefix_len == 61 and it.cache.schedule.holds == 0


def test_a_turn_that_waits_stands_at_no_node_of_the_tree() -> None:
    """SGLang looks for one when it ranks prompts by the tree's branches, and when it asks the disk
    for a prompt that has arrived.
    """
    it = SessionServer.on(Sizes(), options("reuse"))
    one = session()
    it.complete(it.turn(one, run(60)), [7, 8])
    again, other = it.arrive([*run(60), 7, 8, 9]), it.arrive(run(40))
    again.session = one
    waiting = [again, other]
    SchedulePolicy("dfs-weight", it.cache, True, False, False).calc_priority(waiting)
    assert len(waiting) == 2 and {again.rid, other.rid} == {req.rid for req in waiting}
    stands_for: Any = SimpleNamespace(
        enable_hicache_storage=True, enable_lmcache=False, tree_cache=it.cache
    )
    Scheduler._prefetch_kvcache(stands_for, again)
    assert again.prefix_len == 61


@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize("states", [0, 16])
def test_a_turn_that_wants_all_of_its_prompt_begins_anew(*, states: int, ranked: bool) -> None:
    """A turn whose hidden states are wanted is one: SGLang asserts that stored tokens are kept."""
    it = SessionServer.on(Sizes(states=states), options("reuse"))
    one = session()
    it.complete(it.turn(one, run(60)), [7, 8])
    again = it.arrive([*run(60), 7, 8, 9])
    again.session = one
    if ranked:
        match_kv_cache(again, it.cache)
    match_kv_cache(again, it.cache, max_prefix_len=0)
    assert again.prefix_len == 0 and not it.cache.session.slots
    assert again.kv.is_kv_released and not again.kv.holds_mamba
    assert it.admit(again)
    it.complete(again, [7])
    it.cache.release_session("one")
    it.check()


def test_a_turn_that_is_aborted_while_it_waits_was_none() -> None:
    """SGLang would have the next one go on from its prompt (scheduler.py, abort_request)."""
    it = SessionServer.on(Sizes(), options("reuse"))
    one, ended = session(), []
    one.finish_req = ended.append
    first = it.turn(one, run(60))
    it.complete(first, [7, 8])
    waits = it.arrive([*run(60), 7, 8, 9])
    waits.session = one
    assert it.look_up(waits) == 61
    release_kv_cache(waits, it.cache, checkpoint=False)
    again = it.turn(one, [*run(60), 7, 8, 6])
    assert again.prefix_len == 61 and ended == [first]
    it.complete(again, [7])
    assert ended == [first, again]


@pytest.mark.parametrize("states", [0, 16])
def test_a_turn_that_is_retracted_gives_all_back(states: int) -> None:
    """SGLang counts it as the session's last one, which a client may go on from meanwhile, and
    which never ends if it is aborted then.
    """
    it = SessionServer.on(Sizes(states=states), options("reuse"))
    one, ended = session(), []
    one.finish_req = ended.append
    first = it.turn(one, run(60))
    it.complete(first, [7, 8])
    again = it.turn(one, [*run(60), 7, 8, 9])
    it.prefill(again)
    it.decode(again, [7, 8])
    it.retract(again)
    assert ended == [first] and not it.cache.session.slots
    it.check()
    assert it.cache.full_protected_size() == 0
    assert it.admit(again)
    it.complete(again, [7, 8, 9])
    assert ended == [first, again]


@pytest.mark.parametrize("runs", [False, True])
def test_a_refused_turn_leaves_its_session_what_it_has(*, runs: bool) -> None:
    """SGLang refuses a request beside another one of its session, and gives it a prompt of one
    token (session_controller.py, create_req; schedule_batch.py, set_finish_with_abort).
    """
    it = SessionServer.on(Sizes(), options("reuse"))
    one = session()
    req = it.turn(one, run(60))
    it.prefill(req)
    it.decode(req, [7, 8])
    if not runs:
        it.finish(req)
    refused = it.arrive([0])
    refused.session, refused.to_finish = one, FINISH_ABORT()
    assert it.look_up(refused) == 0
    assert it.cache.session.slots["one"].kv.holds_kv
    if runs:
        it.finish(req)
    again = it.turn(one, [*run(60), 7, 8, 9])
    assert again.prefix_len == 61
    it.check()


def test_a_first_turn_is_remembered_as_it_was() -> None:
    """SGLang appends the next turn to the same array (session_controller.py,
    _share_token_arrays)."""
    it = SessionServer.on(Sizes(), options("reuse"))
    req = it.turn(session(), run(60))
    it.complete(req, [7, 8])
    req.origin_input_ids.extend(run(40, 2))
    seen = it.cache.decision_log.recent.get(None, req.rid)
    assert seen.tokens.tolist() == run(60)


def test_the_page_shows_no_node_of_a_turn_that_runs() -> None:
    it = SessionServer.on(Sizes(), options("reuse", hybrid_ui=Ui.LENGTHS))
    it.serve(run(40, 1), [7])
    turn, other = it.turn(session(), run(60)), it.begin(run(41, 1))
    for req in (turn, other):
        it.prefill(req)
    it.cache.page.scheduler = SimpleNamespace(
        running_batch=SimpleNamespace(reqs=[turn, other]), waiting_queue=[]
    )
    told = it.cache.page.watch(WatchReq(reader="a"))
    assert [row[0] for row in told.running] == [other.rid]
