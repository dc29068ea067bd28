"""The start of a server on a pretended machine, as far as it goes without a kernel.

Real: our launcher's `prepare`, the plugin and the patches, SGLang's whole resolution of flags, the
model on torch's meta device, the sizes of its pools, the backend of its recurrent layers, whether a
graph of prefills would be captured, the prefix cache, and what all of them log. Not real: what
`machine` replaces, the backend of full attention, the capture of graphs, ranks beside the first.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import torch

from tests.rehearsal import models
from tests.rehearsal.machine import MACHINES, Pretence, made_on

WEIGHTS_SHARE = 0.6
"""Share of a GPU's memory: larger weights count as so much, as if quantized or sharded."""


SPILLS = "a state without a slot lies in the place of "
PARKS = "KV without room lies in slots without a state"


@dataclass
class Start:
    """A server as it would be. Sizes are of its first rank.

    Args:
        machine, model, flags: what was started.
        stopped: why the start failed, None if it did not.
        strategy: SGLang's for states. held: slots of a running request. overlap: of scheduling.
        page: tokens of a page. attention: of prefills and of decoding.
        linear: backend of recurrent layers. prefill_kernel: of those that have a choice.
        planned: prefills leave the states that we want. why_split: why not in one pass.
        warmups: what the server computes before it is ready.
        captured: prefills are in a CUDA graph. breaks: nothing recurrent is inside it.
        slots, state_bytes, tokens, kv_bytes: of the pools; a slot's, and a KV token's.
        budget: bytes of one memory, 0 where KV and states have a pool each.
        free_bytes: of the GPU when pools were made. weights_bytes: what the model took of it.
        state_dtype, kv_dtype: of the pools. running: requests at once.
        components: what a node of the prefix cache holds.
        log: what this package logged.
    """

    machine: str
    model: str
    flags: list[str]
    stopped: str | None = None
    cache: str = ""
    strategy: str = ""
    held: int = 0
    overlap: bool = False
    page: int = 0
    attention: list[str] = field(default_factory=list)
    linear: str = ""
    prefill_kernel: str = ""
    planned: bool = False
    why_split: str | None = None
    warmups: str | None = None
    captured: bool = False
    breaks: bool = True
    slots: int = 0
    state_bytes: int = 0
    tokens: int = 0
    kv_bytes: int = 0
    budget: int = 0
    free_bytes: int = 0
    weights_bytes: int = 0
    state_dtype: str = ""
    kv_dtype: str = ""
    running: int = 0
    components: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """The lines of the log beside those of every server."""
        of_every_server = (
            "eviction ",
            "KV and states have a pool each",
            "the cost of this model is",
            *(SPILLS, PARKS),
        )
        return [line for line in self.log if not line.startswith(of_every_server)]

    @property
    def spills(self) -> bool:
        """True if states without a slot may lie in the place of KV."""
        return any(line.startswith(SPILLS) for line in self.log)

    @property
    def pool_bytes(self) -> int:
        return self.slots * self.state_bytes + self.tokens * self.kv_bytes

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        return cls(**json.loads(line))


class Rehearsal:
    """Starts on one machine, one after the other in this process."""

    def __init__(self, machine: str, folder: Path) -> None:
        self.machine, self.folder = machine, folder
        self.pretence = Pretence(MACHINES[machine])
        torch.set_num_threads(1)
        from sglang_hybrid import launcher

        self._prepare = launcher.prepare

    def start(self, model: str, flags: Sequence[str] = (), **config: Any) -> Start:
        """The server that `flags` make of a model. config: changed fields of its config.json."""
        found = Start(self.machine, model, list(flags))
        name = model + "".join(f"-{key}" for key in config)
        there = models.write(model, self.folder / name, **config)
        self.pretence.loaded = 0
        with logged(found.log), mock.patch.dict(os.environ):
            try:
                args = self._resolved(found, [*flags, "--model-path", str(there)])
                _Server(found, args, self.pretence).build()
            except Exception as error:
                found.stopped = f"{type(error).__name__}: {error}"
                traceback.print_exc()
        return found

    def _resolved(self, found: Start, argv: list[str]) -> Any:
        """SGLang's server arguments, resolved and published, and groups of ranks that fit them."""
        from sglang.srt.distributed import parallel_state
        from sglang.srt.runtime_context import SpawnRanks, publish

        args = self._prepare([*argv, "--port", "39999"])
        args.resolve_once()
        if torch.distributed.is_initialized():
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        self._join(args)
        return args

    def _join(self, args: Any) -> None:
        """The groups of the first rank among so many, of which no other exists."""
        from sglang.srt.distributed import bootstrap
        from torch.testing._internal.distributed.fake_pg import FakeStore

        distributed = torch.distributed
        world = args.tp_size * args.pp_size
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        group = partial(_fake_group, distributed.new_group)
        alone = mock.patch.dict(os.environ, SGLANG_USE_MESSAGE_QUEUE_BROADCASTER="false")
        with alone, mock.patch.object(distributed, "new_group", group), made_on("cpu"):
            bootstrap._init_parallel_groups(
                backend="fake", dist_init_method="unused", server_args=args, gpu_id=0
            )


def _without_compilers() -> Any:
    """No kernel is compiled while a model is made, as Inkling's are."""
    from sglang.kernels.jit.utils.compile import loader

    return mock.patch.multiple(loader, _find_prebuilt=mock.DEFAULT, _load=mock.DEFAULT)


def _fake_group(make: Callable[..., Any], ranks: Any = None, **_: Any) -> Any:
    return make(ranks, backend="fake")


class _Server:
    """One start after SGLang has resolved its arguments."""

    def __init__(self, found: Start, args: Any, pretence: Pretence) -> None:
        from sglang.srt.arg_groups.model_override_base import model_config_of

        self.found, self.args, self.pretence = found, args, pretence
        self.config = model_config_of(args)
        self.runner: Any = None

    def build(self) -> None:
        self._flags()
        self._model()
        self._pools()
        self._backends()
        self._graphs()
        self._cache()

    def _flags(self) -> None:
        from sglang.srt.arg_groups.model_override_base import attention_backends_of
        from sglang.srt.arg_groups.overrides import resolving_view

        from sglang_hybrid.checkpoints.support import plans_checkpoints

        view = resolving_view(self.args)
        self.found.cache = view.radix_cache_backend or "sglang"
        self.found.strategy = view.mamba_radix_cache_strategy
        self.found.overlap = not view.disable_overlap_schedule
        self.found.page = view.page_size
        self.found.attention = list(attention_backends_of(view))
        self.found.planned = plans_checkpoints(view)
        self.found.warmups = view.warmups

    def _model(self) -> None:
        """The model itself, on the meta device."""
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader.loader import _initialize_model

        before = torch.get_default_dtype()
        torch.set_default_dtype(self.config.dtype)
        try:
            with torch.device("meta"), made_on("meta"), _without_compilers():
                self.model = _initialize_model(self.config, LoadConfig())
        finally:
            torch.set_default_dtype(before)
        weights = sum(it.numel() * it.element_size() for it in self.model.parameters())
        most = int(WEIGHTS_SHARE * self.pretence.machine.free_bytes)
        self.found.weights_bytes = self.pretence.loaded = min(weights, most)
        self.found.free_bytes = self.pretence.machine.free_bytes - self.pretence.loaded

    def _pools(self) -> None:
        """SGLang's sizes, and pools without memory."""
        from sglang.srt.configs.model_config import AttentionArch
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.model_executor.model_runner_components.layer_setup import (
            resolve_layer_indices,
        )
        from sglang.srt.model_executor.model_runner_components.load_model_utils import (
            resolve_sliding_window_size,
        )
        from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
            resolve_spec_aux_hidden_state_config,
        )
        from sglang.srt.runtime_context import get_parallel, get_schedule
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        config, runner = self.config, object.__new__(ModelRunner)
        self.runner = runner
        vars(runner).update(
            device="cuda",
            gpu_id=0,
            pp_group=get_parallel().pp_group,
            model=self.model,
            model_config=config,
            server_args=self.args,
            dtype=config.dtype,
            page_size=get_schedule().page_size,
            sliding_window_size=resolve_sliding_window_size(self.model, config),
            spec_algorithm=SpeculativeAlgorithm.from_string(self.args.speculative_algorithm),
            is_draft_worker=False,
            draft_attention_backend=None,
            token_to_kv_pool_allocator=None,
            req_to_token_pool=None,
            memory_pool_config=None,
            spec_aux_config=resolve_spec_aux_hidden_state_config(
                server_args=self.args,
                model_config=config,
                spec_algorithm=SpeculativeAlgorithm.from_string(self.args.speculative_algorithm),
                is_draft_worker=False,
            ),
            is_hybrid_swa=config.is_hybrid_swa,
            is_hybrid_swa_compress=config.is_hybrid_swa_compress,
            use_mla_backend=config.attention_arch == AttentionArch.MLA,
            forward_stream=None,
            draft_model_idx=None,
            lora_manager=None,
            layer_info=resolve_layer_indices(
                model=self.model, model_config=config, is_draft_worker=False
            ),
        )
        runner.configure_kv_cache_dtype()
        runner.init_kv_cache_configurator()
        warm_up = mock.patch.object(MHATokenToKVPool, "_init_kv_copy_and_warmup", lambda pool: None)
        with warm_up, made_on("meta"):
            made = runner.kv_cache_configurator.configure(
                pre_model_load_memory=self.pretence.machine.free_bytes / (1 << 30)
            )
        for name in (
            *("max_running_requests", "req_to_token_pool", "token_to_kv_pool"),
            *("token_to_kv_pool_allocator", "max_total_num_tokens"),
            *("full_max_total_num_tokens", "swa_max_total_num_tokens"),
        ):
            setattr(runner, name, getattr(made, name))
        self._measure()

    def _measure(self) -> None:
        from sglang.srt.mem_cache.allocation_sizing import get_mamba_tracking_slots
        from sglang.srt.runtime_context import get_exec, get_schedule

        found, runner, mamba = self.found, self.runner, get_exec().mamba
        states = runner.req_to_token_pool.mamba_pool.mamba_cache
        tensors = [*states.conv, states.temporal]
        pool = getattr(runner.token_to_kv_pool, "full_kv_pool", runner.token_to_kv_pool)
        rows = [*getattr(pool, "k_buffer", ()), *getattr(pool, "v_buffer", ())]
        rows = rows or list(getattr(pool, "kv_buffer", ()))
        found.held = 1 + get_mamba_tracking_slots(
            extra_buffer=mamba.enable_mamba_extra_buffer,
            overlap=not get_schedule().disable_overlap_schedule,
            lazy=mamba.enable_mamba_extra_buffer_lazy,
        )
        found.slots = get_schedule().max_mamba_cache_size
        found.state_bytes = sum(it.nbytes // it.shape[1] for it in tensors)
        found.state_dtype = str(states.temporal.dtype).removeprefix("torch.")
        found.tokens = runner.max_total_num_tokens
        found.kv_bytes = sum(it[0].nbytes for it in rows)
        found.kv_dtype = str(rows[0].dtype).removeprefix("torch.") if rows else ""
        found.running = runner.max_running_requests

    def _backends(self) -> None:
        """The backend that SGLang puts beside its full attention for recurrent layers."""
        from sglang.srt.layers.attention.attention_registry import attn_backend_wrapper
        from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

        class Full(AttentionBackend):
            needs_cpu_seq_lens = False
            token_to_kv_pool = self.runner.token_to_kv_pool
            req_to_token_pool = self.runner.req_to_token_pool

            def init_forward_metadata(self, forward_batch: Any) -> None: ...

        runner = self.runner
        runner.prefill_attention_backend_str, runner.decode_attention_backend_str = (
            self.found.attention
        )
        with made_on("meta"):
            runner.attn_backend = attn_backend_wrapper(runner, Full())
        linear = getattr(runner.attn_backend, "linear_attn_backend", runner.attn_backend)
        kernel = getattr(getattr(linear, "kernel_dispatcher", None), "extend_kernel", None)
        self.found.linear = type(linear).__name__
        self.found.prefill_kernel = "" if kernel is None else type(kernel).__name__

    def _graphs(self) -> None:
        """True if SGLang would capture a graph of prefills, and what is inside."""
        from sglang.srt.layers.attention.mamba.mamba import MambaMixer2
        from sglang.srt.layers.cp.bcg import supports_prefill_cp_bcg
        from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
        from sglang.srt.model_executor.runner import PrefillCudaGraphRunner
        from sglang.srt.runtime_context import get_exec

        from sglang_hybrid.checkpoints.scans import why_split

        class Captured(PrefillCudaGraphRunner):
            def __init__(self, model_runner: Any) -> None:
                self.prefill_backend_name = get_exec().graph.cuda_graph_config.prefill.backend
                self.enable_cp_bcg_capture = supports_prefill_cp_bcg(model_runner.server_args)

        runner = self.runner
        with mock.patch.object(cuda_graph_setup, "PrefillCudaGraphRunner", Captured):
            capture = cuda_graph_setup.capture_prefill_graph(
                model_runner=runner, eager_runner=SimpleNamespace()
            )
        runner.prefill_cuda_graph_runner = getattr(capture, "runner", capture)
        self.found.captured = isinstance(runner.prefill_cuda_graph_runner, Captured)
        self.found.breaks = all(
            hasattr(layer, "_forward_mamba")
            for layer in runner.model.modules()
            if any(isinstance(child, MambaMixer2) for child in layer.children())
        )
        self.found.why_split = why_split(runner)

    def _cache(self) -> None:
        """The prefix cache, with SGLang's own builder."""
        from sglang.srt.mem_cache.kv_cache_builder import build_kv_cache
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        from sglang_hybrid.checkpoints import compile_kernels

        runner = self.runner
        runner.mtp_draft_device_pools = runner.mtp_draft_mamba_pools = ()
        worker = SimpleNamespace(
            model_runner=runner,
            model_config=self.config,
            is_hybrid_swa=runner.is_hybrid_swa,
            sliding_window_size=runner.sliding_window_size,
            get_tokens_per_layer_info=lambda: (
                runner.full_max_total_num_tokens,
                runner.swa_max_total_num_tokens,
            ),
            tokenizer=None,
            register_hicache_layer_transfer_counter=lambda counter: None,
            get_memory_pool=lambda: (runner.req_to_token_pool, runner.token_to_kv_pool_allocator),
        )
        compiled = mock.patch.object(compile_kernels, "compile_kernels", lambda *_, **__: None)
        with compiled, made_on("cpu"):
            built = build_kv_cache(
                server_args=self.args,
                model_config=self.config,
                tp_worker=worker,
                page_size=runner.page_size,
                spec_algorithm=SpeculativeAlgorithm.from_string(self.args.speculative_algorithm),
                enable_metrics=False,
                enable_kv_cache_events=False,
                enable_hierarchical_cache=bool(self.args.enable_hierarchical_cache),
            )
        account = getattr(built.tree_cache, "account", None)
        self.found.budget = 0 if account is None else account.budget
        self.found.components = [kind.name for kind in built.tree_cache.components]


@contextmanager
def logged(lines: list[str]) -> Iterator[None]:
    """Collects in `lines` what this package logs."""

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage().removeprefix("sglang_hybrid: "))

    kept, ours = Kept(), logging.getLogger("sglang_hybrid")
    ours.addHandler(kept)
    try:
        yield
    finally:
        ours.removeHandler(kept)
