"""Requests on a real cache with real pools and no model: the calls that SGLang's scheduler makes.

The tensors are tiny, the pools' accounts are SGLang's own. `Server` plays scheduler: a request is
admitted (match, lock, slots, KV), prefilled chunk by chunk, decoded in one go, and then finished,
aborted or retracted; what is short is evicted on the way, as in a server. Line references are to
sglang 0.5.23.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.allocation import alloc_req_slots
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import (
    checkpoint_kv_cache,
    evict_from_tree_cache,
    release_kv_cache,
)
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_memory_pool import init_unified_mamba_pools
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_hybrid.cache.factory import cache_class
from sglang_hybrid.checkpoints.last_hidden import HiddenCapture
from sglang_hybrid.checkpoints.message_boundaries import MessageBoundaries
from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.memory.account import MemoryKind
from sglang_hybrid.core.records.pin import PinRequest
from sglang_hybrid.core.returns.hints import Hint, PromptHints
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.cpu.ops import transfer_streams
from sglang_hybrid.hooks.scheduling import take_cache_fields
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.requests.cache_fields import CacheFields
from tests.cache.backends import COST

FULL, MAMBA = ComponentType.FULL, ComponentType.MAMBA


@dataclass(frozen=True)
class Sizes:
    """A server's pools. states = 0: a model without recurrent state.

    grid: tokens between the positions at which a prefill can leave a state, with extra_buffer.
    one_memory: KV and states share the bytes of both pools, in SGLang's unified pool. spills:
    states may lie in the place of KV. state_tokens: tokens whose KV takes as much as a state then.
    window: tokens that a second attention reads, beside states and with pages of one token; 0 if
    there is none. kv_of_windows: tokens of its pool. row: numbers of a key and of a state's row;
    8 at least where the kinds share bytes, whose rows are whole 16 bytes.
    """

    kv: int = 4_096
    states: int = 16
    page: int = 1
    extra_buffer: bool = False
    one_memory: bool = False
    spills: bool = False
    state_tokens: int = 3
    grid: int = 1
    rows: int = 16
    context: int = 1_024
    window: int = 0
    kv_of_windows: int = 0
    row: int = 2

    @property
    def budget(self) -> int:
        """Bytes of one memory: what two pools of these sizes take."""
        return self.kv * self.token_bytes + self.states * self.state_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: keys and values, a row of bfloat16 each."""
        return 2 * 2 * (max(8, self.row) if self.shares else self.row)

    @property
    def state_bytes(self) -> int:
        """Bytes of a state: two bfloat16 values of the window and four of the state by default."""
        return self.state_tokens * self.token_bytes if self.shares else 2 * (2 * 2 + 8)

    @property
    def shares(self) -> bool:
        """True if KV and states share bytes."""
        return self.one_memory or self.spills


KV_BYTES = Sizes(one_memory=True).token_bytes
"""Bytes of one token in one memory."""
ONE_MEMORY = {"one_memory": True, "state_tokens": 300}


def build_cache(
    sizes: Sizes,
    options: HybridConfig | None,
    cost: CostModel | None = COST,
    tree_core: str = "python",
    *,
    one_pass: bool = True,
    unplanned: str = "",
    tiers: bool = False,
    full_hits: bool = False,
    states_arrive: bool = False,
    rank: int | None = None,
    priority_sign: int | None = None,
    token_allocator: type = TokenToKVPoolAllocator,
    device: str = "cpu",
    message_boundaries: MessageBoundaries | None = None,
    **more: Any,
) -> UnifiedRadixCache:
    """Our cache under `options`, or SGLang's own for None, on pools of their own on `device`.
    token_allocator: of KV slots where a page is one token.
    """
    server_args = ServerArgs(model_path="dummy", page_size=sizes.page)
    server_args._mamba_cache_chunk_size = max(sizes.grid, sizes.page)
    set_global_server_args_for_scheduler(server_args)
    pool: Any
    kv: Any
    row = sizes.token_bytes // 4
    shape: dict[str, Any] = {"dtype": torch.bfloat16, "head_num": 1, "head_dim": row}
    allocator: Any = None
    if sizes.one_memory:
        pool, allocator = unified_pool(sizes, device)
        kv = allocator.get_kvcache()
    elif sizes.states:
        state = shared_state(sizes) if sizes.spills else state_of(width=4, head=2, size=sizes.row)
        pool = HybridReqToTokenPool(
            size=sizes.rows,
            mamba_size=sizes.states,
            mamba_spec_state_size=sizes.rows,
            max_context_len=sizes.context,
            device=device,
            enable_memory_saver=False,
            cache_params=state,
            mamba_layer_ids=[0],
            enable_mamba_extra_buffer=sizes.extra_buffer,
        )
        if sizes.window:
            kv = SWAKVPool(
                size=sizes.kv,
                size_swa=sizes.kv_of_windows,
                page_size=sizes.page,
                full_attention_layer_ids=[1],
                swa_attention_layer_ids=[2],
                device=device,
                **shape,
            )
        else:
            kv = HybridLinearKVPool(
                size=sizes.kv,
                page_size=sizes.page,
                full_attention_layer_ids=[1],
                device=device,
                enable_memory_saver=False,
                mamba_pool=pool.mamba_pool,
                **shape,
            )
    else:
        pool = ReqToTokenPool(
            size=sizes.rows,
            max_context_len=sizes.context,
            device=device,
            enable_memory_saver=False,
        )
        kv = MHATokenToKVPool(
            size=sizes.kv,
            page_size=sizes.page,
            layer_num=1,
            device=device,
            enable_memory_saver=False,
            **shape,
        )
    where = {"dtype": torch.bfloat16, "device": device, "kvcache": kv, "need_sort": False}
    if allocator is not None:
        pass  # it came with its pools
    elif sizes.window:
        sizes_of_both = {"size": sizes.kv, "size_swa": sizes.kv_of_windows}
        allocator = SWATokenToKVPoolAllocator(page_size=sizes.page, **sizes_of_both, **where)
    elif sizes.page == 1:
        allocator = token_allocator(size=sizes.kv, **where)
    else:
        allocator = PagedTokenToKVPoolAllocator(size=sizes.kv, page_size=sizes.page, **where)
    params = CacheInitParams(
        req_to_token_pool=pool,
        token_to_kv_pool_allocator=allocator,
        page_size=sizes.page,
        disable=False,
        tree_components=_components(sizes),
        sliding_window_size=sizes.window or None,
        enable_mamba_extra_buffer=sizes.extra_buffer,
        tree_core_backend=tree_core if options is None else None,
        **more,
    )
    cache: Any
    if options is None:
        cache = UnifiedRadixCache(params)
    else:
        cache = cache_class(tiers=tiers)(
            params,
            options,
            cost,
            message_boundaries=message_boundaries,
            one_pass=one_pass,
            unplanned=unplanned,
            full_hits=full_hits,
            states_arrive=states_arrive,
            spills=sizes.spills,
            rank=rank,
            priority_sign=priority_sign,
        )
    cache.cache_init_params = params  # init_hicache wants them
    return cache


def _components(sizes: Sizes) -> tuple[ComponentType, ...]:
    given = {FULL: True, ComponentType.SWA: sizes.window, MAMBA: sizes.states}
    return tuple(kind for kind, is_there in given.items() if is_there)


def state_of(*, width: int, head: int, size: int) -> Mamba2CacheParams:
    """A layer with one head: `width + 2 * size` values of a window, and `head * size` of a state,
    in bfloat16.
    """
    with envs.SGLANG_MAMBA_SSM_DTYPE.override("bfloat16"):
        return Mamba2CacheParams(
            shape=Mamba2StateShape.create(
                tp_world_size=1,
                intermediate_size=width,
                n_groups=1,
                num_heads=1,
                head_dim=head,
                state_size=size,
                conv_kernel=2,
            ),
            layers=[0],
        )


def shared_state(sizes: Sizes) -> Mamba2CacheParams:
    """A state that takes as many bytes as `sizes.state_tokens` tokens of KV."""
    row = max(8, sizes.row)
    head = max(1, (sizes.state_bytes // 2 - 2 * row) // (row + 1))
    state = state_of(width=sizes.state_bytes // 2 - 2 * row - head * row, head=head, size=row)
    assert sizes.state_bytes == state.mamba_cache_per_req
    return state


def unified_pool(sizes: Sizes, device: str = "cpu") -> tuple[Any, Any]:
    """SGLang's unified pool with this budget: its pool of requests and its allocator. Without a
    device, rows move in the streams of the CPU platform.
    """
    if device == "cpu":
        torch.cuda.current_stream = transfer_streams.current_stream  # type: ignore[assignment]
    row, state = max(8, sizes.row), shared_state(sizes)
    padding = -(-max(sizes.state_bytes, sizes.page * sizes.token_bytes) // sizes.state_bytes)
    bundle = init_unified_mamba_pools(
        device=device,
        kv_cache_dtype=torch.bfloat16,
        head_num=1,
        head_dim=row,
        page_size=sizes.page,
        start_layer=0,
        end_layer=2,
        is_draft_worker=False,
        use_mla_backend=False,
        mamba_layer_ids=[0],
        full_attention_layer_ids=[1],
        mamba2_cache_params=state,
        model_context_len=sizes.context,
        extra_max_context_len=0,
        max_total_num_tokens=sizes.kv,
        max_mamba_cache_size=sizes.states + padding,  # the first rows
        max_num_reqs=sizes.rows,
        enable_memory_saver=False,
        enable_mamba_extra_buffer=sizes.extra_buffer,
        enable_mamba_extra_buffer_lazy=False,
        speculative_num_draft_tokens=None,
        disable_overlap_schedule=False,
        need_sort=False,
        lazy_compaction=True,
    )
    return bundle.req_to_token_pool, bundle.token_to_kv_pool_allocator


class Server:
    """A scheduler's part in the life of requests on `cache`.

    chunk: prompt tokens per prefill step, 0 for all at once.
    """

    builds: Callable[..., UnifiedRadixCache] = staticmethod(build_cache)

    @classmethod
    def on(cls, sizes: Sizes, options: HybridConfig | None, chunk: int = 0, **more: Any) -> Self:
        """A server on a cache of its own; more: arguments of what `builds` it."""
        return cls(cls.builds(sizes, options, **more), sizes, chunk)

    def __init__(self, cache: UnifiedRadixCache, sizes: Sizes, chunk: int = 0) -> None:
        self.cache = cache
        self.sizes = sizes
        self.chunk = chunk
        self.pool: Any = cache.req_to_token_pool
        self.allocator: Any = cache.token_to_kv_pool_allocator
        self.running: list[Req] = []
        self.last_hidden: Any = None  # what the last forward leaves, or is answered from
        self.batch: Any = None  # that of the last forward of a prefill, where states are planned
        self._rid = 0
        self._plans = getattr(cache, "plans_checkpoints", False)
        # What the tracking of states in a prefill reads of a batch (schedule_batch.py:3137-3236).
        self._batch: Any = SimpleNamespace(
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(mamba_chunk_size=sizes.grid)
            ),
            tree_cache=cache,
            req_to_token_pool=self.pool,
        )

    # One request, step by step.

    def arrive(
        self,
        tokens: Sequence[int],
        stamp: float = 0.0,
        *,
        rid: str | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        lora_id: str | None = None,
        declared: Sequence[int] = (),
        pins: Sequence[PinRequest] = (),
        session: Hint | None = None,
        answer: int = 1,
        route: str = "",
    ) -> Req:
        """A request that waits. session: what its client says of the session. answer: tokens that
        it allows. route: by which it came.
        """
        self._rid += 1
        req = Req(
            rid=str(self._rid) if rid is None else rid,
            extra_key=extra_key,
            cache_salt=cache_salt,
            lora_id=lora_id,
            origin_input_text="",
            origin_input_ids=array("q", tokens),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=answer),
        )
        said = CacheFields(PromptHints(tuple(declared), tuple(pins), session), route=route)
        take_cache_fields(req, None, SimpleNamespace(hybrid=said))
        req.time_stats.created_time = stamp
        req.priority = 0
        return req

    def look_up(self, req: Req) -> int:
        """The scheduler's attempt to admit a request; returns the hit length."""
        req.init_next_round_input(self.cache)
        return int(req.prefix_len)

    def send_back(self, req: Req) -> None:
        """It was looked up but not admitted (scheduler.py:4283-4300)."""
        req.kv.mamba_cow_src_index = None
        req.kv.mamba_needs_clear = False
        if req.kv.holds_mamba:
            self.pool.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(-1))
            req.kv.mamba_pool_idx = None

    def probe(self, tokens: Sequence[int]) -> int:
        """The hit length of a request that is looked up once and then forgotten."""
        req = self.arrive(tokens)
        hit = self.look_up(req)
        self.send_back(req)
        return hit

    def admit(self, req: Req) -> bool:
        """Look up, and what the cache's PrefillAdder does; False, and nothing is held, if it does
        not join a batch now. The adder is there, and has arranged the queue, before anything is
        looked up to be admitted (scheduler.py, get_new_batch_prefill).
        """
        adder = self.adder([req])
        self.look_up(req)
        if not self._fits(req):
            self.send_back(req)
            return False
        return self._add(req, adder)

    def try_to_add(self, req: Req, waiting: Sequence[Req] = ()) -> bool:
        """The PrefillAdder's verdict on a request that was looked up; `waiting`: the queue, if it
        has more.
        """
        return self._add(req, self.adder(waiting or [req]))

    def _add(self, req: Req, adder: Any) -> bool:
        unfinished = any(other.extend_end < _length(other) for other in self.running)
        verdict = adder.add_one_req(req, has_chunked_req=unfinished, truncation_align_size=None)
        if req in adder.can_run_list:
            self.running.append(req)
            return True
        if verdict is not AddReqResult.CONTINUE:
            self.send_back(req)
        return False

    def prefill_step(self, req: Req) -> bool:
        """One forward; True if the prompt is done."""
        self.begin_forward(req)
        done = req.extend_end == _length(req)
        if done:
            req.output_ids.append(0)  # `decode` says what it was
        checkpoint_kv_cache(req, self.cache)
        if not done:
            req.init_next_round_input()
        return done

    def begin_forward(self, req: Req) -> None:
        """All of a forward that comes before its results: its states are under way."""
        first = not req.kv.holds_kv
        if not first and req.extend_end == req.prefix_len:
            self.look_ahead(req)
        prefix = self.cache.prefix_device_indices(req) if first and req.prefix_len else None
        alloc_req_slots(self.pool, [req], self.cache)
        if prefix is not None:
            self.pool.write((req.kv.req_pool_idx, slice(0, req.prefix_len)), prefix)
        if first:
            req.kv.kv_committed_len = req.kv.kv_allocated_len = req.prefix_len
        self._grow(req, req.extend_end)
        if self.sizes.states and self.sizes.extra_buffer:
            ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(self._batch, req)
        if self._plans:
            new = self.pool.req_to_token[req.kv.req_pool_idx, req.prefix_len : req.extend_end]
            batch = SimpleNamespace(
                reqs=[req], mamba_cow_src_indices=None, out_cache_loc=new.long()
            )
            self.cache.plan_forward(batch)
            self.batch = batch
            self.last_hidden = getattr(batch, "last_hidden", None)
            if isinstance(self.last_hidden, HiddenCapture):  # the forward leaves them
                self.last_hidden.take(None, None, torch.zeros(len(new), 1), [len(new)])
        req.kv.mamba_cow_src_index = None
        req.kv.mamba_needs_clear = False

    def look_ahead(self, req: Req) -> None:
        """Say where the next forward of a prefill that was begun ends."""
        adder = self.adder()
        adder.add_chunked_req(req)
        assert req in adder.can_run_list, "a prefill that was begun cannot go on"

    def decode(self, req: Req, answer: Sequence[int]) -> None:
        """All of `answer` at once. The last token's KV is never computed."""
        req.output_ids = req.output_ids[:-1] + array("q", answer)
        end = len(req.origin_input_ids) + len(req.output_ids) - 1
        self._grow(req, end)
        if self._plans:
            for length in range(len(req.origin_input_ids) + 1, end):
                self.cache.plans.planner.take_in_answer(req, length)

    def finish(self, req: Req) -> None:
        self._end(req, FINISH_LENGTH(length=len(req.output_ids)))
        release_kv_cache(req, self.cache, checkpoint=True)

    def abort(self, req: Req, *, keep: bool = False) -> None:
        """The client went away. keep: what was computed goes into the tree, as while decoding."""
        self._end(req, FINISH_ABORT())
        release_kv_cache(req, self.cache, checkpoint=keep)

    def abort_before_prefill(self, req: Req) -> None:
        """It was admitted, but its batch never ran."""
        self.running.remove(req)
        self.cache.unlock(req.lock)
        self.send_back(req)

    def retract(self, req: Req) -> Req:
        """It gives up everything and waits again (schedule_batch.py, retract_decode)."""
        self.running.remove(req)
        release_kv_cache(req, self.cache, checkpoint=False)
        req.reset_for_retract()
        return req

    def flush(self) -> None:
        """The effect of /flush_cache when nothing runs."""
        assert not self.running
        self.cache.reset()
        self.pool.clear()
        self.allocator.clear()

    # Whole requests.

    def begin(self, tokens: Sequence[int], stamp: float = 0.0, **more: Any) -> Req:
        """A request that is admitted when it arrives."""
        req = self.arrive(tokens, stamp, **more)
        if not self.admit(req):
            raise RuntimeError("the request does not fit into the pools, even alone")
        return req

    def prefill(self, req: Req) -> None:
        """All that is left of its prompt."""
        while not self.prefill_step(req):
            pass

    def complete(self, req: Req, answer: Sequence[int]) -> None:
        """A request that was admitted gets `answer` and ends."""
        self.prefill(req)
        self.decode(req, answer)
        self.finish(req)

    def serve(
        self,
        tokens: Sequence[int],
        answer: Sequence[int],
        stamp: float = 0.0,
        cache_salt: str | None = None,
        session: Hint | None = None,
        pins: Sequence[PinRequest] = (),
        *,
        extra_key: str | None = None,
    ) -> int:
        """A request from arrival to end, alone; returns its hit length."""
        named = {"extra_key": extra_key, "cache_salt": cache_salt}
        req = self.begin(tokens, stamp, session=session, pins=pins, **named)
        hit = int(req.prefix_len)
        self.complete(req, answer)
        return hit

    def play(self, requests: Iterable[Request]) -> list[int]:
        """Hit lengths of a trace, one request at a time."""
        return [
            self.serve(
                request.tokens[: request.input_len].astype(np.int64).tolist(),
                request.tokens[request.input_len :].astype(np.int64).tolist() or [0],
                request.arrival,
                extra_key=request.tenant or None,
                pins=request.pins,
            )
            for request in requests
        ]

    # Accounts.

    def free(self) -> tuple[int, int]:
        """KV tokens and state slots that nobody has."""
        states = self.pool.mamba_allocator.available_size() if self.sizes.states else 0
        return int(self.allocator.available_size()), int(states)

    def check(self) -> None:
        """SGLang's invariants, the shadow tree's, and every slot is free, cached or a running
        one's.
        """
        self.cache.sanity_check()
        cached_kv = self.cache.full_evictable_size() + self.cache.full_protected_size()
        own_kv = sum(
            _pages(req.kv.kv_allocated_len, self.sizes.page) - req.kv.cache_protected_len
            for req in self.running
            if req.kv.holds_kv
        )
        if self.sizes.one_memory:
            self._check_account(cached_kv + own_kv)
            return
        kv, states = self.free()
        assert kv + cached_kv + own_kv == self.sizes.kv, (kv, cached_kv, own_kv)
        if not self.sizes.states:
            return
        cached, own = self._held_states()
        assert states + cached + own == self.sizes.states, (states, cached, own)
        taken = self.pool.mamba_allocator.free_slots.tolist()
        assert len(set(taken)) == len(taken), "a slot was freed twice"

    def _held_states(self) -> tuple[int, int]:
        """States of the tree and slots in which KV lies, and slots of running requests."""
        cached = self.cache.mamba_evictable_size() + self.cache.mamba_protected_size()
        own = 0
        for req in self.running:
            own += req.kv.holds_mamba
            own += sum(not empty for empty in req.kv.mamba_ping_pong_empty or ())
        if self._plans:
            own += sum(
                len(plan.pending_checkpoints) for _, plan in self.cache.plans.planner.in_flight()
            )
        return int(cached), int(own)

    def _check_account(self, kv_tokens: int) -> None:
        """The account of one memory is what the tree and running requests hold."""
        assert self.allocator.verify_byte_accounting() == []
        used = self.cache.account.used
        assert used[MemoryKind.KV] == kv_tokens * self.sizes.token_bytes
        assert used[MemoryKind.STATES] == sum(self._held_states()) * self.sizes.state_bytes

    def adder(
        self,
        waiting: Sequence[Req] = (),
        running: ScheduleBatch | None = None,
        most_running: int | None = None,
        coming: Sequence[Req] = (),
    ) -> PrefillAdder:
        """The adder of a batch: the cache's own, or SGLang's; made in each round. running: what
        decodes. most_running: how many requests may run at once. coming: those that will wait.
        """
        ours = getattr(self.cache, "prefill_adder_class", None)
        kind = PrefillAdder if ours is None else partial(ours, waiting_queue=waiting, coming=coming)
        return kind(
            self.sizes.page,
            self.cache,
            self.allocator,
            running,
            new_token_ratio=0.0,
            rem_input_tokens=1 << 30,
            rem_chunk_tokens=self.chunk or None,
            max_running_requests=most_running,
        )

    def kv_to_be_had(self) -> int:
        """KV that is free or evictable and promised to no running request."""
        promised = self._promised()
        if self.sizes.one_memory:
            return self._bytes_to_be_had() // self.sizes.token_bytes - promised
        return int(self.allocator.available_size() + self.cache.full_evictable_size() - promised)

    def _promised(self) -> int:
        """Tokens of running prefills that have no KV yet."""
        return sum(
            _pages(len(req.full_untruncated_fill_ids), self.sizes.page)
            - _pages(req.kv.kv_allocated_len, self.sizes.page)
            for req in self.running
        )

    def _bytes_to_be_had(self) -> int:
        """Bytes of one memory that are free or evictable."""
        evictable = self.cache.full_evictable_size() * self.sizes.token_bytes
        evictable += self.cache.mamba_evictable_size() * self.sizes.state_bytes
        return int(self.cache.account.free + evictable)

    def _fits(self, req: Req) -> bool:
        """The conditions that PrefillAdder checks before it admits."""
        lock = self.cache.lock(req.last_node)
        need = _pages(len(req.full_untruncated_fill_ids), self.sizes.page) - req.prefix_len
        fits = self.kv_to_be_had() >= need
        if self.sizes.states:
            slots = 0 if req.kv.holds_mamba else 1
            if req.kv.mamba_ping_pong_track_buffer is None:
                slots += self.pool.mamba_initial_tracking_slots
            free = self.pool.mamba_allocator.available_size() + self.cache.mamba_evictable_size()
            if self.sizes.one_memory:
                left = self._bytes_to_be_had()
                left -= (need + self._promised()) * self.sizes.token_bytes
                free = left // self.sizes.state_bytes
            fits = fits and slots <= free
        self.cache.unlock(lock)
        return fits and self.pool.available_size() > 0

    def _grow(self, req: Req, length: int) -> None:
        """KV up to `length`, evicting what it takes; with pages, whole ones."""
        start = req.kv.kv_allocated_len
        have = _pages(start, self.sizes.page)
        need = _pages(length, self.sizes.page) - have
        row = req.kv.req_pool_idx
        if need:
            evict_from_tree_cache(self.cache, need)
            new = self.allocator.alloc(need)
            if new is None:
                raise MemoryError(f"{need} KV tokens for request {req.rid}")
            self.pool.write((row, slice(have, have + need)), new.to(torch.int32))
        req.kv.kv_committed_len = req.kv.kv_allocated_len = length

    def _end(self, req: Req, reason: Any) -> None:
        self.running.remove(req)
        req.finished_reason = reason


def _length(req: Req) -> int:
    """Tokens that its prefill computes or skips."""
    return len(req.full_untruncated_fill_ids)


def _pages(length: int, page: int) -> int:
    return -(-length // page) * page
