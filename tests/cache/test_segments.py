"""Prompts that are composed of segments, on a real cache whose model has recurrent layers.

Every row of KV and every state holds a number that says of which tokens it is, computed how
(`tiers.py`). What a prompt resumes from is looked at, so a prompt that must be exact and would hit
what was composed, or a segment of somebody else, is found out.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_hybrid.cache.request.segments import Composition
from sglang_hybrid.core.returns.hints import PromptHints
from sglang_hybrid.extensions.schemas.composition.recording import Kind, Recording, SegmentTracks
from sglang_hybrid.serving.requests.cache_fields import CacheFields, Imported, fields_of
from sglang_hybrid.serving.stored_keys import composed_key, segment_key
from sglang_hybrid.storage.codecs import in_use
from sglang_hybrid.storage.codecs.codecs import Codec
from sglang_hybrid.storage.codecs.coded_rows import CodecPlan
from tests.cache.backends import options
from tests.cache.driver import MAMBA, Server, Sizes, build_cache
from tests.cache.tiers import TieredServer, mark
from tests.examples import seeds

SIZES = Sizes(kv=200, states=14, rows=6, context=128)
PLACES = (0, 8, 16)
TEXTS = [[[10 * place + text] * (2 + text) for text in range(2)] for place in range(3)]
"""Texts of the segments at each place."""
TENANTS = ({}, {"extra_key": "a"}, {"cache_salt": "s"})


@dataclass(frozen=True)
class Asked:
    """A prompt of segments, (position, tokens) each, and new tokens, of one tenant."""

    segments: tuple[tuple[int, tuple[int, ...]], ...]
    new: tuple[int, ...]
    extra_key: str | None = None
    cache_salt: str | None = None
    exact_only: bool = False

    @property
    def length(self) -> int:
        return sum(len(tokens) for _, tokens in self.segments)

    @property
    def tokens(self) -> list[int]:
        return [token for _, part in self.segments for token in part] + list(self.new)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        return tuple((start, len(tokens)) for start, tokens in self.segments)


def apart(start: int, tokens: Sequence[int], whose: Asked) -> int:
    """The mark of tokens of a segment that begins at `start`."""
    return mark([-1, start, hash(whose.extra_key or "") % 97, *tokens])


def factor(start: int, tokens: Sequence[int]) -> torch.Tensor:
    """The transition of tokens of a segment, the first of which is at position `start`."""
    return torch.tensor(mark([-3, start, *tokens]) / 256)


class SegmentServer(TieredServer):
    """Computes exact prompts, segments, and prompts that are composed of them."""

    def __init__(self, cache: Any, sizes: Sizes, chunk: int = 0) -> None:
        super().__init__(cache, sizes, chunk)
        self.asked: dict[str, Asked] = {}
        self.composed = 0  # prompts that were resumed from a composed state
        plan_and_compute = cache.plan_forward

        def note(batch: Any) -> None:
            self._planned = batch
            plan_and_compute(batch)

        cache.plan_forward = note

    @classmethod
    def made(cls, chunk: int = 0, *, policy: str = "reuse") -> SegmentServer:
        return cls.on(SIZES, options(policy), chunk)

    def ask(self, asked: Asked) -> Req:
        """A request for a prompt that is composed, if it has segments, or else exact."""
        whose = {"extra_key": asked.extra_key, "cache_salt": asked.cache_salt}
        if asked.segments:
            places = ",".join(f"{start}:{tokens}" for start, tokens in asked.places)
            whose["extra_key"] = composed_key(asked.extra_key, places)
        req = self.arrive(asked.tokens, **whose)
        if asked.segments:
            imported = Imported(asked.places, 24, asked.extra_key)
            req.hybrid = CacheFields(PromptHints(exact=asked.exact_only), imported)
        self.asked[req.rid] = asked
        return req

    def segment(self, asked: Asked, number: int) -> Req:
        """A request that computes one of the segments of a prompt."""
        start, tokens = asked.segments[number]
        key = segment_key(asked.extra_key, start)
        req = self.arrive(tokens, extra_key=key, cache_salt=asked.cache_salt)
        req.hybrid = CacheFields(imported=Imported((), start, asked.extra_key))
        self.asked[req.rid] = replace(asked, segments=(asked.segments[number],), new=())
        return req

    def run(self, req: Req, answer: Sequence[int] = (5,)) -> None:
        """All of a request that waits."""
        assert self.admit(req), "it does not fit, even alone"
        self.complete(req, answer)
        self.check()

    def compute(self, asked: Asked) -> None:
        """All segments of a prompt."""
        for number in range(len(asked.segments)):
            self.run(self.segment(asked, number))

    def composes(self, asked: Asked) -> int:
        """Serve a prompt; tokens that were composed."""
        req = self.ask(asked)
        self.run(req)
        known = self.cache.composition(req)
        return 0 if known is None else known.composed

    def key_of(self, req: Req) -> RadixKey:
        """The key by which a request's prompt is looked up: all of it but the last token."""
        return RadixKey(req.origin_input_ids[:-1], req.extra_key, cache_salt=req.cache_salt)

    def node_of(self, asked: Asked, number: int) -> Any:
        """The node where a segment ends."""
        start, tokens = asked.segments[number]
        key = RadixKey(array("q", tokens), segment_key(asked.extra_key, start))
        return self.cache.match_prefix(MatchPrefixParams(key)).last_device_node

    # Marks

    def _compute(self, req: Req) -> None:
        self._of = req
        super()._compute(req)
        tracks = self._planned.state_tracks
        if not isinstance(tracks, SegmentTracks):
            return
        ((start, _),) = self.asked[req.rid].segments
        tokens = self._tokens(req)[req.prefix_len : req.extend_end]
        for _, recording in tracks.recordings:
            recording.kind = Kind(is_matrix=False)
            recording.add(factor(start + req.prefix_len, tokens))

    def _marked(self, req: Req, end: int) -> int:
        """The mark of the last of the first `end` tokens of a request."""
        asked, tokens = self.asked[req.rid], self._tokens(req)[:end]
        imported = fields_of(req).imported
        if imported is None:
            return mark(tokens)
        if not imported.segments:
            return apart(imported.position, tokens, asked)
        known = self.cache.composition(req)
        if known is None or not known.composed:
            return mark(tokens)
        at = 0
        for start, part in asked.segments:
            if end <= at + len(part):
                return apart(start, part[: end - at], asked)
            at += len(part)
        return mark([-2, *(start for start, _ in asked.segments), *tokens])

    def _fill(self, req: Req, start: int, end: int) -> None:
        places = self.pool.req_to_token[req.kv.req_pool_idx, start:end].long()
        marks = torch.tensor([self._marked(req, at + 1) for at in range(start, end)])
        for rows in self._rows:
            where = self._rows_of(places)
            rows[where] = marks[:, None, None].to(rows.dtype).expand(-1, *rows.shape[1:])
        self._put(req.kv.mamba_pool_idx.reshape(1), self._marked(req, end))

    def _put(self, slot: torch.Tensor, value: float) -> None:
        for tensor in (*self._states.conv, self._states.temporal):
            tensor[:, self._row_of(int(slot))] = value

    def _set_state(self, slot: torch.Tensor, tokens: list[int]) -> None:
        self._put(slot, self._marked(self._of, len(tokens)))

    def _check_resumed(self, req: Req) -> None:
        self._of = req
        if not req.prefix_len:
            return
        places, slot = self._resumed(req)
        expected = [self._marked(req, at + 1) for at in range(req.prefix_len)]
        for rows in self._rows:
            found = rows[self._rows_of(places)][:, 0, 0].tolist()
            assert found == expected, "KV of other tokens"
        assert slot is not None
        asked = self.asked[req.rid]
        state = window = float(expected[-1])
        if asked.segments and fields_of(req).imported and req.prefix_len == asked.length:
            state, window = self._behind(asked), expected[-1]
            self.composed += 1
        row = self._row_of(slot)
        temporal, conv = self._states.temporal[:, row], self._states.conv[0][:, row]
        assert temporal.unique().tolist() == [state], "the state of another prefix"
        assert conv.unique().tolist() == [window], "the window of another prefix"
        if req.kv.mamba_cow_src_index is not None:
            for tensor in (*self._states.conv, self._states.temporal):
                tensor[:, self._row_of(int(req.kv.mamba_pool_idx))] = tensor[:, row]

    def _behind(self, asked: Asked) -> float:
        """The state that is composed of those of the segments."""
        state = torch.zeros(())
        for start, tokens in asked.segments:
            step = self.chunk or len(tokens)
            moved = torch.ones(())
            for at in range(0, len(tokens), step):
                moved = moved * factor(start + at, tokens[at : at + step])
            state = state * moved + apart(start, tokens, asked)
        return float(state.bfloat16())


def drawn(draw: random.Random, **more: Any) -> Asked:
    """A prompt of one to three segments, each at its place; or, as spans of a prompt are where
    attention has no positions, in any order, all at 0.
    """
    places, anywhere = draw.sample(range(3), draw.randint(1, 3)), draw.random() < 0.3
    segments = tuple(
        (0 if anywhere else PLACES[at], tuple(draw.choice(TEXTS[at])))
        for at in (places if anywhere else sorted(places))
    )
    new = tuple(draw.choices(range(60, 62), k=draw.randint(1, 4)))
    return Asked(segments, new, **{**draw.choice(TENANTS), **more})


ONE = Asked(((0, (1, 2, 3)), (8, (4, 5)), (16, (6,))), (60, 61))


@pytest.mark.parametrize("chunk", [0, 2])
def test_a_prompt_begins_with_the_composed_state(chunk: int) -> None:
    """`_check_resumed` looks at KV, window and state. Another order has another state."""
    at = SegmentServer.made(chunk)
    assert at.composes(ONE) == 0
    at.compute(ONE)
    assert at.composes(ONE) == ONE.length
    assert at.composed == 1
    other = replace(ONE, new=(62,))
    assert at.composes(other) == ONE.length
    turned = replace(ONE, segments=(ONE.segments[0], ONE.segments[2]))
    assert at.composes(turned) == 4


@pytest.mark.parametrize("loaded", [False, True])
def test_what_is_composed_of_smaller_copies_says_so(
    monkeypatch: pytest.MonkeyPatch, *, loaded: bool
) -> None:
    """loaded: a segment is marked as a load from the host marks it (`MarkedTreeCore`)."""
    monkeypatch.setattr(in_use, "_chosen", CodecPlan.uniform(Codec.BF16))
    it = SegmentServer.made()
    asked = Asked(((0, (1, 2, 3)), (8, (11, 12))), (90, 91))
    it.compute(asked)
    if loaded:
        it.cache.tree_core.inexact.add(it.node_of(asked, 1))
    for _ in range(2):  # the second one finds the path of the first
        req = it.ask(asked)
        it.run(req)
        assert it.cache.composition(req).composed == asked.length
        assert it.cache.lookups.report(req).exact is not loaded


def test_segments_without_places_are_put_together_in_any_order() -> None:
    at = SegmentServer.made()
    first, second, third = (tokens for _, tokens in ONE.segments)
    at.compute(replace(ONE, segments=((0, first), (0, second), (0, third))))
    for order in ((third, first), (second, first, third)):
        assert at.composes(replace(ONE, segments=tuple((0, one) for one in order)))
    assert at.composed == 2


def test_what_is_missing_is_said_and_computed_whole() -> None:
    at = SegmentServer.made()
    at.run(at.segment(ONE, 1))
    req = at.ask(ONE)
    at.run(req)
    assert at.cache.modular.of(req) == Composition(0, [0, 2])
    assert at.cache.lookups.report(req).as_dict()["missing_segments"] == [0, 2]


def test_a_segment_without_its_transition_is_computed_again() -> None:
    at = SegmentServer.made()
    at.compute(ONE)
    at.cache.modular._states.forget_all()
    req = at.ask(ONE)
    at.run(req)
    assert at.cache.modular.of(req) == Composition(0, [0, 1, 2])
    at.compute(ONE)
    assert at.composes(ONE) == ONE.length


def test_transitions_have_a_bound_and_go_with_their_states() -> None:
    at = SegmentServer.made()
    at.compute(ONE)
    states = at.cache.modular._states
    assert at.cache.server_info()["transitions"] == {"kept": 3, "bytes": 12, "limit": states.limit}
    states._kept.most_bytes = 8
    at.run(at.segment(replace(ONE, segments=((0, (9, 9)),)), 0))
    assert states.as_dict() == {"kept": 2, "bytes": 8, "limit": 8}
    req = at.ask(ONE)
    at.run(req)
    assert at.cache.modular.of(req) == Composition(0), "three were computed anew for each prompt"
    at.cache.evict(EvictParams(num_tokens=10**6, mamba_num=10**6))
    states._kept.most_bytes = 100
    at.run(at.segment(ONE, 0))
    assert states.as_dict()["kept"] == 1
    at.flush()
    assert states.as_dict() == {"kept": 0, "bytes": 0, "limit": 100}
    assert at.free() == (SIZES.kv, SIZES.states)


def test_a_tenants_flood_of_segments_replaces_its_own_transitions() -> None:
    at = SegmentServer.made()
    own, others = replace(ONE, extra_key="a"), replace(ONE, extra_key="b")
    at.compute(own)
    at.cache.modular._states._kept.most_bytes = 6 * 4
    for number in range(4):
        salted = replace(others, segments=((0, (20 + number,)),), cache_salt=str(number))
        at.run(at.segment(salted, 0))
    assert at.cache.modular._states.as_dict()["kept"] == 6
    assert at.composes(own) == ONE.length
    assert at.cache.modular._states.has(at.ask(own), at.node_of(own, 0))
    assert not at.cache.modular._states.has(at.ask(others), at.node_of(own, 0))


def test_composed_states_are_counted_as_such() -> None:
    at = SegmentServer.made()
    at.compute(ONE)
    before = at.cache.server_info()["checkpoints_admitted"]
    at.composes(ONE)
    after = at.cache.server_info()["checkpoints_admitted"]
    assert after["composed"] == 1 and "composed" not in before
    assert "unknown" not in after


def test_without_a_slot_the_prompt_is_whole_and_nothing_is_lost() -> None:
    at = SegmentServer.made()
    at.compute(ONE)
    locks = [at.cache.lock(at.node_of(ONE, number)) for number in range(3)]
    at.cache.evict(EvictParams(num_tokens=0, mamba_num=10**6))
    held = at.pool.mamba_allocator.alloc(at.free()[1])
    before = at.free()
    req = at.ask(ONE)
    found = at.cache.modular._compose(req, at.key_of(req), fields_of(req).imported)
    assert found == Composition(0)
    assert at.free() == before
    for lock in locks:
        at.cache.unlock(lock)
    at.pool.mamba_allocator.free(held)
    at.check()


def test_a_composed_state_that_cannot_be_copied_makes_the_prompt_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The state in the tree had a slot, but then there was none for the request."""
    at = SegmentServer.made()
    at.compute(ONE)
    states = type(at.cache.components[MAMBA])
    monkeypatch.setattr(states, "_room_for_a_copy", lambda *_: False)
    req = at.ask(ONE)
    at.run(req)
    assert req.position_offset == 0 and at.composed == 0
    assert at.cache.modular.of(req) == Composition(0) and req.skip_radix_cache_insert
    monkeypatch.undo()
    assert at.composes(ONE) == ONE.length and at.composed == 1


def test_where_layers_do_not_tell_what_they_read_the_client_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or its server would compute the segments again behind each prompt."""
    at = SegmentServer.made()
    monkeypatch.setattr(Recording, "add", lambda *_: None)
    at.compute(ONE)
    req = at.ask(ONE)
    at.run(req)
    known = at.cache.modular.of(req)
    assert "do not tell" in known.why_never and not known.missing


def test_a_segment_that_was_retracted_has_its_transition() -> None:
    at = SegmentServer.made(2)
    at.run(at.segment(ONE, 1))
    at.run(at.segment(ONE, 2))
    req = at.segment(ONE, 0)
    assert at.admit(req) and not at.prefill_step(req)
    at.run(at.retract(req))
    assert at.composes(ONE) == ONE.length and at.composed == 1


def test_a_segment_of_one_token_is_computed_whenever_it_is_asked_for() -> None:
    """It is no full hit, of which there would be no transition."""
    at = SegmentServer.on(SIZES, options("reuse"), full_hits=True)
    for _ in range(4):
        at.run(at.segment(ONE, 2))
        at.cache.modular.forget_all()
    at.compute(ONE)
    assert at.composes(ONE) == ONE.length


def test_who_asks_for_exact_copies_gets_the_whole_prompt() -> None:
    at = SegmentServer.made()
    at.compute(ONE)
    req = at.ask(replace(ONE, exact_only=True))
    at.run(req)
    assert at.cache.modular.of(req) == Composition(0)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"one_pass": False}, "prefills leave no states"),
        ({"unplanned": "speculative decoding"}, "prefills leave no states"),
        ({"states_arrive": True}, "prefills leave no states"),
    ],
)
def test_where_no_states_are_composed_the_client_is_told(more: dict[str, Any], why: str) -> None:
    at = SegmentServer(build_cache(SIZES, options("reuse"), **more), SIZES)
    req = at.ask(ONE)
    at.look_up(req)
    known = at.cache.modular.of(req)
    assert why in known.why_never and not known.composed and not known.missing
    assert req.skip_radix_cache_insert and req.position_offset == 0
    assert why in at.cache.lookups.report(req).as_dict()["composes_nothing"]


class DeviceServer(SegmentServer):
    """A server without memory below the device."""

    builds = staticmethod(build_cache)

    def admit(self, req: Req) -> bool:
        joined = Server.admit(self, req)
        if joined:
            self._check_resumed(req)
        return joined

    def poll(self) -> None:
        """Do nothing: there are no copies."""

    check = Server.check


KINDS = {
    "reuse": SIZES,
    "sglang-lru": SIZES,
    "one memory": replace(SIZES, one_memory=True, state_tokens=12),
    "spilled states": replace(SIZES, states=6, kv=300, spills=True, state_tokens=12),
    "parked KV": replace(SIZES, states=30, kv=110, spills=True, state_tokens=12),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", seeds(4))
def test_any_traffic_resumes_from_its_own_kind(seed: int, kind: str) -> None:
    """Exact prompts of the same tokens, segments, composed prompts, of several tenants, with
    evictions, aborts, retractions, loads from the host and flushes: `_check_resumed` looks at each.
    """
    draw = random.Random(seed)
    sizes = KINDS[kind]
    policy = "reuse" if sizes.shares else kind
    server = DeviceServer if kind == "parked KV" else SegmentServer
    at = server.on(sizes, options(policy), draw.choice([0, 2]))
    start = at.free()
    for _ in range(120):
        asked = drawn(draw, exact_only=draw.random() < 0.1)
        step = draw.random()
        if step < 0.1:
            at.run(at.segment(asked, draw.randrange(len(asked.segments))))
        elif step < 0.35:
            exact = Asked((), tuple(asked.tokens), asked.extra_key, asked.cache_salt)
            at.run(at.ask(exact), draw.choices(range(60, 62), k=2))
        elif step < 0.9:
            req = at.ask(asked)
            at.run(req, draw.choices(range(60, 62), k=2))
            for number in at.cache.modular.of(req).missing:
                at.run(at.segment(asked, number))
        elif step < 0.94:
            at.cache.evict(
                EvictParams(num_tokens=draw.randint(0, 60), mamba_num=draw.randint(0, 4))
            )
        elif step < 0.97:
            req = at.ask(asked)
            if at.admit(req):
                at.prefill_step(req)
                at.abort(req, keep=draw.random() < 0.5)
        elif step < 0.99:
            req = at.ask(asked)
            if at.admit(req):
                at.prefill(req)
                at.run(at.retract(req))
        else:
            at.flush()
            assert at.free() == start
        at.poll()
        at.check()
    assert at.composed
    assert (at.cache.parked is not None) == (kind == "parked KV")
    assert not sizes.spills or at.cache.spilled.spilled
    while at.cache.ongoing_write_through:
        at.poll()
    at.cache.evict(EvictParams(num_tokens=10**6, mamba_num=10**6))
    at.check()
    assert at.free() == start
