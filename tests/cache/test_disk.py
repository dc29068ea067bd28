"""Device, host and disk: whatever is copied, loaded, forgotten, lost or damaged, in any order,
every request resumes from what belongs to its prefix, and no tier loses count of what it holds.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_hybrid.core.tiers.rates import Link
from sglang_hybrid.extensions.cpu.ops import transfer_streams
from sglang_hybrid.extensions.disk import file_backend, object_store
from sglang_hybrid.hooks.models import forget_old_weights
from tests.cache.backends import options
from tests.cache.disk import FULL, MAMBA, DiskServer, PlainTiers, disk_server
from tests.cache.driver import Sizes
from tests.cache.tiers import SLOW

TWO_POOLS = Sizes(states=7, kv=160, rows=6, context=128)
SIZES = {
    "two pools": TWO_POOLS,
    "one memory": replace(TWO_POOLS, one_memory=True, state_tokens=20),
}
Start = Callable[..., AbstractContextManager[DiskServer]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """Starts servers on one folder, where loading is always faster than computing."""
    monkeypatch.setattr(file_backend, "served_model", lambda: {"weights": "some"})
    monkeypatch.setattr(object_store, "RETRY_SECONDS", 0.0)
    yield partial(disk_server, tmp_path / "disk", options=options("reuse"), speeds=SLOW)
    transfer_streams.simulate(None)


def forget(server: DiskServer, *, device: bool = True, host: bool = True) -> None:
    """All that these tiers may forget."""
    server.settle()
    if device:
        server.cache.evict(EvictParams(num_tokens=10**6, mamba_num=10**6))
    if host:
        for kind in (FULL, MAMBA):
            server.cache.evict_host(10**6, kind)
    server.settle()


def serve(server: DiskServer, tokens: list[int]) -> int:
    """Its hit length, whatever tier it came from."""
    req = server.read(tokens)
    assert server.admit(req)
    hit = int(req.prefix_len)
    server.complete(req, [3])
    server.settle()
    return hit


def test_what_device_and_host_forgot_is_read_from_the_disk(start: Start) -> None:
    prompt = list(range(100, 140))
    with start(sizes=TWO_POOLS) as server:
        assert serve(server, prompt) == 0
        for tiers in ({"host": False}, {"device": False}, {}, {}):
            forget(server, **tiers)
            assert serve(server, prompt) == 39
            server.check_contents()
    with start(sizes=TWO_POOLS) as server:
        assert serve(server, prompt) == 39
        server.check_contents()


def test_copies_end_before_weights_change(start: Start) -> None:
    """While there are any SGLang does not empty its cache, and would answer from KV of the old
    weights.
    """
    transfer_streams.simulate(Link(1e9, 0.2))
    with start(sizes=TWO_POOLS) as server:
        req = server.read(list(range(100, 140)))
        assert server.admit(req)
        server.complete(req, [3])
        server.poll()
        assert server.cache.ongoing_write_through
        forget_old_weights(None)
        assert not server._under_way() and not server.store.in_use
        server.flush()
        server.check()


@dataclass
class Chaos:
    """The events of `server` between two steps of its requests. waiting: those that wait for what
    they need from the disk. full: for how many more steps nothing can be written there.
    """

    server: DiskServer
    source: random.Random
    monkeypatch: pytest.MonkeyPatch
    waiting: list[Req] = field(default_factory=list)
    happened: set[str] = field(default_factory=set)
    full: int = 0

    def happens(self) -> None:
        if self.full:
            self.full -= 1
            if not self.full:  # there is room again
                self.monkeypatch.undo()
        if self.source.random() < 0.2:  # first what has not happened yet
            new = [event for event in self.EVENTS if event not in self.happened]
            what = self.source.choice(new or self.EVENTS)
            getattr(self, what)()
            self.happened.add(what)

    def device_forgets(self) -> None:
        tokens, states = self.source.randrange(80), self.source.randrange(4)
        self.server.cache.evict(EvictParams(num_tokens=tokens, mamba_num=states))

    def host_forgets(self) -> None:
        kind = self.source.choice([FULL, MAMBA])
        self.server.cache.evict_host(self.source.randrange(1, 60 if kind is FULL else 5), kind)

    def a_file_is_lost(self) -> None:
        for path in self._some_file():
            path.unlink(missing_ok=True)

    def a_file_is_damaged(self) -> None:
        for path in self._some_file():
            with suppress(FileNotFoundError):  # the store has just forgotten it
                content = bytearray(path.read_bytes())
                content[self.source.randrange(len(content))] ^= 1 << self.source.randrange(8)
                path.write_bytes(content)

    def a_file_is_cut(self) -> None:
        for path in self._some_file():
            with suppress(FileNotFoundError), path.open("r+b") as file:
                file.truncate(self.source.randrange(path.stat().st_size))

    def the_disk_is_full(self) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        self.monkeypatch.setattr(object_store, "write_file", full)
        self.full = self.source.randrange(1, 12)

    def a_client_goes_away(self) -> None:
        if self.waiting:
            self.server.give_up(self.waiting.pop())

    EVENTS = (
        *("device_forgets", "host_forgets", "a_file_is_lost", "a_file_is_damaged"),
        *("a_file_is_cut", "the_disk_is_full", "a_client_goes_away"),
    )

    def _some_file(self) -> list[Path]:
        files = self.server.store._index.files()
        return [self.source.choice(files).path] if files else []


def step(chaos: Chaos, plain: PlainTiers, prompts: list[list[int]]) -> bool:
    """A request arrives, begins, goes on or ends; False if none did: while requests wait for the
    disk nothing else happens, or all of them would be given up where its threads are slow.
    """
    server, source = chaos.server, chaos.source
    choice = source.random()
    if prompts and choice < 0.25 and len(chaos.waiting) < 2:
        req = server.arrive(prompts.pop(0))
        server.fetch(req)
        chaos.waiting.append(req)
        return True
    if chaos.waiting and choice < 0.6 and len(server.running) < 2:
        req = source.choice(chaos.waiting)
        if not server.fetched(req):
            time.sleep(1e-3)
            return False
        if not server.admit(req):
            return False
        chaos.waiting.remove(req)
        tokens = list(req.origin_input_ids)
        assert int(req.prefix_len) in plain.depths(tokens, ("device", "host", "disk"))
        return True
    if not server.running:
        return False
    req = source.choice(server.running)
    plain.computes(req.origin_input_ids)
    if req.output_ids or server.prefill_step(req):
        if source.random() < 0.85:
            server.decode(req, [source.randrange(5, 90) for _ in range(3)])
            plain.computes(server._tokens(req))
            server.finish(req)
        else:
            server.abort(req)
    return True


def play(chaos: Chaos, plain: PlainTiers, stems: list[list[int]], requests: int) -> None:
    """Requests that continue one another's prompts, interleaved with everything else."""
    server, source = chaos.server, chaos.source
    prompts: list[list[int]] = []
    for number in range(requests):
        stem = source.choice(stems)
        prompts.append(stem[: source.randrange(8, 50)] + [100 + number] * source.randrange(1, 9))
    while prompts or chaos.waiting or server.running:
        moved = step(chaos, plain, prompts)
        if source.random() < 0.7:
            server.poll()
        if moved:
            chaos.happens()
        server.check()
        plain.look()
        server.check_contents()
    server.settle()
    server.check()
    plain.look()
    server.check_contents()


RUNS = [
    pytest.param(SIZES["one memory"], "write_through", None, 10, id="a few requests"),
    *(
        pytest.param(sizes, writes, link, 40, id=f"{name}-{writes}-{kind}", marks=pytest.mark.slow)
        for name, sizes in SIZES.items()
        for writes in ("write_through", "write_back")
        for kind, link in (("prompt copies", None), ("copies that take time", Link(1e9, 2e-3)))
    ),
]


@pytest.mark.parametrize(("sizes", "writes", "link", "requests"), RUNS)
def test_every_request_resumes_from_its_own_prefix(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    sizes: Sizes,
    writes: str,
    link: Link | None,
    requests: int,
) -> None:
    """Two servers, one after another, on a disk that holds a part of what they write."""
    source = random.Random(f"{sizes}{writes}")
    stems = [[source.randrange(5, 90) for _ in range(60)] for _ in range(4)]
    happened: set[str] = set()
    read = written = loads = 0
    plain: PlainTiers | None = None
    transfer_streams.simulate(link)
    for _ in range(2):
        with start(sizes=sizes, policy=writes, budget=60_000, ratio=1.5) as server:
            plain = PlainTiers(server, plain)
            with monkeypatch.context() as patched:
                chaos = Chaos(server, source, patched)
                play(chaos, plain, stems, requests)
            happened |= chaos.happened
            read += server.store.counts.read
            written += server.store.counts.written
            loads += server.loads
    assert written
    if requests > 10:
        assert happened == set(Chaos.EVENTS)
        assert loads
        assert read


def test_an_idle_server_finds_the_deepest_state_that_any_tier_has(start: Start) -> None:
    """A request finds what the plain model has, if nothing fails between the tiers."""
    source = random.Random(5)
    stems = [[source.randrange(5, 90) for _ in range(60)] for _ in range(3)]
    tiers = ("device", "host", "disk")
    with start(sizes=TWO_POOLS) as server:
        plain, deep = PlainTiers(server), 0
        for number in range(25):
            tokens = source.choice(stems)[: source.randrange(8, 50)] + [100 + number] * 3
            near, far = (plain.depths(tokens, some) for some in (tiers[:2], tiers))
            hit = serve(server, tokens)
            plain.computes([*tokens, 3])
            assert hit in far
            if max(far) - max(near) >= 4:  # fewer tokens are not read from the disk
                assert hit == max(far)
                deep += 1
            else:
                assert hit >= max(near)
            plain.look()
            server.check()
            server.check_contents()
            if source.random() < 0.5:
                forget(server, device=source.random() < 0.7, host=source.random() < 0.5)
                plain.look()
        assert deep
