"""Sliding windows beside states in one tree: what a request resumes from is its own prefix.

No model runs. Rows of KV, of windows and of states are marked with the prefix that was written
there, and each forward finds the marks of its prompt in all that it would read.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from tests.cache.backends import POLICIES, options
from tests.cache.driver import Server, Sizes

WINDOW = 16
ROOMY = Sizes(kv=4_000, states=40, window=WINDOW, kv_of_windows=2_000)
NARROW = Sizes(kv=900, states=7, window=WINDOW, kv_of_windows=330)
BUFFERS = {"extra_buffer": True, "grid": 16}  # as Inkling asks for
buffers = pytest.mark.parametrize("buffers", [{}, BUFFERS], ids=["one buffer", "extra buffers"])

Mark = int


class MarkedServer(Server):
    """A server whose forwards look at what they would read, and mark what they would write."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kv: dict[int, Mark] = {}
        self.windows: dict[int, Mark] = {}
        self.states: dict[int, Mark] = {}

    def begin_forward(self, req: Req) -> None:
        source = req.kv.mamba_cow_src_index
        super().begin_forward(req)
        tokens, start, end = list(req.full_untruncated_fill_ids), req.prefix_len, req.extend_end
        if source is not None:
            assert self.states[int(source)] == mark(tokens, start), "another prefix's state"
        for position in range(start):
            assert self.kv[self._row(req, position)] == mark(tokens, position + 1)
        for position in range(max(0, start - WINDOW), start):
            row = self._row_of_window(req, position)
            assert row > 0 and self.windows[row] == mark(tokens, position + 1)
        if self.batch.mamba_cow_src_indices is not None:
            rows = self.batch.mamba_cow_src_indices, self.batch.mamba_cow_dst_indices
            for live, slot in zip(*rows, strict=True):
                self.states[int(slot)] = self.states[int(live)]
        self._write(req, tokens, start, end)
        tracks = self.batch.state_tracks
        for position, slot in zip(tracks.positions, tracks.slots, strict=True) if tracks else ():
            self.states[int(slot)] = mark(tokens, position)

    def decode(self, req: Req, answer: Any) -> None:
        super().decode(req, answer)
        tokens = [*req.origin_input_ids, *req.output_ids]
        end = req.kv.kv_committed_len
        self._write(req, tokens, len(req.origin_input_ids), end)
        self.cache.evict_sliding_windows(req, end)

    def _write(self, req: Req, tokens: list[int], start: int, end: int) -> None:
        for position in range(start, end):
            self.kv[self._row(req, position)] = mark(tokens, position + 1)
            row = self._row_of_window(req, position)
            assert row > 0, "a token has no room in its window"
            self.windows[row] = mark(tokens, position + 1)
        self.states[int(req.kv.mamba_pool_idx)] = mark(tokens, end)

    def _row(self, req: Req, position: int) -> int:
        return int(self.pool.req_to_token[req.kv.req_pool_idx, position])

    def _row_of_window(self, req: Req, position: int) -> int:
        return int(self.allocator.full_to_swa_index_mapping[self._row(req, position)])

    def kv_to_be_had(self) -> int:
        """KV of all tokens; SGLang's adder says whether there is room in windows."""
        free = self.allocator.full_available_size() + self.cache.full_evictable_size()
        return int(free - self._promised())

    def check(self) -> None:
        """SGLang's invariants, the shadow tree's, and every row and slot is free, the tree's, or a
        running request's.
        """
        self.cache.sanity_check()
        tree, held = self.cache.tree_core, [req.kv for req in self.running if req.kv.holds_kv]
        own = sum(kv.kv_allocated_len - kv.cache_protected_len for kv in held)
        cached = tree.full_evictable_size() + tree.full_protected_size()
        assert self.allocator.full_available_size() + cached + own == self.sizes.kv
        own = sum(
            kv.kv_allocated_len
            - max(kv.cache_protected_len, kv.get_evicted_seqlen(ComponentType.SWA))
            for kv in held
        )
        cached = tree.swa_evictable_size() + tree.swa_protected_size()
        assert self.allocator.swa_available_size() + cached + own == self.sizes.kv_of_windows
        cached, own = self._held_states()
        assert self.free()[1] + cached + own == self.sizes.states


def mark(tokens: list[int], length: int) -> Mark:
    return hash(tuple(tokens[:length]))


def prompt(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(10, 1_000) for _ in range(length)]


def served(sizes: Sizes, policy: str = "reuse", chunk: int = 0, **more: Any) -> MarkedServer:
    return MarkedServer.on(sizes, options(policy), chunk, **more)


@buffers
@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("chunk", [0, 70])
def test_all_states_of_a_prefill_have_their_windows(
    chunk: int, one_pass: bool, buffers: dict[str, Any]
) -> None:
    """The third sibling hits where the second one branched, far before its end."""
    server = served(replace(ROOMY, **buffers), chunk=chunk, one_pass=one_pass)
    shared = prompt(200, seed=1)
    siblings = [shared + prompt(120, seed) for seed in (2, 3, 4)]
    hits = [server.serve(tokens, prompt(9, seed=5)) for tokens in siblings]
    assert hits[0] == 0 and hits[2] == 200
    assert server.serve(siblings[1], [1]) == 319
    server.check()


@buffers
def test_a_reply_is_hit_to_its_end(buffers: dict[str, Any]) -> None:
    server = served(replace(ROOMY, **buffers))
    tokens, reply = prompt(90, seed=1), prompt(50, seed=2)
    server.serve(tokens, reply)
    assert server.serve([*tokens, *reply, *prompt(30, seed=3)], [1]) == 90 + 49
    server.check()


@pytest.mark.parametrize("states", [1, 40])
def test_a_prompt_may_be_longer_than_all_windows(states: int) -> None:
    """There may be slots for states at the ends of its chunks, or none."""
    sizes = Sizes(kv=2_000, states=states, window=WINDOW, kv_of_windows=150)
    server = served(sizes, chunk=64)
    for seed in range(4):
        server.serve(prompt(800, seed), prompt(5, seed=9))
        server.check()


@buffers
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [0, 48])
@pytest.mark.parametrize("seed", range(2))
def test_what_is_resumed_from_is_right_when_memory_is_short(
    policy: str, chunk: int, seed: int, buffers: dict[str, Any]
) -> None:
    """KV, windows and states are each evicted now and then. Some hits remain, and all end where
    everything is as it was written.
    """
    source = random.Random(seed)
    more = 2 if buffers else 0  # slots of a running request
    server = served(replace(NARROW, states=NARROW.states + more, **buffers), policy, chunk)
    families = [prompt(220, seed=100 + k) for k in range(5)]
    hits = []
    for step in range(80):
        family = source.choice(families)
        tokens = family[: source.randrange(20, 220)] + prompt(source.randrange(1, 60), step % 7)
        req = server.begin(tokens)
        hits.append(int(req.prefix_len))
        server.prefill(req)
        server.check()
        if source.random() < 0.1:
            server.abort(req)
        else:
            server.decode(req, prompt(source.randrange(1, 40), step % 3))
            server.finish(req)
        server.check()
    assert 5 < sum(hit > 0 for hit in hits) < 80
    server.cache.evict(EvictParams(num_tokens=10**6, swa_num_tokens=10**6, mamba_num=10**6))
    server.check()
    assert server.allocator.full_available_size() == NARROW.kv
    assert server.allocator.swa_available_size() == NARROW.kv_of_windows
