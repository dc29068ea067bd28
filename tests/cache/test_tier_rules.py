"""Rules of the host memory below the device, and faults seen elsewhere: one test each.

Numbers in brackets are reports about other caches with states, which the rule answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.core.records.pin import PinRequest, Priority
from sglang_hybrid.core.tiers.places import copies_of
from sglang_hybrid.core.tiers.rates import Link, Speeds, Tier
from sglang_hybrid.explain.messages import ExplainReq
from sglang_hybrid.explain.miss_report import MissReport
from sglang_hybrid.explain.render import render
from sglang_hybrid.extensions.cpu.ops import transfer_streams
from tests.cache.backends import options
from tests.cache.driver import Sizes
from tests.cache.tiers import FAST, SLOW, TieredServer, set_speeds

ROOM = Sizes(states=8, kv=256, rows=6, context=256)
SHARED = list(range(200, 240))


def server(sizes: Sizes = ROOM, speeds: Speeds = SLOW, chunk: int = 0, **more: Any) -> TieredServer:
    """A server whose next best way costs what `speeds` say. Without a watermark what a request has
    left is copied when it has ended.
    """
    flags = {"hybrid_offload_watermark": 1.0, **more.pop("flags", {})}
    flags = options(more.pop("eviction", "reuse"), **flags)
    at = TieredServer.on(sizes, flags, chunk, **more)
    set_speeds(at.cache, speeds)
    return at


def empty_the_device(at: TieredServer) -> None:
    """All that may go."""
    at.poll()
    at.cache.evict(EvictParams(num_tokens=10**6, mamba_num=10**6))
    at.poll()
    at.check()


def on_the_host(**more: Any) -> tuple[TieredServer, list[int]]:
    """A server, and a prompt of 40 tokens that its device has forgotten."""
    at, prompt = server(**more), list(range(100, 140))
    hit(at, prompt)
    empty_the_device(at)
    return at, prompt


def poll(at: TieredServer, times: int) -> None:
    for _ in range(times):
        at.poll()


def hit(at: TieredServer, tokens: list[int], **more: Any) -> int:
    """Tokens that a request resumes from, after loads; it is served to its end."""
    served = at.serve(tokens, [3], **more)
    at.poll()
    at.check()
    return served


def tiers_of(at: TieredServer) -> dict[str, Any]:
    at.cache.sanity_check()
    info: dict[str, Any] = at.cache.tiers_info()
    return info


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("chunk", [0, 16])
def test_a_prompt_that_ends_on_a_chunk_boundary_is_backed_up(policy: str, chunk: int) -> None:
    """[sglang 39745, 30850]"""
    at = server(policy=policy, chunk=chunk)
    prompt = list(range(100, 132))
    hit(at, prompt)
    empty_the_device(at)
    assert tiers_of(at)["held"]["device"]["kv_tokens"] == 0
    assert hit(at, prompt) == 31
    assert at.loads == 1


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_state_inside_the_tree_is_demoted_and_found(policy: str) -> None:
    """[sglang 33713, vllm 52773] The KV above two branches stays on the device, its state goes."""
    at = server(policy=policy)
    for end in (1, 2, 3):
        hit(at, SHARED + [end] * 30)
    at.cache.evict(EvictParams(num_tokens=0, mamba_num=10**6))
    at.poll()
    assert hit(at, SHARED + [4] * 30) == len(SHARED)


def test_a_state_that_comes_while_its_kv_is_copied_is_copied_after_it() -> None:
    """A prefill that leaves several states cuts the node that is being copied."""
    at = server(eviction="seglen")
    req = at.begin(list(range(100, 160)), declared=[16, 32])
    at.complete(req, [3])
    poll(at, 3)
    held = tiers_of(at)["held"]
    assert held["device"]["states"] == held["host"]["states"] == 4


def test_the_last_token_is_not_applied_twice() -> None:
    """[vllm 51094, lmcache 5249] The mark of the state that is resumed from is checked, too."""
    at = server()
    prompt = list(range(100, 130))
    hit(at, prompt)
    for _ in range(3):
        empty_the_device(at)
        assert hit(at, prompt) == len(prompt) - 1


def test_the_host_has_room_for_states_by_their_number() -> None:
    """[sglang 39436, 29034] Large states do not take the room of KV."""
    sizes = replace(ROOM, states=20, kv=16_384, one_memory=True, state_tokens=256)
    at = server(sizes, ratio=2.0)
    pools = at.cache.host_pool_group
    kv, states = (at.cache.components[kind] for kind in (ComponentType.FULL, ComponentType.MAMBA))
    assert pools is not None
    host_kv, host_states = kv._full_kv_pool_host, states._mamba_pool_host
    held = host_kv.size * at.cache.cost.kv_bytes_per_token
    held += host_states.size * at.cache.cost.state_bytes
    assert host_kv.size // host_states.size == pytest.approx(1_000, rel=0.3)
    assert held == pytest.approx(2 * at.cache.account.budget, rel=0.1)


@pytest.fixture
def stuck_link() -> Iterator[None]:
    """Nothing that is copied arrives."""
    transfer_streams.simulate(Link(1e-3))
    yield
    transfer_streams.simulate(None)


@pytest.mark.usefixtures("stuck_link")
def test_states_that_are_being_copied_do_not_end_the_scheduler() -> None:
    """[sglang 36770, 40128, 40416, 37943] Requests wait until slots are there, and no longer."""
    at = server(replace(ROOM, states=4))
    served = 0
    for number in range(6):
        req = at.arrive([number + 10] * 40)
        if at.admit(req):
            at.complete(req, [3])
            served += 1
        at.poll()
        at.check()
    assert 0 < served < 6
    transfer_streams.simulate(None)
    for ack in at.cache.cache_controller.ack_write_queue:
        ack.finish_event.record(transfer_streams.Stream())  # it has arrived
    at.poll()
    assert hit(at, [99] * 40) == 0


def test_what_computing_gives_sooner_is_neither_copied_nor_loaded() -> None:
    at = server(speeds=FAST)
    prompt = list(range(100, 140))
    hit(at, prompt)
    info = tiers_of(at)
    assert info["held"]["host"]["bytes"] == 0 and info["not_written"] > 0
    set_speeds(at.cache, SLOW)
    hit(at, [*prompt, 1, 2])
    empty_the_device(at)
    assert tiers_of(at)["held"]["host"]["kv_tokens"] > 0
    set_speeds(at.cache, FAST)
    assert hit(at, prompt) == 0 and at.loads == 0
    empty_the_device(at)
    set_speeds(at.cache, SLOW)
    assert hit(at, prompt) == len(prompt) - 1


def test_what_a_request_holds_is_copied_when_it_ends() -> None:
    """Before that it cannot be forgotten, and nobody knows what becomes of it."""
    at = server()
    req = at.begin(list(range(100, 140)))
    assert at.prefill_step(req)
    at.poll()
    assert tiers_of(at)["written_bytes"] == 0
    at.decode(req, [3])
    at.finish(req)
    at.poll()
    assert tiers_of(at)["written_bytes"] > 0


ANSWER = list(range(40, 70))


def serve_conversations(at: TieredServer, count: int) -> None:
    """Conversations whose every prompt repeats the one before with its answer, so that requests
    return to the ends of answers and never to the ends of prompts.
    """
    for number in range(count):
        prompt = list(range(1_000 + 200 * number, 1_020 + 200 * number))
        for turn in range(3):
            at.serve(prompt, ANSWER, stamp=10.0 * number + turn)
            at.poll()
            prompt = [*prompt, *ANSWER, *(20 + turn for _ in range(16))]


def copied_states(at: TieredServer, tokens: list[int]) -> dict[int, bool]:
    """Positions of the states on the way to the end of `tokens`: whether the host has them."""
    found = {}
    record = at.cache.shadow_tree.record(at.cache.tree_core.node_by_id(at.probe_node(tokens)))
    while record.parent is not None:
        if record.has_state:
            found[record.depth] = copies_of(record).has_state(Tier.HOST)
        record = record.parent
    return found


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_states_of_a_class_that_never_returns_are_not_copied(policy: str) -> None:
    """The KV of a prompt is copied for the answer's end, without the state of the prompt's."""
    at = server(replace(ROOM, states=30, kv=1_024, context=512), policy=policy)
    speeds = Speeds.of(1e9, Link(1e12), Link(1e12), host_write=Link(1e8))
    set_speeds(at.cache, speeds)
    serve_conversations(at, 30)
    prompt = list(range(9_000, 9_040))
    at.serve(prompt, ANSWER, stamp=305.0)
    at.poll()
    end = at.cache.tree_core.node_by_id(at.probe_node([*prompt, *ANSWER, 1]))
    if not end.backuped:
        assert at.cache.copy_to_host(end)
        at.cache.flush_pending_backups()
        at.poll()
    assert end.parent.backuped
    assert copied_states(at, [*prompt, *ANSWER, 1]) == {39: False, 69: True}


def test_what_the_host_has_forgotten_is_copied_again_only_after_its_next_use() -> None:
    at = server(eviction="seglen")
    prompt = list(range(100, 140))
    hit(at, prompt)
    node = at.cache.tree_core.node_by_id(at.probe_node([*prompt, 3, 4]))
    assert tiers_of(at)["held"]["host"]["states"] > 0
    at.cache.evict_host(10**6, ComponentType.MAMBA)
    assert tiers_of(at)["held"]["host"]["states"] == 0
    assert not at.cache.copy_to_host(node)
    hit(at, [*prompt, 3, 4])
    assert tiers_of(at)["held"]["host"]["states"] > 0


def test_a_load_that_cannot_be_is_computed_and_may_be_after_a_retraction() -> None:
    at = server()
    prompt = list(range(100, 140))
    hit(at, prompt[:20])
    hit(at, prompt)
    empty_the_device(at)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(at.cache), "load_back", lambda *args, **kwargs: False)
        req = at.arrive(prompt)
        assert not at.admit(req)
        assert at.admit(req) and req.prefix_len == 0
    assert tiers_of(at)["failed_loads"] == 1
    assert at.cache.lookups.report(req).missed.value == "not_loaded"
    at.prefill_step(req)
    waits = at.retract(req)
    empty_the_device(at)
    assert at.admit(waits) and waits.prefix_len == len(prompt)
    at.abort(waits)
    at.check()


def test_a_load_without_a_slot_is_computed_where_nothing_ends() -> None:
    """The tree would get a slot for the state beside the request's; idle sessions hold the rest."""
    at, prompt = on_the_host(sizes=replace(ROOM, states=2))
    at.prefill(at.begin([7]))  # of a session: the adder knows of nothing that runs
    req = at.arrive([*prompt, 8])
    assert not at.admit(req) and req.mamba_host_hit_length
    assert at.admit(req) and req.prefix_len == 0
    at.complete(req, [3])
    at.check()


def test_a_state_without_a_slot_to_copy_it_into_gives_no_tokens() -> None:
    at, prompt = server(), list(range(100, 140))
    hit(at, prompt)
    states = type(at.cache.components[ComponentType.MAMBA])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "_room_for_a_copy", lambda *args: False)
        req = at.arrive([*prompt, 9])
        assert at.admit(req) and req.prefix_len == 0
    at.complete(req, [3])
    assert at.cache.lookups.report(req).missed.value == "no_slot"
    assert tiers_of(at)["hit_tokens"] == {"device": 0, "host": 0}


def test_a_request_that_is_sent_again_is_said_to_compute_where_that_is_faster() -> None:
    at, prompt = server(), list(range(100, 140))
    req = at.begin(prompt, rid="asked")
    at.complete(req, [3])
    empty_the_device(at)
    for speeds, resumes_at in ((SLOW, len(prompt) - 1), (FAST, 0)):
        set_speeds(at.cache, speeds)
        now = at.cache.explainer.answer(ExplainReq(input_ids=prompt)).report
        again = at.cache.explainer.answer(ExplainReq(request_id="asked")).report
        assert now["hit"] == again["request"]["now"] == resumes_at


def test_a_victim_whose_copy_is_below_moves_no_bytes() -> None:
    at = server(flags={"hybrid_offload_watermark": 0.0}, policy="write_back")
    for number in range(3):
        hit(at, [number + 10] * 50)
    poll(at, 20)
    info = tiers_of(at)
    assert info["offloaded"] > 0
    empty_the_device(at)
    after = tiers_of(at)
    assert after["written_bytes"] == info["written_bytes"] > 0
    assert after["held"]["device"]["states"] == 0
    assert hit(at, [10] * 50) == 49


def test_without_the_watermark_nothing_is_copied_in_the_background() -> None:
    at = server(policy="write_back")
    for number in range(3):
        hit(at, [number + 10] * 50)
    assert tiers_of(at)["written_bytes"] == 0


def test_under_write_through_what_would_go_next_is_copied_before() -> None:
    at = server(flags={"hybrid_offload_watermark": 0.25}, eviction="lru")
    for number in range(3):
        hit(at, [number + 10] * 57)
    poll(at, 5)
    info = tiers_of(at)
    assert info["offloaded"] > 0
    at.cache.evict(EvictParams(num_tokens=100))
    at.poll()
    assert tiers_of(at)["written_bytes"] == info["written_bytes"]
    assert [hit(at, [number + 10] * 57) for number in range(2)] == [56, 56]
    assert at.loads == 2


def test_a_session_that_returns_before_its_turn_is_not_copied() -> None:
    """Each turn would be, if what a request has left were copied when it has ended."""
    written = []
    for watermark in (0.6, 1.0):
        flags = {"hybrid_offload_watermark": watermark}
        at = server(replace(ROOM, states=30), flags=flags, eviction="lru")
        prompt = list(range(100, 130))
        for turn in range(4):
            hit(at, prompt)
            prompt = [*prompt, 3, *(turn for _ in range(10))]
        written.append(tiers_of(at)["written_bytes"])
    assert written[0] == 0 < written[1]


def test_what_was_not_worth_its_copy_is_judged_again_after_its_next_use() -> None:
    at = server(speeds=FAST, flags={"hybrid_offload_watermark": 0.0})
    prompt = list(range(100, 140))
    hit(at, prompt)
    poll(at, 5)
    assert tiers_of(at)["not_written"] > 0
    set_speeds(at.cache, SLOW)
    poll(at, 5)
    assert tiers_of(at)["written_bytes"] == 0
    hit(at, [*prompt, 3, 4])
    poll(at, 5)
    assert tiers_of(at)["written_bytes"] > 0


def test_what_the_device_has_too_goes_before_what_must_be_computed() -> None:
    """The one with a copy on the host is evicted, of two prompts used alike."""
    at = server(policy="write_back")
    first, second = [11] * 60, [12] * 60
    hit(at, first)
    at.cache.copy_to_host(at.cache.tree_core.node_by_id(at.probe_node(first)))
    at.cache.flush_pending_backups()
    at.poll()
    hit(at, second)
    victim = at.cache.shadow_tree.kv_victim()
    assert victim.key.raw_token_ids()[0] == 11
    assert at.cache.tier_stats.written_tokens > 0


def test_the_host_forgets_what_saves_least() -> None:
    """Short prompts go first, and the long ones that would cost most stay."""
    at = server(replace(ROOM, kv=120), ratio=2.0, eviction="seglen")
    long = [list(range(300 + 100 * n, 300 + 100 * n + 90)) for n in range(2)]
    for prompt in long:
        hit(at, prompt)
        hit(at, prompt)
    for number in range(20):
        hit(at, [number + 10] * 12)
    empty_the_device(at)
    assert [hit(at, prompt) for prompt in long] == [89, 89]


def test_what_would_push_out_more_than_it_is_worth_is_not_copied() -> None:
    at = server(replace(ROOM, kv=120), ratio=1.0, eviction="seglen")
    hit(at, list(range(300, 400)))
    written = tiers_of(at)["written_bytes"]
    hit(at, [11] * 40)
    info = tiers_of(at)
    assert info["not_written"] > 0
    assert info["written_bytes"] == written
    empty_the_device(at)
    assert hit(at, list(range(300, 400))) == 99


def test_tenants_stay_apart_on_the_host() -> None:
    at = server()
    prompt = list(range(100, 140))
    hit(at, prompt, cache_salt="one")
    empty_the_device(at)
    assert hit(at, prompt, cache_salt="two") == 0
    empty_the_device(at)
    assert hit(at, prompt, cache_salt="one") == 39


def test_a_request_is_told_where_its_hit_came_from() -> None:
    at, prompt = on_the_host()
    req = at.begin([*prompt, 1, 2, 3])
    at.prefill_step(req)
    (report,) = req.customized_info["hybrid_cache"]
    assert report["tiers"]["way"] == "load"
    assert report["tiers"]["host_tokens"] == report["hit_tokens"] == 40
    assert report["tiers"]["state"] == Tier.HOST.name.lower()
    at.abort(req)


@pytest.mark.parametrize(("speeds", "end"), [(SLOW, "it is loaded"), (FAST, "it is computed")])
def test_an_explanation_names_the_tier(speeds: Speeds, end: str) -> None:
    at, prompt = on_the_host()
    set_speeds(at.cache, speeds)
    answer = at.cache.explainer.answer(ExplainReq(input_ids=[*prompt, 1, 2]))
    report = msgspec.convert(answer.report, MissReport)
    (line,) = [line for line in render(report) if line.startswith("below")]
    assert "token 40: its state and KV of 40 tokens are in host memory; loading takes" in line
    assert line.endswith(end)
    assert at.cache.tree_core.ways is at.cache.ways and at.loads == 0


def test_a_pin_goes_to_the_host_with_its_state_and_comes_back() -> None:
    """While any tier has the state it is pinned, on the host it outlives a flood, and a load brings
    it back; when the last copy goes, the pin does.
    """
    at = server(ratio=1.5)
    prompt = list(range(100, 160))
    hit(at, prompt, pins=[PinRequest(40, 86_400.0, Priority.HIGH)])
    pins = at.cache.shadow_tree.tree.pins
    empty_the_device(at)
    assert len(pins) == 1 and tiers_of(at)["held"]["device"]["states"] == 0
    for number in range(30):
        hit(at, [1_000 * number + k for k in range(60)])
    assert len(pins) == 1
    assert hit(at, [*prompt[:40], 1, 2, 3]) == 40
    at.cache.reset()
    assert len(pins) == 0 and pins.held_bytes == 0
