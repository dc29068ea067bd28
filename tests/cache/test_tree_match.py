"""A look-up that is remembered finds what a new one finds."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from sglang_hybrid.cache.request.tree_match import common_tokens
from tests.cache.backends import options
from tests.cache.driver import Server, Sizes
from tests.examples import examples


def plain(server: Server, params: MatchPrefixParams) -> MatchResult:
    """SGLang's own look-up in the same tree."""
    return UnifiedTreeCore.match_prefix(server.cache.tree_core, params)


def look_up(server: Server, req: Req, limit: int | None = None) -> MatchResult:
    key = RadixKey(req.origin_input_ids, req.extra_key, limit=limit, cache_salt=req.cache_salt)
    before = server.cache.tree_core.known_match(MatchPrefixParams(key=key, req=req))
    ours = server.cache.tree_core.match_prefix(MatchPrefixParams(key=key, req=req))
    again = server.cache.tree_core.match_prefix(MatchPrefixParams(key=key, req=req))
    known = server.cache.tree_core.known_match(MatchPrefixParams(key=key, req=req))
    theirs = plain(server, MatchPrefixParams(key=key, req=req))
    assert ours == theirs
    assert before in (None, theirs)
    assert again == theirs
    assert known == theirs or (known is None and len(key) < server.sizes.page)
    return ours


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(kv=600, states=12),
        Sizes(kv=640, states=24, page=4, extra_buffer=True, grid=4),
        Sizes(kv=600, states=0),
    ],
    ids=["states", "pages", "attention"],
)
@examples(8)
@given(st.integers(0, 10**9))
def test_a_request_that_waits_is_matched_as_if_it_were_new(sizes: Sizes, seed: int) -> None:
    """Many requests wait and are looked up again and again, while others are served, nodes are
    split, given up and grown, and the cache is flushed.
    """
    rng = random.Random(seed)
    server = Server.on(sizes, options("reuse"))
    sequences: list[list[int]] = [[]]
    waiting: list[Req] = []
    for _ in range(60):
        base = rng.choice(sequences)
        tokens = base[: rng.randrange(len(base) + 1)]
        tokens = tokens + [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
        salt = rng.choice([None, None, "a"])
        if rng.random() < 0.4 or not waiting:
            waiting.append(server.arrive(tokens[:200], cache_salt=salt))
        else:
            server.serve(tokens[:200], [rng.randrange(3) for _ in range(5)], cache_salt=salt)
            sequences.append(tokens[:200])
        if rng.random() < 0.02:
            server.flush()
        for req in rng.sample(waiting, min(3, len(waiting))):
            look_up(server, req, rng.choice([None, len(req.origin_input_ids) - 1]))
        server.check()


@examples(8)
@given(st.integers(0, 10**9))
def test_ranked_requests_know_what_a_new_look_up_finds(seed: int) -> None:
    """They are ranked again and again, and some are looked up to be admitted in between."""
    rng = random.Random(seed)
    server = Server.on(Sizes(kv=1200, states=12), options("reuse"))
    policy = SchedulePolicy("lpm", server.cache, False, False, False)
    sequences: list[list[int]] = [[]]
    waiting: list[Req] = []
    for _ in range(40):
        base = rng.choice(sequences)
        tokens = base[: rng.randrange(len(base) + 1)]
        tokens = tokens + [rng.randrange(3) for _ in range(rng.randrange(1, 120))]
        if rng.random() < 0.4 or not waiting:
            waiting.append(server.arrive(tokens[:300]))
        else:
            server.serve(tokens[:300], [rng.randrange(3) for _ in range(5)])
            sequences.append(tokens[:300])
        if rng.random() < 0.02:
            server.flush()
        if rng.random() < 0.3:
            req = rng.choice(waiting)
            server.look_up(req)
            server.send_back(req)
        policy.calc_priority(waiting)
        for req in waiting:
            found = plain(server, MatchPrefixParams(key=RadixKey(req.origin_input_ids), req=req))
            assert req.prefix_len == found.device_prefix_len
            assert req.last_node == found.last_device_node


def test_ranking_looks_up_again_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server.on(Sizes(kv=2000, states=12), options("reuse"))
    policy = SchedulePolicy("lpm", server.cache, False, False, False)
    server.serve([3] * 50, [4])
    hits, misses = server.arrive([3] * 50 + [4] * 20), server.arrive([7] * 20)
    matched: list[Req] = []
    match = server.cache._match_tree

    def counted(params: MatchPrefixParams) -> MatchResult:
        matched.append(params.req)
        return match(params)

    monkeypatch.setattr(server.cache, "_match_tree", counted)
    policy.calc_priority([misses, hits])
    assert matched == [misses, hits]
    assert hits.prefix_len == 50
    policy.calc_priority([misses, hits])
    assert matched[2:] == [misses], "so short a hit may be shared with another one that waits"
    server.serve([3] * 50 + [4] * 15, [6])
    del matched[:]
    policy.calc_priority([misses, hits])
    assert matched == [misses, hits]
    assert hits.prefix_len > 50


def test_another_prompt_of_the_same_request_is_looked_up_anew() -> None:
    server = Server.on(Sizes(kv=600, states=12), options("reuse"))
    server.serve([1] * 50, [2])
    req = server.arrive([1] * 50 + [3])
    assert look_up(server, req).full_kv_hit_length == 50
    req.origin_input_ids = array("q", [4] * 60)
    assert look_up(server, req).full_kv_hit_length == 0


def test_a_second_look_up_compares_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server.on(Sizes(kv=600, states=12), options("reuse"))
    server.serve([1] * 50, [2])
    req = server.arrive([1] * 50 + [3] * 20)
    look_up(server, req)

    def never(*_: object) -> int:
        raise AssertionError("tokens were compared")

    monkeypatch.setattr("sglang_hybrid.cache.request.tree_match.common_tokens", never)
    key = RadixKey(req.origin_input_ids)
    params = MatchPrefixParams(key=key, req=req)
    assert server.cache.tree_core.match_prefix(params).full_kv_hit_length == 50


@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=20),
    st.lists(st.integers(0, 1), min_size=1, max_size=20),
    st.integers(0, 19),
)
def test_common_tokens(edge: list[int], prompt: list[int], start: int) -> None:
    start = min(start, len(prompt) - 1)
    same = 0
    for one, other in zip(edge, prompt[start:], strict=False):
        if one != other:
            break
        same += 1
    assert common_tokens(array("q", edge), array("q", prompt), start, len(prompt)) == same
