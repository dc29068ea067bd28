"""A scheduler on a pretended GPU (`pretended_gpu`): requests of `TieredServer`, whose forwards are
launched at one time and done at another.

The stream of the forwards runs as late as it may. Their results are known when a request's next
step is asked for; the last token of an answer is then computed still, as under overlap scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.managers import cache_controller
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache import l2_transfer, unified_memory_pool
from sglang.srt.mem_cache.allocator import unified_sub_pool
from sglang.srt.mem_cache.common import checkpoint_kv_cache
from sglang.srt.mem_cache.pool_host import mamba, mha
from sglang.srt.utils import common

from sglang_hybrid.extensions.cpu.ops import host_copies
from sglang_hybrid.kernels import host_rows
from tests.cache.driver import Server, Sizes, _length, build_cache
from tests.cache.pretended_gpu import Gpu, OnDevice, pinned
from tests.cache.tiers import SLOW, TieredServer, build_tiered_cache, mark, set_speeds

KERNELS = {
    (mha, "transfer_kv_per_layer_pf_lf"): host_copies.per_layer_pf_lf,
    (mha, "transfer_kv_all_layer_lf_pf"): host_copies.all_layer_lf_pf,
    (mamba, "transfer_kv_mamba_pf_lf"): host_copies.rows_pf_lf,
    (mamba, "transfer_kv_mamba_lf_pf"): host_copies.mamba_lf_pf,
    (mha, "transfer_kv_per_layer_direct_pf_lf"): host_copies.per_layer_direct_pf_lf,
    (mha, "transfer_kv_all_layer_direct_lf_pf"): host_copies.all_layer_direct_lf_pf,
    (mamba, "transfer_kv_per_layer_direct_pf_lf"): host_copies.per_layer_direct_pf_lf,
    (mamba, "transfer_kv_all_layer_direct_lf_pf"): host_copies.all_layer_direct_lf_pf,
}
"""The kernels that copy exact rows between host and device."""

OF_SGLANGS_POOL = {
    (mha, "jit_transfer_hicache_one_layer"): host_copies.strided_one_layer,
    (mha, "jit_transfer_hicache_all_layer"): host_copies.strided_all_layers,
    (unified_memory_pool, "copy_pages"): unified_memory_pool.copy_pages,
    (unified_memory_pool, "zero_pages"): unified_memory_pool.zero_pages,
}
"""The same of rows in SGLang's unified pool, and what moves and clears them there."""

STAGED = ("_copy_tensor", "_copy_tensor_pf_lf", "_copy_tensor_all_layers_lf_pf")
"""Functions that gather such rows of states before they copy them."""

TABLES = ("alloc_bind_inplace", "bind_inplace", "free_unbind_inplace", "translate_token_ids")
"""Kernels of its tables of rows, whose results the host code goes on with."""


def pretend(monkeypatch: pytest.MonkeyPatch, *, at_once: bool = False, seed: int = 0) -> Gpu:
    """Let SGLang's transfers, and whoever asks `torch.cuda`, have the streams of a pretended GPU,
    and their kernels run in them.
    """
    gpu = Gpu(at_once=at_once, seed=seed)
    for module in (l2_transfer, cache_controller):
        monkeypatch.setattr(module, "device_module", gpu)
    for name in ("Stream", "Event", "current_stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(common, "is_pin_memory_available", lambda device=None: True)
    for (module, name), kernel in (KERNELS | OF_SGLANGS_POOL).items():
        monkeypatch.setattr(module, name, launched(gpu, kernel))
    for name in STAGED:
        whole = getattr(mamba.MambaPoolHost, name)
        monkeypatch.setattr(mamba.MambaPoolHost, name, staticmethod(launched(gpu, whole)))
    for name in TABLES:
        monkeypatch.setattr(unified_sub_pool, name, at_once_on(getattr(unified_sub_pool, name)))
    monkeypatch.setattr(host_rows, "_launch", launched(gpu, copy_rows))
    return gpu


def launched(gpu: Gpu, kernel: Callable[..., None]) -> Callable[..., None]:
    """`kernel`, done in the stream that is current when it is called."""

    def launch(*args: Any, **kwargs: Any) -> None:
        def run() -> None:
            with plainly(), gpu.stream(gpu.schedule):  # what it launches itself is done at once
                kernel(*args, **kwargs)

        gpu.current_stream().give(run)

    return launch


def at_once_on(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, done when it is called; its results are the device's."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        with plainly():
            found = kernel(*args, **kwargs)
        return found.as_subclass(OnDevice) if isinstance(found, torch.Tensor) else found

    return launch


def copy_rows(
    part: torch.Tensor, content: torch.Tensor, rows: torch.Tensor, *, to_host: bool
) -> None:
    """The copies of the kernel of `host_rows`."""
    if to_host:
        part[rows] = content
    else:
        content.copy_(part[rows])


def plainly() -> AbstractContextManager[Any]:
    """The work of the device: nothing of it is the host's."""
    return torch._C.DisableTorchFunction()


class PretendedServer(TieredServer):
    """Its cache is on `gpu`. loads_under_way: the most that a scheduler lets there be. overlap:
    forwards have a stream of their own, and not the scheduler's.
    """

    loads_under_way = 3

    def __init__(
        self,
        gpu: Gpu,
        cache: Any,
        sizes: Sizes,
        chunk: int = 0,
        *,
        overlap: bool = True,
    ) -> None:
        self.gpu = gpu
        self.forwards = gpu.forwards if overlap else gpu.schedule
        self._launched: dict[Req, int] = {}
        super().__init__(cache, sizes, chunk)
        cache.forward_stream = gpu.forwards if overlap else None
        if cache.cache_controller is not None:
            cache.cache_controller.load_fence_stream = gpu.forwards
            cache.cache_controller.write_fence_stream = gpu.forwards

    def poll(self) -> None:
        self.gpu.poll()
        super().poll()
        if self.cache.schedule is not None:
            self.cache.schedule.step([])

    def admit(self, req: Req) -> bool:
        if len(self.cache.cache_controller.ack_load_queue) >= self.loads_under_way:
            return False
        return super().admit(req)

    def prefill_step(self, req: Req) -> bool:
        """Launch a forward, or take the result of the one that was launched; True if that ends the
        prompt.
        """
        if req not in self._launched:
            self.begin_forward(req)
            self._launched[req] = len(self.forwards.work)
            return False
        self.forwards.run(self._launched.pop(req))
        done = req.extend_end == _length(req)
        if done:
            req.output_ids.append(0)
        checkpoint_kv_cache(req, self.cache)
        if not done:
            req.init_next_round_input()
        return done

    def decode(self, req: Req, answer: Sequence[int]) -> None:
        """All but the last step is done when this returns."""
        if len(answer) > 1:
            super().decode(req, answer[:-1])
            req.output_ids.append(0)
            answer = answer[-1:]
        self.forwards.run()
        super().decode(req, answer)

    def abort(self, req: Req, *, keep: bool = False) -> None:
        self.forwards.run(self._launched.pop(req, None))
        super().abort(req, keep=keep)

    def check(self) -> None:
        with plainly():
            super().check()

    # What the device does.

    def _fill(self, req: Req, start: int, end: int) -> None:
        with plainly():
            tokens, row = self._tokens(req), req.kv.req_pool_idx
            places = self.pool.req_to_token[row, start:end].long()
            marks = torch.tensor([mark(tokens[: at + 1]) for at in range(start, end)])

        def compute() -> None:
            where = self._rows_of(places)
            for rows in self._rows:
                rows[where] = marks[:, None, None].to(rows.dtype).expand(-1, *rows.shape[1:])

        self._forward(compute)
        if self._states is not None:
            self._set_state(req.kv.mamba_pool_idx.reshape(1), tokens[:end])

    def _set_state(self, slot: torch.Tensor, tokens: list[int]) -> None:
        with plainly():
            place, value = int(slot.reshape(-1)[0]), mark(tokens)

        def write() -> None:
            for tensor in (*self._states.conv, self._states.temporal):
                tensor[:, self._row_of(place)] = value

        self._forward(write)

    def _check_resumed(self, req: Req) -> None:
        """Look at what the request resumes from when its forward runs, which waits for the loads
        that SGLang was told of.
        """
        prefix = self._tokens(req)[: req.prefix_len]
        assert len(prefix) < len(self._tokens(req)), "the last token was to be computed"
        if not prefix:
            return
        with plainly():
            places, slot = self._resumed(req)
            places = places.clone()
        self._wait_for_loads()
        self._forward(lambda: self._look(places, slot, prefix))
        self._copy_state(req)

    def _wait_for_loads(self) -> None:
        counter = self.cache.cache_controller.layer_done_counter
        counter.set_consumer(self.waits_for)
        with self.gpu.stream(self.forwards):
            for layer in range(counter.num_layers):
                counter.wait_until(layer)

    def _forward(self, work: Callable[[], None]) -> None:
        def run() -> None:
            with plainly():
                work()

        self.forwards.wait_stream(self.gpu.schedule)
        self.forwards.give(run)
        if self.sizes.one_memory:  # what the scheduler tells SGLang's pool after a forward
            done = self.gpu.Event()
            done.record(self.forwards)
            self.allocator.set_latest_forward_done_event(done)


class LendingServer(PretendedServer):
    """The same without memory below the device, on two pools that lend each other room."""

    def poll(self) -> None:
        self.gpu.poll()

    def admit(self, req: Req) -> bool:
        joined = Server.admit(self, req)
        if joined:
            self._check_resumed(req)
        return joined

    def _wait_for_loads(self) -> None:
        """Do nothing: there are no loads."""


def lending_server(gpu: Gpu, sizes: Sizes, options: Any, chunk: int = 0) -> LendingServer:
    """A server without memory below the device, whose pools are on `gpu`."""
    with envs.SGLANG_DISABLE_FUSED_MAMBA_SLOT_OPS.override(True):
        return LendingServer(gpu, build_cache(sizes, options, device="cuda"), sizes, chunk)


def pretended_server(
    gpu: Gpu,
    sizes: Sizes,
    options: Any,
    chunk: int = 0,
    *,
    overlap: bool = True,
    **more: Any,
) -> PretendedServer:
    """A server whose pools are on `gpu`."""
    with envs.SGLANG_DISABLE_FUSED_MAMBA_SLOT_OPS.override(True):  # they are kernels of Triton
        cache = build_tiered_cache(sizes, options, device="cuda", **more)
    assert isinstance(cache.req_to_token_pool.req_to_token, OnDevice)
    set_speeds(cache, SLOW)
    return PretendedServer(gpu, cache, sizes, chunk, overlap=overlap)
