"""An insertion that begins at the nodes a request holds leaves the tree that SGLang's leaves."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import Req

from sglang_hybrid.cache.tree.tree_core import HybridTreeCore
from tests.cache.backends import options
from tests.cache.driver import MAMBA, Server, Sizes
from tests.examples import examples

SIZES = {
    "states": Sizes(kv=600, states=12),
    "pages": Sizes(kv=640, states=24, page=4, extra_buffer=True, grid=4),
    "attention": Sizes(kv=600, states=0),
    "one memory": Sizes(kv=600, states=12, one_memory=True),
}


class Pair:
    """The same requests on our tree and on one into which SGLang alone inserts. grows: requests go
    on at the node that they hold; otherwise a whole path is inserted each time.
    """

    def __init__(self, sizes: Sizes, *, grows: bool) -> None:
        self.sizes = sizes
        self.servers = [Server.on(sizes, options("reuse"), 16) for _ in "ab"]
        for server in self.servers[grows:]:
            server.cache.publisher.growth.can_grow = lambda req: False
        theirs: Any = self.servers[1].cache.tree_core
        theirs.begin_insert = super(HybridTreeCore, theirs).begin_insert
        self.running: list[list[Req]] = []

    def begin(self, tokens: list[int]) -> None:
        reqs = [server.arrive(tokens) for server in self.servers]
        admitted = [server.admit(req) for server, req in zip(self.servers, reqs, strict=True)]
        assert admitted[0] == admitted[1]
        assert reqs[0].prefix_len == reqs[1].prefix_len
        if admitted[0]:
            self.running.append(reqs)

    def step(self, reqs: list[Req], answer: list[int], *, keep: bool) -> None:
        """A prefill step; after the last one the request is answered, or its client goes away."""
        done = [server.prefill_step(req) for server, req in zip(self.servers, reqs, strict=True)]
        assert done[0] == done[1]
        if not done[0]:
            return
        self.running.remove(reqs)
        for server, req in zip(self.servers, reqs, strict=True):
            if keep:
                server.decode(req, answer)
                server.finish(req)
            else:
                server.abort(req)

    def compare(self) -> None:
        first, second = (tree(server) for server in self.servers)
        assert first == second
        assert self.servers[0].free() == self.servers[1].free()
        for server in self.servers:
            server.check()
        for req in (req for reqs in self.running for req in reqs[:1] if req.kv.holds_kv):
            server = self.servers[0]
            path = server.cache.path_device_indices(req.last_node)
            row = server.pool.req_to_token[req.kv.req_pool_idx, : req.kv.cache_protected_len]
            assert row.tolist() == path.tolist(), "a request reads the KV that the tree keeps"


def tree(server: Server) -> Any:
    """Tokens of every node, and whether it has a state, as nested lists."""
    core: Any = server.cache.tree_core

    def of(node: Any) -> Any:
        has_state = bool(server.sizes.states) and node.component_data[MAMBA].value is not None
        below = sorted((of(child) for child in node.children.values()), key=repr)
        tokens = [] if node is core.root_node else list(node.key.token_ids)
        return [tokens, has_state, below]

    return of(core.root_node)


def starts_of_insertions(server: Server) -> list[int]:
    """A list that grows by the depth at which each insertion begins from now on, in tokens."""
    core: Any = server.cache.tree_core
    insert_below, starts = core.insert_below, []

    def noted(node: Any, depth: int) -> None:
        starts.append(depth)
        insert_below(node, depth)

    core.insert_below = noted
    return starts


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("name", SIZES)
@examples(3)
@given(st.integers(0, 10**9))
def test_it_is_the_tree_of_an_insertion_from_the_root(name: str, grows: bool, seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(SIZES[name], grows=grows)
    starts = starts_of_insertions(pair.servers[0])
    sequences: list[list[int]] = [[]]
    for _ in range(40):
        if rng.random() < 0.5 or not pair.running:
            base = rng.choice(sequences)
            tokens = base[: rng.randrange(len(base) + 1)]
            tokens = (tokens + [rng.randrange(3) for _ in range(rng.randrange(1, 40))])[:150]
            sequences.append(tokens)
            if len(pair.running) < 3:
                pair.begin(tokens)
        else:
            answer = [rng.randrange(3) for _ in range(rng.randrange(1, 8))]
            pair.step(rng.choice(pair.running), answer, keep=rng.random() < 0.8)
        if rng.random() < 0.3:
            pair.compare()
    pair.compare()
    event(f"insertions that began below the root: {any(starts)}")


def test_an_insertion_begins_at_what_the_request_holds() -> None:
    server = Server.on(SIZES["states"], options("reuse"), 16)
    starts = starts_of_insertions(server)
    server.serve(range(40), [7, 8])
    server.serve([*range(41), 9], [7])
    assert starts[0] == 0, "the first request finds nothing"
    assert {16, 39} <= set(starts), "its later steps and the second request go on below"


def test_a_path_stays_locked_while_its_checkpoint_is_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang gives its lock up first; each node would be free and be locked again."""
    server = Server.on(SIZES["states"], options("reuse"))
    server.serve(range(40), [1])
    req = server.begin([*range(40), 7, 8, 9])
    held = server.cache.shadow_tree.record(server.cache.tree_core.node_by_id(req.last_node))
    freed: list[Any] = []
    lock = server.cache.shadow_tree.tree.lock

    def noted(node: Any, *, kv: bool, state: bool) -> None:
        if not kv:
            freed.append(node)
        lock(node, kv=kv, state=state)

    monkeypatch.setattr(server.cache.shadow_tree.tree, "lock", noted)
    assert server.prefill_step(req)
    assert held.kv_locked and held not in freed
    server.decode(req, [1])
    server.finish(req)
    assert held in freed and not held.kv_locked
    server.check()
