"""Why a prompt was not hit further: each reason from a situation that has it, on the real tree."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_hybrid.checkpoints.message_boundaries import MessageBoundaries
from sglang_hybrid.core.records.latest import Latest
from sglang_hybrid.explain.decisions import Decisions
from sglang_hybrid.explain.explanation import Explanation
from sglang_hybrid.explain.messages import ExplainReq
from sglang_hybrid.explain.miss_report import (
    ExplainedRequest,
    MissReport,
    Reason,
    Unstored,
    UnstoredReason,
)
from sglang_hybrid.explain.render import remedy, render
from sglang_hybrid.serving.tenants import tenant
from tests.cache.backends import options
from tests.cache.driver import MAMBA, Server, Sizes, build_cache
from tests.cache.test_rules import node, run


def server(policy: str = "reuse", admission: str = "judicious", **more: Any) -> Server:
    sizes = {name: more.pop(name) for name in list(more) if name in Sizes.__dataclass_fields__}
    how = {name: more.pop(name) for name in ("unplanned", "one_pass", "rank") if name in more}
    where = Sizes(**sizes)
    return Server(build_cache(where, options(policy, admission, **more), **how), where)


def serve(it: Server, length: int, *kinds: int) -> None:
    """Requests with prompts of `length` tokens, one of each kind, which share nothing."""
    for kind in kinds:
        it.serve(run(length, kind), [7])


def explain(it: Server, tokens: list[int], **whose: str | None) -> MissReport:
    report = told(it, **whose).of_prompt(array("q", tokens))
    assert list(render(report))
    return report


def told(it: Server, extra_key: str | None = None, cache_salt: str | None = None) -> Explanation:
    return Explanation(it.cache, it.cache.decision_log, tenant(extra_key, cache_salt))


def of_request(it: Server, request_id: str) -> MissReport:
    seen = it.cache.decision_log.recent.get(tenant(None, None), request_id)
    assert seen is not None
    report = told(it).of_request(request_id, seen)
    assert list(render(report))
    return report


def reasons(report: MissReport) -> dict[int, Reason]:
    return {missed.position: missed.reason for missed in report.deeper}


def unstored(report: MissReport) -> Unstored:
    assert report.unstored is not None
    return report.unstored


def request(report: MissReport) -> ExplainedRequest:
    assert report.request is not None
    return report.request


def said(report: MissReport) -> str:
    return "\n".join(render(report))


# What is there.


def test_a_prompt_that_nobody_sent() -> None:
    report = explain(server(), run(100))
    assert (report.prompt, report.usable, report.kv, report.hit) == (100, 99, 0, 0)
    assert (report.checkpoint, report.deeper) == (None, [])
    assert unstored(report).why is UnstoredReason.NEW
    assert report.leaves == [(99, "prompt_end")]
    assert "Tokens 0 to 99 were never sent before." in said(report)


def test_the_checkpoint_that_is_used() -> None:
    it = server()
    it.serve(run(100), [7], stamp=10.0)
    it.serve([*run(100), 5], [7], stamp=30.0)
    it.serve(run(50, 3), [7], stamp=31.0)
    report = explain(it, [*run(100), *run(9, 4)])
    assert report.hit == 100
    used = report.checkpoint
    assert used is not None
    assert (used.position, used.kind, used.hits) == (100, "tail", 1)
    assert (used.taken, used.last_used) == (21.0, 1.0)
    assert "token 100: answer's end; taken 21 s ago, 1 hit, the last one 1.0 s ago" in said(report)


def test_an_identical_prompt_misses_nothing() -> None:
    it = server()
    it.serve(run(100), [7])
    report = explain(it, run(100))
    assert (report.hit, report.deeper, report.unstored) == (99, [], None)
    assert "Nothing was missed." in said(report)


# Why there is none.


def test_nobody_branched_there_before() -> None:
    it = server()
    it.serve(run(100), run(5, 1))
    report = explain(it, [*run(60), *run(30, 2)])
    assert (report.kv, report.hit) == (60, 0)
    assert reasons(report) == {60: Reason.NOT_WANTED}
    assert report.deeper[0].gain == 60
    assert report.leaves == [(60, "branch"), (89, "prompt_end")]
    assert "never stored: no earlier prompt left the stored ones here" in said(report)
    assert remedy(report) is None
    it.serve([*run(60), *run(30, 2)], [7])
    assert explain(it, [*run(60), *run(30, 3)]).hit == 60


@pytest.mark.parametrize("gain, least", [(30, 40), (7, 16)])
def test_a_micro_branch(gain: int, least: int) -> None:
    def after_two_prompts(least: int) -> Server:
        it = server(hybrid_min_branch_tokens=least)
        it.serve(run(100), [7])
        it.serve([*run(100), *run(90, 1)], [7])
        return it

    it = after_two_prompts(least)
    prompt = [*run(100), *run(gain, 1), *run(50, 2)]
    report = explain(it, prompt)
    assert (report.kv, report.hit) == (100 + gain, 100)
    assert reasons(report) == {100 + gain: Reason.MICRO_BRANCH}
    assert report.deeper[0].request is None  # foreseen
    it.serve(prompt, [7])
    again = [*run(100), *run(gain, 1), *run(50, 3)]
    report = explain(it, again)
    assert reasons(report) == {100 + gain: Reason.MICRO_BRANCH}
    assert report.deeper[0].request == "3"  # decided
    worth_a_flag = "SGLANG_HYBRID_MIN_BRANCH_TOKENS=30 or less; it is 40."
    assert remedy(report) == (worth_a_flag if gain >= 16 else None)
    lenient = after_two_prompts(gain)
    lenient.serve(prompt, [7])
    assert explain(lenient, again).hit == 100 + gain


def test_no_slot_was_free_and_nothing_could_go() -> None:
    it = server(states=1)  # the request's own state takes it
    it.serve(run(50, 1), [7])
    report = explain(it, run(50, 1))
    assert (report.kv, report.hit) == (49, 0)
    assert reasons(report) == {49: Reason.NO_SLOT}
    assert report.deeper[0].request == "1"
    assert "no slot was free and nothing could be pushed out" in said(report)
    assert "--max-mamba-cache-size above 1" in (remedy(report) or "")


def test_a_prompts_end_takes_free_slots_only() -> None:
    it = server("marconi", hybrid_alpha=1.0, states=2)
    serve(it, 100, 0, 1)
    report = explain(it, run(100, 1)[:100])
    assert reasons(report) == {99: Reason.NOT_WORTH}
    assert report.deeper[0].kind == "prompt_end"
    assert report.deeper[0].score is None
    assert "it takes free slots only" in said(report)


def test_worth_no_more_than_the_cheapest() -> None:
    it = server("marconi", hybrid_alpha=100.0, states=3)
    it.serve(run(900, 1), [7])
    it.serve(run(900, 2), [7])
    it.serve(run(30, 3), [7])
    for k in (4, 5):
        it.serve([*run(20, 3), *run(900, k)], [7])
    report = explain(it, [*run(20, 3), *run(9, 6)])
    missed = report.deeper[0]
    assert (missed.position, missed.reason, missed.kind) == (20, Reason.NOT_WORTH, "branch")
    assert missed.score is not None and missed.victim_score is not None
    assert missed.score <= missed.victim_score
    assert f"{missed.score:.3g} against {missed.victim_score:.3g} by marconi" in said(report)


def test_evicted_for_a_state_that_was_worth_more() -> None:
    it = server(states=4)
    it.serve(run(100), run(5, 1))
    it.serve([*run(60), *run(30, 2)], [3])
    serve(it, 80, *range(5, 9))
    report = explain(it, [*run(60), *run(30, 3)])
    (missed,) = report.deeper
    assert (missed.position, missed.reason, missed.kind) == (60, Reason.EVICTED, "branch")
    assert (missed.short, missed.policy, missed.with_kv) == ("states", "reuse", True)
    gets, score = missed.recipient, missed.score
    assert gets is not None and gets.score is not None and score is not None
    assert (gets.position, gets.kind) == (79, "prompt_end") and gets.score > score
    assert unstored(report).why is UnstoredReason.EVICTED
    assert unstored(report).known == 60
    assert "--max-mamba-cache-size above 4" in (remedy(report) or "")


def test_a_state_that_went_alone() -> None:
    it = server("marconi", "all", hybrid_alpha=10.0)
    it.serve(run(20), run(5, 1))
    hold = it.cache.lock(node(it, [*run(20), *run(5, 1)[:4]]).id)  # the deeper one stays
    it.cache.evict(EvictParams(num_tokens=0, mamba_num=1))
    it.cache.unlock(hold)
    report = explain(it, [*run(20), 9])
    assert (report.kv, report.hit) == (20, 0)
    (missed,) = report.deeper
    assert (missed.position, missed.reason, missed.kind) == (20, Reason.EVICTED, "prompt_end")
    assert (missed.with_kv, missed.recipient) == (False, None)
    assert "another request needed the slot" in said(report)


def test_evicted_when_kv_ran_short() -> None:
    it = server(kv=400)
    serve(it, 150, 0, 1, 2, 3)
    report = explain(it, [*run(150), 9])
    assert report.kv == 0
    assert {missed.short for missed in report.deeper} == {"kv"}
    assert all(missed.with_kv for missed in report.deeper)
    assert (unstored(report).why, unstored(report).short) == (UnstoredReason.EVICTED, "kv")
    assert unstored(report).known == 150
    assert "more KV" in (remedy(report) or "")
    stranger = explain(it, [1, *run(150)])
    assert stranger.deeper == []
    assert unstored(stranger).why is UnstoredReason.CHANGING_TEXT


def test_evicted_when_one_memory_ran_short() -> None:
    """Neither kind has a pool that could be larger."""
    it = server(kv=300, states=4, one_memory=True, state_tokens=20)
    serve(it, 150, 0, 1, 2, 3)
    report = explain(it, [*run(150), 9])
    assert unstored(report).why is UnstoredReason.EVICTED
    assert "when room ran short" in said(report)
    assert f"share {it.sizes.budget:,} bytes" in (remedy(report) or "")


def test_one_memory_does_not_tell_what_other_tenants_store() -> None:
    it = server(kv=2_000, states=4, one_memory=True, state_tokens=20)
    before = explain(it, run(9), cache_salt="b").cache
    for k in range(1, 4):
        it.serve(run(100, k), [7], cache_salt="a")
    assert explain(it, run(9), cache_salt="b").cache == before
    assert before.kv_room == it.sizes.budget // it.sizes.token_bytes


def test_kv_that_went_so_long_ago_that_only_the_history_knows() -> None:
    it = server(kv=400)
    it.cache.decision_log.decisions = Decisions(entries=1)
    serve(it, 150, *range(4))
    report = explain(it, run(150))
    assert (unstored(report).why, unstored(report).known) == (UnstoredReason.GONE, 149)
    assert report.deeper == []
    assert len(it.cache.decision_log.decisions) == 1


def test_a_leaf_that_a_prompt_shares_in_part() -> None:
    """The evicted edge reached further than this prompt goes along with it."""
    it = server(kv=400)
    serve(it, 150, 0, 1, 2, 3)
    report = explain(it, [*run(40), *run(30, 9)])
    assert (unstored(report).why, unstored(report).known) == (UnstoredReason.EVICTED, 40)


def test_states_on_a_grid() -> None:
    it = server("marconi", "all", states=16, extra_buffer=True, grid=64)
    it.serve(run(200), run(5, 1))
    report = explain(it, [*run(150), *run(30, 2)])
    assert report.kv == 150
    assert reasons(report)[150] is Reason.GRID
    assert report.cache.grid == 64
    assert report.leaves == []
    assert remedy(report) == "--hybrid-admission judicious, which takes exact states."


def test_a_prompt_that_ends_behind_the_grid() -> None:
    """All of it was sent; SGLang keeps KV up to the last state."""
    how = {"unplanned": "two-batch overlap", "extra_buffer": True, "grid": 64}
    it = server(states=16, **how)
    it.serve(run(200), run(5, 1))
    report = explain(it, run(200))
    assert (report.hit, report.kv) == (192, 192)
    assert (unstored(report).why, unstored(report).known) == (UnstoredReason.GRID, 199)
    assert "keeps KV up to its last state, on a grid of 64 tokens" in said(report)
    assert remedy(report) == "a server without two-batch overlap, which takes exact states."
    seen = it.begin(run(200))
    assert unstored(of_request(it, seen.rid)).why is UnstoredReason.GRID
    new = explain(it, run(200, 5))
    assert unstored(new).why is UnstoredReason.NEW


def test_positions_are_whole_pages() -> None:
    it = server(page=16, extra_buffer=True, grid=16)
    it.serve(run(100), [7])
    report = explain(it, [*run(60), *run(40, 2)])
    assert (report.usable, report.kv) == (96, 48)
    assert set(reasons(report)) == {48}
    assert report.leaves == [(48, "branch"), (96, "prompt_end")]


def test_a_model_without_states() -> None:
    it = server("gdsf", states=0, kv=400)
    it.serve(run(150), [7])
    report = explain(it, [*run(60), *run(30, 2)])
    assert (report.hit, report.kv, report.checkpoint, report.deeper) == (60, 60, None, [])
    assert "this model needs no states" in said(report)
    it.serve([*run(60), *run(30, 2)], [7])
    assert of_request(it, "2").hit == 60
    assert "this model needs no states" in said(of_request(it, "2"))
    serve(it, 150, 1, 2, 3)
    report = explain(it, run(150))
    assert report.hit < 149
    assert unstored(report).why is UnstoredReason.EVICTED


def test_under_lru_it_says_what_is_not_recorded() -> None:
    it = server("sglang-lru", states=3)
    serve(it, 100, 0, 1)
    report = explain(it, [*run(100, 1), 5])
    assert report.checkpoint is not None
    assert (report.checkpoint.position, report.checkpoint.kind) == (100, None)
    report = explain(it, [*run(60, 1), *run(30, 2)])
    assert reasons(report) == {60: Reason.UNKNOWN}
    assert unstored(report).why is UnstoredReason.UNKNOWN
    assert "Under --hybrid-eviction sglang-lru nothing is recorded" in said(report)
    assert of_request(it, "2").hit == 0


def test_an_emptied_cache() -> None:
    it = server(states=4)
    serve(it, 80, *range(6))
    assert explain(it, run(80)).deeper
    it.flush()
    report = explain(it, run(80))
    assert report.deeper == []
    assert unstored(report).why is UnstoredReason.GONE
    assert report.cache.emptied is not None
    assert "The cache was emptied" in said(report)


def test_prompts_with_another_key_share_nothing() -> None:
    it = server(states=4)
    serve(it, 80, *range(6))
    assert explain(it, run(80)).deeper
    for scope in ({"extra_key": "adapter"}, {"cache_salt": "tenant"}):
        report = explain(it, run(80), **scope)
        assert (report.kv, report.deeper) == (0, [])
        assert unstored(report).why is UnstoredReason.NEW


def test_what_was_sent_with_a_key_is_found_with_it() -> None:
    it = server(states=4)
    for k in range(6):
        req = it.arrive(run(80, k))
        req.extra_key = "adapter"
        assert it.admit(req)
        assert it.prefill_step(req)
        it.decode(req, [7])
        it.finish(req)
    assert set(reasons(explain(it, run(80), extra_key="adapter")).values()) == {Reason.EVICTED}
    assert explain(it, run(80, 5), extra_key="adapter").hit == 79
    assert explain(it, run(80)).deeper == []
    assert explain(it, run(80, 5)).kv == 0
    adapters = it.cache.decision_log.recent.get(tenant("adapter", None), "1")
    assert adapters is not None
    assert told(it, "adapter").of_request("1", adapters).request is not None


def test_where_the_last_message_would_get_its_state() -> None:
    it = server()
    it.cache.plans.message_boundaries = MessageBoundaries({"user": [(-7, -8)]})
    prompt = [-7, -8, *run(40), -7, -8, *run(20, 1)]
    assert explain(it, prompt).leaves == [(42, "message"), (63, "prompt_end")]


# A request that came.


def stamped(stamp: int, *, opener: int = 12) -> list[int]:
    """A prompt with a stamp of three tokens behind the template's first ones."""
    return [*run(opener, 8), *run(3, 100 + stamp), *run(200, 9), *run(20, 200 + stamp)]


def test_a_text_that_changes_at_the_top_is_named_with_its_place() -> None:
    it = server()
    it.cache.plans.message_boundaries = MessageBoundaries({"user": [(8_003,)]})
    for stamp in range(3):
        it.serve(stamped(stamp), [7])
    reports = [seen.report for seen in it.cache.decision_log.recent.of(None)]
    assert [report.missed.value for report in reports] == [
        "not_stored",
        "changing_text",
        "changing_text",
    ]
    told = {"position": 12, "tokens": 3, "same_tokens": 200, "message": 1}
    assert reports[2].as_dict()["changing_text"] == told
    for report in (of_request(it, "3"), explain(it, stamped(5))):
        assert unstored(report).why is UnstoredReason.CHANGING_TEXT
        assert "At token 12 (message 1) a text of 3 tokens differs" in said(report)
        assert "belongs behind text that stays the same" in (remedy(report) or "")
    assert it.cache.explainer.answer(ExplainReq(request_id="3")).before == run(12, 8)


def test_the_first_prompt_of_a_batch_has_none_before_it() -> None:
    it = server(states=0)
    batch = [it.arrive(stamped(stamp)) for stamp in (0, 1, 2)]
    assert all(it.admit(req) for req in batch)
    for req in batch:
        it.prefill(req)
    seen = it.cache.decision_log.recent.of(None)
    missed = [each.report.missed.value for each in seen]
    assert missed == ["not_stored", "changing_text", "changing_text"]


def test_the_text_of_another_tenant_is_compared_with_nobodys() -> None:
    it = server()
    it.serve(stamped(0), [7], extra_key="one")
    assert unstored(explain(it, stamped(1))).why is UnstoredReason.NEW
    assert unstored(explain(it, stamped(1), extra_key="one")).changing_text is not None


def test_what_was_evicted_is_no_text_that_changes() -> None:
    it = server(states=0)
    it.serve(stamped(0), [7])
    it.serve(stamped(1), [7])
    it.cache.evict(EvictParams(num_tokens=10_000))
    assert unstored(explain(it, stamped(0))).why is UnstoredReason.EVICTED


def test_an_id_that_is_used_again_is_the_newest_request() -> None:
    """Nothing of the first one is told of the second."""
    it = server()
    it.serve(run(60), run(5, 1))
    for _ in range(3):
        req = it.begin([*run(60), *run(5, 1), *run(9, 3)], rid="same")
        it.complete(req, [7])
    used = of_request(it, "same").checkpoint
    assert used is not None and used.hits == 1, "the second one's"
    it.complete(it.begin(run(9, 5), rid="same"), [7])
    assert it.cache.decision_log.known_len(it.arrive(run(9, 6), rid="same")) == 0


def test_a_request_is_explained_as_of_when_it_came() -> None:
    it = server(states=4)
    it.serve(run(100), run(5, 1))  # 1
    it.serve([*run(60), *run(30, 2)], [3])  # 2
    it.serve([*run(60), *run(30, 3)], [3])  # 3
    second = of_request(it, "2")
    assert (second.kv, second.hit) == (60, 0)
    assert reasons(second) == {60: Reason.NOT_WANTED}
    assert (60, "branch") in request(second).left
    third = of_request(it, "3")
    assert third.checkpoint is not None
    assert (third.checkpoint.position, third.checkpoint.kind) == (60, "branch")
    assert third.checkpoint.hits == 0  # its own is not counted
    it.cache.evict(EvictParams(num_tokens=0, mamba_num=100))
    again = of_request(it, "2")  # the branch's state went, but for this one it was not there yet
    assert reasons(again) == {60: Reason.NOT_WANTED}
    assert request(again).now == 0
    it.serve([*run(60), *run(30, 4)], [3])
    assert reasons(of_request(it, "4")) == {60: Reason.EVICTED}


@pytest.mark.parametrize(
    "wants", [{"return_logprob": True, "logprob_start_len": 40}, {"return_hidden_states": True}]
)
def test_what_a_request_may_not_hit_is_not_said_to_be_gone(wants: dict[str, Any]) -> None:
    it = server()
    it.serve(run(100), [7])
    req = it.arrive(run(100))
    for name, value in wants.items():
        setattr(req, name, value)
    assert it.admit(req)
    it.complete(req, [7])
    report = of_request(it, req.rid)
    assert (report.usable, report.unstored) == (wants.get("logprob_start_len", 0), None)
    assert "gone" not in said(report)


def test_a_position_that_was_left_for_another_reason_was_not_refused() -> None:
    it = server(hybrid_min_branch_tokens=40)
    it.serve(run(100), [7])
    it.serve([*run(100), *run(50, 1)], [7])
    it.serve([*run(100), *run(10, 1)], [7])  # a micro-branch at its end, which is kept as such
    report = of_request(it, "3")
    assert (report.hit, report.kv) == (100, 109)
    assert (109, "prompt_end") in request(report).left
    assert request(report).refused == []


def test_a_request_that_is_looked_up_again_and_again() -> None:
    it = server()
    it.serve(run(100), [7], stamp=1.0)
    req = it.arrive([*run(100), 5], stamp=9.0)
    for _ in range(3):
        assert it.look_up(req) == 100
        it.send_back(req)
    report = of_request(it, req.rid)
    assert report.checkpoint is not None and report.checkpoint.last_used is not None
    assert (report.checkpoint.hits, report.checkpoint.last_used) == (0, 8.0)
    assert not request(report).started
    assert "which has not been prefilled yet" in said(report)


def test_what_a_request_wanted_to_leave_and_did_not() -> None:
    it = server("marconi", hybrid_alpha=1.0, states=2)
    serve(it, 100, 0, 1)
    report = of_request(it, "2")
    assert request(report).left == [(100, "tail")]
    assert [(missed.position, missed.reason) for missed in request(report).refused] == [
        (99, Reason.NOT_WORTH)
    ]
    assert "It left none at token 99" in said(report)


def test_a_state_was_there_but_no_slot_to_copy_it_into() -> None:
    it = server(states=2)
    it.serve(run(100), [7])
    holder = it.arrive(run(50, 1))
    assert it.admit(holder)
    it.prefill_step(holder)
    req = it.arrive([*run(100), 5])
    it.look_up(req)
    report = of_request(it, req.rid)
    it.send_back(req)
    assert request(report).missed == "no_slot"
    assert (report.hit, report.kv, report.deeper) == (0, 99, [])  # the tail went for the holder
    assert "no free slot to copy it into" in said(report)
    assert "--max-mamba-cache-size above 2" in (remedy(report) or "")


def test_an_unknown_request_and_an_empty_prompt() -> None:
    it = server()
    it.serve(run(20), [7])

    def answer(**asked: Any) -> Any:
        return it.cache.explainer.answer(ExplainReq(**asked))

    nobody = answer(request_id="nobody")
    told = "no request 'nobody' with this extra key, salt and adapter is among the last 1"
    assert nobody.report is None and told in nobody.error
    assert answer(input_ids=[]).error == "the prompt has no tokens."
    assert answer(input_ids=run(30)).report["kv"] == 20
    impossible = answer(input_ids=[1 << 70])
    assert impossible.report is None and "the server's log says why" in impossible.error
    assert answer(request_id="1").report["prompt"] == 20


def test_health_checks_are_not_kept() -> None:
    it = server()
    req = it.arrive(run(20))
    req.rid = "HEALTH_CHECK_1"
    it.admit(req)
    it.prefill_step(req)
    it.finish(req)
    assert len(it.cache.decision_log.recent) == 0


def test_recent_requests_are_bounded_in_number_and_bytes() -> None:
    it = server()
    it.cache.decision_log.recent = kept = Latest(8 * 1_000, 3)
    serve(it, 30, *range(5))
    assert [kept.get(None, str(rid)) is not None for rid in range(1, 6)] == [False] * 2 + [True] * 3
    it.cache.decision_log.recent = small = Latest(8 * 50)
    serve(it, 40, *range(5))
    assert len(small) == 1


# Asking changes nothing.


def observables(it: Server) -> dict[str, Any]:
    """Everything that a later decision could depend on."""
    cache, tree = it.cache, it.cache.tree_core
    nodes = []
    stack = [tree.root_node]
    while stack:
        node = stack.pop()
        state = node.component_data[MAMBA]
        record = cache.shadow_tree.record(node)
        nodes.append(
            (
                node.id,
                len(node.key) if node.key is not None else 0,
                node.last_access_time,
                node.hit_count,
                [data.lock_ref for data in node.component_data],
                state.value is not None,
                (record.hits, record.last_used, record.stamp, record.taken, record.kind),
            )
        )
        stack.extend(node.children.values())
    history = cache.shadow_tree.history
    return {
        "nodes": nodes,
        "clock": (cache.shadow_tree.clock.tick, cache.shadow_tree.clock.stamp),
        "stats": cache.stats.as_dict(),
        "free": it.free(),
        "history": None if history is None else (history.held_bytes, history._versions),
        "decisions": (cache.decision_log.decisions.count, len(cache.decision_log.recent)),
        "victim": [
            choice and (choice[0].id, choice[1])
            for choice in (
                cache.shadow_tree.kv_pool.cheapest(),
                cache.shadow_tree.state_pool.cheapest(last_resort=True),
            )
        ],
    }


@pytest.mark.parametrize("policy", ["reuse", "marconi", "gdsf", "seglen"])
def test_asking_changes_nothing(policy: str) -> None:
    """Two caches serve the same traffic; one is asked about everything after each request."""
    quiet, asked = (server(policy, states=5, kv=700) for _ in range(2))
    prompts = [
        [*run(60 + 7 * (k % 3), k % 4), *run(20 + k, 10 + k % 5), *run(k % 3, 30)]
        for k in range(24)
    ]
    for at, prompt in enumerate(prompts):
        stamp = 1.0 + at
        assert quiet.serve(prompt, [7], stamp) == asked.serve(prompt, [7], stamp)
        before = observables(asked)
        for other in prompts:
            explain(asked, other)
            explain(asked, [*other[:50], 3])
        of_request(asked, str(at + 1))
        assert observables(asked) == before
        asked.check()
    seen, twin = observables(asked), observables(quiet)
    assert seen["stats"] == twin["stats"]
    assert seen["stats"]["evicted"] and seen["stats"]["checkpoints_skipped"]
    while quiet.cache.mamba_evictable_size():  # and the same victims in the same order
        for it in (quiet, asked):
            it.cache.evict(EvictParams(num_tokens=0, mamba_num=1))
        assert quiet.free() == asked.free()
        assert _depths(quiet) == _depths(asked)


def _depths(it: Server) -> list[tuple[int, bool]]:
    return sorted((record.depth, record.has_state) for record in it.cache.shadow_tree.tree.walk())
