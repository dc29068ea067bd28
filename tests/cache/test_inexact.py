"""Whatever comes from smaller copies is marked, with all that was computed behind it; requests that
ask for exactness never meet any of it.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_hybrid.core.returns.hints import PromptHints
from sglang_hybrid.hooks.scheduling import take_cache_fields
from sglang_hybrid.serving.requests.cache_fields import NOTHING, CacheFields
from sglang_hybrid.serving.stored_keys import check_key, is_exact_part
from sglang_hybrid.storage.codecs import in_use
from sglang_hybrid.storage.codecs.codecs import Codec
from sglang_hybrid.storage.codecs.coded_rows import CodecPlan
from sglang_hybrid.storage.codecs.exactness import storage_key
from tests.cache.backends import options
from tests.cache.driver import Sizes
from tests.cache.tiers import SLOW, PollingServer, TieredServer, mark, set_speeds

SIZES = Sizes(states=7, kv=160, rows=6, context=128)
EXACT = CacheFields(PromptHints(exact=True))


@pytest.fixture(autouse=True)
def loads_are_visible(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is decoded is negative, and stays so."""
    decode = Codec.decode

    def negative(self: Codec, content: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return -decode(self, content, dtype).abs()

    monkeypatch.setattr(Codec, "decode", negative)
    in_use.set_codecs(CodecPlan.uniform(Codec.BF16))
    yield
    in_use.set_codecs(CodecPlan())


class SignedServer(PollingServer):
    """Knows by the sign of what a request resumes from whether that is exact, and gives the sign to
    all that it computes. counted: by what the cache said, and what was true.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._inexact: set[str] = set()
        self._sign = 1
        self.counted = {(said, true): 0 for said in (False, True) for true in (False, True)}

    def _check_resumed(self, req: Req) -> None:
        if not req.prefix_len:
            return
        places, slot = self._resumed(req)
        values = torch.cat([rows[places][:, 0, 0] for rows in self._rows])
        marks = [mark(self._tokens(req)[: at + 1]) for at in range(req.prefix_len)]
        assert values.abs().tolist() == marks * len(self._rows)
        state = self._states.temporal[:, slot]
        assert state.abs().unique().tolist() == marks[-1:]
        if bool((values < 0).any()) or bool((state < 0).any()):
            self._inexact.add(req.rid)

    def _fill(self, req: Req, start: int, end: int) -> None:
        self._sign = -1 if req.rid in self._inexact else 1
        super()._fill(req, start, end)
        places = self.pool.req_to_token[req.kv.req_pool_idx, start:end].long()
        for rows in self._rows:
            rows[places] = self._sign * rows[places].abs()

    def _set_state(self, slot: torch.Tensor, tokens: list[int]) -> None:
        for tensor in (*self._states.conv, self._states.temporal):
            tensor[:, slot.long()] = self._sign * mark(tokens)

    def serve_one(self, tokens: Sequence[int], *, exactly: bool = False) -> None:
        req = self.arrive(tokens)
        if exactly:
            req.extra_key = storage_key(None, EXACT)
        while not self.admit(req):
            self.poll()
        self.complete(req, [7])
        self.poll()
        self.check()
        said = self.cache.lookups.report(req).exact
        true = req.rid not in self._inexact
        assert true or not said, "what comes from a smaller copy is called exact"
        assert not exactly or (said and true)
        self.counted[said, true] += 1


@pytest.mark.parametrize("writes", ["write_through", "write_back"])
def test_nothing_inexact_is_called_exact(writes: str) -> None:
    server = SignedServer.on(SIZES, options("reuse"), policy=writes)
    source = random.Random(1)
    stems = [[source.randrange(5, 90) for _ in range(60)] for _ in range(5)]
    for number in range(80):
        stem = source.choice(stems)
        prompt = stem[: source.randrange(20, 60)] + [100 + number] * source.randrange(1, 4)
        server.serve_one(prompt, exactly=source.random() < 0.3)
    assert server.counted[True, True] >= 10 and server.counted[False, False] >= 10


def test_exact_parts_do_not_hold_up_copies_of_others() -> None:
    """An entry that must stay exact is not copied down; entries that are evicted after it are."""
    flags = options("reuse", hybrid_offload_watermark=0.0)
    server = SignedServer.on(SIZES, flags, policy="write_through")
    set_speeds(server.cache, SLOW)
    server.serve_one(range(5, 25), exactly=True)
    for first in (30, 60):
        server.serve_one(range(first, first + 15))
    for _ in range(8):
        server.poll()
    info = server.cache.tiers_info()
    assert info["held"]["host"]["kv_tokens"] == 2 * 15


def test_bytes_of_copies_are_those_that_they_take() -> None:
    """Where they are written, held and loaded."""
    in_use.set_codecs(CodecPlan.uniform(Codec.INT8))
    flags = options("reuse", hybrid_offload_watermark=1.0)
    server = PollingServer.on(replace(SIZES, row=16), flags, policy="write_through")
    set_speeds(server.cache, SLOW)
    for _ in range(2):
        server.serve(range(5, 65), [7])
        server.poll()
    host = server.cache.host_pool_group
    kv, state = (host.get_pool(name).size_per_token for name in (PoolName.KV, PoolName.MAMBA))
    info = server.cache.tiers_info()
    held = info["held"]
    copies = {name: held["host"][name] for name in ("kv_tokens", "states")}
    assert copies == {name: held["device"][name] for name in copies} and copies["states"]
    assert held["host"]["bytes"] == copies["kv_tokens"] * kv + copies["states"] * state
    assert info["written_bytes"] == held["host"]["bytes"] < held["device"]["bytes"]


def test_a_request_says_so_itself() -> None:
    """SGLang's request object takes its part of the tree from our fields (hooks/scheduling.py)."""

    def key(extra_key: str | None, fields: CacheFields) -> str | None:
        sampling = SamplingParams(max_new_tokens=1)
        req = Req("a", "", array("q", [5]), sampling, extra_key=extra_key)
        take_cache_fields(req, None, SimpleNamespace(hybrid=fields))
        found: str | None = req.extra_key
        return found

    assert is_exact_part(key(None, EXACT)) and is_exact_part(key("tenant", EXACT))
    assert key("tenant", NOTHING) == "tenant"
    with pytest.raises(ValueError, match="the server's own"):
        check_key(key("tenant", EXACT))


def test_without_smaller_copies_nothing_is_said() -> None:
    in_use.set_codecs(CodecPlan())
    server = TieredServer.on(SIZES, options("reuse"))
    req = server.begin([5, 6, 7, 8])
    assert server.prefill_step(req)
    server.decode(req, [7])
    server.finish(req)
    report = server.cache.lookups.report(req)
    assert report.exact is None and "exact" not in report.as_dict()
