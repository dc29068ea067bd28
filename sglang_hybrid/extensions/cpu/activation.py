"""Prepares a process that serves on the CPU, before it imports SGLang."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Final

from sglang_hybrid.extensions.cpu.binder import bind_on_import
from sglang_hybrid.serving.config import CPU_ATTENTION

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

SPINS: Final = 1_000
"""Turns of the loop in which a thread of GNU's OpenMP waits before it sleeps (docs/benchmarks.md).
"""

GPU_LINES: Final = {
    "sglang.kernels.jit.utils.arch": "Cannot detect CUDA architecture",
    "sglang.srt.distributed.bootstrap": "init_cpu_threads_env and shared memory based AllReduce",
    "sglang.srt.model_executor.model_runner_components.cuda_graph_setup": "Disable prefill CUDA",
}
"""Beginnings of lines of the log, by SGLang's loggers, that are about a GPU, or another engine for
CPUs."""


def activate() -> None:
    """Prepare this process, before SGLang is imported, for our platform."""
    bind_on_import()
    leave_out(GPU_LINES)
    wait_briefly(os.environ)
    # Waits of SGLang after a process has died: for GPUs that settle, and for their core dumps.
    os.environ.setdefault("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "0")
    os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")


def register() -> None:
    """Add to SGLang what a server on our platform needs."""
    from sglang_hybrid.extensions.cpu import images

    images.register()
    _use_our_attention()


def leave_out(lines: Mapping[str, str]) -> None:
    """Keep lines out of this process's log that begin so, by the names of their loggers."""
    for name, start in lines.items():

        def is_other(record: logging.LogRecord, start: str = start) -> bool:
            return not record.getMessage().startswith(start)

        logging.getLogger(name).addFilter(is_other)


def wait_briefly(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP's threads wait in a loop for some microseconds, then sleep, in the processes that
    are started with `environment`; what it says already stays.

    Threads that wait in a loop for long make decoding ten times slower as soon as anything else
    wants the cores. Threads that sleep at once cost a wake-up in every product.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        environment.setdefault("GOMP_SPINCOUNT", str(SPINS))


def _use_our_attention() -> None:
    """SGLang's CPU defaults name Intel's AMX kernels, which this platform does not need."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if CPU_ATTENTION not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([CPU_ATTENTION])

    @register_attention_backend(CPU_ATTENTION)
    def build_attention(model_runner: ModelRunner) -> AttentionBackend:
        from sglang_hybrid.extensions.cpu.attention import HybridCpuAttnBackend

        return HybridCpuAttnBackend(model_runner)

    @register_resolution_hook("handle_cpu_backends")
    def handle_cpu_backends(
        server_args: ServerArgs, previous: Callable[[ServerArgs], None]
    ) -> None:
        if resolving_view(server_args).attention_backend is None:
            declare_resolution(server_args, "sglang_hybrid", attention_backend=CPU_ATTENTION)

    @register_resolution_hook("handle_page_major_kv_layout")
    def handle_page_major_kv_layout(
        server_args: ServerArgs, previous: Callable[[ServerArgs], None]
    ) -> None:
        """The unified pool's rows lie apart, which SGLang allows backends of its own only."""
        if resolving_view(server_args).enable_unified_memory:
            declare_resolution(server_args, "sglang_hybrid", enable_page_major_kv_layout=True)
