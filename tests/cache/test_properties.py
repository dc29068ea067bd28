"""Any order of requests, probes, holds, evictions, aborts and flushes, step by step, against plain
models: a set of prefixes for what is stored, `tests/core/plain.py` for every victim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_hybrid.core.records.nodes import Node
from sglang_hybrid.core.victims.eviction import Gdsf
from sglang_hybrid.core.victims.pool import Pool
from sglang_hybrid.storage.codecs.codecs import Codec
from tests.cache.backends import coding, match_prefix, options
from tests.cache.driver import Server, Sizes, build_cache
from tests.core.plain import plain_victim
from tests.examples import DEEP, examples

CONFIGS = {
    "attention only": Sizes(states=0, kv=192, rows=6, context=128),
    "attention only, pages of 4": Sizes(states=0, kv=192, page=4, rows=6, context=128),
    "no_buffer": Sizes(states=7, kv=192, rows=6, context=128),
    "extra_buffer, pages of 4": Sizes(
        states=14, kv=256, page=4, extra_buffer=True, grid=4, rows=6, context=128
    ),
    "extra_buffer, pages of 16": Sizes(
        states=14, kv=640, page=16, extra_buffer=True, grid=16, rows=6, context=256
    ),
    "one memory": Sizes(states=7, kv=192, rows=6, context=128, one_memory=True, state_tokens=20),
    "one memory, extra_buffer, pages of 4": Sizes(
        states=14,
        kv=256,
        page=4,
        extra_buffer=True,
        grid=4,
        rows=6,
        context=128,
        one_memory=True,
        state_tokens=12,
    ),
}
CONFIGS |= {
    "spilling": replace(CONFIGS["one memory"], one_memory=False, spills=True),
    "spilling, extra_buffer, pages of 4": replace(
        CONFIGS["one memory, extra_buffer, pages of 4"], one_memory=False, spills=True
    ),
}
CONFIGS |= {
    "parking": replace(CONFIGS["spilling"], states=24, kv=112),
    "parking, extra_buffer, pages of 4": replace(
        CONFIGS["spilling, extra_buffer, pages of 4"], states=32, kv=160
    ),
}
CODED = {
    f"coded, {name}": replace(CONFIGS[name], row=16)
    for name in ("no_buffer", "extra_buffer, pages of 4", "one memory")
}
POLICIES = ("reuse", "marconi", "seglen", "gdsf", "lru", "sglang-lru")

number = st.integers(0, 10**6)
operation = st.one_of(
    st.tuples(st.sampled_from(["arrive"] * 4), number, number, number),
    st.tuples(st.sampled_from(["step"] * 4 + ["finish"] * 4), number, number, number),
    st.tuples(st.sampled_from(["abort", "retract", "look up", "match"]), number, number, number),
    st.tuples(st.sampled_from(["hold", "let go", "evict kv"]), number, number, number),
    st.tuples(st.sampled_from(["evict states", "evict both", "flush"]), number, number, number),
)


class Stored:
    """The content of the tree, as plain prefixes: where there is KV, and where there is a state."""

    def __init__(self, cache: Any, has_states: bool) -> None:
        self.has_states = has_states
        self.page = cache.page_size
        self.kv: set[tuple[int, ...]] = set()
        self.states: set[tuple[int, ...]] = set()
        shadow_tree = cache.shadow_tree
        for name in ("on_add", "on_remove", "on_state_gain", "on_state_loss", "reset"):
            setattr(shadow_tree, name, self._also(getattr(self, name), getattr(shadow_tree, name)))

    @staticmethod
    def _also(mine: Any, its: Any) -> Any:
        def both(*args: Any) -> None:
            mine(*args)
            its(*args)

        return both

    def on_add(self, node: Any) -> None:
        path = _path(node)
        self.kv |= self._pages(path, len(node.key))

    def _pages(self, path: tuple[int, ...], tokens: int) -> set[tuple[int, ...]]:
        return {path[:n] for n in range(len(path), len(path) - tokens, -self.page)}

    def on_remove(self, node: Any) -> None:
        path = _path(node)
        gone = self._pages(path, len(node.key))
        assert gone <= self.kv, "KV was removed that was not there"
        assert path not in self.states, "a node left with its state"
        self.kv -= gone

    def on_state_gain(self, node: Any, kind: Any) -> None:
        assert _path(node) not in self.states, "a node was given a second state"
        self.states.add(_path(node))

    def on_state_loss(self, node: Any) -> None:
        self.states.remove(_path(node))

    def reset(self, root: Any) -> None:
        self.kv.clear()
        self.states.clear()

    def lookup(self, tokens: list[int]) -> tuple[int, int]:
        """The tokens with KV, and those that a request can skip."""
        kv = 0
        while kv + self.page <= len(tokens) and tuple(tokens[: kv + self.page]) in self.kv:
            kv += self.page
        if not self.has_states:
            return kv, kv
        hits = (n for n in range(kv, 0, -1) if tuple(tokens[:n]) in self.states)
        return kv, next(hits, 0)


def _path(node: Any) -> tuple[int, ...]:
    tokens: list[int] = []
    while node.key is not None and node.parent is not None:
        tokens = list(node.key.raw_token_ids()) + tokens
        node = node.parent
    return tuple(tokens)


def compare_victims(pool: Pool, cache: Any) -> None:
    """Assert from now on that every victim of `pool` is the one that the plain twin names."""
    choose = pool.victim
    if isinstance(pool.policy, Gdsf):  # its twin remembers: tests/core/test_eviction.py
        return

    def victim(*, last_resort: bool = False) -> Node | None:
        expected = plain_victim(
            cache.shadow_tree.tree, pool.scarce, pool.cost, pool.policy, last_resort=last_resort
        )
        chosen = choose(last_resort=last_resort)
        assert chosen is expected, (chosen, expected)
        event("a victim was compared")
        return chosen

    pool.victim = victim  # type: ignore[method-assign]


class Run:
    """One example: a server, requests at all stages, holds, and the plain models."""

    def __init__(self, sizes: Sizes, policy: str, admission: str, chunk: int, **more: Any) -> None:
        self.sizes = sizes
        flags = options(policy, admission, hybrid_min_branch_tokens=3)
        self.cache: Any = build_cache(sizes, flags, **more)
        self.server = Server(self.cache, sizes, chunk)
        self.start = self.server.free()
        self.prefilling: list[Req] = []
        self.decoding: list[Req] = []
        self.waiting: list[Req] = []
        self.holds: list[Any] = []
        self.stored: Stored | None = None
        if self.cache.shadow_tree is not None:
            self._watch()

    def _watch(self) -> None:
        self.stored = Stored(self.cache, self.sizes.states > 0)
        self._compare()

    def _compare(self) -> None:
        for pool in {self.cache.shadow_tree.kv_pool, self.cache.shadow_tree.state_pool}:
            compare_victims(pool, self.cache)

    def tokens(self, a: int, b: int) -> list[int]:
        """A prompt that shares a prefix with others: few families, few forks, few tails."""
        longest = 6 * self.sizes.page if self.sizes.page > 1 else 24
        prefix_wait = [a % 3] + [10 + a % 3] * (longest - 1)
        cut = 1 + b % longest
        tail = [100 + (a // 3) % 3] * (1 + (b // longest) % longest)
        return (prefix_wait[:cut] + tail)[: self.sizes.context // 2]

    def do(self, name: str, a: int, b: int, c: int) -> None:
        page = self.sizes.page
        if name == "arrive":
            req = self.waiting.pop() if self.waiting and c % 2 else None
            if req is None:
                req = self.server.arrive(self.tokens(a, b), stamp=float(c % 50) * (c % 3 > 0))
            expected = self._lookup(list(req.origin_input_ids + req.output_ids)[:-1])
            if self.server.admit(req):
                self.prefilling.append(req)
                if expected is not None:
                    # A hit may be given up for want of a slot, never lengthened.
                    assert req.prefix_len in (expected[1], 0)
                self._step(req)
            else:
                self.waiting = [*self.waiting[-2:], req]
        elif name == "step" and self.prefilling:
            self._step(self.prefilling[a % len(self.prefilling)])
        elif name == "finish" and self.decoding:
            req = self.decoding.pop(a % len(self.decoding))
            answer = [200 + b % 3] * (1 + c % (2 * page + 3))
            if self.server.kv_to_be_had() >= len(answer) + page:
                self.server.decode(req, answer)
            self.server.finish(req)
        elif name == "abort" and self.prefilling + self.decoding:
            self._drop((self.prefilling + self.decoding)[a % len(self.server.running)])
        elif name == "retract" and self.decoding:
            req = self.decoding.pop(a % len(self.decoding))
            self.waiting = [*self.waiting[-2:], self.server.retract(req)]
        elif name == "look up":
            req = self.server.arrive(self.tokens(a, b))
            self.server.look_up(req)
            self.server.send_back(req)
        elif name in ("match", "hold"):
            self._match(self.tokens(a, b), hold=name == "hold")
        elif name == "let go" and self.holds:
            self.cache.unlock(self.holds.pop(a % len(self.holds)))
        elif name.startswith("evict"):
            kv = 0 if name == "evict states" else 1 + b % 40
            states = 0 if name == "evict kv" or not self.sizes.states else 1 + c % 3
            free = self.server.free()
            evictable = self.cache.full_evictable_size(), self.cache.mamba_evictable_size()
            result = self.cache.evict(EvictParams(num_tokens=kv, mamba_num=states))
            if self.sizes.spills:  # a move may be enough
                freed = (now - then for now, then in zip(self.server.free(), free, strict=True))
                wanted = zip(freed, (kv, states), evictable, strict=True)
                assert all(got >= min(asked, most) for got, asked, most in wanted if asked)
                return
            assert result.num_tokens_evicted >= min(kv, evictable[0])
            assert result.mamba_num_evicted >= min(states, evictable[1])
            if self.sizes.one_memory:
                return
            assert self.server.free()[0] - free[0] == result.num_tokens_evicted
            assert self.server.free()[1] - free[1] == result.mamba_num_evicted
        elif name == "flush" and not self.server.running and not self.holds:
            self.server.flush()
            assert self.server.free() == self.start
            if self.cache.shadow_tree is not None:
                self._compare()

    def end(self) -> None:
        """Whatever happened, everything can be given back."""
        for req in list(self.server.running):
            self._drop(req)
        for hold in self.holds:
            self.cache.unlock(hold)
        self.server.check()
        self.cache.evict(EvictParams(num_tokens=10**6, mamba_num=10**6))
        self.server.check()
        assert self.server.free() == self.start

    def _drop(self, req: Req) -> None:
        for stage in (self.prefilling, self.decoding):
            if req in stage:
                stage.remove(req)
        self.server.abort(req)

    def _match(self, tokens: list[int], *, hold: bool) -> None:
        expected = self._lookup(tokens)
        result = match_prefix(self.cache, tokens)
        if expected is not None:
            assert (result.full_kv_hit_length, result.device_prefix_len) == expected
        if hold and len(self.holds) < 3:
            self.holds.append(self.cache.lock(result.last_device_node))
            if self.server.kv_to_be_had() < 0:  # running requests were promised this KV
                self.cache.unlock(self.holds.pop())

    def _step(self, req: Req) -> None:
        if self.server.prefill_step(req):
            self.prefilling.remove(req)
            self.decoding.append(req)

    def _lookup(self, tokens: list[int]) -> tuple[int, int] | None:
        return None if self.stored is None else self.stored.lookup(tokens)


@pytest.mark.parametrize("config", [*CONFIGS, *CODED])
def test_nothing_is_lost_freed_twice_or_chosen_wrongly(config: str) -> None:
    @settings(examples(20), derandomize=DEEP == 1, suppress_health_check=list(HealthCheck))
    @given(
        policy=st.sampled_from(POLICIES),
        admission=st.sampled_from(["judicious", "all"]),
        chunk=st.sampled_from([0, 16]),
        operations=st.lists(operation, min_size=30, max_size=80),
    )
    def property(policy: str, admission: str, chunk: int, operations: list[Any]) -> None:
        sizes, codec = (CONFIGS | CODED)[config], Codec.INT8 if config in CODED else Codec.EXACT
        ours_only = sizes.shares or config in CODED  # SGLang's order knows pools as they are
        assume(not (ours_only and policy == "sglang-lru"))
        full_hits = sizes.page == 1 and sizes.states > 0
        with coding(codec):
            run = Run(sizes, policy, admission, chunk, full_hits=full_hits)
        for step in operations:
            run.do(*step)
            run.server.check()
        run.end()

    property()
