"""Platforms that SGLang does not bring itself: here, the CPU without Intel's own kernels.

SGLang asks `activate` in every process for the platform's class name (`plugin.py`). It answers only
where no accelerator can be used, so that the same installation serves a GPU machine untouched.
"""

import logging
import os
from collections.abc import Mapping, MutableMapping
from typing import Final

CPU_PLATFORM: Final = "sglang_hybrid.platforms.cpu.HybridCpuPlatform"

SPINS: Final = 1_000
"""Turns of the loop in which a thread of GNU's OpenMP waits before it sleeps (docs/benchmarks.md).
"""

GPU_LINES: Final = {
    "sglang.kernels.jit.utils.arch": "Cannot detect CUDA architecture",
    "sglang.srt.distributed.bootstrap": "init_cpu_threads_env and shared memory based AllReduce",
    "sglang.srt.model_executor.model_runner_components.cuda_graph_setup": "Disable prefill CUDA",
}
"""By the names of SGLang's loggers, how lines begin that say what only a GPU, or another engine for
CPUs, has."""


def activate() -> str | None:
    """Name the CPU platform's class, or None where SGLang has a platform of its own."""
    if not is_ours():
        return None
    from sglang_hybrid.platforms.binder import bind_on_import

    bind_on_import()
    leave_out(GPU_LINES)
    wait_briefly(os.environ)
    # What SGLang waits for when a process has died: GPUs that settle, and their core dumps.
    os.environ.setdefault("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "0")
    os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")
    return CPU_PLATFORM


def leave_out(lines: Mapping[str, str]) -> None:
    """Keep lines out of this process's log that begin so, by the names of their loggers."""
    for name, start in lines.items():

        def is_other(record: logging.LogRecord, start: str = start) -> bool:
            return not record.getMessage().startswith(start)

        logging.getLogger(name).addFilter(is_other)


def is_ours() -> bool:
    """Whether SGLang has no platform of its own for this machine."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE", "0") != "1" and not accelerator_available()


def wait_briefly(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP's threads wait in a loop for some microseconds, then sleep, in the processes that
    are started with `environment`; what it says already stays.

    Threads that wait in a loop for long make decoding ten times slower as soon as anything else
    wants the cores. Threads that sleep at once cost a wake-up in every product.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        environment.setdefault("GOMP_SPINCOUNT", str(SPINS))


def accelerator_available() -> bool:
    """True if torch sees a device that SGLang serves on without our help."""
    import torch

    if torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available():
        return True
    return any(
        hasattr(torch, name) and getattr(torch, name).is_available() for name in ("npu", "musa")
    )
