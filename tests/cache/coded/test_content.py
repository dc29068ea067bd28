"""Coded entries are read again as they were, within int8's error, by whoever resumes from it, and
the accounts hold: real pools, random conversations, and a value for each prefix in place of a
model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_hybrid.serving.stored_keys import exact_key
from sglang_hybrid.storage.codecs.codecs import Codec
from tests.cache.backends import coding, options
from tests.cache.driver import FULL, Server, Sizes
from tests.examples import seeds

CONFIGS = {
    "two pools": Sizes(states=9, kv=400, rows=6, context=512, row=32),
    "pages of 4": Sizes(
        states=16, kv=320, page=4, extra_buffer=True, grid=4, rows=6, context=512, row=32
    ),
    "one memory": Sizes(
        states=9, kv=400, rows=6, context=512, row=32, one_memory=True, state_tokens=10
    ),
}


class Valued(Server):
    """Each token's KV and each state of a sequence's end hold numbers of the prefix that they
    stand for.
    """

    def values(self, prefix: Sequence[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash(tuple(prefix)) % 2**31)
        return torch.randn(self.sizes.row, generator=generator)

    @property
    def keys(self) -> Any:
        return self.allocator.get_kvcache().full_kv_pool.k_buffer[0]

    @property
    def temporal(self) -> Any:
        return self.pool.mamba_pool.mamba_cache.temporal[0]

    def write(self, req: Req, start: int, end: int) -> None:
        """The results of a forward of these tokens."""
        tokens = [*req.origin_input_ids, *req.output_ids]
        for at in range(start, end):
            self.keys[self.row_of(req, at)] = self.values(tokens[: at + 1]).to(self.keys.dtype)
        for known, plan in self.cache.plans.planner.in_flight():
            if known is req:
                for pending in plan.pending_checkpoints:
                    self.write_state(int(pending.slot), tokens[: pending.position])
        self.write_state(int(req.kv.mamba_pool_idx), tokens[:end])

    def write_state(self, slot: int, prefix: Sequence[int]) -> None:
        row = self.row_of_state(slot)
        self.temporal[row] = self.values(prefix).to(self.temporal.dtype)

    def row_of(self, req: Req, at: int) -> int:
        """The row of a token's KV now: its slot is that row, or names it in one memory."""
        slot = self.pool.req_to_token[req.kv.req_pool_idx, at].long().reshape(1)
        return int(self.allocator.translate_kv_loc(slot) if self.sizes.one_memory else slot)

    def row_of_state(self, slot: int) -> int:
        """The row of a state; 0, the row for padding, if the state has none."""
        return max(0, int(self.pool.translate_mamba_indices(torch.tensor([slot]))[0]))

    def begin_forward(self, req: Req) -> None:
        super().begin_forward(req)
        self.check_prefix(req)
        self.write(req, req.prefix_len, req.extend_end)

    def decode(self, req: Req, answer: Sequence[int]) -> None:
        planner = self.cache.plans.planner
        take = planner.take_in_answer

        def take_in_answer(req: Req, length: int) -> Any:
            taken = take(req, length)
            if taken is not None:
                tokens = [*req.origin_input_ids, *req.output_ids]
                self.write_state(int(taken.slot), tokens[:length])
            return taken

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(planner, "take_in_answer", take_in_answer)
            super().decode(req, answer)
        length = len(req.origin_input_ids)
        self.write(req, length, length + len(req.output_ids) - 1)

    def check_prefix(self, req: Req) -> None:
        tokens = [*req.origin_input_ids, *req.output_ids]
        for at in range(req.prefix_len):
            self.compare(self.keys[self.row_of(req, at)], tokens[: at + 1])

    def check_state(self, req: Req) -> None:
        """The state that a request which was just looked up resumes from."""
        if req.prefix_len:
            slot = int(req.kv.mamba_cow_src_index)
            for row in self.temporal[self.row_of_state(slot)].reshape(-1, self.sizes.row):
                self.compare(row, list(req.origin_input_ids)[: req.prefix_len])

    def compare(self, found: torch.Tensor, prefix: Sequence[int]) -> None:
        wanted = self.values(prefix)
        bound = float(wanted.abs().max()) / 253 + 0.02
        assert (found.float() - wanted).abs().max() <= bound, len(prefix)


def conversation(rng: random.Random, server: Valued) -> tuple[int, int]:
    """A few chats by turns, some of which fork. Returns tokens that were hit, and how many of them
    were not exact.
    """
    chats = [[rng.randrange(50) for _ in range(20)] for _ in range(8)]
    hit = inexact = 0
    for _ in range(40):
        chat = rng.choice(chats)
        if rng.random() < 0.2:
            del chat[rng.randrange(10, len(chat)) :]
        chat += [rng.randrange(50) for _ in range(rng.randrange(2, 12))]
        if len(chat) > 150:
            del chat[20:]
        req = server.arrive(chat)
        if not server.admit(req):
            continue
        server.check_state(req)
        hit += req.prefix_len
        core = server.cache.tree_core
        if not core.is_exact(core.node_by_id(req.last_node)):
            inexact += req.prefix_len
        answer = [rng.randrange(50) for _ in range(rng.randrange(2, 10))]
        server.complete(req, answer)
        chat += answer
        server.check()
    return hit, inexact


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", seeds(2))
def test_what_is_hit_is_what_was_stored(config: str, seed: int) -> None:
    with coding(Codec.INT8):
        server = Valued.on(CONFIGS[config], options("reuse"), 16)
    hit, inexact = conversation(random.Random(seed), server)
    assert hit > 0
    assert inexact > 0
    assert server.cache.parts.coded.as_dict()["now"]["kv"] > 0


@pytest.mark.parametrize("config", CONFIGS)
def test_two_pools_say_that_they_lend_nothing(config: str) -> None:
    with coding(Codec.INT8):
        server = Valued.on(CONFIGS[config], options("reuse"), 16)
    coded = server.cache.parts.coded
    assert coded is not None
    assert ("lend each other nothing" in coded.describe()) == (config != "one memory")


def test_a_wrong_scale_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails with it."""
    decode = Codec.decode
    monkeypatch.setattr(Codec, "decode", lambda *given: 1.1 * decode(*given))
    with coding(Codec.INT8):
        server = Valued.on(CONFIGS["two pools"], options("reuse"), 16)
    with pytest.raises(AssertionError):
        conversation(random.Random(0), server)


def test_what_a_request_computes_anew_is_exact_again() -> None:
    """KV that is stored without a state behind it, and coded, gives way to what the next prompt
    computes of it.
    """
    with coding(Codec.INT8):
        server = Valued.on(CONFIGS["two pools"], options("reuse"), 16)
    server.serve(range(40), [1, 2, 3])
    cache = server.cache
    record = next(iter(cache.shadow_tree.tree.walk()))
    while not cache.parts.coded.coded["kv"]:
        cache.evict(EvictParams(num_tokens=1, mamba_num=1))
    node = record.payload
    while record.children:
        record = next(iter(record.children.values()))
        node = record.payload
    assert record.coded_kv
    slots = len(node.component_data[FULL].value)
    assert slots == -(-len(node.key) // 2)
    path = [*range(40), 1, 2]
    held = server.arrive([*path, 7])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            cache.parts.coded, "make_readable", lambda _: False
        )  # as if there were no room
        assert server.admit(held)
    assert held.prefix_len == 0
    server.complete(held, [9])
    assert not record.coded_kv
    assert cache.tree_core.is_exact(node)
    assert len(node.component_data[FULL].value) == len(node.key)
    server.check()


def test_a_hit_needs_room_for_one_edge_after_the_other() -> None:
    """The room that an edge gives back when it is decoded is there for the edge below it."""
    with coding(Codec.INT8):
        server = Valued.on(CONFIGS["two pools"], options("reuse"), 16)
    cache, coded = server.cache, server.cache.parts.coded
    chat: list[int] = []
    for turn in range(4):
        chat += [turn] * 36
        server.serve(chat, [9, 9])
        chat += [9]
    stored = sum(node.tokens for node in cache.shadow_tree.tree.walk())
    while coded.as_dict()["now"]["kv"] < stored:
        cache.evict(EvictParams(num_tokens=1, mamba_num=1))
    free = server.allocator.available_size()
    held = server.allocator.alloc(free - stored * 3 // 4)
    req = server.arrive([*chat, 7])
    assert server.look_up(req) == stored
    assert not coded.as_dict()["now"]["kv"]
    server.allocator.free(held)


def test_a_miss_copies_no_state() -> None:
    """A request found a state to copy, and then has no room to decode what it needs: it begins
    anew, without that state and without the slot for it.
    """
    with coding(Codec.INT8):
        server = Valued.on(CONFIGS["two pools"], options("reuse"), 16)
    server.serve(range(40), [1, 2, 3])
    req = server.arrive([*range(40), 1, 2, 7])
    assert server.look_up(req) > 0
    assert req.kv.mamba_cow_src_index is not None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server.cache.parts.coded, "make_readable", lambda _: False)
        assert server.look_up(req) == 0
    assert req.kv.mamba_cow_src_index is None
    assert not req.kv.holds_mamba
    server.check()


def test_what_resumes_from_coded_entries_after_a_retraction_says_so() -> None:
    """Its first prefill found exact ones."""
    with coding(Codec.INT8):
        server = Valued.on(CONFIGS["two pools"], options("reuse"), 16)
        server.serve(range(40), [1, 2, 3])
        cache = server.cache
        prompt = [*range(40), 1, 2, 7]
        req = server.begin(prompt)
        server.prefill(req)
        server.decode(req, [8])
        assert cache.lookups.report(req).exact
        server.retract(req)
        while not cache.parts.coded.coded["states"]:
            cache.evict(EvictParams(num_tokens=1, mamba_num=1))
        assert server.admit(req)
        assert req.prefix_len > 0
        server.complete(req, [9])
    assert cache.lookups.report(req).exact is False
    server.check()


def test_a_state_that_was_computed_behind_a_coded_one_stays_inexact() -> None:
    """Though all the KV in front of it was computed anew meanwhile, it is the old one."""
    with coding(Codec.INT8):
        server = Valued.on(CONFIGS["two pools"], options("reuse"), 16)
        cache, coded = server.cache, server.cache.parts.coded
        server.serve(range(40), [1, 2, 3])
        records = cache.shadow_tree.tree
        while any(node.has_state and not node.coded_state for node in records.walk()):
            cache.evict(EvictParams(num_tokens=0, mamba_num=1))
        prompt = [*range(40), 1, 2, 7, 8, 9]
        server.serve(prompt, [4, 5, 6])
        assert coded.decoded["states"]
        while coded.as_dict()["now"]["kv"] < len(prompt):
            cache.evict(EvictParams(num_tokens=1))
        prompt += [4, 5, 11]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(coded, "make_readable", lambda _: False)  # as if there were no room
            server.serve(prompt, [12, 13])
        req = server.arrive([*prompt[:45], 14, 15])  # where the second prompt ended
        assert server.admit(req)
        assert req.prefix_len > 42
        server.complete(req, [15])
    assert cache.lookups.report(req).exact is False


def test_prompts_that_ask_for_exactness_are_never_coded() -> None:
    with coding(Codec.INT8):
        server = Valued.on(CONFIGS["two pools"], options("reuse"), 16)
    chats = [[number] * 60 for number in range(5)]
    for _ in range(3):
        for chat in chats:
            server.serve(chat, [1, 2], extra_key=exact_key("tenant"))
            server.check()
    assert not server.cache.parts.coded.coded
