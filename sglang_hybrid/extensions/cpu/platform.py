"""SGLang on any CPU: torch and a few kernels in C++, no Intel extension, no Triton.

For correctness, tests and small models. SGLang's own CPU engine (`SGLANG_USE_CPU_ENGINE=1`) needs
`sgl_kernel` and has no Mamba kernels; an out-of-tree platform needs neither, because SGLang then
takes its torch-native allocators, samplers and attention (sglang/srt/platforms/interface.py).
"""

import logging
import os
from typing import TYPE_CHECKING, Any

import psutil
import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_hybrid.checkpoints.support import EXACT_DRAFTS
from sglang_hybrid.core.tiers.rates import parse_links
from sglang_hybrid.extensions.cpu.flags import ADAPTERS_OF_SGLANG, ADAPTERS_ON_CPU
from sglang_hybrid.extensions.cpu.ops.draft_steps import slots_behind
from sglang_hybrid.extensions.cpu.sizing import (
    DTYPES,
    MAX_MAMBA_CACHE_SIZE,
    MAX_RUNNING_REQUESTS,
    MAX_TOTAL_TOKENS,
    MEMORY_FRACTION,
    model_sizes,
)
from sglang_hybrid.serving.config import CPU_ATTENTION, HybridConfig
from sglang_hybrid.serving.host_memory import keep_freed_memory, memory_limit, memory_used

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


class HybridCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """The platform object that SGLang asks for devices, defaults and kernels."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        """A string: SGLang's argument resolution splits it (arg_groups/serving_hook.py)."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return CPU_ATTENTION

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """A backend that compiles nothing: torch's default needs a C++ compiler on the machine."""
        return "eager"

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in EXACT_DRAFTS

    def get_speculative_cache_locs_fn(self) -> Any:
        return slots_behind

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def get_torch_profiler_activity_str(self) -> str:
        """A name of its own: SGLang records the activity CPU by itself, and twice if this is it
        (utils/profile_utils.py).
        """
        return "HYBRID_CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return memory_limit()

    def get_current_memory_usage(self, device: object = None) -> float:
        return float(memory_used())

    def apply_server_args_defaults(self, server_args: "ServerArgs") -> None:
        """Defaults that suit a machine without an accelerator; flags given by the user win."""
        sizes = model_sizes(server_args.model_path, server_args.dtype)
        defaults: dict[str, Any] = {
            "sampling_backend": "pytorch",
            "mem_fraction_static": MEMORY_FRACTION,
            "max_total_tokens": MAX_TOTAL_TOKENS,
            "max_mamba_cache_size": sizes.default_slots if sizes else MAX_MAMBA_CACHE_SIZE,
            "max_running_requests": MAX_RUNNING_REQUESTS,
        }
        for field, value in defaults.items():
            if getattr(server_args, field) is None:
                setattr(server_args, field, value)
        if server_args.lora_backend == ADAPTERS_OF_SGLANG:
            server_args.lora_backend = ADAPTERS_ON_CPU
        server_args.sleep_on_idle = True  # an idle scheduler would spin on one of the cores
        server_args.dtype = DTYPES[server_args.dtype]
        # SGLang keeps convolution windows in bfloat16 whatever the model computes in.
        os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", server_args.dtype)
        for step in ("PRE", "POST"):  # of hyper-connections: SGLang has them in torch, too
            os.environ[f"SGLANG_OPT_USE_TILELANG_MHC_{step}"] = "0"
        ranks = server_args.tp_size * server_args.pp_size * server_args.dp_size
        if ranks > 1:
            bind_cores(ranks)

    def init_backend(self) -> None:
        """Runs once in every process that holds a model runner."""
        logger.info(
            "sglang_hybrid: serving on the CPU without SGLang's kernels (%d threads); meant for "
            "correctness and small models.",
            torch.get_num_threads(),
        )
        from sglang_hybrid.extensions.cpu.native.library import library
        from sglang_hybrid.extensions.cpu.ops.moe import teach_torch_mm_with_dtype

        library()
        torch.compiler.set_stance("force_eager")  # as in get_compile_backend
        teach_torch_mm_with_dtype()
        keep_freed_memory()
        _patch_torch_without_cuda()
        _simulate_bandwidth()


def bind_cores(ranks: int) -> None:
    """Share the usable cores among `ranks` processes, unless the user has bound them already.

    SGLang refuses more ranks than NUMA nodes without it (sglang/srt/utils/numa_utils.py).
    """
    if os.environ.get("SGLANG_CPU_OMP_THREADS_BIND"):
        return
    cores = sorted(psutil.Process().cpu_affinity())
    share = max(1, len(cores) // ranks)
    groups = [
        cores[(rank * share) % len(cores) : (rank * share) % len(cores) + share]
        for rank in range(ranks)
    ]
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
        ",".join(str(core) for core in group) for group in groups
    )


def _simulate_bandwidth() -> None:
    """Slow copies between device and host pools down to SGLANG_HYBRID_SIMULATE_BANDWIDTH."""
    from sglang_hybrid.extensions.cpu.ops import transfer_streams

    text = HybridConfig.from_environment().hybrid_simulate_bandwidth
    if text:
        logger.warning(
            "sglang_hybrid: copies between tiers take the time of a simulated bandwidth (%s); "
            "meant for measurements.",
            text,
        )
    transfer_streams.simulate(parse_links(text).get("host"))


def _patch_torch_without_cuda() -> None:
    """Replace four names of torch that raise without an accelerator but are used on every platform:
    `Tensor.pin_memory` for each decode batch (sglang/srt/managers/schedule_batch.py, mamba track
    mask), `torch.cuda.synchronize` where a draft model gets its target's embeddings,
    `torch.cuda.Event` where a prefill server sends what it has found in its cache, and
    `torch.cuda.current_stream` where rows of the unified pool move.
    """
    from sglang_hybrid.extensions.cpu.ops import transfer_streams

    def pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
        return tensor

    def synchronize(device: object = None) -> None:
        """Do nothing: no work runs beside the caller."""

    torch.Tensor.pin_memory = pin_memory  # type: ignore[assignment,method-assign]
    torch.cuda.synchronize = synchronize
    torch.cuda.Event = torch.cpu.Event  # type: ignore[misc,assignment]
    torch.cuda.current_stream = transfer_streams.current_stream  # type: ignore[assignment]
