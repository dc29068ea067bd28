"""Our PrefillAdder: what it decides beyond SGLang's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, _PrefillAdmission
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_hybrid.cache.prefill_adder import HybridPrefillAdder
from tests.cache.backends import options
from tests.cache.driver import Server, Sizes
from tests.cache.test_rules import run

REQUEST = SimpleNamespace()


def admission(**given: int) -> _PrefillAdmission:
    """An admission of SGLang's; what is not given is 0."""
    return _PrefillAdmission(**{one.name: 0 for one in fields(_PrefillAdmission)} | given)


FITS = admission(extend_len=100, max_new_tokens=8, is_chunked=False)
CUT_OFF = admission(extend_len=60, is_chunked=True)


def admit(
    monkeypatch: pytest.MonkeyPatch,
    sglangs: _PrefillAdmission,
    *,
    cut: int | None = None,
    from_before: bool = False,
    in_this_batch: bool = False,
) -> _PrefillAdmission | AddReqResult:
    """The final verdict, given SGLang's, if a state is wanted at `cut` and another prefill is
    unfinished: one from an earlier batch, or one that this batch begins.
    """
    monkeypatch.setattr(PrefillAdder, "_select_prefill_admission", lambda *_, **__: sglangs)
    adder = object.__new__(HybridPrefillAdder)
    adder.tree_cache = SimpleNamespace(plans=SimpleNamespace(next_cut=lambda *_: cut))
    adder.rem_chunk_tokens = 60
    adder.new_chunked_req = SimpleNamespace() if in_this_batch else None
    adder._unlimited = False
    return adder._select_prefill_admission(REQUEST, has_chunked_req=from_before)


def test_a_prefill_stops_where_a_state_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = admit(monkeypatch, FITS, cut=40)
    assert (stopped.extend_len, stopped.is_chunked, stopped.max_new_tokens) == (40, True, 0)


@pytest.mark.parametrize("unfinished", ["from_before", "in_this_batch"])
@pytest.mark.parametrize(("sglangs", "cut"), [(CUT_OFF, None), (CUT_OFF, 40), (FITS, 40)])
def test_two_prefills_are_never_unfinished_at_once(
    monkeypatch: pytest.MonkeyPatch, unfinished: str, sglangs: _PrefillAdmission, cut: int | None
) -> None:
    """One that stopped for a state leaves room in the chunk, but not for another that stops."""
    verdict = admit(monkeypatch, sglangs, cut=cut, **{unfinished: True})
    assert verdict is AddReqResult.OTHER


@pytest.mark.parametrize("unfinished", ["from_before", "in_this_batch"])
def test_one_that_fits_whole_fills_the_room_beside_it(
    monkeypatch: pytest.MonkeyPatch, unfinished: str
) -> None:
    assert admit(monkeypatch, FITS, **{unfinished: True}) is FITS


def server(*, one_pass: bool = True, **sizes: int) -> Server:
    return Server.on(Sizes(**sizes), options("reuse"), one_pass=one_pass)


def test_without_chunked_prefill_a_prefill_is_split_where_kernels_need_that() -> None:
    it = server(one_pass=False)
    document = run(100)
    it.serve([*document, *run(50, 1)], [7])
    req = it.begin([*document, *run(50, 2)])
    ends = [req.extend_end]
    while not it.prefill_step(req):
        it.look_ahead(req)
        ends.append(req.extend_end)
    assert ends == [100, 149, 150]  # and not all 150 at once
    assert it.cache.plans.planner.in_flight() == []
    it.finish(req)
    assert it.probe([*document, *run(50, 3)]) == 100


def test_a_batch_without_chunks_keeps_its_bound() -> None:
    it = server(one_pass=False)
    adder = it.adder()
    adder.rem_input_tokens = 120
    verdicts = []
    for seed in range(3):
        req = it.arrive(run(100, seed))
        it.look_up(req)
        verdicts.append(adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None))
    assert len(adder.can_run_list) == 1, "one prefill that is split at a time"
    assert verdicts[-1] is AddReqResult.OTHER


def test_a_request_that_does_not_fit_is_counted_once_it_does() -> None:
    """Fifty attempts, one micro-branch."""
    it = server(kv=400)
    document = run(100)
    it.serve([*document, *run(60, 1)], [7])
    for seed in (2, 3):  # a state at the branch, and a prompt that leaves it 8 tokens further down
        it.serve([*document, *run(40, seed)], [7])
    holder = it.begin(run(180, 9))
    it.prefill_step(holder)
    waiting = it.arrive([*document, *run(60, 1)[:8], *run(190, 8)])
    before = dict(it.cache.stats.skipped), it.cache.decision_log.decisions.count
    for _ in range(50):
        it.look_up(waiting)
        assert not it.try_to_add(waiting)
    assert (dict(it.cache.stats.skipped), it.cache.decision_log.decisions.count) == before
    it.finish(holder)
    assert it.admit(waiting)
    assert it.cache.stats.skipped["micro_branch"] - before[0].get("micro_branch", 0) == 1


def test_a_request_that_ends_reserves_nothing() -> None:
    """Room is left for the next steps of requests that run, not of those that ran last."""
    it = server()
    it.serve(run(40), [7])
    assert it.cache.slots.decoding == 0
    first, second = (it.arrive(run(40, seed)) for seed in (1, 2))
    for req in (first, second):
        assert it.admit(req)
        it.prefill_step(req)
    it.cache.slots.reserve(2)
    it.finish(first)
    assert it.cache.slots.decoding == 1
    it.retract(second)
    assert it.cache.slots.decoding == 0


def test_a_request_that_is_looked_up_again_while_it_waits_holds_no_slot() -> None:
    """SGLang looks up a prompt to admit it, and once more to ask the disk for the rest of it."""
    it = server(states=4)
    document = run(100)
    it.serve(document, [7])
    free = it.pool.mamba_allocator.available_size()
    req = it.arrive([*document, 1, 2])
    assert it.look_up(req) > 0
    assert req.kv.mamba_cow_src_index is not None and req.kv.holds_mamba
    req.init_next_round_input(it.cache, cow_mamba=False)
    assert req.kv.mamba_cow_src_index is None and not req.kv.holds_mamba
    assert it.pool.mamba_allocator.available_size() == free
    assert it.admit(req)


def test_a_request_of_a_session_that_does_not_join_holds_no_slot() -> None:
    """SGLang leaves it the slot of its look-up. After a flush, as in a pause for new weights, that
    would be given back into a pool in which it is free already.
    """
    it = server(states=4)
    it.serve(run(100), [7])
    free = it.pool.mamba_allocator.available_size()
    req = it.arrive([*run(100), 1, 2])
    req.session = SimpleNamespace(session_id="one", streaming=False)
    assert it.look_up(req) > 0 and req.kv.holds_mamba
    adder = it.adder([req])
    adder.prefill_max_requests = 0
    assert adder.add_one_req(req, False, None) is AddReqResult.OTHER
    assert it.pool.mamba_allocator.available_size() == free
    it.flush()
    assert it.look_up(req) == 0
    it.check()


def test_a_request_that_runs_keeps_its_slot() -> None:
    it = server(states=4)
    document = run(100)
    it.serve(document, [7])
    req = it.begin([*document, 1, 2])
    assert it.prefill_step(req)
    slot = int(req.kv.mamba_pool_idx)
    it.cache.match_prefix(
        MatchPrefixParams(key=RadixKey(req.origin_input_ids), req=req, cow_mamba=False)
    )
    assert int(req.kv.mamba_pool_idx) == slot


# A prefill that was begun, and memory that others have taken since.

LAYOUTS = {
    "two pools": {"kv": 400},
    "one memory": {"kv": 400, "states": 4, "one_memory": True},
    "pages": {"kv": 416, "page": 16, "extra_buffer": True, "grid": 16},
}
CHUNK = 64


class Crowded:
    """One request decodes and will for long; of the 300 tokens of another prompt, one chunk is
    computed; `free` tokens of KV are left.
    """

    def __init__(self, layout: str, free: int) -> None:
        self.it = it = Server.on(Sizes(**LAYOUTS[layout]), options("reuse"), CHUNK)
        self.decodes = it.arrive(run(16, 1))
        assert it.admit(self.decodes) and it.prefill_step(self.decodes)
        self.prefills = it.arrive(run(300, 2))
        assert it.admit(self.prefills) and not it.prefill_step(self.prefills)
        it.decode(self.decodes, [7] * (it.allocator.available_size() - free + 1))
        self.decodes.sampling_params.max_new_tokens = 1_000
        self.decodes.sampling_params.ignore_eos = True
        assert it.allocator.available_size() == free and not it.cache.full_evictable_size()
        self.adder = self.new_adder()

    def new_adder(self, waiting: Sequence[Req] = ()) -> HybridPrefillAdder:
        running = [req for req in self.it.running if req is not self.prefills]
        batch = ScheduleBatch(reqs=running, spec_algorithm=SpeculativeAlgorithm.NONE)
        batch.token_to_kv_pool_allocator = self.it.allocator
        self.adder = self.it.adder(waiting, batch)
        return self.adder

    def go_on(self) -> Req | None:
        """The rest of the unfinished prefill, as the scheduler asks for it."""
        self.prefills.init_next_round_input()
        return self.adder.add_chunked_req(self.prefills)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chunk_that_does_not_fit_waits_and_nobody_joins_before_it(layout: str) -> None:
    """SGLang would take a whole chunk, because its estimate of what is left is negative."""
    here = Crowded(layout, free=48)
    it, adder = here.it, here.adder
    assert adder.rem_total_tokens < 0
    assert here.go_on() is here.prefills
    assert adder.can_run_list == [] and adder.preempt_list == []
    assert here.prefills.extend_end == here.prefills.prefix_len == CHUNK, "it has nothing to keep"
    small = it.arrive([1, 2, 3])
    it.look_up(small)
    assert adder.budget_state() is AddReqResult.OTHER
    assert adder.add_one_req(small, False, None) is AddReqResult.OTHER
    it.send_back(small)
    it.finish(here.decodes)
    here.new_adder()
    assert here.go_on() is here.prefills and adder is not here.adder
    assert here.adder.can_run_list == [here.prefills]
    it.prefill(here.prefills)
    it.finish(here.prefills)
    it.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chunk_that_fits_beside_the_next_step_goes_on(layout: str) -> None:
    here = Crowded(layout, free=96)
    assert here.adder.rem_total_tokens < 0 and here.go_on() is here.prefills
    assert here.adder.can_run_list == [here.prefills]
    assert here.it.cache.slots._rest == 300 - 2 * CHUNK, "checkpoints leave room for it"
    here.it.begin_forward(here.prefills)
    assert here.prefills.kv.kv_allocated_len == 2 * CHUNK


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prefill_gives_its_memory_to_those_that_could_not_go_on(layout: str) -> None:
    """SGLang ends the last running request with an error when it has no memory for its next step.
    What was computed of the prompt is in the tree meanwhile, and evictable.
    """
    here = Crowded(layout, free=0)
    it = here.it
    here.prefills.inflight_middle_chunks = 1
    assert here.go_on() is here.prefills, "its last chunk is still computed"
    here.prefills.inflight_middle_chunks = 0
    here.new_adder()
    assert here.go_on() is None
    assert here.adder.preempt_list == [here.prefills] and here.adder.can_run_list == []
    it.running.remove(here.prefills)
    it.check()
    assert it.cache.full_evictable_size() == CHUNK
    it.decode(here.decodes, [7] * CHUNK)
    it.finish(here.decodes)
    assert it.admit(here.prefills)
    it.prefill(here.prefills)
    it.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_turn_of_a_session_gives_its_memory_too(layout: str) -> None:
    """A streaming session keeps what a turn that is retracted has computed."""
    here = Crowded(layout, free=0)
    it, req = here.it, here.prefills
    done = {"finish_req": lambda req: None, "abort_req": lambda: None}
    req.session = SimpleNamespace(session_id="one", streaming=True, **done)
    it.cache.maybe_hand_to_session(req)
    assert here.go_on() is None and here.adder.preempt_list == [req]
    it.running.remove(req)
    it.check()
    assert it.cache.full_evictable_size() == CHUNK
    it.decode(here.decodes, [7] * CHUNK)
    it.finish(here.decodes)
    assert it.admit(req)


def test_a_prefill_that_waits_for_nobody_waits_in_the_queue() -> None:
    """Something else than a running request holds the memory: an idle session, say."""
    here = Crowded("two pools", free=16)
    here.it.running.remove(here.decodes)
    here.new_adder()
    assert here.go_on() is None and here.adder.preempt_list == [here.prefills]


def test_a_prefill_that_is_sent_to_another_server_keeps_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Crowded("two pools", free=0)
    role = SimpleNamespace(disaggregation_mode="prefill")
    monkeypatch.setattr("sglang_hybrid.cache.prefill_adder.get_disagg", lambda: role)
    assert here.go_on() is here.prefills and here.adder.preempt_list == []


def test_prompts_that_will_come_are_known_before_they_wait() -> None:
    """A prefill server knows of prompts before their decode server has said where to send them."""
    it = server()
    first, second = (it.arrive(run(100, 2) + run(90, 3 + k)) for k in range(2))
    adder = it.adder([first], coming=[second])
    it.look_up(first)
    assert it._add(first, adder)
    assert 100 in it.cache.plans.planner.in_flight()[0][1].wanted
    it.look_up(second)
    assert it.cache.plans.prefix_wait.waits_for_prefix(second)


@pytest.mark.parametrize("late", [run(200, 2) + run(90, 3), run(40, 2) + run(90, 3)])
def test_a_prompt_that_comes_between_chunks_branches_in_the_next_one(late: list[int]) -> None:
    """A branch that was passed already is not taken."""
    here = Crowded("two pools", free=300)
    arrived = here.it.arrive(late)
    here.new_adder([arrived])
    here.go_on()
    plans = here.it.cache.plans
    wanted = plans.planner.in_flight()[0][1].wanted
    assert (200 in wanted) is (len(late) == 290) and 40 not in wanted
    here.it.look_up(arrived)
    assert plans.prefix_wait.waits_for_prefix(arrived) is (len(late) == 290)
