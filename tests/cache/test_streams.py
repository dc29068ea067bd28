"""The scheduler's thread on a pretended GPU: what it waits for, and what streams keep in order.

`REMAINS` lists every call of it that a real device might make wait, in SGLang's code and in ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocator.unified_sub_pool import MultiEndedAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_hybrid.cache import host_tier
from sglang_hybrid.cache.host_tier import HostTierCache
from sglang_hybrid.cache.request import segments as modular
from sglang_hybrid.cache.request.positions import shifted
from sglang_hybrid.cache.state_slots import parked_kv, spilled_states
from sglang_hybrid.cache.tiers.ahead_loads import AheadLoads
from sglang_hybrid.cache.tiers.background_copies import Offload
from sglang_hybrid.checkpoints.tracks import PrefillTracks, StateTracks
from sglang_hybrid.serving import device_streams
from sglang_hybrid.serving.requests.cache_fields import Imported
from sglang_hybrid.serving.stored_keys import composed_key, segment_key
from sglang_hybrid.storage.codecs import in_use
from sglang_hybrid.storage.codecs.codecs import Codec
from sglang_hybrid.storage.codecs.coded_rows import CodecPlan, CodedRows
from tests.cache.backends import options
from tests.cache.driver import ONE_MEMORY, Server, Sizes, build_cache
from tests.cache.pretended_gpu import PACKAGES, Gpu, OnDevice
from tests.cache.pretended_server import (
    PretendedServer,
    lending_server,
    plainly,
    pretend,
    pretended_server,
)
from tests.cache.test_tiers import serve_at_random
from tests.examples import seeds
from tests.extensions.lab.simulation.tuner.traffic import conversations, requests, templates

SIZES = Sizes(states=7, kv=160, rows=6, context=128)
IN_ONE_MEMORY = Sizes(states=7, kv=160, rows=6, context=128, **ONE_MEMORY)
KV_ONLY = Sizes(states=0, kv=160, rows=6, context=128)
SLOW = pytest.mark.slow

_UNIFIED = "sglang/srt/mem_cache/unified_radix_cache.py"
_CONTROLLER = "sglang/srt/managers/cache_controller.py"
_STATES = "sglang/srt/mem_cache/pool_host/mamba.py"
UNPINNED = "a copy of memory that is not pinned"

REMAINS = {
    f"Event.synchronize (reached) in writing_check ({_UNIFIED})": (
        "the copy has arrived: SGLang asked the event before, on all ranks"
    ),
    f"Event.synchronize (reached) in loading_check ({_UNIFIED})": "the same, of a load",
    f"{UNPINNED} in move_indices ({_CONTROLLER})": (
        "eight bytes per token or state, handed over at once by the driver up to 64 KiB; beyond "
        "that the host waits for the scheduler's stream, which itself never waits for copies"
    ),
    f"{UNPINNED} in backup_from_device_all_layer ({_STATES})": "the same, of states' slots",
}
"""Work that the scheduler's thread still does, and why it does not matter."""

WITH_DIRECT_COPIES = {
    f"a copy between host and device in move_indices ({_CONTROLLER})": (
        "torch copies row by row and needs the rows' numbers on the host, which waits for what the "
        "scheduler's stream was given: indices, and the forward's use of them"
    ),
}


@pytest.fixture(autouse=True)
def exact_again() -> Iterator[None]:
    yield
    in_use.set_codecs(CodecPlan())


def watched(monkeypatch: pytest.MonkeyPatch, writes: str, **more: Any) -> PretendedServer:
    """Random requests are served while waits are noted."""
    gpu = pretend(monkeypatch, at_once=True)
    with gpu.watching():
        at = pretended_server(gpu, SIZES, options("reuse"), 16, policy=writes, **more)
        gpu.waits.clear()  # of the start
        serve_at_random(at, 0, 40)
        settle(at)
    return at


def settle(at: PretendedServer) -> None:
    """All that was begun is done and acknowledged."""
    for _ in range(3):
        at.gpu.poll(finish=True)
        at.poll()


@pytest.mark.parametrize("writes", ["write_through", "write_back"])
def test_the_scheduler_waits_for_nothing_that_is_not_listed(
    monkeypatch: pytest.MonkeyPatch, writes: str
) -> None:
    victims = copied_victims(monkeypatch)
    at = watched(monkeypatch, writes)
    assert {str(wait) for wait in at.gpu.waits} == REMAINS.keys()
    assert at.gpu.schedule.waits == 0, "the scheduler's own stream waits"
    info, stats = at.cache.tiers_info(), at.cache.stats
    assert at.loads > 5 and info["written_bytes"] > 0 and sum(stats.admitted.values()) > 20
    assert victims, "no victim was copied on its way out"


def test_by_sglangs_direct_copies_it_waits_for_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's `--hicache-io-backend direct` waits for indices; `kernel`, the default, does not."""
    at = watched(monkeypatch, "write_back", layout="page_first_direct")
    found = {str(wait) for wait in at.gpu.waits} - REMAINS.keys()
    assert found == WITH_DIRECT_COPIES.keys()
    assert at.gpu.schedule.waits == 0 and at.loads > 5


def test_smaller_copies_wait_for_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    in_use.set_codecs(CodecPlan.uniform(Codec.BF16))  # that is what the pools' numbers are
    at = watched(monkeypatch, "write_back")
    pools = {type(entry.host_pool).__name__ for entry in at.cache.host_pool_group.entries}
    assert pools == {"CodedKVPool", "CodedStatePool"}
    assert {str(wait) for wait in at.gpu.waits} <= REMAINS.keys()
    assert at.gpu.schedule.waits == 0 and at.loads > 5


@pytest.mark.parametrize("codec", list(Codec))
def test_rows_are_encoded_and_decoded_on_the_device(
    monkeypatch: pytest.MonkeyPatch, codec: Codec
) -> None:
    gpu = pretend(monkeypatch, at_once=True)
    rows = CodedRows([[((4, 32), torch.float32), ((64, 3), torch.float32)]], (codec,))
    with gpu.watching():
        values = [torch.ones(5, *part.shape, device="cuda") for part in rows.layers[0]]
        gpu.waits.clear()
        content = rows.encode(0, values)
        back = rows.decode(0, content)
    assert not gpu.waits
    assert all(isinstance(one, OnDevice) for one in (content, *back))


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(kv=3_200, states=6, grid=64),
        Sizes(kv=3_200, states=0),
        Sizes(kv=3_200, states=12, page=16, extra_buffer=True, grid=64),
        Sizes(kv=3_200, states=6, spills=True, state_tokens=10),
        Sizes(kv=1_600, states=60, spills=True, state_tokens=40),
    ],
    ids=["states", "attention only", "pages of 16", "states in KV", "KV in slots"],
)
def test_a_cache_without_a_host_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, sizes: Sizes
) -> None:
    gpu = pretend(monkeypatch, at_once=True)
    with gpu.watching(), envs.SGLANG_DISABLE_FUSED_MAMBA_SLOT_OPS.override(True):
        cache: Any = build_cache(sizes, options("reuse"), device="cuda")
        server = Server(cache, sizes, 64)
        gpu.waits.clear()
        hits = server.play(requests(templates(30) + conversations(30)))
        cache.server_info()
    assert not gpu.waits and gpu.schedule.waits == 0
    assert sum(hits) > 0 and sum(cache.stats.evicted.values()) > 0
    assert bool(moved(cache)) is sizes.spills


def moved(cache: Any) -> int:
    """Moves between two pools that lend each other room."""
    spilled, parked = cache.spilled, cache.parked
    return 0 if spilled is None else spilled.spilled + spilled.fetched + parked.brought_back


def copied_victims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with the nodes whose copies are begun when the device gives them up."""
    begun: list[int] = []
    copy_down = HostTierCache._copy_down

    def note(cache: Any, node_ids: list[int], write_back: bool = False) -> None:
        if write_back:
            begun.extend(node_ids)
        copy_down(cache, node_ids, write_back)

    monkeypatch.setattr(HostTierCache, "_copy_down", note)
    return begun


PLANTED = {
    "item": "cache.req_to_token_pool.req_to_token[0, 0].item()",
    "tolist": "cache.token_to_kv_pool_allocator.free_pages.tolist()",
    "__bool__": "bool(cache.token_to_kv_pool_allocator.free_pages.any())",
    "a copy between host and device": "cache.req_to_token_pool.req_to_token[0].cpu()",
    "tensor of host memory": "torch.tensor([1, 2], device=cache.token_to_kv_pool_allocator.device)",
    "__getitem__ by numbers of the host": "cache.req_to_token_pool.req_to_token[0, [1, 2]]",
    "nonzero": "cache.req_to_token_pool.req_to_token[0].nonzero()",
    "__getitem__ by a mask": (
        "cache.req_to_token_pool.req_to_token[0][cache.req_to_token_pool.req_to_token[0] > 1]"
    ),
    "synchronize": "torch.cuda.synchronize()",
    "Stream.synchronize": "torch.cuda.current_stream().synchronize()",
    "Event.synchronize": (
        "for ack in cache.cache_controller.ack_write_queue: ack.finish_event.synchronize()"
    ),
}


def test_waits_that_somebody_adds_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are added to the step that copies in the background."""
    code = "def wait(cache):\n" + "".join(f"    {line}\n" for line in PLANTED.values())
    names: dict[str, Any] = {"torch": torch}
    exec(compile(code, str(PACKAGES["sglang_hybrid"] / "cache/planted.py"), "exec"), names)
    step = Offload.step

    def step_and_wait(offload: Any) -> None:
        step(offload)
        names["wait"](offload._cache)

    monkeypatch.setattr(Offload, "step", step_and_wait)
    at = watched(monkeypatch, "write_back")
    found = {str(wait) for wait in at.gpu.waits} - REMAINS.keys()
    assert found >= {f"{what} in wait (sglang_hybrid/cache/planted.py)" for what in PLANTED}


# The order of streams.


@pytest.mark.parametrize("writes", ["write_through", "write_back"])
@pytest.mark.parametrize(
    "sizes",
    [
        SIZES,
        pytest.param(IN_ONE_MEMORY, id="one memory"),
        pytest.param(KV_ONLY, id="attention only", marks=SLOW),
        pytest.param(
            Sizes(states=14, kv=256, page=4, extra_buffer=True, grid=4, rows=6, context=128),
            id="pages of 4",
            marks=SLOW,
        ),
    ],
)
def test_whatever_streams_do_late_requests_resume_from_their_own_prefix(
    monkeypatch: pytest.MonkeyPatch, writes: str, sizes: Sizes
) -> None:
    assert sum(serve_late(monkeypatch, writes, seed, sizes).loads for seed in seeds(2)) > 0


def serve_late(
    monkeypatch: pytest.MonkeyPatch,
    writes: str,
    seed: int,
    sizes: Sizes = SIZES,
    **more: Any,
) -> PretendedServer:
    gpu, chunk = pretend(monkeypatch, seed=seed), 0 if seed % 2 else 16
    with gpu.watching():
        at = pretended_server(gpu, sizes, options("reuse"), chunk, policy=writes, **more)
        serve_at_random(at, seed, 25)
        settle(at)
    return at


def without_order_before_clearing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a victim are cleared while they are copied to the host."""
    copy, order = HostTierCache.copy_before_eviction, device_streams.order_behind

    def copied(cache: Any, node: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(host_tier, "order_behind", forwards_only)
            copy(cache, node)

    def forwards_only(event: Any, *streams: Any) -> None:
        if streams:
            order(event, *streams)

    monkeypatch.setattr(HostTierCache, "copy_before_eviction", copied)


def without_order_before_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MultiEndedAllocator, "_wait_hicache_transfers", lambda pool: None)


@pytest.mark.parametrize("mistake", [without_order_before_clearing, without_order_before_moves])
def test_rows_of_one_memory_are_cleared_and_moved_in_order(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Both wait for copies of what was there; a mistake in either order is seen."""
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match=r"other tokens|another prefix"):
        for seed in range(24):
            serve_late(monkeypatch, "write_back", seed, IN_ONE_MEMORY)


def test_without_overlap_scheduling_the_order_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards and indices have one stream."""
    served = [serve_late(monkeypatch, "write_back", seed, overlap=False) for seed in seeds(2)]
    assert sum(at.loads for at in served) > 0
    without_order_behind_copies(monkeypatch)
    with pytest.raises(AssertionError, match=r"other tokens|another prefix"):
        for seed in range(12):
            serve_late(monkeypatch, "write_back", seed, overlap=False)


def without_order_behind_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "order_behind", lambda *event: None)


def without_a_lock_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    track = UnifiedRadixCache._track_write_through_node
    monkeypatch.setattr(HostTierCache, "_track_write_through_node", track)


@pytest.mark.parametrize("mistake", [without_order_behind_copies, without_a_lock_on_the_host])
def test_what_is_out_of_order_is_found(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mistake(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(8):
            serve_late(monkeypatch, "write_back", seed)


@pytest.mark.parametrize("waits", [True, False])
def test_a_batch_waits_on_the_device_for_the_loads_of_others(
    monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    """Its load was begun before, for it or for somebody else."""
    if not waits:
        theirs = UnifiedRadixCache.ready_to_load_host_cache
        monkeypatch.setattr(HostTierCache, "ready_to_load_host_cache", theirs)
    gpu = pretend(monkeypatch)
    with gpu.watching():
        at = pretended_server(gpu, SIZES, options("reuse", hybrid_offload_watermark=1.0))
        prompt = list(range(100, 130))
        serve(at, prompt)
        settle(at)
        at.cache.evict(EvictParams(num_tokens=10**6, mamba_num=10**6))
        cache = at.cache
        ahead = AheadLoads(cache, cache.shadow_tree, cache.slots, cache.cost)
        assert ahead.begin_load(at.probe_node([*prompt, 3, 4])) > 0
        gpu.waits.clear()
        req = at.begin([*prompt, 3, 4])
        assert req.prefix_len >= len(prompt)
        assert at.loads == 0 and at.cache.cache_controller.ack_load_queue
        assert not [wait for wait in gpu.waits if str(wait) not in REMAINS]
        if waits:
            gpu.forwards.run()
        else:
            with pytest.raises(AssertionError, match=r"other tokens|another prefix"):
                gpu.forwards.run()


def serve(at: PretendedServer, tokens: list[int]) -> None:
    req = at.begin(tokens)
    at.complete(req, [3])


@pytest.mark.parametrize("ordered", [True, False])
def test_segments_are_copied_behind_the_forward_that_writes_them(
    monkeypatch: pytest.MonkeyPatch, *, ordered: bool
) -> None:
    """A prompt of a module that was just computed: its rows come with what a forward under way
    still writes to them.
    """
    if not ordered:
        monkeypatch.setattr(modular, "on_stream", lambda *used: plainly())
    gpu = pretend(monkeypatch)
    with gpu.watching():
        at = pretended_server(gpu, KV_ONLY, options("reuse"))
        gpu.waits.clear()
        own = composed_key("a", "b")
        segment, key = list(range(50, 70)), segment_key("a", 0)
        req = at.begin(segment, extra_key=key)
        assert not at.prefill_step(req)  # launched
        done = gpu.forwards.done
        at.cache.checkpoint_into_tree(req, up_to=len(segment))
        assert gpu.forwards.done == done, "the forward was to be under way"
        other = at.arrive([*segment, 1])
        prompt = RadixKey(other.origin_input_ids, own)
        asked = Imported(((0, len(segment)),), len(segment), "a")
        assert at.cache.modular_prompts()._compose(other, prompt, asked).composed == len(segment)
        assert not gpu.waits and gpu.schedule.waits == 0
        gpu.forwards.run()
        found, _ = at.cache.modular_prompts()._lookup(prompt.token_ids[: len(segment)], prompt, own)
        source, _ = at.cache.modular_prompts()._lookup(
            prompt.token_ids[: len(segment)], prompt, key
        )
        with plainly():
            same = all(torch.equal(rows[found.long()], rows[source.long()]) for rows in at._rows)
        assert same is ordered


LENDING = {
    "states in KV": Sizes(states=5, kv=160, rows=6, context=128, spills=True, state_tokens=10),
    "KV in slots": Sizes(states=24, kv=160, rows=6, context=128, spills=True, state_tokens=10),
}
"""Two pools that lend each other room, as a GPU has them by default; one of which is too small."""


def lend_late(monkeypatch: pytest.MonkeyPatch, seed: int, sizes: Sizes) -> PretendedServer:
    gpu, chunk = pretend(monkeypatch, seed=seed), 0 if seed % 2 else 16
    with gpu.watching():
        at = lending_server(gpu, sizes, options("reuse"), chunk)
        gpu.waits.clear()  # of the start
        serve_at_random(at, seed, 25)
        gpu.forwards.run()
    return at


@pytest.mark.parametrize("name", LENDING)
def test_what_two_pools_lend_each_other_is_moved_between_forwards(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Copies are in the forwards' stream, however late these are; the host waits for nothing."""
    served = [lend_late(monkeypatch, seed, LENDING[name]) for seed in seeds(6)]
    assert all(moved(at.cache) for at in served)
    assert not any(at.gpu.waits for at in served)


@pytest.mark.parametrize(
    ("name", "module"), zip(LENDING, (spilled_states, parked_kv), strict=True), ids=LENDING
)
def test_moves_in_another_stream_are_found(
    monkeypatch: pytest.MonkeyPatch, name: str, module: Any
) -> None:
    monkeypatch.setattr(module, "on_stream", lambda *_: contextlib.nullcontext())
    with pytest.raises(AssertionError, match=r"other tokens|another prefix"):
        for seed in range(8):
            lend_late(monkeypatch, seed, LENDING[name])


# What the scheduler's thread prepares of a forward.


def test_tensors_of_a_forward_are_made_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = pretend(monkeypatch, at_once=True)
    with gpu.watching():
        slots = torch.tensor([4, 5, 6]).pin_memory().to("cuda", non_blocking=True)
        indices, bounds = slots[:2].int(), slots.cumsum(0).int()
        gpu.waits.clear()
        tracks = PrefillTracks(
            StateTracks([0, 1, 1], [6, 3, 9], slots), [2, 0], [4, 9], slots, indices, bounds
        )
        forward = SimpleNamespace(
            positions=slots.repeat(3), extend_seq_lens=slots[:2], forward_mode=None
        )
        reqs = [SimpleNamespace(position_offset=10), SimpleNamespace(position_offset=0)]
        moved = shifted(forward, SimpleNamespace(reqs=reqs))
    assert isinstance(tracks.targets.slots, OnDevice) and isinstance(moved, OnDevice)
    assert not gpu.waits
    with plainly():
        assert moved.tolist() == [14, 15, 16, 14, 5, 6, 4, 5, 6]


WAITS = """torch.unique(x) | x.nonzero() | bool(x.any()) | int(x[0]) | x.numpy() | np.asarray(x)
float(x.sum()) | x.tolist() | x[0].item() | f"{x}" | repr(x) | torch.where(x > 1) | x[x > 1]
x.masked_select(x > 1) | x.cpu() | x.to("cpu") | x.to("cpu", non_blocking=True)
torch.tensor([x[0]]) | torch.tensor([1], device="cuda") | x.new_tensor([1]) | torch.equal(x, x)
h.to("cuda") | h.cuda() | h.to(x) | x.copy_(h) | h.copy_(x) | max(x) | range(x[0])
x[h] | x[[1, 2]] | x[x[0]] | 3 in x | x.__setitem__(0, h)
x.__setitem__(slice(None), h[:4]) | x.repeat_interleave(x) | torch.cuda.synchronize()"""

GOES_ON = """x + 1 | x[1:3] | x[x - 1] | x.long() | x.sort() | torch.cat([x, x]) | x.to(torch.int32)
torch.zeros(3, device="cuda") | x.__setitem__(x - 1, x) | x.__setitem__(slice(0, 2), 7) | len(x)
h.pin_memory().to("cuda", non_blocking=True) | x.shape | h.tolist() | h[h > 1]
x.cumsum(0) | x.max() | x.repeat_interleave(x, output_size=10) | torch.where(x > 1, x, 0)
x.device | h[0].item()"""


def of(expressions: str) -> list[str]:
    return [one.strip() for line in expressions.splitlines() for one in line.split("|")]


@pytest.mark.parametrize(
    ("expression", "waits"),
    [*((one, True) for one in of(WAITS)), *((one, False) for one in of(GOES_ON))],
)
def test_what_makes_a_host_wait_is_known(
    monkeypatch: pytest.MonkeyPatch, expression: str, *, waits: bool
) -> None:
    gpu = pretend(monkeypatch, at_once=True)
    with gpu.watching():
        numbers = {"x": torch.arange(1, 5, device="cuda"), "h": torch.arange(4)}
        code = compile(expression, str(PACKAGES["sglang_hybrid"] / "expression.py"), "eval")
        with contextlib.suppress(RuntimeError, TypeError):
            eval(code, {"torch": torch, "np": np, **numbers})
    assert bool(gpu.waits) is waits


def test_a_pretended_device_is_one() -> None:
    """Its numbers are right, and of its kind is what comes of it."""
    gpu = Gpu(at_once=True)
    with gpu.watching():
        here = torch.arange(6, device="cuda")
        assert here.is_cuda and here.device == torch.device("cuda", 0)
        assert isinstance(here[here[:2]] + 1, OnDevice)
        assert here.to(torch.int32).is_cuda and not here.cpu().is_cuda
        assert isinstance(torch.cat([here, here]).view(3, 4)[1], OnDevice)
        assert not torch.zeros(3).is_cuda
