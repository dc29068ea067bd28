"""Our PrefillAdder: what it decides beyond SGLang's."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, _PrefillAdmission
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_hybrid.cache.state_slots.prefill_adder import HybridPrefillAdder
from tests.cache.backends import options
from tests.cache.driver import Server, Sizes, build_cache
from tests.cache.test_rules import run

REQUEST = SimpleNamespace()


def admission(**given: int) -> _PrefillAdmission:
    """What SGLang admits; what a release adds to it is 0."""
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
    """What becomes of SGLang's verdict if a state is wanted at `cut` and another prefill is
    unfinished: one from an earlier batch, or one that this batch begins.
    """
    monkeypatch.setattr(PrefillAdder, "_select_prefill_admission", lambda *_, **__: sglangs)
    adder = object.__new__(HybridPrefillAdder)
    adder.tree_cache = SimpleNamespace(next_cut=lambda *_: cut)
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
    where = Sizes(**sizes)
    return Server(build_cache(where, options("reuse"), one_pass=one_pass), where)


def test_without_chunked_prefill_a_prefill_is_split_where_kernels_need_that() -> None:
    it = server(one_pass=False)
    document = run(100)
    it.serve([*document, *run(50, 1)], [7])
    req = it.arrive([*document, *run(50, 2)])
    assert it.admit(req)
    ends = [req.extend_end]
    while not it.prefill_step(req):
        it.look_ahead(req)
        ends.append(req.extend_end)
    assert ends == [100, 149, 150]  # and not all 150 at once
    assert it.cache.planner.in_flight() == []
    it.finish(req)
    assert it.probe([*document, *run(50, 3)]) == 100


def test_a_batch_without_chunks_keeps_its_bound() -> None:
    it = server(one_pass=False)
    adder = it._adder()
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
    holder = it.arrive(run(180, 9))
    assert it.admit(holder)
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


def test_a_request_that_runs_keeps_its_slot() -> None:
    it = server(states=4)
    document = run(100)
    it.serve(document, [7])
    req = it.arrive([*document, 1, 2])
    assert it.admit(req) and it.prefill_step(req)
    slot = int(req.kv.mamba_pool_idx)
    it.cache.match_prefix(
        MatchPrefixParams(key=RadixKey(req.origin_input_ids), req=req, cow_mamba=False)
    )
    assert int(req.kv.mamba_pool_idx) == slot
