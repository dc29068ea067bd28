"""The cache's rules, one worked example each, on the real tree with real pools.

Under admission `all`, `serve` leaves a checkpoint at the end of the prompt and one at the end of
the answer (no_buffer, page 1), so a request of p prompt and a answer tokens caches p + a - 1. What
is evicted is shown under it; what is admitted, under `judicious`.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.runtime_context import get_memory, get_parallel, get_schedule, get_serving

from sglang_hybrid.cache.state_slots.slots import count_state_slots, slots_per_request
from sglang_hybrid.checkpoints.message_boundaries import MessageBoundaries
from sglang_hybrid.core.records.nodes import Kind
from sglang_hybrid.serving.startup import StartupError
from sglang_hybrid.serving.telemetry.metrics import rank_labels
from tests.cache.backends import COST, match_prefix, options
from tests.cache.driver import Server, Sizes


def server(policy: str = "marconi", admission: str = "all", chunk: int = 0, **sizes: Any) -> Server:
    more = {"hybrid_alpha": 10.0} if policy == "marconi" else {}
    return Server.on(Sizes(**sizes), options(policy, admission, **more), chunk)


def run(length: int, start: int = 0) -> list[int]:
    """A run of tokens that no other start shares."""
    return [start * 1_000 + k for k in range(length)]


def node(of: Server, tokens: list[int]) -> Any:
    """The tree's node that ends at `tokens`; looking does not count as an access."""
    here = of.cache.tree_core.root_node
    seen = 0
    while seen < len(tokens):
        key = RadixKey(array("q", tokens[seen:]))
        here = here.children[key.child_key(of.sizes.page)]
        seen += len(here.key)
    return here


def states(of: Server) -> list[int]:
    """Depths of all states."""
    records = of.cache.shadow_tree.tree.walk()
    return sorted(record.depth for record in records if record.has_state)


def evict_states(of: Server, count: int = 1) -> int:
    result = of.cache.evict(EvictParams(num_tokens=0, mamba_num=count))
    of.check()
    return int(result.mamba_num_evicted)


def stats(of: Server) -> dict[str, Any]:
    return dict(of.cache.stats.as_dict())


# What an eviction takes.


def test_a_leaf_goes_with_its_kv_and_its_state() -> None:
    it = server()
    it.serve(run(20), [7])  # the answer's one token has no KV: the prompt's end is the leaf
    start = it.free()
    assert states(it) == [20]
    assert evict_states(it) == 1
    assert it.free() == (start[0] + 20, start[1] + 1)
    assert stats(it)["evicted"] == {"leaf": 1}
    assert len(it.cache.shadow_tree) == 1  # the root


def test_with_one_child_the_state_goes_and_the_kv_stays_for_the_child() -> None:
    it = server()
    it.serve(run(20), run(5, 1))
    assert states(it) == [20, 24]
    answer = node(it, [*run(20), *run(5, 1)[:4]])
    hold = it.cache.lock(answer.id)  # so that the inner state is the only candidate
    before = it.free()
    assert evict_states(it) == 1
    assert it.free() == (before[0], before[1] + 1)
    assert states(it) == [24]
    assert stats(it)["evicted"] == {"state": 1}
    it.cache.unlock(hold)
    assert it.probe([*run(20), 5]) == 0
    assert it.probe([*run(20), *run(5, 1)[:4], 5]) == 24
    # With the leaf go 4 tokens; the 20 above it, which served nothing else, are the next to go.
    assert it.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 4
    assert it.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 20
    assert stats(it)["evicted"] == {"state": 1, "leaf": 1, "kv": 1}
    it.check()


def test_under_lru_an_inner_state_goes_alone_too() -> None:
    it = server("sglang-lru")
    it.serve(run(20), run(5, 1))
    before = it.free()
    assert evict_states(it) == 1
    assert it.free() == (before[0], before[1] + 1)  # its KV is its child's now
    assert stats(it)["evicted"] == {"state": 1}


def test_a_fork_is_the_last_to_go() -> None:
    it = server()
    it.serve(run(20), [7])
    for k in (1, 2, 3):
        it.serve([*run(20), *run(5, k)], [7])
    assert states(it) == [20, 25, 25, 25]
    assert evict_states(it, 3) == 3
    assert states(it) == [20]
    it.serve([*run(20), *run(5, 1)], [7])
    it.serve([*run(20), *run(5, 2)], [7])
    hold = [
        it.cache.lock(match_prefix(it.cache, [*run(20), *run(5, k)]).last_device_node)
        for k in (1, 2)
    ]
    it.check()
    # Both leaves are held. Only the fork's state is left: the last resort.
    assert evict_states(it) == 1
    assert states(it) == [25, 25]
    for one in hold:
        it.cache.unlock(one)
    it.check()
    assert stats(it)["evicted"] == {"leaf": 3, "state": 1}


def test_what_a_request_holds_stays() -> None:
    it = server(states=4)
    it.serve(run(20), [7])
    req = it.begin([*run(20), 5])
    assert req.prefix_len == 20
    assert evict_states(it, 10) == 0
    assert it.cache.evict(EvictParams(num_tokens=1_000)).num_tokens_evicted == 0
    it.abort_before_prefill(req)
    it.check()
    assert evict_states(it, 10) == 1


# What a state is worth.


def test_an_access_counts_once_per_request_not_per_probe() -> None:
    it = server()
    it.serve(run(20), [7])
    record = it.cache.shadow_tree.record(node(it, run(20)))
    req = it.arrive([*run(20), 5])
    for _ in range(5):  # the scheduler ranks the queue, and tries to admit it, again and again
        it.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", run(20))), req=req))
        assert it.look_up(req) == 20
        it.send_back(req)
    assert record.hits == 1
    assert it.cache.shadow_tree.clock.tick == 2
    assert it.admit(req)
    it.prefill_step(req)
    it.finish(req)
    assert record.hits == 1
    assert stats(it)["requests"] == 2
    assert stats(it)["hit_tokens"] == 20
    assert stats(it)["flops_saved"] == COST.flops(20)


def test_a_match_without_a_request_is_no_access() -> None:
    it = server()
    it.serve(run(20), [7])
    record = it.cache.shadow_tree.record(node(it, run(20)))
    match_prefix(it.cache, run(20))
    assert (record.hits, it.cache.shadow_tree.clock.tick) == (0, 1)


# What is admitted.


def test_a_prefill_leaves_its_branch_and_its_end() -> None:
    """Exactly there, and each is used: by a sibling, by the same prompt, by the next turn."""
    it = server(admission="judicious", states=24, extra_buffer=True, grid=256, kv=2_048)
    first = [*run(100), *run(40, 1)]
    second = [*run(100), *run(50, 2)]
    assert it.serve(first, run(9, 3)) == 0
    assert states(it) == [139, 148]
    assert it.serve(second, run(9, 4)) == 0
    it.check()
    assert states(it) == [100, 139, 148, 149, 158]
    assert stats(it)["checkpoints_admitted"] == {"prompt_end": 2, "tail": 2, "branch": 1}
    assert it.probe([*run(100), 5]) == 100
    assert it.probe(second) == 149
    assert it.probe([*second, *run(9, 4), 5]) == 158


def test_a_state_in_the_middle_of_a_chunked_prefill() -> None:
    it = server(admission="judicious", chunk=30, states=24, grid=64)
    it.serve([*run(100), *run(40, 1)], [7])
    assert it.serve([*run(100), *run(50, 2)], [7]) == 0
    it.check()
    assert it.probe([*run(100), 5]) == 100


def test_the_ends_of_chunks_are_kept_in_free_slots_only() -> None:
    """Nobody knows where a prompt without messages will be left."""
    sizes = {"extra_buffer": True, "grid": 64, "kv": 2_048}
    it = server(admission="judicious", chunk=64, states=24, **sizes)
    it.serve(run(300), [7])
    assert states(it) == [64, 128, 192, 256, 299, 300]
    tight = server(admission="judicious", chunk=64, states=5, **sizes)
    tight.serve(run(300), run(9, 1))  # 3 of 5 slots are its own
    tight.check()
    assert [depth for depth in states(tight) if depth < 299] == [64, 128]
    assert stats(tight)["checkpoints_skipped"]["not_worth"] >= 2


def test_a_message_begins_where_the_next_prompt_will_differ() -> None:
    it = server(admission="judicious", states=24, grid=64, kv=2_048)
    it.cache.plans.message_boundaries = MessageBoundaries({"user": [(-7, -8)]})
    system = run(100)
    assert it.serve([*system, -7, -8, *run(30, 1)], [7]) == 0
    assert stats(it)["checkpoints_admitted"] == {"message": 1, "prompt_end": 1, "tail": 1}
    assert it.serve([*system, -7, -8, *run(30, 2)], [7]) == 100


def test_what_is_not_worth_its_slot_is_not_taken() -> None:
    """Marconi at a large alpha: short prompts push out no long one."""
    it = server(admission="judicious", states=5)
    for k in range(2):
        it.serve(run(200, k), run(20, 5 + k))
    assert states(it) == [199, 199, 219, 219]
    it.serve(run(30, 3), [7])
    it.check()
    assert stats(it)["checkpoints_skipped"]["not_worth"] == 1
    assert [depth for depth in states(it) if depth > 100] == [199, 199, 219, 219]


def test_under_all_a_chunks_end_pushes_out_the_oldest() -> None:
    it = server("sglang-lru", "all", chunk=10, states=3)
    it.serve(run(10), [7])
    it.serve(run(35, 1), [7])
    it.check()
    assert stats(it)["checkpoints_admitted"] == {"prompt_end": 2, "chunk": 3}
    assert it.probe([*run(10), 5]) == 0


def test_a_chunks_end_pushes_out_no_other_where_sglang_tracks_states() -> None:
    """SGLang tracks states for speculative decoding."""
    it = Server.on(
        Sizes(extra_buffer=True, grid=64, kv=2_048, states=5),
        options("marconi"),
        64,
        unplanned="speculation",
    )
    it.serve(run(64), [7])
    assert states(it) == [64]
    it.serve(run(5 * 64, 1), [7])  # 3 of 5 slots are its own; one chunk end finds a free slot
    it.check()
    found = stats(it)
    assert found["checkpoints_skipped"] == {"not_worth": 3}
    assert found["checkpoints_admitted"] == {"prompt_end": 2, "chunk": 1}


@pytest.mark.parametrize("gain, wanted", [(99, False), (100, True)])
def test_a_branch_that_gains_too_little_gets_no_state(gain: int, wanted: bool) -> None:
    how = options("marconi", hybrid_min_branch_tokens=100)
    it = Server.on(Sizes(states=24, extra_buffer=True, grid=64, kv=2_048), how)
    it.serve(run(320), [7])
    it.serve([*run(gain), *run(150, 3)], [7])
    it.check()
    kinds = stats(it)["checkpoints_admitted"]
    assert kinds.get("branch", 0) == wanted
    assert it.cache.stats.skipped["micro_branch"] == (not wanted)
    assert it.probe([*run(gain), *run(10, 5)]) == (gain if wanted else 0)


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("extra_buffer", [True, False])
def test_kernels_that_cannot_stop_in_a_forward_get_shorter_ones(
    one_pass: bool, extra_buffer: bool
) -> None:
    it = Server.on(
        Sizes(states=24, extra_buffer=extra_buffer, grid=64, kv=2_048),
        options("marconi"),
        one_pass=one_pass,
    )
    it.serve([*run(100), *run(40, 1)], run(9, 3))
    req = it.begin([*run(100), *run(50, 2)])
    steps = 1
    while not it.prefill_step(req):
        steps += 1
    it.decode(req, run(9, 4))
    it.finish(req)
    it.check()
    assert steps == (1 if one_pass else 3)  # cut at 100 and at 149
    assert [depth for depth in states(it) if depth < 139] == [100] + [128] * one_pass
    assert it.probe([*run(100), *run(50, 2)]) == 149


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("chunk", [0, 16])
def test_declared_positions_get_checkpoints_on_the_first_visit(one_pass: bool, chunk: int) -> None:
    it = Server.on(Sizes(), options("reuse", "judicious"), chunk, one_pass=one_pass)
    req = it.begin(run(50), declared=[7, 16, 33])
    it.complete(req, run(2, 1))
    it.check()
    report = it.cache.lookups.report(req).as_dict()
    kinds = {each["position"]: each["kind"] for each in report["checkpoints"]}
    assert {at: kinds[at] for at in (7, 16, 33)} == dict.fromkeys((7, 16, 33), "declared")
    assert report["declared"] == {"kept": [7, 16, 33], "written_tokens": 33}
    for declared in (7, 16, 33):
        assert it.probe([*run(declared), *run(20, 9)]) == declared
    again = it.begin([*run(16), *run(30, 9)], declared=[7, 16, 20])
    it.prefill_step(again)
    while again.extend_end < 46:
        it.prefill_step(again)
    assert it.cache.lookups.report(again).as_dict()["declared"] == {
        "kept": [20],
        "written_tokens": 4,
    }


def test_a_declared_position_takes_the_slot_of_the_cheapest_state() -> None:
    it = server("reuse", "judicious", states=4)
    for start in range(1, 5):
        it.serve(run(30, start), [7])
    req = it.begin(run(60), declared=[31])
    it.complete(req, [7])
    it.check()
    assert it.probe([*run(31), 9]) == 31


def test_without_recurrent_state_every_declared_position_is_kept() -> None:
    it = server("reuse", "judicious", states=0)
    it.serve(run(20), [7])
    req = it.begin(run(60), declared=[10, 40])
    it.prefill_step(req)
    assert it.cache.lookups.report(req).as_dict()["declared"] == {
        "kept": [40],
        "written_tokens": 20,
    }


@pytest.mark.parametrize("extra_buffer", [False, True])
@pytest.mark.parametrize("why", ["thoughts are not kept", "a verification passed the stop"])
def test_a_live_state_behind_the_kept_tokens_is_not_kept(why: str, extra_buffer: bool) -> None:
    """It has consumed 9 tokens of an answer of which fewer are kept: it is the state of none of the
    kept prefixes.
    """
    it = server(admission="judicious", extra_buffer=extra_buffer)
    req = it.begin(run(50))
    it.prefill_step(req)
    it.decode(req, run(10, 1))
    req.reasoning_tokens = 5
    thoughts_go = why == "thoughts are not kept"
    req.finished_len = None if thoughts_go else 3
    with get_serving().override(strip_thinking_cache=thoughts_go):
        assert req.owned_kv_len() == (50 if thoughts_go else 53)
        it.finish(req)
    it.check()
    assert states(it) == [49]


# When slots run out.


def test_no_slot_costs_a_checkpoint_and_not_the_request() -> None:
    it = server(states=1)
    hit = it.serve(run(20), run(5, 1))  # its own slot is all there is
    it.check()
    assert hit == 0
    assert stats(it)["checkpoints_skipped"] == {"no_slot": 1}
    assert stats(it)["checkpoints_admitted"] == {"tail": 1}  # its own slot, when it ended


def test_a_state_without_a_slot_to_copy_it_into_is_a_miss() -> None:
    it = server(states=2)
    it.serve(run(20), [7])
    other = it.begin(run(30, 1))
    it.prefill_step(other)  # holds one slot; its checkpoint pushed the other state out, or not
    it.check()
    req = it.arrive([*run(30, 1), 5])
    found = it.look_up(req)
    report = it.cache.lookups.report(req)
    assert found == 0
    assert report.missed.value in ("no_slot", "no_state")
    it.send_back(req)
    it.check()


def test_a_request_that_waits_keeps_no_slot_whose_state_is_gone() -> None:
    """SGLang would copy what is in the slot by now."""
    it = server()
    it.serve(run(20), [7])
    free = it.cache.slots.free()
    req = it.arrive([*run(20), 7, 8])
    for _ in range(2):
        assert it.look_up(req) == 20 and req.kv.mamba_cow_src_index is not None
        assert it.cache.slots.free() == free - 1
    it.cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=100))
    assert it.look_up(req) == 0
    assert not req.kv.holds_mamba and req.kv.mamba_cow_src_index is None
    assert it.cache.slots.free() > free
    it.check()


# Everything comes back.


@pytest.mark.parametrize("policy", ["reuse", "marconi", "sglang-lru"])
@pytest.mark.parametrize("extra_buffer", [False, True])
@pytest.mark.parametrize("how", ["abort", "keep", "retract", "flush"])
def test_every_slot_comes_back(policy: str, extra_buffer: bool, how: str) -> None:
    grid = 64 if extra_buffer else 1
    it = server(policy, "judicious", chunk=64, states=16, extra_buffer=extra_buffer, grid=grid)
    start = it.free()
    it.serve(run(130), run(3, 1))
    for done in (1, 2, 9):  # in the middle of its prefill, and after it
        req = it.begin([*run(100), *run(60, 2)])
        for _ in range(done):
            if it.prefill_step(req):
                break
        it.check()
        if how == "retract":
            again = it.retract(req)
            it.check()
            assert it.admit(again)
            it.prefill_step(again)
            it.abort(again)
        else:
            it.abort(req, keep=how == "keep")
        it.check()
    if how != "flush":
        it.cache.evict(EvictParams(num_tokens=10**6, mamba_num=10**6))
    else:
        it.flush()
    it.check()
    assert it.free() == start


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("how", ["abort", "retract"])
def test_states_under_way_come_back_when_their_request_leaves(how: str, one_pass: bool) -> None:
    """It leaves between the start of a forward and its results."""
    it = Server.on(Sizes(grid=16), options("reuse"), one_pass=one_pass)
    start = it.free()
    req = it.begin(run(60), declared=[20, 40])
    if not one_pass:  # the state at 20 is copied when the forward that follows it begins
        it.prefill_step(req)
    it.begin_forward(req)
    ((_, plan),) = it.cache.plans.planner.in_flight()
    assert plan.pending_checkpoints
    if how == "abort":
        it.abort(req)
    else:
        it.retract(req)
    assert it.cache.plans.planner.in_flight() == []
    it.check()
    it.cache.evict(EvictParams(num_tokens=10**6, mamba_num=10**6))
    assert it.free() == start


def test_the_history_is_as_large_as_the_flag_says() -> None:
    it = Server.on(Sizes(states=16), options("reuse", hybrid_history_mb=0))
    for k in range(5):
        it.serve(run(20, k), [7])
    history = it.cache.shadow_tree.history
    assert history.max_bytes == 0
    assert len(history.tree().leaves) == 1, "only the newest sequence is kept"


def test_a_flushed_cache_knows_nothing_but_its_history() -> None:
    it = server("reuse")
    it.serve(run(20), [7])
    it.flush()
    assert len(it.cache.shadow_tree) == 1
    assert it.cache.shadow_tree.history.match(array("q", run(20))).known_len == 19
    assert it.serve(run(20), [7]) == 0
    it.check()


# What is reported.


def test_a_report_says_what_was_hit_missed_and_left() -> None:
    it = server(admission="judicious")
    it.serve(run(20), run(5, 1))
    req = it.begin([*run(12), *run(8, 3)])
    it.prefill_step(req)
    report = it.cache.lookups.report(req)
    assert (report.hit_tokens, report.kv_only_tokens) == (0, 12)
    assert report.missed.value == "no_state"
    assert report.checkpoints == [(19, Kind.PROMPT_END)]
    it.decode(req, run(4, 5))
    it.finish(req)
    assert report.checkpoints == [(19, Kind.PROMPT_END), (23, Kind.TAIL)]
    sent = req.customized_info["hybrid_cache"]
    assert sent == [report.as_dict()]
    assert sent[0]["checkpoints"][1] == {"position": 23, "kind": "tail"}
    again = it.begin([*run(12), *run(8, 3), *run(4, 5)[:3], 9])
    assert it.cache.lookups.report(again).missed.value == "nothing"
    assert it.cache.lookups.report(again).hit_tokens == 23


@pytest.mark.parametrize(
    ("policy", "admission", "unplanned"),
    [
        ("reuse", "judicious", "two-batch overlap"),
        ("marconi", "judicious", "two-batch overlap"),
        ("reuse", "all", ""),
        ("sglang-lru", "all", ""),
    ],
)
def test_what_was_sent_before_ends_at_sglangs_grid(
    policy: str, admission: str, unplanned: str
) -> None:
    """The same prompt again, and a prompt that nobody sent."""
    sizes = Sizes(extra_buffer=True, grid=64, kv=2_048, states=16)
    it = Server.on(sizes, options(policy, admission), unplanned=unplanned)
    it.serve(run(200), run(5, 1))
    again, other = it.begin(run(200)), it.begin(run(200, 2))
    reports = [it.cache.lookups.report(req) for req in (again, other)]
    assert [report.hit_tokens for report in reports] == [192, 0]
    assert [report.missed.value for report in reports] == ["grid", "not_stored"]
    it.complete(again, [7])
    assert again.customized_info["hybrid_cache"][0]["missed"] == "grid"


def test_what_was_evicted_is_no_matter_of_the_grid() -> None:
    how = {"unplanned": "two-batch overlap"}
    it = Server.on(Sizes(extra_buffer=True, grid=64, kv=512, states=16), options("reuse"), **how)
    for kind in range(4):
        it.serve(run(200, kind), [7])
    req = it.begin(run(200))
    report = it.cache.lookups.report(req)
    assert (report.hit_tokens, report.missed.value) == (0, "not_stored")


def test_with_pages_the_whole_usable_prompt_can_be_hit() -> None:
    it = server(states=0, page=16)
    it.serve(run(40), run(10, 1))
    req = it.arrive(run(40))
    assert it.look_up(req) == 32
    assert it.cache.lookups.report(req).missed.value == "nothing"


def test_a_model_without_states_is_served_too() -> None:
    it = server("reuse", states=0)
    assert it.serve(run(20), run(5, 1)) == 0
    assert it.serve([*run(20), 9], [7]) == 20
    found = stats(it)
    assert (found["hit_tokens"], found["kv_only_tokens"]) == (20, 0)
    assert found["checkpoints_admitted"] == {}
    it.cache.evict(EvictParams(num_tokens=3))
    it.check()
    assert sum(stats(it)["evicted"].values()) == stats(it)["evicted"]["kv"] > 0


@pytest.mark.parametrize("policy", ["reuse", "sglang-lru"])
def test_a_health_probe_is_no_traffic(policy: str, tmp_path: Path) -> None:
    flags = options(policy, "judicious", hybrid_record=str(tmp_path / "trace.jsonl"))
    it = Server.on(Sizes(), flags, rank=0)
    it.serve(run(100), [1, 2])
    seen, free = stats(it), it.free()
    probe = it.begin(run(20), rid="HEALTH_CHECK_1")
    it.complete(probe, [5])
    it.check()
    assert (stats(it), it.free()) == (seen, free)
    it.cache.tuning.file.close()
    assert len((tmp_path / "trace.jsonl").read_text().splitlines()) == 1
    assert it.serve(run(100), [1, 2]) > 0


@pytest.mark.parametrize("rank", [None, 1])
def test_metrics_have_the_labels_of_sglangs_own(rank: int | None) -> None:
    server()
    alone = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "moe_ep_rank": 0}
    with (
        get_parallel().override(**alone, dp_rank=rank, dp_size=2),
        get_serving().override(served_model_name="m"),
    ):
        labels = rank_labels()
    ranks = dict.fromkeys(("tp_rank", "pp_rank", "moe_ep_rank"), "0")
    of_rank = {} if rank is None else {"dp_rank": "1"}
    assert labels == {"model_name": "m", "engine_type": "unified", **ranks, **of_rank}


@pytest.mark.parametrize("one_memory", [False, True])
def test_the_slot_of_padding_is_no_requests(
    one_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang counts it among the state slots in one memory."""
    monkeypatch.setenv("SGLANG_HYBRID_SLOTS_PER_REQUEST", "9")
    server()
    memory, schedule = get_memory(), get_schedule()
    with memory.override(enable_unified_memory=one_memory):
        with schedule.override(max_mamba_cache_size=8 + one_memory):
            assert count_state_slots() == 8
            with pytest.raises(StartupError, match="=9 is more than the 8 state slots that"):
                slots_per_request(1)
        with schedule.override(max_mamba_cache_size=9 + one_memory):
            assert slots_per_request(1) == 9
        with schedule.override(max_mamba_cache_size=None):
            assert count_state_slots() is None
            assert slots_per_request(1) == 9
