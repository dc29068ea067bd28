"""Host memory below the device: whatever is demoted, loaded, forgotten or copied, in any order,
every request resumes from what belongs to its prefix.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

import pytest
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_hybrid.cache.tiers.host_room import share_host_room
from sglang_hybrid.core.tiers.places import copies_of
from sglang_hybrid.core.tiers.rates import Link, Tier
from sglang_hybrid.extensions.cpu.ops import transfer_streams
from sglang_hybrid.serving.startup import StartupError
from tests.cache import tiers
from tests.cache.backends import options
from tests.cache.driver import ONE_MEMORY, Sizes
from tests.cache.tiers import TieredServer, build_tiered_cache, set_speeds
from tests.examples import seeds

SIZES = {
    "two pools": Sizes(states=7, kv=160, rows=6, context=128),
    "one memory": Sizes(states=7, kv=160, rows=6, context=128, one_memory=True, state_tokens=20),
    "pages of 4": Sizes(states=14, kv=256, page=4, extra_buffer=True, grid=4, rows=6, context=128),
    "attention only": Sizes(states=0, kv=160, rows=6, context=128),
    "one memory, large states": Sizes(states=5, kv=160, rows=6, context=128, **ONE_MEMORY),
}
WRITES = ("write_through", "write_through_selective", "write_back")


def serve_at_random(server: TieredServer, seed: int, requests: int) -> None:
    """Requests that continue one another's prompts, interleaved with everything else."""
    source = random.Random(seed)
    stems = [[source.randrange(5, 90) for _ in range(60)] for _ in range(4)]
    waiting: list[list[int]] = []
    for number in range(requests):
        stem = source.choice(stems)
        waiting.append(stem[: source.randrange(8, 50)] + [100 + number] * source.randrange(1, 9))
        if source.random() < 0.4:
            waiting.append(list(waiting[-1]))
    while waiting or server.running:
        choice = source.random()
        if waiting and choice < 0.4 and len(server.running) < 2:
            req = server.arrive(waiting[0], number)
            if server.admit(req):
                waiting.pop(0)
        elif server.running:
            req = source.choice(server.running)
            if req.output_ids or server.prefill_step(req):
                if source.random() < 0.8:
                    answer = [source.randrange(5, 90) for _ in range(source.randrange(1, 6))]
                    server.decode(req, answer)
                    waiting += [server._tokens(req)] if source.random() < 0.2 else []
                    server.finish(req)
                else:
                    server.abort(req)
        if source.random() < 0.7:
            server.poll()
        server.check()
    server.poll()
    server.check()


SLOW = pytest.mark.slow
QUICK = ("one memory", "one memory, large states")
LINKS = [
    pytest.param(None, id="prompt copies", marks=SLOW),
    pytest.param(Link(1e9, 2e-3), id="copies that take time"),
]


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest) -> Iterator[None]:
    transfer_streams.simulate(request.param)
    yield
    transfer_streams.simulate(None)


@pytest.mark.usefixtures("link")
@pytest.mark.parametrize("writes", WRITES)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(sizes, id=name, marks=() if name in QUICK else SLOW)
        for name, sizes in SIZES.items()
    ],
)
def test_every_request_resumes_from_its_own_prefix(sizes: Sizes, writes: str) -> None:
    loads = 0
    for seed in seeds(2):
        server = TieredServer.on(sizes, options("reuse"), 0 if seed % 2 else 16, policy=writes)
        if sizes.one_memory:  # its states are large
            set_speeds(server.cache, tiers.SLOW)
        serve_at_random(server, seed, 25)
        loads += server.loads
    if sizes.states or writes != "write_through_selective":  # few KV nodes are used twice there
        assert loads > 0, "nothing was loaded"


def test_a_host_that_the_machine_has_no_memory_for() -> None:
    with pytest.raises(StartupError, match=r"^--hicache-ratio 1e\+12 asks for .* can be had"):
        build_tiered_cache(Sizes(), options("reuse"), ratio=1e12)


def test_a_host_whose_size_sglang_chooses() -> None:
    """Neither --hicache-ratio nor --hicache-size is given."""
    cache = build_tiered_cache(Sizes(), options("reuse"))
    arguments = ServerArgs(model_path="dummy")
    assert arguments.hicache_ratio is None
    set_global_server_args_for_scheduler(arguments)
    share_host_room(cache, cache.cost)
    assert cache.req_to_token_pool.mamba_pool.host_capacity_tokens > 0


def test_a_model_without_kv_has_no_host_tier() -> None:
    """Mamba alone. SGLang divides by the size of its KV."""
    cache = build_tiered_cache(Sizes(), options("reuse"))
    cache.token_to_kv_pool_allocator.get_kvcache().full_kv_pool.layer_num = 0
    with pytest.raises(StartupError, match="this model has no KV; leave the flag out"):
        share_host_room(cache, cache.cost)


@pytest.mark.parametrize("writes", ["write_through", "write_back"])
@pytest.mark.parametrize("name", ["two pools", "one memory"])
def test_nodes_that_only_the_host_has(name: str, writes: str) -> None:
    """Nodes that SGLang reads from disk come into the tree so: at the root, and where it cuts a
    node.
    """
    server = TieredServer.on(SIZES[name], options("reuse"), policy=writes)
    cache, tree = server.cache, server.cache.tree_core
    one, two = list(range(5, 35)), [*range(5, 20), *range(50, 60)]
    for tokens in (one, two):
        host = cache.cache_controller.mem_pool_host.alloc(len(tokens))
        hashes = [f"{token:064x}" for token in tokens]
        key = RadixKey(array("q", tokens))
        result = tree.insert_host(tree.root_node.id, key, host, hashes)
        assert not result.host_insert_dropped
        cache.cache_controller.mem_pool_host.free(host[: result.prefix_len])
        server.check()
    records = [record for record in cache.shadow_tree.tree.walk() if record.parent is not None]
    assert sorted(record.depth for record in records) == [15, 25, 30]
    for record in records:
        assert copies_of(record).has_kv(Tier.HOST) and not copies_of(record).has_kv(Tier.DEVICE)
